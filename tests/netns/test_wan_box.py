"""The WAN box itself: isolation, shaping, counters, cleanup."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.netns.wan_box import PREFIX, WanBox, missing_requirement, remove_stale

REASON = missing_requirement()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


def namespaces():
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def ping_code(address, port):
    return f"import socket; socket.create_connection(({address!r}, {port}), timeout=5).close()"


@pytest.mark.parametrize("ipv6", [False, True])
def test_islands_reach_each_other_and_the_hub(ipv6):
    with WanBox(2, ipv6=ipv6) as box:
        assert (":" in box.hub.address) is ipv6
        assert box.measure_mbit(0, 1, num_bytes=8 << 20) > 0
        family = "socket.AF_INET6" if ipv6 else "socket.AF_INET"
        server = (
            f"import socket; s = socket.create_server(({box.hub.address!r}, 0), family={family});"
            "print(s.getsockname()[1], flush=True); s.accept()"
        )
        with box.start_in(box.hub, [sys.executable, "-c", server], stdout=subprocess.PIPE, text=True) as hub:
            port = int(hub.stdout.readline())
            box.run_in(1, [sys.executable, "-c", ping_code(box.hub.address, port)], check=True)
            # The host itself cannot: the box is closed.
            outside = subprocess.run(
                [sys.executable, "-c", ping_code(box.hub.address, port)], capture_output=True, check=False
            )
            assert outside.returncode != 0


def test_shaping_holds_and_is_confirmed_by_a_probe():
    with WanBox(2, rate_mbit=40) as box:
        # Only the upper bound is the shaper's alone; a busy host can be slower.
        assert all(20 <= rate <= 46 for rate in box.confirm_shaping(seconds=1.0, tolerance=0.5))
        box.shape(0, 10)
        assert 5 <= box.measure_mbit(0, 1, num_bytes=(1 << 19) + 1_000_000) <= 11.5
        with pytest.raises(RuntimeError, match=r"island 0: .* Mbit/s, asked for 40"):
            box.confirm_shaping(seconds=0.5, tolerance=0.5)


def test_unshaped_box_has_nothing_to_confirm():
    with WanBox(2) as box, pytest.raises(RuntimeError, match="not shaped"):
        box.confirm_shaping()


def test_kernel_counts_what_was_sent():
    num_bytes = 4 << 20
    with WanBox(3) as box:
        before = [box.tx_bytes(i) for i in range(3)]
        box.measure_mbit(0, 1, num_bytes=num_bytes)
        sent = [box.tx_bytes(i) - before[i] for i in range(3)]
        assert num_bytes < sent[0] < 1.1 * num_bytes
        assert sent[1] < 0.1 * num_bytes
        assert sent[2] < 0.01 * num_bytes
        assert box.rx_bytes(1) > num_bytes


def test_nothing_is_left_after_a_failure_inside():
    with pytest.raises(KeyError), WanBox(2) as box:
        sleeper = box.start_in(0, ["sleep", "1000"])
        raise KeyError
    assert sleeper.wait(timeout=10) != 0
    assert box.islands[0].namespace not in namespaces()
    assert box.hub.namespace not in namespaces()


def test_nothing_is_left_when_building_fails(monkeypatch):
    box = WanBox(2, rate_mbit=1)
    monkeypatch.setattr(box, "shape", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"), box:
        pass
    assert box.hub.namespace not in namespaces()


def test_leftovers_of_dead_processes_are_removed_and_others_kept():
    dead = subprocess.Popen(["true"])
    dead.wait()
    stale = f"{PREFIX}-{dead.pid}-0-hub"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    with WanBox(1) as box:
        assert stale not in namespaces()
        assert remove_stale() == []
        assert box.hub.namespace in namespaces()
        assert str(os.getpid()) in box.hub.namespace


def test_two_boxes_live_side_by_side():
    with WanBox(1) as one, WanBox(1) as two:
        assert one.islands[0].address == two.islands[0].address
        assert one.islands[0].namespace != two.islands[0].namespace
