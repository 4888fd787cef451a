"""One island's part of a swap over the WAN process group: `swap.py ME STORE_ADDRESS NUM_BYTES DELAY_S`.

Island 0 serves the store and prints its port; island 1 reads the port from its input.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import torch
from torch.distributed import TCPStore

from dilocox.outer.wan.process_group import WanProcessGroup
from tests.netns.wan_box import INTERFACE

TIMEOUT = timedelta(seconds=60)


def main(me: int, address: str, num_bytes: int, delay_s: float) -> None:
    store = None
    if me == 0:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        print(store.port, flush=True)
    port = store.port if store else int(sys.stdin.readline())
    group = WanProcessGroup(INTERFACE, streams=1, identity={"run_id": "swap"}, timeout=TIMEOUT)
    group.configure(f"{address}:{port}/swap", "swap", me, 2)
    empty, message = torch.empty(0, dtype=torch.uint8), torch.full((num_bytes,), me, dtype=torch.uint8)
    sizes = [num_bytes, num_bytes]
    sizes[me] = 0
    messages = [message, message]
    messages[me] = empty
    group.all_to_all([m[:1] for m in messages], [min(n, 1) for n in sizes])  # both are there
    time.sleep(delay_s)
    received = group.all_to_all(messages, sizes)[1 - me]
    assert received.numel() == num_bytes and bool((received == 1 - me).all())
    group.all_to_all([m[:1] for m in messages], [min(n, 1) for n in sizes])  # neither leaves too early
    print("done", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
