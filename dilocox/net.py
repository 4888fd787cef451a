"""Interfaces, addresses, ports and name look-ups: for doctor, command line and level 2. No torch."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

import psutil

from dilocox.errors import ConfigError

Family = Literal["ipv4", "ipv6"]
Reach = Literal["open", "refused", "timeout", "unreachable"]


@dataclass(frozen=True)
class Network:
    """Look-ups in the operating system; tests pass their own.

    Attributes:
        interfaces: addresses of each interface, IPv4 and IPv6, without scope.
        resolve: addresses of a host name; empty when it is unknown.
        route_source: local address from which packets to (address, port) leave, None without a route.
    """

    interfaces: Callable[[], Mapping[str, Sequence[str]]]
    resolve: Callable[[str], Sequence[str]]
    route_source: Callable[[str, int], str | None]


def bracketed(host: str) -> str:
    """The host as URLs and HOST:PORT need it: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host


def split_host_port(address: str, *, field: str) -> tuple[str, int]:
    """HOST:PORT or http://HOST:PORT into its parts; IPv6 literals stand in brackets.

    Raises:
        ConfigError: `address` has no host or no port; names `field`.
    """
    rule = "needs the form http://HOST:PORT, an IPv6 address in brackets: http://[2001:db8::1]:29510"
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigError(field, address, rule) from None
    if not host or not port or parts.scheme not in ("", "http"):
        raise ConfigError(field, address, rule)
    return host, port


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1."""
    return ipaddress.ip_address(address).is_loopback


def family_of(address: str) -> Family:
    return "ipv6" if ipaddress.ip_address(address).version == 6 else "ipv4"


def bound_port(address: str, port: int) -> int | None:
    """Returns the port that a bind to (address, port) gets, port 0 meaning any; None if it fails."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: a port whose last connections are still in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


def is_port_free(port: int) -> bool:
    """Whether a local port is free now."""
    return bound_port("", port) is not None


def reach(host: str, port: int, timeout_s: float) -> Reach:
    """Tries a TCP connection and returns how it ended."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return "refused"
    except TimeoutError:
        return "timeout"
    except OSError:
        return "unreachable"
    return "open"


def name_lookup_s(address: str) -> float:
    """Seconds until the name server has answered for an address, or given up.

    Asked in the IPv6 form, as torch does; for this form glibc does not read /etc/hosts.
    """
    started = time.perf_counter()
    mapped = address if ":" in address else f"::ffff:{address}"
    with contextlib.suppress(OSError):
        socket.getnameinfo((mapped, 0), 0)
    return time.perf_counter() - started


def system_network() -> Network:
    """Returns the look-ups of this host."""
    return Network(interfaces=_interfaces, resolve=_resolve, route_source=_route_source)


def is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _interfaces() -> dict[str, list[str]]:
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in families]
        for name, entries in psutil.net_if_addrs().items()
    }


def _resolve(host: str) -> list[str]:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(sockaddr[0]).partition("%")[0] for *_, sockaddr in answers]


def _route_source(address: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))  # UDP: sends nothing, only asks the routing table
        except OSError:
            return None
        return str(probe.getsockname()[0])
