"""A WAN in a box: one network namespace an island, joined by a bridge, with shaped links and counters.

Everything lives in namespaces of its own (the bridge too, in the `hub`), so that nothing touches the
host's network and boxes never collide. Removing the namespaces removes all of it.

    with WanBox(num_islands=2, rate_mbit=100) as box:
        lighthouse = box.start_in(box.hub, [...])          # reachable at box.hub.address
        before = box.tx_bytes(0)
        box.run_in(box.islands[0], [...], check=True)
        sent = box.tx_bytes(0) - before
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "dilocox"
INTERFACE = "wan0"
MIN_BURST_BYTES = 128 * 1024
_box_numbers = itertools.count()


@dataclass(frozen=True)
class Place:
    """A namespace of the box: an island or the hub."""

    namespace: str
    interface: str
    address: str


def missing_requirement() -> str | None:
    """Why a box cannot be had on this host, None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"program {program} is missing (package iproute2)"
    name = f"{PREFIX}-{os.getpid()}-try"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"this kernel or container allows no network namespaces: {done.stderr.strip()}"
    _ip("netns", "del", name)
    return None


def remove_stale() -> list[str]:
    """Removes the namespaces of boxes whose process is gone; returns their names."""
    removed = []
    for name in _namespaces():
        prefix, _, rest = name.partition("-")
        pid = rest.partition("-")[0]
        if prefix == PREFIX and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            _remove_namespace(name)
            removed.append(name)
    return removed


