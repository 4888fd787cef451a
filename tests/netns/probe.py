"""Bandwidth of one TCP stream between two network namespaces; the standard library only.

`probe.py listen ADDRESS` prints its port, receives one stream and prints bits per second;
`probe.py send ADDRESS PORT NUM_BYTES` sends it.
"""

from __future__ import annotations

import socket
import sys
import time

CHUNK_BYTES = 1 << 16
HEAD_BYTES = 1 << 19
"""Not timed: the token bucket lets a burst through at full speed first."""


def listen(address: str) -> None:
    with socket.create_server((address, 0), family=_family(address)) as server:
        server.settimeout(30)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            received, timed_from, started = 0, 0, 0.0
            while chunk := connection.recv(CHUNK_BYTES):
                received += len(chunk)
                if not started and received >= HEAD_BYTES:
                    started, timed_from = time.perf_counter(), received
            elapsed = time.perf_counter() - started
    print(8 * (received - timed_from) / elapsed, flush=True)


def send(address: str, port: int, num_bytes: int) -> None:
    with socket.create_connection((address, port), timeout=30) as connection:
        block = bytes(CHUNK_BYTES)
        for _ in range(-(-num_bytes // CHUNK_BYTES)):
            connection.sendall(block)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
