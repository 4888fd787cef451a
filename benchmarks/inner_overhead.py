"""What does our inner step cost above a bare megatron-core loop on the same model?

    python benchmarks/inner_overhead.py [--steps 60] [--hidden-size 256] [--log-interval 10] [--output FILE]
    torchrun --nproc-per-node 2 benchmarks/inner_overhead.py --tp 2

Two copies of one model train side by side on the same batches: one by `Inner.step`, with the collective for
losses and votes every `--log-interval` steps, one by the loop below (forward and backward by Megatron's
schedule, optimizer, learning rate; no report). They take turns, each first in every second pair, so that a
busy machine slows both; medians count. The losses must be equal.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from dilocox.backend import choose_backend, init_island, quiet_third_parties, shutdown

quiet_third_parties()

import torch  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from provenance import provenance  # noqa: E402

from dilocox.config.defaults import resolve  # noqa: E402
from dilocox.config.schema import Config  # noqa: E402
from dilocox.inner.model import build_model  # noqa: E402
from dilocox.inner.step import Inner, InnerReport, _forward_step  # noqa: E402
from dilocox.topology import Topology  # noqa: E402

VOCAB_SIZE = 2048
LIMIT = 0.02
RESULT = Path(__file__).parent / "results" / "inner_overhead.json"


def make_config(arguments: argparse.Namespace, world_size: int) -> Config:
    return resolve(
        Config.model_validate(
            {
                "run": {"device": arguments.device},
                "model": {
                    "num_layers": 4,
                    "hidden_size": arguments.hidden_size,
                    "num_attention_heads": 4,
                    "seq_length": 128,
                },
                "parallel": {
                    "tensor_model_parallel_size": arguments.tp,
                    "ranks_per_island": world_size,
                },
                "inner": {
                    "train_iters": 10_000,
                    "micro_batch_size": 4,
                    "global_batch_size": 8 * (world_size // arguments.tp),
                },
            }
        )
    )


def bare_step(inner: Inner, config: Config) -> Callable[[list], torch.Tensor]:
    """The loop that a Megatron user would write; returns the loss sum of the last microbatch."""
    run_schedule = get_forward_backward_func()

    def step(batch: list) -> torch.Tensor:
        inner.model.zero_grad_buffer()
        inner.optimizer.zero_grad()
        losses = run_schedule(
            forward_step_func=_forward_step,
            data_iterator=iter(batch),
            model=[inner.model],
            num_microbatches=len(batch),
            seq_length=config.model.seq_length,
            micro_batch_size=config.inner.micro_batch_size,
            forward_only=False,
        )
        succeeded, _, _ = inner.optimizer.step()
        if succeeded:
            inner.scheduler.step(1)
        return losses

    return step


def reported_step(inner: Inner, log_interval: int) -> Callable[[list], InnerReport]:
    """Our step, and the collective that the trainer makes when a line of the log is due."""
    pending: list[InnerReport] = []

    def step(batch: list) -> InnerReport:
        pending.append(inner.step(batch))
        report = pending[-1]
        if len(pending) == log_interval:
            inner.mean_losses(pending, 0.0, 0.0)
            pending.clear()
        return report

    return step


def make_batch(config: Config, step: int) -> list:
    generator = torch.Generator().manual_seed(step)
    length, size = config.model.seq_length, config.inner.micro_batch_size
    batch = []
    for _ in range(8 // size):
        text = torch.randint(0, VOCAB_SIZE, (size, length + 1), generator=generator)
        batch.append(
            {
                "tokens": text[:, :-1].contiguous(),
                "labels": text[:, 1:].contiguous(),
                "loss_mask": torch.ones(size, length),
                "position_ids": torch.arange(length).expand(size, length).contiguous(),
            }
        )
    return batch


def timed(step: Callable, batch: list, is_cuda: bool) -> tuple[float, float, object]:
    """Wall seconds, CPU seconds of this process, and what the step returned."""
    if is_cuda:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    result = step(batch)
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def measure(config: Config, island, steps: int, log_interval: int) -> dict:
    ours, bare = (Inner(config, island, build_model(config, island, vocab_size=VOCAB_SIZE)) for _ in range(2))
    ways = {"ours": reported_step(ours, log_interval), "bare": bare_step(bare, config)}
    seconds: dict[str, list] = {"ours": [], "bare": []}
    for step in range(5 + steps):
        batch = make_batch(config, step)
        losses = {}
        for name in ("ours", "bare") if step % 2 else ("bare", "ours"):
            wall, cpu, losses[name] = timed(ways[name], batch, island.backend.is_cuda)
            if step >= 5:  # the first ones warm up
                seconds[name].append((wall, cpu))
        loss_sum, num_tokens = sum(losses["bare"]).tolist()
        ((loss,), _) = ours.mean_losses([losses["ours"]])
        if abs(loss - loss_sum / num_tokens) > 1e-6 and island.topology.dp == 1:
            raise AssertionError(f"step {step}: the two did not do the same: {losses}")
    result = {}
    for kind, index in (("wall", 0), ("cpu", 1)):
        medians = {name: statistics.median(pair[index] for pair in seconds[name]) for name in seconds}
        # Paired: both steps of a pair ran within the same moment of the machine.
        ratios = [
            mine[index] / other[index] for mine, other in zip(seconds["ours"], seconds["bare"], strict=True)
        ]
        result[f"{kind}_s"] = medians
        result[f"{kind}_overhead"] = statistics.median(ratios) - 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=10)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    where = provenance()
    config = make_config(arguments, world_size)
    backend = choose_backend(config.run.device, int(os.environ.get("LOCAL_RANK", "0")))
    island = init_island(backend, Topology.from_config(config.parallel), rank=rank, run=config.run)
    result = measure(config, island, arguments.steps, arguments.log_interval)
    shutdown(island)
    if rank == 0:
        report = {
            "question": "seconds of Inner.step against a bare megatron-core loop on the same model",
            **where,
            "megatron_core": version("megatron-core"),
            "ranks": world_size,
            "tensor_parallel": arguments.tp,
            "hidden_size": arguments.hidden_size,
            "steps": arguments.steps,
            "log_interval": arguments.log_interval,
            **result,
            "limit": LIMIT,
            "within_limit": result["wall_overhead"] <= LIMIT,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
