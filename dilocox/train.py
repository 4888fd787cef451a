"""THE LOOP: how a rank trains, from settings to summary. Read this page first.

Level 1 (`inner`): one island, every step, fast fabric; plain Megatron.
Level 2 (`outer`): between islands, every H steps, WAN; DiLoCo and its streaming and delayed variants.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from dilocox.backend import choose_backend
from dilocox.config.check import check_device
from dilocox.config.schema import Config
from dilocox.data.resolve import prepare
from dilocox.data.samples import check_sizes
from dilocox.errors import ConfigError
from dilocox.hashing import combine, hash_tensors
from dilocox.inner.generate import generate
from dilocox.inner.model import check_layers
from dilocox.metrics.sinks import check_packages
from dilocox.metrics.summary import RunOutcome, Status, island_summary, merge, write_island_summary
from dilocox.run_folder import check_writable
from dilocox.shapes import count_parameters
from dilocox.trainer import RankContext, Trainer

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 64


def train(config: Config, context: RankContext, *, resume: bool) -> int:
    """Trains this rank's part of one island.

    Returns:
        Exit code 0, for a run that completed or that stopped on request with a checkpoint.

    Raises:
        ConfigError: bad settings or data, before any process group exists.
    """
    check(config, context)
    data = prepare(config, context.cache_dir, island_id=context.island_id)
    check_sizes(config, data, island_ids=[context.island_id])
    with Trainer(config, context, data, resume=resume) as trainer:
        trainer.start()
        close(trainer, loop(trainer))
    return 0


def loop(trainer: Trainer) -> Status:
    """Trains until the last step or a reason to stop."""
    outer, train_iters = trainer.outer, trainer.config.inner.train_iters
    while trainer.inner_step < train_iters:
        # Level 1: one optimizer step inside this island, fast fabric.
        report = trainer.step()
        # Level 2: between islands, WAN. The schedule is pure integers and fixes the order.
        for event in outer.events():
            match event.kind.name:
                case "MEASURE":
                    outer.measure(event)  # weights untouched
                case "START":
                    outer.start(event)  # goes on the WAN while training continues
                case "APPLY":
                    outer.apply(event)  # the only place where level 2 changes weights
        trainer.after_step(report)
        if trainer.must_stop():
            trainer.save()
            return "interrupted"
    outer.drain()
    return "completed"


def close(trainer: Trainer, status: Status) -> None:
    """Ends a run: puts the anchor into the model, saves, generates a sample, and writes the summary.

    Collective: all ranks of the island.
    """
    trainer.throughput.stop()
    sample = None
    if status == "completed":
        # Before the checkpoint: the model of a completed run is the anchor, on all islands.
        trainer.load_anchors()
        trainer.evaluate()
        trainer.save()
        sample = _sample(trainer)
    config, island_id = trainer.config, trainer.context.island_id
    outcome = RunOutcome(
        status=status,
        run_id=config.run.name,
        parameters=count_parameters(config.model, config.parallel, vocab_size=trainer.vocab_size),
        outer_steps=trainer.outer.num_outer_steps,
        anchor_hash=_anchor_hash(trainer),
        predicted_bytes=_predicted_bytes(trainer),
        sample=sample,
    )
    # Everything above is collective; one rank writes.
    if trainer.context.rank != 0:
        return
    summary = island_summary(
        config,
        island_id=island_id,
        outcome=outcome,
        totals=trainer.recorder.totals,
        throughput=trainer.throughput,
        interface=trainer.interface,
    )
    write_island_summary(trainer.run_dir, summary)
    merge(trainer.run_dir)


def check(config: Config, context: RankContext) -> None:
    """Checks everything that would stop this rank later; starts nothing.

    Raises:
        ConfigError: a setting does not fit this host, or `wan.lighthouse` is missing.
    """
    chosen = choose_backend(config.run.device, context.local_rank)
    check_device(config, device="cuda" if chosen.is_cuda else "cpu")
    check_layers(config.model, chosen)
    check_packages(config)
    check_writable(config)
    if config.outer.method == "none" or config.parallel.num_islands == 1:
        return
    if config.wan.lighthouse is None:
        raise ConfigError(
            "wan.lighthouse",
            None,
            "islands need a place to meet; start `dilocox lighthouse` and set its address",
        )
    from dilocox.outer.wan.address import parse_port_range, resolve_address

    resolve_address(config.wan.interface, config.wan.advertise_address, config.wan.lighthouse)
    if config.wan.port_range is not None:
        parse_port_range(config.wan.port_range)


def _sample(trainer: Trainer) -> str:
    """Returns generated text with its prompt; with a NullTokenizer it is numbers."""
    prompt = "" if trainer.config.data.tokenizer_type == "NullTokenizer" else SAMPLE_PROMPT
    seed = trainer.config.run.seed
    return prompt + generate(trainer.inner, trainer.tokenizer, prompt, num_tokens=SAMPLE_TOKENS, seed=seed)


def _anchor_hash(trainer: Trainer) -> str:
    """Returns the hash over the anchors of all ranks of the island; equal on all islands."""
    anchors = trainer.outer.anchors() or [shard.tensor for shard in trainer.masters.shards]
    hashes: list[str] = [""] * trainer.island.topology.ranks_per_island
    dist.all_gather_object(hashes, hash_tensors(anchors), group=trainer.island.control_group)
    return combine(hashes)


def _predicted_bytes(trainer: Trainer) -> int:
    """Returns the payload bytes of the island that the formula gives for the syncs done."""
    total = torch.tensor(trainer.outer.predicted_bytes())
    dist.all_reduce(total, group=trainer.island.control_group)
    return int(total)
