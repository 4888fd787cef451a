"""Log lines: Megatron's pipe-separated iteration line, one line per sync, one formatter for all."""

from __future__ import annotations

import logging
from pathlib import Path

from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord
from dilocox.run_folder import rank_log

LOGGER_NAME = "dilocox"


class IslandFormatter(logging.Formatter):
    """`[island 0] text`; with the rank on ranks other than 0, with the level on warnings and errors."""

    def __init__(self, *, island_id: int, rank: int, with_time: bool) -> None:
        super().__init__("%(asctime)s %(message)s" if with_time else "%(message)s", "%Y-%m-%d %H:%M:%S")
        self._origin = f"[island {island_id}]" if rank == 0 else f"[island {island_id} rank {rank}]"

    def format(self, record: logging.LogRecord) -> str:
        level = f" {record.levelname}:" if record.levelno >= logging.WARNING else ""
        return f"{self._origin}{level} {super().format(record)}"


def configure(island_dir: Path, *, island_id: int, rank: int) -> logging.Logger:
    """Sends the package's log to `rank_R.log` and to stderr (warnings and errors only for rank > 0).

    Calling it again replaces the handlers of the first call.
    """
    logger = logging.getLogger(LOGGER_NAME)
    release(logger)
    island_dir.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(rank_log(island_dir, rank))
    to_file.setFormatter(IslandFormatter(island_id=island_id, rank=rank, with_time=True))
    to_console = logging.StreamHandler()
    to_console.setFormatter(IslandFormatter(island_id=island_id, rank=rank, with_time=False))
    to_console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for handler in (to_file, to_console):
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    return logger


def release(logger: logging.Logger) -> None:
    """Closes and removes the handlers that `configure` has added."""
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, IslandFormatter):
            logger.removeHandler(handler)
            handler.close()
    logger.propagate = True


def inner_line(
    record: InnerRecord, *, train_iters: int, global_batch_size: int, mean_step_time_s: float
) -> str:
    """Returns Megatron's iteration line, with the fields that exist here."""
    return (
        f"iteration {record.inner_step:8d}/{train_iters:8d} |"
        f" consumed samples: {record.inner_step * global_batch_size:12d} |"
        f" elapsed time per iteration (ms): {mean_step_time_s * 1000:.1f} |"
        f" learning rate: {record.lr:.6E} |"
        f" global batch size: {global_batch_size:5d} |"
        f" lm loss: {record.lm_loss:.6E} |"
        f" grad norm: {record.grad_norm:.3f} |"
    )


def sync_line(record: SyncRecord) -> str:
    cosine = "n/a" if record.cosine_to_mean is None else f"{record.cosine_to_mean:.3f}"
    discarded = "" if record.committed else " DISCARDED |"
    return (
        f"outer step {record.outer_step} | fragment {record.fragment} |"
        f" participants {record.num_participants} |"
        f" pseudo-gradient norm {record.pseudo_gradient_norm:.3f} | cosine {cosine} |"
        f" sent {record.payload_bytes_sent / 1e6:.3f} MB | exchange {record.exchange_s:.3f} s |"
        f" waiting {record.waiting_s:.3f} s |"
        f" blocked {record.blocked_s:.3f} s |{discarded}"
    )


def eval_line(record: EvalRecord) -> str:
    """Returns Megatron's validation line."""
    return (
        f"validation loss at iteration {record.inner_step} on the anchor |"
        f" lm loss value: {record.val_loss:.6E} |"
    )


def event_line(record: EventRecord) -> str:
    details = "".join(f" {key} {value} |" for key, value in record.details.items())
    return f"event at iteration {record.inner_step} | {record.event} |{details}"
