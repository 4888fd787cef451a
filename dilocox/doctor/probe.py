"""A small TCP server and client that measure clock skew, latency and bandwidth between two hosts.

`dilocox doctor --listen` runs the server, `dilocox doctor --peer HOST:PORT` the client. The client asks one
letter a connection: `t` = the server's clock, `b` = the server reads all it gets and says how many bytes.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from dataclasses import dataclass

CHUNK_BYTES = 1 << 18
TIMEOUT_S = 15.0
NUM_PINGS = 5


@dataclass(frozen=True)
class LinkReport:
    """What the client measured.

    Attributes:
        round_trip_s: shortest of several.
        clock_skew_s: server's clock minus own, from the same exchange.
        gbps: payload rate of one TCP stream to the server, Gbit/s.
    """

    round_trip_s: float
    clock_skew_s: float
    gbps: float


def open_server(host: str, port: int) -> socket.socket:
    """Listens on an address; `::` means all addresses, IPv4 included."""
    dual = host == "::" and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, dualstack_ipv6=dual)


def serve(server: socket.socket, stop: threading.Event) -> None:
    """Answers one client after another until `stop` is set."""
    server.settimeout(0.2)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(TIMEOUT_S)
            try:
                _answer(connection)
            except OSError:
                continue  # a port scanner or an aborted client; the next one is served


def measure(host: str, port: int, *, seconds: float = 2.0) -> LinkReport:
    """Asks the server for its clock, then sends for some seconds.

    Raises:
        OSError: no connection, or it broke.
    """
    pings = [_ping(host, port) for _ in range(NUM_PINGS)]
    round_trip, skew = min(pings)
    return LinkReport(round_trip_s=round_trip, clock_skew_s=skew, gbps=_send(host, port, seconds))


def _answer(connection: socket.socket) -> None:
    match connection.recv(1):
        case b"t":
            connection.sendall(struct.pack("!d", time.time()))
        case b"b":
            received = 0
            while chunk := connection.recv(CHUNK_BYTES):
                received += len(chunk)
            connection.sendall(struct.pack("!Q", received))


def _ping(host: str, port: int) -> tuple[float, float]:
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        sent = time.time()
        connection.sendall(b"t")
        (remote,) = struct.unpack("!d", _receive(connection, 8))
        received = time.time()
    return received - sent, remote - (sent + received) / 2


def _send(host: str, port: int, seconds: float) -> float:
    block = bytes(CHUNK_BYTES)
    with socket.create_connection((host, port), timeout=TIMEOUT_S) as connection:
        connection.sendall(b"b")
        started = time.perf_counter()
        while time.perf_counter() - started < seconds:
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        # The answer comes when all has arrived; what waits in buffers is not counted as sent.
        (received,) = struct.unpack("!Q", _receive(connection, 8))
        elapsed = time.perf_counter() - started
    return float(received) * 8 / elapsed / 1e9


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        chunk = connection.recv(num_bytes - len(data))
        if not chunk:
            raise ConnectionError("the other side closed the connection")
        data += chunk
    return data
