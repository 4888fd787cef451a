"""Interface, address and port decisions, on planted networks."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from dilocox.errors import ConfigError
from dilocox.net import Network, bracketed, split_host_port
from dilocox.outer.wan.address import parse_port_range, pick_port, resolve_address

INTERFACES = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1"],
    "ib0": ["192.168.7.5", "fd00::7"],
    "six0": ["2001:db8::5"],
    "down0": [],
    "link0": ["fe80::9"],
}
NAMES = {"login": ["127.0.1.1"], "head": ["10.0.0.1"], "localhost": ["127.0.0.1"], "me": ["10.0.0.5"]}
ROUTES = {
    "10.0.0.1": "10.0.0.5",
    "2001:db8::1": "2001:db8::5",
    "127.0.0.1": "127.0.0.1",
    "127.0.1.1": "127.0.0.1",
}


def planted(interfaces=INTERFACES, names=NAMES, routes=ROUTES):
    def resolve(host):
        literal = host.replace(":", "").replace(".", "").isalnum() and (":" in host or host[0].isdigit())
        return [host] if literal else names.get(host, [])

    return Network(lambda: interfaces, resolve, lambda address, port: routes.get(address))


def resolve(interface=None, advertise=None, lighthouse=None):
    return resolve_address(interface, advertise, lighthouse, network=planted())


@pytest.mark.parametrize(
    ("arguments", "interface", "address", "family"),
    [
        ({}, "lo", "127.0.0.1", "ipv4"),
        ({"lighthouse": "http://127.0.0.1:29510"}, "lo", "127.0.0.1", "ipv4"),
        ({"lighthouse": "http://localhost:29510"}, "lo", "127.0.0.1", "ipv4"),
        ({"lighthouse": "http://head:29510"}, "eth0", "10.0.0.5", "ipv4"),
        ({"lighthouse": "http://10.0.0.1:29510"}, "eth0", "10.0.0.5", "ipv4"),
        ({"lighthouse": "http://[2001:db8::1]:29510"}, "six0", "2001:db8::5", "ipv6"),
        ({"lighthouse": "http://10.0.0.1:29510", "interface": "ib0"}, "ib0", "192.168.7.5", "ipv4"),
        ({"lighthouse": "http://[2001:db8::1]:1", "interface": "ib0"}, "ib0", "fd00::7", "ipv6"),
        ({"lighthouse": "http://10.0.0.1:1", "interface": "six0"}, "six0", "2001:db8::5", "ipv6"),
        ({"interface": "eth0"}, "eth0", "10.0.0.5", "ipv4"),
        ({"lighthouse": "http://login:1", "interface": "eth0"}, "eth0", "10.0.0.5", "ipv4"),
        ({"lighthouse": "http://login:1", "interface": "lo"}, "lo", "127.0.0.1", "ipv4"),
    ],
)
def test_decision(arguments, interface, address, family):
    got = resolve(**arguments)
    assert (got.interface, got.address, got.family) == (interface, address, family)


def test_advertised_address_differs_from_the_local_one_behind_nat():
    got = resolve("eth0", "203.0.113.9", "http://10.0.0.1:29510")
    assert (got.address, got.local_address) == ("203.0.113.9", "10.0.0.5")
    assert "advertised as 203.0.113.9" in got.describe()


@pytest.mark.parametrize(
    ("arguments", "field", "rule"),
    [
        ({"interface": "eth9"}, "wan.interface", "this host has down0, eth0"),
        ({"interface": "down0"}, "wan.interface", "no address that others can reach"),
        ({"interface": "link0"}, "wan.interface", "no address that others can reach"),
        ({"interface": "lo", "lighthouse": "http://10.0.0.1:1"}, "wan.interface", "loopback address"),
        ({"lighthouse": "http://login:1"}, "wan.lighthouse", "resolves to loopback (127.0.1.1)"),
        ({"lighthouse": "http://nobody:1"}, "wan.lighthouse", "unknown here"),
        ({"lighthouse": "http://10.9.9.9:1"}, "wan.lighthouse", "no route to 10.9.9.9"),
        ({"lighthouse": "http://head"}, "wan.lighthouse", "http://HOST:PORT"),
        ({"lighthouse": "http://head:port"}, "wan.lighthouse", "http://HOST:PORT"),
        ({"lighthouse": "https://head:1"}, "wan.lighthouse", "http://HOST:PORT"),
        ({"advertise": "login", "lighthouse": "http://head:1"}, "wan.advertise_address", "is loopback"),
        ({"advertise": "127.0.0.1", "lighthouse": "http://head:1"}, "wan.advertise_address", "is loopback"),
        ({"advertise": "nobody"}, "wan.advertise_address", "neither an address nor a known host name"),
    ],
)
def test_refusal_names_field_and_rule(arguments, field, rule):
    with pytest.raises(ConfigError) as caught:
        resolve(**arguments)
    assert caught.value.field == field
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)


def test_url_spelling():
    assert split_host_port("http://[::1]:80", field="f") == ("::1", 80)
    assert split_host_port("host:80", field="f") == ("host", 80)
    assert bracketed("::1") == "[::1]"
    assert bracketed("10.0.0.1") == "10.0.0.1"
    assert resolve("six0").host_in_url() == "[2001:db8::5]"


def test_pick_port_skips_ports_in_use_and_wraps_around():
    with socket.socket() as first:
        first.bind(("", 0))
        first.listen()
        used = first.getsockname()[1]
        if not 1024 <= used - 1 <= used + 1 <= 65535:
            pytest.skip("the system gave a port at the edge")
        assert pick_port(f"{used}-{used + 3}") != used
        assert pick_port(f"{used - 1}-{used}", offset=1) == used - 1
        with pytest.raises(ConfigError, match="all 1 ports are in use"):
            pick_port(f"{used}-{used}")


def test_pick_port_without_a_range():
    assert 1024 <= pick_port(None) <= 65535
    with pytest.raises(ConfigError, match="not an address of this host"):
        pick_port(None, address="203.0.113.9")


@pytest.mark.parametrize("text", ["5-4", "80-90", "30000-70000", "30000", "a-b"])
def test_port_range_rules(text):
    with pytest.raises(ConfigError, match=r"wan\.port_range"):
        parse_port_range(text)


def test_the_real_system_answers_for_one_machine():
    assert resolve_address(None, None, "http://127.0.0.1:29510").local_address == "127.0.0.1"


def test_needs_no_torch():
    code = "import sys, dilocox.outer.wan.address; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
