"""Seconds: utilisation, overlap, pauses, resume."""

import pytest

from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.throughput import Throughput, overlap_efficiency


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_utilisation_counts_training_seconds_only():
    clock = Clock()
    throughput = Throughput(clock)
    throughput.start()
    clock.now += 4
    throughput.add_step(tokens=300, compute_s=3.0)
    with throughput.paused():
        clock.now += 1000
    clock.now += 2
    throughput.stop()
    clock.now += 1000
    throughput.stop()
    assert (throughput.wall_s, throughput.compute_s, throughput.tokens) == (6.0, 3.0, 300)


def test_overlap_efficiency():
    assert overlap_efficiency(exchange_s=0.0, blocked_s=0.0) is None
    assert overlap_efficiency(exchange_s=4.0, blocked_s=1.0) == 0.75
    assert overlap_efficiency(exchange_s=0.1, blocked_s=100.0) == 0.0


def test_state_survives_a_resume():
    clock = Clock()
    first = Throughput(clock)
    first.start()
    clock.now += 5
    first.add_step(tokens=10, compute_s=4.0)
    second = Throughput(clock)
    second.load_state_dict(first.state_dict())
    second.start()
    clock.now += 5
    second.add_step(tokens=10, compute_s=4.0)
    second.stop()
    assert (second.wall_s, second.compute_s, second.tokens) == (10.0, 8.0, 20)


def counters(folder, sent, received):
    statistics = folder / "eth7" / "statistics"
    statistics.mkdir(parents=True, exist_ok=True)
    (statistics / "tx_bytes").write_text(f"{sent}\n")
    (statistics / "rx_bytes").write_text(f"{received}\n")


def test_interface_bytes_since_the_start(tmp_path):
    counters(tmp_path, 1000, 500)
    interface = InterfaceBytes("eth7", sysfs=tmp_path)
    counters(tmp_path, 1700, 501)
    assert (interface.sent, interface.received, interface.reason) == (700, 1, None)


@pytest.mark.parametrize("name, reason", [(None, "no WAN"), ("lo", "loopback"), ("nope0", "nope0")])
def test_no_figure_where_it_would_mislead(name, reason, tmp_path):
    interface = InterfaceBytes(name, sysfs=tmp_path)
    assert interface.sent is None and interface.received is None
    assert reason in interface.reason
