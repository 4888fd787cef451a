"""Several islands of one rank each, as threads in this process: the whole of level 2 without Megatron."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, OuterConfig
from dilocox.outer.control_group import SingleRankControl
from dilocox.outer.diloco import DilocoLoop
from dilocox.outer.fragment_set import FragmentSet
from dilocox.outer.members import MemberInfo
from dilocox.outer.shared_state import SharedState
from dilocox.outer.sync.join import JoinRules
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.wan.base import Member
from dilocox.outer.wan.loopback import LoopbackHub
from dilocox.param_shard import ParamShard

SHAPES = [(2, 3), (5,)]


class Log:
    """A reporter that keeps everything."""

    def __init__(self):
        self.syncs, self.events = [], []

    def sync(self, stats):
        self.syncs.append(stats)

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
        weights: one list of tensors per fragment.
    """

    def __init__(
        self, island, hub, config, *, shapes=SHAPES, shard=None, num_islands=2, min_islands=1, seed=None
    ):
        self.number = island
        self.log = Log()
        generator = torch.Generator().manual_seed(seed or 0)
        make = torch.zeros if seed is None else lambda shape: torch.randn(shape, generator=generator)
        self.weights = [[make(shape) for shape in shapes] for _ in range(config.num_fragments)]
        make_shard = shard or (lambda name, tensor, p: ParamShard.whole(name, tensor, layer=p))
        shards = [
            make_shard(f"fragment{p}.{i}", tensor, p)
            for p, tensors in enumerate(self.weights)
            for i, tensor in enumerate(tensors)
        ]
        per = len(shapes)
        indices = [list(range(p * per, (p + 1) * per)) for p in range(config.num_fragments)]
        self.wan = hub.wan(island)
        self.stopping = threading.Event()
        self.fragments = FragmentSet(config, shards, indices, island=island)
        self.state = SharedState(self.fragments)
        runner = SyncRunner(
            self.wan,
            SingleRankControl(),
            self.state,
            targets=self.fragments.all,
            stopping=self.stopping.is_set,
        )
        self.loop = DilocoLoop(
            self.fragments,
            runner,
            rules=JoinRules(num_islands, min_islands, timeout_s=5.0),
            members=MemberInfo(
                config,
                Member(island, "sync", "run", "print"),
                fragments=self.fragments,
                state=self.state,
                control=SingleRankControl(),
            ),
            publish=lambda: None,
            report=self.log,
        )

    @property
    def tensors(self):
        return [tensor for fragment in self.weights for tensor in fragment]

    @property
    def inner_step(self):
        return self.loop.position.inner_step

    def anchors(self):
        return [tensor.clone() for tensor in self.loop.anchors()]

    def train(self, last, move, after=lambda step: None):
        """Inner steps until `last` are done: `move(island, steps done before)` changes the weights."""
        while (step := self.inner_step) < last:
            move(self, step)
            self.loop.step_done(1)
            for event in self.loop.events():
                getattr(self.loop, event.kind)(event)
            after(self.inner_step)


def on_islands(islands, job):
    """Runs `job(island)` on all islands at once; returns their results in order."""
    with ThreadPoolExecutor(len(islands)) as pool:
        return list(pool.map(job, islands))


def make_islands(num_islands, config, *, hub=None, **settings):
    hub = hub or LoopbackHub(num_islands, timeout_s=10.0)
    return [
        ThreadIsland(island, hub, config, num_islands=num_islands, **settings)
        for island in range(num_islands)
    ]
