"""The command `dilocox doctor`, and the short form that `launch` and `train` run at their start."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from dilocox.config.load import load_config
from dilocox.config.schema import Config
from dilocox.doctor import machine, network, probe, software
from dilocox.doctor.finding import Finding, ok, problem
from dilocox.doctor.host import Host, this_host
from dilocox.errors import ConfigError
from dilocox.net import bracketed, split_host_port

Check = Callable[[Host, Config | None], Iterable[Finding]]

QUICK: tuple[Check, ...] = (
    software.python,
    software.packages,
    software.apex,
    software.torch_build,
    network.host_name,
    network.wan_address,
    network.ports,
    machine.gpus,
    machine.open_files,
    machine.checkpoint_disk,
    machine.shared_file_system,
)
"""Milliseconds each: nothing leaves this host, no program is started, torch is not imported."""
SLOW: tuple[Check, ...] = (network.name_lookups, network.lighthouse, machine.gpu_links)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Checks software, interface, ports, lighthouse, clock, GPUs, disks and limits of this host, each "
        "finding with what to do. Exit code 1 if there is a problem. Run it on the nodes that will train."
    )
    parser.add_argument("config", type=Path, nargs="?", help="YAML file of the run; without it fewer checks")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.LEAF=VALUE")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", help="serve measurements for --peer of another host, until Ctrl-C"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="measure clock and bandwidth to a --listen",
    )


def main(args: argparse.Namespace) -> int:
    """Returns 0 = fine, 1 = problems found."""
    if args.listen is not None:
        return _listen(args.listen)
    if args.set and args.config is None:
        raise ConfigError("--set", args.set[0], "overrides a config; give CONFIG as well")
    config = load_config(args.config, args.set) if args.config is not None else None
    findings = [*examine(this_host(), config, QUICK + SLOW)]
    for peer in args.peer:
        findings += measure_peer(peer)
    for finding in findings:
        print(finding.line())
    counts = {s: sum(f.severity == s for f in findings) for s in ("problem", "warning")}
    print(f"{counts['problem']} problems, {counts['warning']} warnings")
    return 1 if counts["problem"] else 0


def quick_checks(config: Config, *, host: Host | None = None) -> list[Finding]:
    """The short form for the start of a run: warnings and problems only, in milliseconds, without torch."""
    findings = examine(host or this_host(), config, QUICK)
    return [finding for finding in findings if finding.severity in ("warning", "problem")]


def warn(config: Config) -> None:
    """Prints what the short form finds; a run starts all the same, as a check may be wrong about a site."""
    for finding in quick_checks(config):
        print(f"dilocox: {finding.line()}", file=sys.stderr, flush=True)


def examine(host: Host, config: Config | None, checks: Sequence[Check]) -> Iterator[Finding]:
    for check in checks:
        yield from check(host, config)


def measure_peer(peer: str) -> list[Finding]:
    """Clock and bandwidth to a host that runs `dilocox doctor --listen`."""
    host, port = split_host_port(peer, field="--peer")
    try:
        report = probe.measure(host, port)
    except OSError as error:
        advice = (
            f"run `dilocox doctor --listen {bracketed(host)}:{port}` there and open the port in its firewall"
        )
        return [problem("peer", f"{peer}: {error}", advice)]
    text = f"{peer}: {report.gbps:.3f} Gbit/s on one stream, round trip {report.round_trip_s * 1e3:.1f} ms"
    return [ok("peer", text), *network.clock(report.clock_skew_s, peer)]


def _listen(address: str) -> int:
    host, port = split_host_port(address, field="--listen")
    try:
        server = probe.open_server(host, port)
    except OSError as error:
        raise ConfigError(
            "--listen", address, f"cannot listen there ({error.strerror}); take a free port"
        ) from None
    with server:
        print(f"listening on {bracketed(host)}:{port}; Ctrl-C ends it", flush=True)
        try:
            probe.serve(server, threading.Event())
        except KeyboardInterrupt:
            print("ended")
    return 0
