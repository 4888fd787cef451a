"""The whole trainer on processes of the fork server: real Megatron, real torchft, small models."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np

from dilocox.config.load import load_config
from tests.data.pairs import write_pair
from tests.distributed.forkserver import run_islands

SETTINGS = {
    "run": {"name": "test", "device": "cpu", "seed": 1},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "seq_length": 16,
        "make_vocab_size_divisible_by": 16,
    },
    "parallel": {"num_islands": 1, "ranks_per_island": 1},
    "data": {"tokenizer_type": "NullTokenizer", "vocab_size": 61, "split": "8,2,0"},
    "inner": {
        "train_iters": 20,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "lr": 1e-2,
        "lr_warmup_iters": 2,
    },
    "wan": {"timeout_s": 60.0, "grace_s": 5.0},
    "logging": {"log_interval": 100, "eval_iters": 1},
}


def write_run(folder: Path, **sections: dict) -> Path:
    """A corpus of random walks (so that there is something to learn) and a configuration file."""
    generator = np.random.default_rng(0)
    walks = [(generator.integers(60) + np.cumsum(generator.integers(1, 3, 65))) % 60 for _ in range(200)]
    prefix = write_pair(folder / "corpus", [walk.tolist() for walk in walks])
    merged = {
        name: SETTINGS.get(name, {}) | sections.get(name, {}) for name in SETTINGS.keys() | sections.keys()
    }
    merged["data"] = {"data_path": prefix} | merged["data"]
    merged["run"] = {"output_dir": str(folder / "runs")} | merged["run"]
    path = folder / "config.yaml"
    path.write_text(json.dumps(merged))
    return path


@contextlib.contextmanager
def lighthouse(min_islands: int = 1):
    """A lighthouse in this process; yields its address."""
    from dilocox.outer.wan.membership import serve_lighthouse

    server = serve_lighthouse("127.0.0.1:0", min_islands=min_islands, grace_s=5.0)
    try:
        yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    finally:
        server.shutdown()


def train(
    path: Path, *overrides: str, job=None, resume: bool = False, timeout_s: float = 200.0
) -> list[list]:
    """Trains all islands of a configuration.

    Args:
        job: called as job(trainer) on every rank when the loop has ended; at module level of a test.

    Returns: result[island][rank] = (losses of all inner steps, what the job returned).
    """
    config = load_config(path, list(overrides))
    islands, ranks = config.parallel.num_islands, config.parallel.ranks_per_island
    with lighthouse() if islands > 1 else contextlib.nullcontext() as address:
        settings = [*overrides, *([f"wan.lighthouse={address}"] if address else [])]
        return run_islands(train_rank, islands, ranks, path, settings, job, resume, timeout_s=timeout_s)


def train_rank(island: int, rank: int, path: Path, overrides: list[str], job, resume: bool):
    from dilocox.data.resolve import prepare
    from dilocox.metrics.jsonl import read_records
    from dilocox.metrics.records import InnerRecord
    from dilocox.train import close, loop
    from dilocox.trainer import RankContext, Trainer

    config = load_config(path, overrides)
    context = RankContext(island, rank, rank, path.parent / "cache")
    data = prepare(config, context.cache_dir, island_id=island)
    with Trainer(config, context, data, resume=resume) as trainer:
        trainer.start()
        status = loop(trainer)
        answer = job(trainer) if job is not None else None
        close(trainer, status)
        records = read_records(trainer.run_dir / f"island_{island}" / "metrics.jsonl")
    return [record.lm_loss for record in records if isinstance(record, InnerRecord)], answer
