"""Checks on names, interfaces, ports and the way to the lighthouse."""

from __future__ import annotations

from collections.abc import Iterator

from dilocox.config.schema import Config
from dilocox.doctor.finding import Finding, note, ok, problem, warning
from dilocox.doctor.host import Host
from dilocox.errors import ConfigError
from dilocox.net import family_of, is_loopback, split_host_port
from dilocox.outer.wan.address import WanAddress, parse_port_range, resolve_address

PORTS_PER_ISLAND = 2
"""The island's store and its membership server, both on the host of its rank 0."""
MAX_CLOCK_SKEW_S = 5.0
MAX_NAME_LOOKUP_S = 1.5
"""Over a dead name server the resolver waits 5 s by default, and 1 s as the advice sets it."""
_CONNECT_TIMEOUT_S = 5.0


def host_name(host: Host, config: Config | None) -> Iterator[Finding]:
    """Launchers announce the host name to other nodes; it must not mean loopback there or here."""
    addresses = host.network.resolve(host.host_name)
    several_nodes = config is not None and config.parallel.nodes_per_island > 1
    if addresses and not all(is_loopback(address) for address in addresses):
        yield ok("host name", f"{host.host_name} is {addresses[0]}")
        return
    seen = f"resolves to loopback ({addresses[0]})" if addresses else "cannot be resolved"
    if several_nodes:
        yield warning(
            "host name",
            f"{host.host_name} {seen}, so other nodes of this island would be told a useless address",
            "set NODE_ADDRESS (torchrun --local-addr; the SLURM files do), or correct /etc/hosts",
        )
    else:
        yield note("host name", f"{host.host_name} {seen}; harmless while each island is one node")


def wan_address(host: Host, config: Config | None) -> Iterator[Finding]:
    """The interface and address that the WAN group would use."""
    if config is None or config.parallel.num_islands == 1:
        return
    try:
        address = _resolve(host, config)
    except ConfigError as error:
        yield problem("interface", *_split(error))
        return
    own = [a for a in host.network.interfaces()[address.interface] if not a.startswith("fe80")]
    if is_loopback(address.local_address):
        yield note("interface", f"{address.describe()}: all islands on this machine")
    elif all(family_of(a) == "ipv6" for a in own):
        yield from _ipv6_only(host, config, address.describe())
    else:
        yield ok("interface", address.describe())


def _ipv6_only(host: Host, config: Config, described: str) -> Iterator[Finding]:
    lighthouse = config.wan.lighthouse
    lighthouse_host = split_host_port(lighthouse, field="wan.lighthouse")[0] if lighthouse else None
    reachable = lighthouse_host is None or any(
        family_of(address) == "ipv6" for address in host.network.resolve(lighthouse_host)
    )
    if reachable:
        yield warning(
            "interface",
            f"{described} has IPv6 only",
            "every island needs IPv6, and URLs need brackets: http://[ADDRESS]:PORT",
        )
    else:
        yield problem(
            "interface",
            f"{described} has IPv6 only, but the lighthouse {lighthouse} is IPv4",
            "give wan.lighthouse by its IPv6 address in brackets, or set wan.interface to one with IPv4",
        )


def ports(host: Host, config: Config | None) -> Iterator[Finding]:
    """Ports that other islands connect to; the data connections take the kernel's own range."""
    if config is None or config.parallel.num_islands == 1:
        return
    low, high = host.ephemeral_ports()
    data = f"data connections use the kernel's range {low}-{high}"
    if config.wan.port_range is None:
        yield note("ports", f"any free port is used; behind a firewall set wan.port_range; {data}")
        return
    try:
        first, last = parse_port_range(config.wan.port_range)
    except ConfigError as error:
        yield problem("ports", *_split(error))
        return
    free = sum(host.can_bind(port) for port in range(first, last + 1))
    if free < PORTS_PER_ISLAND:
        yield problem(
            "ports",
            f"wan.port_range {config.wan.port_range}: {free} of {last - first + 1} ports are free, "
            f"an island needs {PORTS_PER_ISLAND}",
            "end what listens there (ss -ltnp) or widen the range",
        )
    else:
        yield ok("ports", f"{free} of {last - first + 1} ports of wan.port_range are free; {data}")


def name_lookups(host: Host, config: Config | None) -> Iterator[Finding]:
    """torch asks for the name of every address that it connects to, and waits for the answer."""
    if config is None or config.parallel.num_islands == 1:
        return
    try:
        address = _resolve(host, config)
    except ConfigError:
        return  # `interface` has said so
    seconds = host.name_lookup_s(address.local_address)
    if seconds > MAX_NAME_LOOKUP_S:
        yield warning(
            "name lookups",
            f"the name server took {seconds:.0f} s over {address.local_address}, and torch asks it at every "
            "connection",
            "export RES_OPTIONS='timeout:1 attempts:1' in the jobs, or use a name server that answers",
        )
    else:
        yield ok("name lookups", f"answered in {seconds:.1f} s")


def lighthouse(host: Host, config: Config | None) -> Iterator[Finding]:
    """Reachability of the lighthouse, and its clock against ours."""
    if config is None or config.wan.lighthouse is None:
        return
    url = config.wan.lighthouse
    try:
        name, port = split_host_port(url, field="wan.lighthouse")
    except ConfigError as error:
        yield problem("lighthouse", *_split(error))
        return
    if not host.network.resolve(name):
        return  # `interface` has said so
    advice = {
        "refused": "nothing listens there; start `dilocox lighthouse` on that host, or correct the port",
        "timeout": f"a firewall drops the packets; open TCP port {port} of that host for this one",
        "unreachable": "there is no route; check the address and wan.interface",
    }
    reach = host.reach(name, port, _CONNECT_TIMEOUT_S)
    if reach != "open":
        yield problem("lighthouse", f"{url} does not answer ({reach})", advice[reach])
        return
    yield ok("lighthouse", f"{url} answers")
    yield from clock(host.clock_skew_s(name, port), f"the lighthouse {url}")


def clock(skew_s: float | None, other: str) -> Iterator[Finding]:
    """Logs of several sites can be compared only if their clocks agree."""
    if skew_s is None:
        yield note("clock", f"{other} does not tell the time")
    elif abs(skew_s) > MAX_CLOCK_SKEW_S:
        direction = "ahead of" if skew_s > 0 else "behind"
        yield warning(
            "clock",
            f"{other} is {abs(skew_s):.0f} s {direction} this host",
            "start time synchronisation (chrony, ntpd)",
        )
    else:
        yield ok("clock", f"within {MAX_CLOCK_SKEW_S:.0f} s of {other}")


def _resolve(host: Host, config: Config) -> WanAddress:
    wan = config.wan
    return resolve_address(wan.interface, wan.advertise_address, wan.lighthouse, network=host.network)


def _split(error: ConfigError) -> tuple[str, str]:
    """Message and advice of an error that has both in one line."""
    what, _, advice = str(error).rpartition("; ")
    return (what, advice) if what else (str(error), "correct it in the config or with --set")
