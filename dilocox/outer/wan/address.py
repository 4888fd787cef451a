"""Which interface and address the WAN group of this host uses, and which ports. No torch. Level 2.

Inside many clusters the host name resolves to loopback; gloo then listens there and the first sync hangs
without a message. So the interface is decided here, once, from settings or from the route to the lighthouse,
checked, and passed on by name.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from dilocox.errors import ConfigError
from dilocox.net import (
    Family,
    Network,
    bound_port,
    bracketed,
    family_of,
    is_literal,
    is_loopback,
    split_host_port,
    system_network,
)


@dataclass(frozen=True)
class WanAddress:
    """Interface and addresses of this host on the WAN.

    Attributes:
        interface: name of the network interface; what gloo binds to.
        address: address that other islands use; differs from `local_address` behind NAT.
        local_address: the interface's own address.
        family: family of `local_address`.
    """

    interface: str
    address: str
    local_address: str
    family: Family

    def host_in_url(self) -> str:
        """Returns the advertised address in the form of a URL: IPv6 in brackets."""
        return bracketed(self.address)

    def describe(self) -> str:
        """Returns one line for the log, so that a wrong interface is seen at start."""
        behind = "" if self.address == self.local_address else f", advertised as {self.address}"
        return f"interface {self.interface}, address {self.local_address} ({self.family}){behind}"


def resolve_address(
    interface: str | None,
    advertise_address: str | None,
    lighthouse: str | None,
    *,
    network: Network | None = None,
) -> WanAddress:
    """Decides interface and address of this host: from settings, else by the route to the lighthouse.

    Without interface and lighthouse it is loopback: a run on one machine.

    Args:
        interface: `wan.interface`.
        advertise_address: `wan.advertise_address`.
        lighthouse: `wan.lighthouse`.
        network: look-ups to use instead of those of the operating system.

    Raises:
        ConfigError: the interface does not exist or has no usable address, the lighthouse's name is
            unknown or has no route, or others would be told a loopback address.
    """
    network = network or system_network()
    target = None if lighthouse is None else _lighthouse_target(lighthouse, network)
    if interface is not None:
        name, local = interface, _address_of(interface, target, network)
    elif target is None:
        name, local = _loopback(network)
    else:
        name, local = _by_route(str(lighthouse), target, network)
    if target is not None and not is_loopback(target.address) and is_loopback(local):
        raise ConfigError(
            "wan.interface", name, f"has the loopback address {local}, but the lighthouse is at "
            f"{target.address}; name the interface that reaches it"
        )  # fmt: skip
    advertised = advertise_address or local
    _check_advertised(advertised, target, network)
    return WanAddress(interface=name, address=advertised, local_address=local, family=family_of(local))


def parse_port_range(port_range: str) -> tuple[int, int]:
    """Parses LOW-HIGH, both included.

    Raises:
        ConfigError: not two ports in 1024..65535 with LOW <= HIGH.
    """
    low, _, high = port_range.partition("-")
    if not (low.isdigit() and high.isdigit() and 1024 <= int(low) <= int(high) <= 65535):
        raise ConfigError("wan.port_range", port_range, "needs LOW-HIGH with 1024 <= LOW <= HIGH <= 65535")
    return int(low), int(high)


def pick_port(port_range: str | None, *, offset: int = 0, address: str = "") -> int:
    """Returns a port that is free now: of the range, or any if it is None.

    Another process may take the port before it is used; ranks of one host that ask at the same moment give
    different offsets.

    Args:
        port_range: `wan.port_range`.
        offset: where in the range to begin; it wraps around.
        address: local address to try; default: all IPv4 addresses.

    Raises:
        ConfigError: the range is malformed or has no free port.
    """
    if port_range is None:
        return _any_port(address)
    low, high = parse_port_range(port_range)
    size = high - low + 1
    for step in range(size):
        port = low + (offset + step) % size
        if bound_port(address, port) is not None:
            return port
    raise ConfigError("wan.port_range", port_range, f"all {size} ports are in use; widen the range")


@dataclass(frozen=True)
class _Target:
    """The lighthouse, looked up on this host.

    Attributes:
        address: one of its addresses.
        port: its port.
        on_loopback: it was *written* as loopback (`localhost`, 127.0.0.1, ::1): a run on one machine.
    """

    address: str
    port: int
    on_loopback: bool


def _lighthouse_target(lighthouse: str, network: Network) -> _Target:
    host, port = split_host_port(lighthouse, field="wan.lighthouse")
    addresses = network.resolve(host)
    if not addresses:
        raise ConfigError("wan.lighthouse", lighthouse, f"host name {host} is unknown here; use an address")
    written_as_loopback = host == "localhost" or (is_literal(host) and is_loopback(host))
    return _Target(addresses[0], port, written_as_loopback)


def _address_of(interface: str, target: _Target | None, network: Network) -> str:
    """Returns the address of a named interface, of the lighthouse's family where there is a choice."""
    interfaces = network.interfaces()
    if interface not in interfaces:
        rule = f"no such interface; this host has {', '.join(sorted(interfaces))}"
        raise ConfigError("wan.interface", interface, rule)
    usable = [a for a in interfaces[interface] if not ipaddress.ip_address(a).is_link_local]
    if not usable:
        rule = "has no address that others can reach (link-local ones cannot be routed); give it one"
        raise ConfigError("wan.interface", interface, rule)
    source = None if target is None else network.route_source(target.address, target.port)
    if source in usable:
        return str(source)
    wanted: Family = "ipv4" if target is None else family_of(target.address)
    return min(usable, key=lambda address: family_of(address) != wanted)


def _by_route(lighthouse: str, target: _Target, network: Network) -> tuple[str, str]:
    """Returns interface and address from which packets to the lighthouse leave."""
    if is_loopback(target.address) and not target.on_loopback:
        raise ConfigError(
            "wan.lighthouse", lighthouse, f"the host name resolves to loopback ({target.address}) here, "
            "so other islands would be told a useless address; use an address instead of the name, "
            "or set wan.interface"
        )  # fmt: skip
    source = network.route_source(target.address, target.port)
    if source is None:
        rule = f"no route to {target.address}; set wan.interface to the one that reaches it"
        raise ConfigError("wan.lighthouse", lighthouse, rule)
    for name, addresses in network.interfaces().items():
        if source in addresses:
            # A lighthouse on this very host is reached over loopback, but by its own outside address.
            return name, source
    raise ConfigError("wan.lighthouse", lighthouse, f"no interface has {source}; set wan.interface")


def _loopback(network: Network) -> tuple[str, str]:
    for name, addresses in network.interfaces().items():
        for address in sorted(addresses, key=lambda a: family_of(a) != "ipv4"):
            if is_loopback(address):
                return name, address
    raise ConfigError("wan.interface", None, "no loopback interface; name the interface to use")


def _check_advertised(advertised: str, target: _Target | None, network: Network) -> None:
    """Others must be able to use the advertised address: known here, and not loopback to them."""
    addresses = network.resolve(advertised)
    if not addresses:
        rule = "is neither an address nor a known host name; give the address other islands use"
        raise ConfigError("wan.advertise_address", advertised, rule)
    elsewhere = target is not None and not is_loopback(target.address)
    if elsewhere and is_loopback(addresses[0]):
        rule = f"is loopback ({addresses[0]}), useless to other islands; give an outside address"
        raise ConfigError("wan.advertise_address", advertised, rule)


def _any_port(address: str) -> int:
    port = bound_port(address, 0)
    if port is None:
        raise ConfigError("wan.interface", address, "cannot be bound here; it is not an address of this host")
    return port
