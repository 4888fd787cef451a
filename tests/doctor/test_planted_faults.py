"""Each planted fault is found, with its advice, and nothing else is."""

from __future__ import annotations

import pytest

from dilocox.doctor import machine
from dilocox.doctor.command import QUICK, SLOW, examine, quick_checks
from tests.doctor.hosts import VERSIONS, config, healthy, network

PCIE = "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tSYS\t X \n"


def without(name):
    return {key: value for key, value in VERSIONS.items() if key != name}.get


def versions(**changed):
    return (VERSIONS | {name.replace("_", "-"): version for name, version in changed.items()}).get


IPV6_ONLY = {"lo": ["127.0.0.1"], "eth0": ["2001:db8::5", "fe80::5"]}
ONE_NODE = ("parallel.ranks_per_island=2", "parallel.nodes_per_island=1")

FAULTS = {
    "old python": ({"python_version": (3, 10, 12)}, (), "problem", "python", "Python 3.11 or newer"),
    "package missing": (
        {"package_version": without("torchft")},
        (),
        "problem",
        "packages",
        "pip install 'torchft>=0.2,<0.3'",
    ),
    "package too new": (
        {"package_version": versions(megatron_core="0.21.0")},
        (),
        "problem",
        "packages",
        "pip install 'megatron-core>=0.16,<0.20'",
    ),
    "wrong apex": (
        {"package_version": versions(apex="0.9.10"), "has_submodule": lambda package, name: False},
        (),
        "problem",
        "apex",
        "pip uninstall apex",
    ),
    "CPU torch beside GPUs": ({"torch_cuda": lambda: None}, (), "problem", "torch", "install the CUDA build"),
    "no Transformer Engine": (
        {"package_version": without("transformer-engine")},
        (),
        "warning",
        "torch",
        "dilocox[transformer-engine]",
    ),
    "device cuda without a GPU": (
        {"num_gpus": lambda: 0},
        ("run.device=cuda",),
        "problem",
        "torch",
        "set run.device=cpu",
    ),
    "idle GPUs": ({}, ("run.device=cpu",), "warning", "torch", "set run.device=auto"),
    "host name is loopback": (
        {"network": network(names={"gpu05": ["127.0.1.1"]})},
        (),
        "warning",
        "host name",
        "set NODE_ADDRESS",
    ),
    "host name unknown": (
        {"network": network(names={"gpu05": []})},
        (),
        "warning",
        "host name",
        "/etc/hosts",
    ),
    "lighthouse name is loopback": (
        {"network": network(names={"head": ["127.0.1.1"]})},
        ("wan.lighthouse=http://head:29510",),
        "problem",
        "interface",
        "use an address instead of the name",
    ),
    "no such interface": ({}, ("wan.interface=ib7",), "problem", "interface", "this host has eth0, lo"),
    "interface without address": (
        {"network": network(interfaces={"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "ib0": ["fe80::1"]})},
        ("wan.interface=ib0",),
        "problem",
        "interface",
        "give it one",
    ),
    "loopback interface": (
        {},
        ("wan.interface=lo",),
        "problem",
        "interface",
        "name the interface that reaches it",
    ),
    "IPv6-only interface, IPv4 lighthouse": (
        {"network": network(interfaces=IPV6_ONLY)},
        ("wan.interface=eth0",),
        "problem",
        "interface",
        "IPv6 address in brackets",
    ),
    "IPv6-only interface": (
        {"network": network(interfaces=IPV6_ONLY)},
        ("wan.interface=eth0", "wan.lighthouse=http://[2001:db8::1]:29510"),
        "warning",
        "interface",
        "brackets",
    ),
    "ports in use": ({"can_bind": lambda port: port == 29600}, (), "problem", "ports", "ss -ltnp"),
    "lighthouse not started": (
        {"reach": lambda *a: "refused"},
        (),
        "problem",
        "lighthouse",
        "start `dilocox lighthouse`",
    ),
    "firewall": ({"reach": lambda *a: "timeout"}, (), "problem", "lighthouse", "open TCP port 29510"),
    "no route": ({"reach": lambda *a: "unreachable"}, (), "problem", "lighthouse", "check the address"),
    "dead name server": ({"name_lookup_s": lambda a: 10.0}, (), "warning", "name lookups", "RES_OPTIONS"),
    "clock skew": ({"clock_skew_s": lambda *a: -40.0}, (), "warning", "clock", "time synchronisation"),
    "too few GPUs": ({"num_gpus": lambda: 1}, (), "problem", "gpus", "raise parallel.nodes_per_island"),
    "slow GPU links": (
        {"gpu_links": lambda: PCIE},
        (),
        "warning",
        "gpu links",
        "prefer pipeline or data parallel",
    ),
    "few open files": (
        {"open_file_limit": lambda: (256, 4096)},
        (),
        "problem",
        "open files",
        "ulimit -n 1026",
    ),
    "few open files, hard": (
        {"open_file_limit": lambda: (256, 256)},
        (),
        "problem",
        "open files",
        "administrators",
    ),
    "disk full": ({"free_bytes": lambda path: 10**8}, (), "problem", "disk", "lower checkpoint.save_retain"),
    "local disk": (
        {"file_system": lambda path: "ext4"},
        (),
        "warning",
        "shared disk",
        "shared file system (NFS",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_with_its_advice(tmp_path, name):
    planted, overrides, severity, check, advice = FAULTS[name]
    findings = [*examine(healthy(**planted), config(tmp_path, *overrides), QUICK + SLOW)]
    seen = [finding for finding in findings if finding.severity in ("problem", "warning")]
    assert [(finding.severity, finding.check) for finding in seen] == [(severity, check)], seen
    assert advice in seen[0].line()
    assert "\n" not in seen[0].line()


def test_a_healthy_host_has_nothing_to_complain_about(tmp_path):
    findings = [*examine(healthy(), config(tmp_path), QUICK + SLOW)]
    assert {finding.severity for finding in findings} <= {"ok", "note"}, findings
    assert {"interface", "ports", "name lookups", "lighthouse", "clock", "gpu links", "shared disk"} <= {
        f.check for f in findings
    }


def test_who_has_followed_the_advice_on_name_lookups_is_not_warned_again(tmp_path):
    host = healthy(name_lookup_s=lambda address: 1.01)  # timeout:1 attempts:1, and still no answer
    assert {f.severity for f in examine(host, config(tmp_path), SLOW)} <= {"ok", "note"}


def test_without_a_config_only_the_host_is_checked():
    findings = [*examine(healthy(), None, QUICK + SLOW)]
    assert {finding.check for finding in findings} == {
        "python", "packages", "torch", "host name", "gpu links", "open files",
    }  # fmt: skip


def test_one_node_islands_need_no_host_name_and_no_shared_disk(tmp_path):
    host = healthy(network=network(names={"gpu05": ["127.0.1.1"]}), file_system=lambda path: "ext4")
    assert quick_checks(config(tmp_path, *ONE_NODE), host=host) == []


def test_the_short_form_asks_no_other_host(tmp_path):
    def outside(*arguments):
        raise AssertionError("asked outside")

    questions = dict.fromkeys(("reach", "clock_skew_s", "name_lookup_s", "gpu_links"), outside)
    host = healthy(**questions, open_file_limit=lambda: (256, 256))
    assert [finding.check for finding in quick_checks(config(tmp_path), host=host)] == ["open files"]


def test_small_checkpoints_are_told_in_small_units(tmp_path):
    findings = examine(healthy(free_bytes=lambda path: 10**6), config(tmp_path), [machine.checkpoint_disk])
    (finding,) = findings
    assert "1.0 MB free" in finding.message and "0.0 GB" not in finding.message
