"""Bytes on the wire as the kernel counts them, headers and retransmissions included."""

from __future__ import annotations

from pathlib import Path

SYSFS = Path("/sys/class/net")


class InterfaceBytes:
    """Counters of one network interface since this object was made.

    The kernel counts everything that crosses the interface, of all processes. Figures are therefore None
    where they would mislead: on loopback, which also carries traffic inside the islands, and where the
    counters cannot be read. `reason` then says why.
    """

    def __init__(self, interface: str | None, *, sysfs: Path = SYSFS) -> None:
        self.interface = interface
        self._folder = None if interface is None else sysfs / interface / "statistics"
        self.reason = self._why_not()
        self._first_sent = self._read("tx_bytes")
        self._first_received = self._read("rx_bytes")

    @property
    def sent(self) -> int | None:
        """Bytes sent since the start."""
        return self._delta("tx_bytes", self._first_sent)

    @property
    def received(self) -> int | None:
        """Bytes received since the start."""
        return self._delta("rx_bytes", self._first_received)

    def _why_not(self) -> str | None:
        if self._folder is None:
            return "no WAN interface"
        if self.interface == "lo":
            return "the WAN runs over loopback, whose counter includes traffic inside the islands"
        if not (self._folder / "tx_bytes").exists():
            return f"no counters of {self.interface} below {self._folder.parent.parent}"
        return None

    def _read(self, counter: str) -> int | None:
        if self.reason is not None or self._folder is None:
            return None
        return int((self._folder / counter).read_text())

    def _delta(self, counter: str, first: int | None) -> int | None:
        now = self._read(counter)
        return None if now is None or first is None else now - first
