"""Checks on GPUs, limits and disks."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dilocox.config.schema import Config
from dilocox.doctor.finding import Finding, note, ok, problem, warning
from dilocox.doctor.host import Host
from dilocox.run_folder import checkpoint_dir_of
from dilocox.shapes import count_parameters

OPEN_FILES_BASE = 1024
OPEN_FILES_PER_CONNECTION = 2
LOCAL_FILE_SYSTEMS = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "overlay", "zfs", "f2fs"}
)
BYTES_PER_PARAMETER = 24
"""fp32 master weight and two Adam moments; anchor, outer momentum and residual."""
MIN_FREE_BYTES = 1 << 30


def gpus(host: Host, config: Config | None) -> Iterator[Finding]:
    """Every rank has a GPU of its own."""
    num_gpus = host.num_gpus()
    if config is None or config.run.device == "cpu":
        return
    if num_gpus == 0:
        yield note("gpus", f"none; training on {host.num_cpus} CPU cores")
        return
    per_node = config.parallel.ranks_per_island // config.parallel.nodes_per_island
    if num_gpus < per_node:
        yield problem(
            "gpus",
            f"{num_gpus} GPUs here, but {per_node} ranks of an island on each node",
            "raise parallel.nodes_per_island, or lower parallel.ranks_per_island",
        )
    else:
        yield ok("gpus", f"{num_gpus} GPUs for {per_node} ranks per node")


def gpu_links(host: Host, config: Config | None) -> Iterator[Finding]:
    """Tensor parallel ranks exchange activations in every layer; over PCIe between sockets that is slow."""
    tp = 1 if config is None else config.parallel.tensor_model_parallel_size
    text = host.gpu_links() if host.num_gpus() > 1 else None
    if text is None:
        return
    rows = [line.split() for line in text.splitlines() if re.match(r"GPU\d+\s", line)]
    links = {row[1 + column] for row in rows for column in range(len(rows)) if len(row) > column + 1} - {"X"}
    slow = sorted(links & {"SYS", "NODE", "PHB"})
    if slow and not any(link.startswith("NV") for link in links):
        message = f"GPUs are joined by {', '.join(slow)} (PCIe), without NVLink"
        if tp > 1:
            yield warning(
                "gpu links",
                message,
                f"tensor_model_parallel_size={tp} is slow there; prefer pipeline or data parallel",
            )
        else:
            yield note("gpu links", message)
    elif links:
        yield ok("gpu links", ", ".join(sorted(links)))


def open_files(host: Host, config: Config | None) -> Iterator[Finding]:
    """Every connection to another island and every data file takes one."""
    islands = 1 if config is None else config.parallel.num_islands
    streams = 1 if config is None else config.wan.streams
    needed = OPEN_FILES_BASE + OPEN_FILES_PER_CONNECTION * (islands - 1) * streams
    soft, hard = host.open_file_limit()
    if 0 <= soft < needed:
        how = (
            f"ulimit -n {needed}"
            if hard < 0 or hard >= needed
            else "ask the administrators for a higher hard limit"
        )
        yield problem("open files", f"the limit is {soft} files per process, {needed} are needed", how)
    else:
        yield ok("open files", f"{'unlimited' if soft < 0 else soft} files per process")


def checkpoint_disk(host: Host, config: Config | None) -> Iterator[Finding]:
    """Room for the checkpoints that are kept and the one that is being written."""
    if config is None:
        return
    folder = checkpoint_dir_of(config)
    free = host.free_bytes(folder)
    one = _checkpoint_bytes(config)
    needed = max(MIN_FREE_BYTES, one * (config.checkpoint.save_retain + 1) * config.parallel.num_islands)
    seen = f"{_size(free)} free for checkpoints in {folder}"
    if free < needed:
        yield problem(
            "disk",
            f"{seen}, {_size(needed)} are needed (a checkpoint of one island: {_size(one)})",
            "set checkpoint.save to a larger disk or lower checkpoint.save_retain",
        )
    else:
        yield ok("disk", seen)


def shared_file_system(host: Host, config: Config | None) -> Iterator[Finding]:
    """The ranks of one island write parts of one checkpoint; all its nodes must see all parts."""
    if config is None or config.parallel.nodes_per_island == 1:
        return
    folder = checkpoint_dir_of(config)
    kind = host.file_system(folder)
    if kind in LOCAL_FILE_SYSTEMS:
        yield warning(
            "shared disk",
            f"{folder} is on {kind}, which other nodes of this island probably do not see",
            "set run.output_dir or checkpoint.save to a shared file system (NFS, Lustre, GPFS, BeeGFS)",
        )
    else:
        yield ok("shared disk", f"{folder} is on {kind}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _checkpoint_bytes(config: Config) -> int:
    vocab_size = config.data.vocab_size or 1 << 16  # known exactly only with the tokenizer
    return BYTES_PER_PARAMETER * count_parameters(config.model, config.parallel, vocab_size=vocab_size)