class WanBox:
    """Context manager; root only.

    Args:
        num_islands: namespaces besides the hub.
        rate_mbit: egress rate of each island in Mbit/s; None = unshaped.
        ipv6: give IPv6 addresses and no IPv4 ones.
        delay_ms: extra egress delay; needs the kernel's netem.
    """

    def __init__(
        self, num_islands: int, *, rate_mbit: float | None = None, ipv6: bool = False, delay_ms: float = 0.0
    ) -> None:
        base = f"{PREFIX}-{os.getpid()}-{next(_box_numbers)}"
        self._rate_mbit = rate_mbit
        self._delay_ms = delay_ms
        self._net, self._prefix_length = ("fd5d:1::", 64) if ipv6 else ("10.213.0.", 24)
        self.hub = Place(f"{base}-hub", "br0", f"{self._net}1")
        self.islands = [
            Place(f"{base}-island{i}", INTERFACE, f"{self._net}{10 + i}") for i in range(num_islands)
        ]

    def __enter__(self) -> WanBox:
        remove_stale()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills what runs in the box and removes it; harmless when parts are missing already."""
        existing = set(_namespaces())
        for place in [*self.islands, self.hub]:
            if place.namespace in existing:
                _remove_namespace(place.namespace)

    def run_in(
        self, place: Place | int, command: Sequence[str], **kwargs: Any
    ) -> subprocess.CompletedProcess:
        """`subprocess.run` inside an island (by number) or any place."""
        return subprocess.run(self._inside(place, command), **kwargs)

    def start_in(self, place: Place | int, command: Sequence[str], **kwargs: Any) -> subprocess.Popen:
        """`subprocess.Popen` inside an island (by number) or any place."""
        return subprocess.Popen(self._inside(place, command), **kwargs)

    def shape(self, island: int, rate_mbit: float | None, *, delay_ms: float = 0.0) -> None:
        """Sets the egress rate of an island, also while traffic flows; None removes the limit.

        Raises:
            RuntimeError: `delay_ms` is asked for and this kernel has no netem.
        """
        place = self.islands[island]
        at = ("dev", place.interface)
        self.run_in(place, ["tc", "qdisc", "del", *at, "root"], capture_output=True, check=False)
        parent = ["root"]
        if rate_mbit is not None:
            burst = max(MIN_BURST_BYTES, int(rate_mbit * 1e6 / 8 * 0.002))
            limits = ["rate", f"{int(rate_mbit * 1e6)}bit", "burst", str(burst), "latency", "400ms"]
            self._tc(place, "qdisc", "add", *at, "root", "handle", "1:", "tbf", *limits)
            parent = ["parent", "1:1"]
        if delay_ms:
            self._tc(
                place, "qdisc", "add", *at, *parent, "netem", "delay", f"{delay_ms}ms", "limit", "100000"
            )

    def tx_bytes(self, island: int) -> int:
        """Bytes that the kernel counted as sent by an island, Ethernet headers included."""
        return self._counter(island, "tx_bytes")

    def rx_bytes(self, island: int) -> int:
        return self._counter(island, "rx_bytes")

    def measure_mbit(self, source: int, target: int, *, num_bytes: int) -> float:
        """Payload rate of one TCP stream between two islands in Mbit/s."""
        probe = [sys.executable, str(Path(__file__).with_name("probe.py"))]
        address = self.islands[target].address
        with self.start_in(target, [*probe, "listen", address], stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            self.run_in(source, [*probe, "send", address, port, str(num_bytes)], check=True, timeout=120)
            return float(server.stdout.readline()) / 1e6

    def confirm_shaping(self, *, seconds: float = 2.0, tolerance: float = 0.15) -> list[float]:
        """Measures each island's egress and compares it with the asked rate.

        Raises:
            RuntimeError: the box is unshaped, or a rate is off by more than `tolerance` (a fraction).
        """
        if self._rate_mbit is None or len(self.islands) < 2:
            raise RuntimeError("nothing to confirm: the box is not shaped")
        num_bytes = int(self._rate_mbit * 1e6 / 8 * seconds) + (1 << 19)
        measured = []
        for source in range(len(self.islands)):
            rate = self.measure_mbit(source, (source + 1) % len(self.islands), num_bytes=num_bytes)
            if abs(rate / self._rate_mbit - 1) > tolerance:
                raise RuntimeError(f"island {source}: {rate:.1f} Mbit/s, asked for {self._rate_mbit}")
            measured.append(rate)
        return measured

    def _build(self) -> None:
        for place in [self.hub, *self.islands]:
            _ip("netns", "add", place.namespace)
            _ip("-n", place.namespace, "link", "set", "lo", "up")
        _ip("-n", self.hub.namespace, "link", "add", self.hub.interface, "type", "bridge")
        self._bring_up(self.hub)
        for number, island in enumerate(self.islands):
            port = f"port{number}"
            _ip(
                *("-n", self.hub.namespace, "link", "add", port, "type", "veth"),
                *("peer", "name", island.interface, "netns", island.namespace),
            )
            _ip("-n", self.hub.namespace, "link", "set", port, "master", self.hub.interface, "up")
            self._bring_up(island)
            if self._rate_mbit is not None or self._delay_ms:
                self.shape(number, self._rate_mbit, delay_ms=self._delay_ms)

    def _bring_up(self, place: Place) -> None:
        at = ("-n", place.namespace)
        no_wait = ("nodad",) if ":" in self._net else ()  # duplicate detection would delay its use
        with_length = f"{place.address}/{self._prefix_length}"
        _ip(*at, "address", "add", with_length, "dev", place.interface, *no_wait)
        _ip(*at, "link", "set", place.interface, "up")

    def _tc(self, place: Place, *arguments: str) -> None:
        done = self.run_in(place, ["tc", *arguments], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")

    def _counter(self, island: int, name: str) -> int:
        path = f"/sys/class/net/{self.islands[island].interface}/statistics/{name}"
        return int(self.run_in(island, ["cat", path], capture_output=True, text=True, check=True).stdout)

    def _inside(self, place: Place | int, command: Sequence[str]) -> list[str]:
        place = self.islands[place] if isinstance(place, int) else place
        return ["ip", "netns", "exec", place.namespace, *command]


def _namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.strip()]


def _remove_namespace(name: str) -> None:
    """Ends the processes inside, then deletes it; a namespace with processes would live on unnamed."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        done = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        if not done.stdout.split():
            break
        for pid in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
