"""The end of a run on one rank: anchor, last checkpoint, sample of text, summary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dilocox.inner.generate import generate
from dilocox.metrics.summary import Outcome, Status, island_summary, merge, write_island_summary
from dilocox.outer.hashing import combine, hash_tensors
from dilocox.shapes import count_parameters

if TYPE_CHECKING:
    from dilocox.train import Run

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 64


def close_run(run: Run, status: Status) -> None:
    """Leaves the anchor in the model, saves, generates a sample, and sums the run up.

    Collective: all ranks of the island.
    """
    run.throughput.stop()
    sample = None
    if status == "completed":
        if (anchors := run.outer.anchors()) is not None:
            run.masters.load(anchors)
        run.evaluate()
        run.save()
        sample = _sample(run)
    anchor_hash, predicted_bytes = _island_hash(run), _island_total(run, run.outer.predicted_bytes())
    if run.place.rank != 0:
        return
    outcome = Outcome(
        status=status,
        run_id=run.config.run.name,
        parameters=count_parameters(run.config.model, run.config.parallel, vocab_size=run.vocab_size),
        outer_steps=run.outer.num_outer_steps,
        anchor_hash=anchor_hash,
        predicted_bytes=predicted_bytes,
        sample=sample,
    )
    written = island_summary(
        run.config,
        island_id=run.place.island_id,
        outcome=outcome,
        totals=run.recorder.totals,
        throughput=run.throughput,
        interface=run.interface,
    )
    write_island_summary(run.run_dir, written)
    merge(run.run_dir)


def _sample(run: Run) -> str:
    # the text of a NullTokenizer is numbers
    prompt = "" if run.config.data.tokenizer_type == "NullTokenizer" else SAMPLE_PROMPT
    seed = run.config.run.seed
    return prompt + generate(run.inner, run.tokenizer, prompt, num_tokens=SAMPLE_TOKENS, seed=seed)


def _island_hash(run: Run) -> str:
    """Hash over the anchors of all ranks; equal on all islands."""
    anchors = run.outer.anchors() or [shard.tensor for shard in run.masters.shards]
    hashes: list[str] = [""] * run.topology.ranks_per_island
    dist.all_gather_object(hashes, hash_tensors(anchors), group=run.island.control_group)
    return combine(hashes)


def _island_total(run: Run, value: int) -> int:
    total = torch.tensor(value)
    dist.all_reduce(total, group=run.island.control_group)
    return int(total)
