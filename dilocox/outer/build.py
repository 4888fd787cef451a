"""Level 2 by method, with its WAN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from dilocox.config.load import fingerprint
from dilocox.config.schema import Config
from dilocox.outer.control_group import GlooControlGroup
from dilocox.outer.data_parallel import WanDataParallel
from dilocox.outer.diloco import DilocoLoop
from dilocox.outer.fragments import Sized, assign, group
from dilocox.outer.loop import OuterLoop
from dilocox.outer.reporter import Reporter
from dilocox.outer.sync.runner import JoinRules, SyncRunner
from dilocox.outer.wan.address import resolve_address
from dilocox.outer.wan.base import Member, Wan
from dilocox.outer.wan.membership import TorchftWan
from dilocox.outer.wan.single_island import SingleIslandWan
from dilocox.param_shard import ParamShard
from dilocox.topology import Topology


def build_outer_loop(
    config: Config,
    *,
    island_id: int,
    sync_group: dist.ProcessGroup,
    shards: Sequence[ParamShard],
    parameters: Sequence[Sized],
    publish: Callable[[], None],
    gradient_buffers: Callable[[], Sequence[Tensor]],
    report: Reporter,
    stopping: Callable[[], bool],
    tokenizer: str,
) -> OuterLoop:
    """Builds what `outer.method` asks for.

    Collective: all ranks of the island.

    Args:
        config: resolved.
        sync_group: gloo group of the island's ranks for the exchange thread alone.
        shards: fp32 shards that this rank owns.
        parameters: whole parameters of this pipeline stage, for balanced fragments.
        publish: makes the model follow the shards.
        gradient_buffers: this rank's fp32 gradients (`data_parallel`).
        stopping: True once this rank was told to stop.
        tokenizer: identity of the tokenizer, which all islands must share.

    Raises:
        ConfigError: the WAN's interface or address is no good.
    """
    island = GlooControlGroup(sync_group)
    identity = {
        "run_id": config.run.name,
        "fingerprint": fingerprint(config),
        "layout": Topology.from_config(config.parallel).describe(),
        "tokenizer": tokenizer,
    }
    wan: Wan = SingleIslandWan()
    interface: str | None = None
    if config.parallel.num_islands > 1:
        settings = config.wan
        address = resolve_address(settings.interface, settings.advertise_address, settings.lighthouse)
        interface = address.interface
        wan = TorchftWan(settings, address=address, island_id=island_id, island=island, identity=identity)
        report.event("wan", 0, lighthouse=settings.lighthouse, address=address.describe())
    exchange = SyncRunner(wan, island, retry_s=config.wan.timeout_s, stopping=stopping)
    rules = JoinRules(config.parallel.num_islands, config.wan.min_islands, config.wan.join_timeout_s)
    hello = Member(
        island=island_id,
        kind="sync",
        run_id=identity["run_id"],
        fingerprint=identity["fingerprint"],
        outer_step=0,
        fragment=0,
        inner_step=0,
        weight=1.0,
        anchor_hash="",
    )
    level2: DilocoLoop | WanDataParallel
    if config.outer.method == "data_parallel":
        level2 = WanDataParallel(
            config.outer,
            buffers=gradient_buffers,
            exchange=exchange,
            rules=rules,
            hello=hello,
            report=report,
        )
    else:
        num_fragments = config.outer.num_fragments
        assignment = assign(parameters, num_fragments, config.outer.fragment_pattern)
        level2 = DilocoLoop(
            config.outer,
            shards=shards,
            fragments=group(shards, assignment, num_fragments),
            exchange=exchange,
            rules=rules,
            hello=hello,
            publish=publish,
            report=report,
        )
    level2.interface = interface
    return level2
