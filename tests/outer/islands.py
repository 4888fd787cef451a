"""Several islands of one rank each, as threads in this process: the whole of level 2 without Megatron."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, OuterConfig
from dilocox.outer.control_group import SingleRankControl
from dilocox.outer.diloco import DilocoLoop
from dilocox.outer.schedule import EventKind
from dilocox.outer.sync.runner import JoinRules, SyncRunner
from dilocox.outer.wan.base import Member
from dilocox.outer.wan.loopback import LoopbackHub
from dilocox.param_shard import ParamShard

SHAPES = [(2, 3), (5,)]


class Log:
    """A reporter that keeps everything."""

    def __init__(self):
        self.syncs, self.events = [], []

    def sync(self, record):
        self.syncs.append(record)

    def event(self, event, inner_step, **details):
        self.events.append((event, inner_step, details))

    def named(self, name):
        return [event for event in self.events if event[0] == name]


def outer_config(**settings) -> OuterConfig:
    """A resolved `outer` section."""
    return resolve(Config(outer=OuterConfig(**settings))).outer


class ThreadIsland:
    """One island: shards that a test moves by hand, and its `DilocoLoop`.

    Attributes:
        weights: one list of tensors a fragment.
    """

    def __init__(self, island, hub, config, *, shapes=SHAPES, num_islands=2, min_islands=1, seed=None):
        self.number = island
        self.log = Log()
        generator = torch.Generator().manual_seed(seed or 0)
        make = torch.zeros if seed is None else lambda shape: torch.randn(shape, generator=generator)
        self.weights = [[make(shape) for shape in shapes] for _ in range(config.num_fragments)]
        shards = [
            ParamShard.whole(f"fragment{p}.{i}", tensor, layer=p)
            for p, tensors in enumerate(self.weights)
            for i, tensor in enumerate(tensors)
        ]
        per = len(shapes)
        self.wan = hub.wan(island)
        self.stopping = threading.Event()
        self.sync = DilocoLoop(
            config,
            shards=shards,
            fragments=[list(range(p * per, (p + 1) * per)) for p in range(config.num_fragments)],
            exchange=SyncRunner(self.wan, SingleRankControl(), retry_s=5.0, stopping=self.stopping.is_set),
            rules=JoinRules(num_islands, min_islands, timeout_s=5.0),
            hello=Member(island, "sync", "run", "print", 0, 0, 0, 1.0, ""),
            publish=lambda: None,
            report=self.log,
        )

    @property
    def tensors(self):
        return [tensor for fragment in self.weights for tensor in fragment]

    def train(self, first, last, move, after=lambda step: None):
        """Inner steps first .. last - 1: `move(island, step)` changes the weights, then level 2 acts."""
        for step in range(first, last):
            move(self, step)
            self.sync.add_tokens(1)
            for event in self.sync.events_after(step):
                match event.kind:
                    case EventKind.MEASURE:
                        self.sync.measure(event, step + 1)
                    case EventKind.START:
                        self.sync.start(event)
                    case EventKind.APPLY:
                        self.sync.apply(event, step + 1)
            after(step)


def on_islands(islands, job):
    """Runs `job(island)` on all islands at once; returns their results in order."""
    with ThreadPoolExecutor(len(islands)) as pool:
        return list(pool.map(job, islands))


def make_islands(num_islands, config, **settings):
    hub = LoopbackHub(num_islands, timeout_s=10.0)
    return [
        ThreadIsland(island, hub, config, num_islands=num_islands, **settings)
        for island in range(num_islands)
    ]
