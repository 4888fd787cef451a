"""Level 2 by method, with its WAN."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from dilocox.config.load import fingerprint
from dilocox.config.schema import Config
from dilocox.outer.control_group import ControlGroup, GlooControlGroup
from dilocox.outer.data_parallel import Gradients, WanDataParallel
from dilocox.outer.diloco import DilocoLoop
from dilocox.outer.fragment_set import FragmentSet
from dilocox.outer.fragments import Sized, assign, group
from dilocox.outer.loop import OuterLoop
from dilocox.outer.members import MemberInfo
from dilocox.outer.reporter import Reporter
from dilocox.outer.shared_state import SharedState, StateSource
from dilocox.outer.sync.join import JoinRules
from dilocox.outer.sync.request import SyncTarget
from dilocox.outer.sync.runner import SyncRunner
from dilocox.outer.wan.address import resolve_address
from dilocox.outer.wan.base import Member, Wan
from dilocox.outer.wan.membership import TorchftWan
from dilocox.outer.wan.single_island import SingleIslandWan
from dilocox.param_shard import ParamShard
from dilocox.topology import Topology


@dataclass(frozen=True)
class OuterParts:
    """What level 2 needs of the rest of the trainer.

    Attributes:
        island_id: of this island.
        sync_group: gloo group of the island's ranks for the sync thread alone.
        shards: fp32 shards that this rank owns.
        parameters: whole parameters of this pipeline stage, for balanced fragments.
        publish: makes the model's weights follow the shards.
        gradient_buffers: returns this rank's fp32 gradients (`data_parallel`).
        report: receives reports of level 2.
        stopping: True once this rank was told to stop.
        tokenizer: identity of the tokenizer, which all islands must share.
    """

    island_id: int
    sync_group: dist.ProcessGroup
    shards: Sequence[ParamShard]
    parameters: Sequence[Sized]
    publish: Callable[[], None]
    gradient_buffers: Callable[[], Sequence[Tensor]]
    report: Reporter
    stopping: Callable[[], bool]
    tokenizer: str


def build_outer_loop(config: Config, parts: OuterParts) -> OuterLoop:
    """Builds the outer loop of `outer.method`: `diloco` or `data_parallel`.

    Collective: all ranks of the island.

    Args:
        config: resolved.

    Raises:
        ConfigError: the WAN's interface or address cannot be used.
    """
    control = GlooControlGroup(parts.sync_group)
    wan, interface = _build_wan(config, parts, control)
    rules = JoinRules(config.parallel.num_islands, config.wan.min_islands, config.wan.join_timeout_s)
    identity = Member(
        island=parts.island_id, kind="sync", run_id=config.run.name, fingerprint=fingerprint(config)
    )

    def runner(source: StateSource, targets: Sequence[SyncTarget]) -> SyncRunner:
        return SyncRunner(wan, control, SharedState(source), targets=targets, stopping=parts.stopping)

    loop: DilocoLoop | WanDataParallel
    if config.outer.method == "data_parallel":
        gradients = Gradients(parts.gradient_buffers, island=parts.island_id)
        loop = WanDataParallel(
            config.outer,
            runner(gradients, [gradients]),
            gradients=gradients,
            rules=rules,
            identity=identity,
            report=parts.report,
        )
    else:
        num_fragments = config.outer.num_fragments
        assignment = assign(parts.parameters, num_fragments, config.outer.fragment_pattern)
        indices = group(parts.shards, assignment, num_fragments)
        fragments = FragmentSet(config.outer, parts.shards, indices, island=parts.island_id)
        runs = runner(fragments, fragments.all)
        loop = DilocoLoop(
            fragments,
            runs,
            rules=rules,
            members=MemberInfo(
                config.outer, identity, fragments=fragments, state=runs.state, control=control
            ),
            publish=parts.publish,
            report=parts.report,
        )
    loop.interface = interface
    return loop


def _build_wan(config: Config, parts: OuterParts, control: ControlGroup) -> tuple[Wan, str | None]:
    """Returns the WAN, and the network interface that carries it (None for one island)."""
    if config.parallel.num_islands == 1:
        return SingleIslandWan(), None
    settings = config.wan
    address = resolve_address(settings.interface, settings.advertise_address, settings.lighthouse)
    identity = {
        "run_id": config.run.name,
        "fingerprint": fingerprint(config),
        "layout": Topology.from_config(config.parallel).describe(),
        "tokenizer": parts.tokenizer,
    }
    wan = TorchftWan(settings, address=address, island_id=parts.island_id, control=control, identity=identity)
    parts.report.event("wan", 0, lighthouse=settings.lighthouse, address=address.describe())
    return wan, address.interface
