"""Memory of a sync: the formula against what really lives while islands sync through the outer loop."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dilocox.outer.sync.thread import SyncThread
from dilocox.plan.in_flight import in_flight_bytes
from tests.outer.islands import make_islands, on_islands, outer_config

SHAPES = [(144, 64), (48, 128), (96, 64), (64,)]  # rows of whole blocks, as in every real model
NUMELS = [144 * 64, 48 * 128, 96 * 64, 64]


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that torch has made under this mode and that are still alive."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._lock = threading.Lock()
        self._alive = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {id_of(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        with self._lock:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and id_of(leaf) not in known:
                    storage = leaf.untyped_storage()
                    self._alive[id_of(leaf)] = (StorageWeakRef(storage), storage.nbytes())
            self._alive = {key: value for key, value in self._alive.items() if not value[0].expired()}
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def id_of(tensor):
    return tensor.untyped_storage()._cdata


def watch(loop) -> LiveBytes:
    """Counts what the sync thread of an outer loop makes, too."""
    live = LiveBytes()
    (thread,) = (value for value in vars(loop).values() if isinstance(value, SyncThread))
    submit = thread.submit

    def submit_watched(job):
        def run():
            with live:
                return job()

        return submit(run)

    thread.submit = submit_watched
    return live


CASES = {
    "blocking fp32": ({}, 2),
    "blocking int4": ({"codec": "int4"}, 2),
    "blocking int4 + EF": ({"codec": "int4", "error_feedback": True}, 2),
    "blocking int4 + EF, three islands": ({"codec": "int4", "error_feedback": True}, 3),
    "blocking bf16, three islands": ({"codec": "bf16"}, 3),
    "blocking fp32, three islands": ({}, 3),
    "blocking low rank": ({"codec": "low_rank", "codec_rank": 4, "error_feedback": True}, 2),
    "streaming int4 + EF": ({"overlap_delay": 1, "codec": "int4", "error_feedback": True}, 2),
    "delayed_keep int4 + EF": ({"overlap_delay": 4, "codec": "int4", "error_feedback": True}, 2),
    "eager int4 + EF": (
        {"overlap_delay": 4, "delay_mode": "eager", "codec": "int4", "error_feedback": True},
        2,
    ),
    "eager fp32": ({"overlap_delay": 4, "delay_mode": "eager"}, 2),
    "one island": ({"codec": "int4", "error_feedback": True}, 1),
}


@pytest.mark.parametrize(("settings", "num_islands"), CASES.values(), ids=CASES)
def test_the_formula_counts_what_lives(settings, num_islands):
    config = outer_config(sync_interval=4, **settings)
    islands = make_islands(num_islands, config, shapes=SHAPES)
    on_islands(islands, lambda island: island.loop.join(0))

    def move(island, step):
        for tensor in island.tensors:
            tensor.add_(0.01 * (step + island.number))

    on_islands(islands, lambda island: island.train(8, move))  # momentum buffers are there now
    live = watch(islands[0].loop)

    def train(island):
        if island.number:
            island.train(20, move)
            return
        with live:
            island.train(20, move)

    on_islands(islands, train)
    payload_bytes = max(sync.payload_bytes_sent for sync in islands[0].log.syncs)
    formula = in_flight_bytes(config, numels=NUMELS, num_islands=num_islands, payload_bytes=payload_bytes)
    copies = 4 * sum(NUMELS)
    print(f"measured {live.peak / copies:.2f}, formula {formula / copies:.2f} copies of the fragment")
    assert 0.8 * formula <= live.peak <= 1.1 * formula
