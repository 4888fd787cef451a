"""Both levels as one record: Megatron's distributed format, plus what belongs to the run and to each rank.

iter_0000100/   *.distcp, common.pt, metadata.json   level 1, Megatron's format: could be resharded
                dilocox.json                         which run this is, and plain values of the caller
                rank_0000.pt ...                     level 2 and random generators of each rank
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from dilocox.backend import Island
from dilocox.checkpoint import files as checkpoint_files
from dilocox.errors import CheckpointError
from dilocox.inner.names import unwrap
from dilocox.inner.optimizer_state import count_steps, restore_state

FORMAT = 1
IDENTITY_FILE = "dilocox.json"


@dataclass(frozen=True)
class TrainState:
    """The objects of level 1 whose state is saved, all of them Megatron's."""

    model: Any
    optimizer: Any
    scheduler: Any


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint held for the caller.

    Attributes:
        iteration: inner steps done.
        common: equal on all ranks, as given to `save`.
        rank_state: of this rank, as given to `save`.
    """

    iteration: int
    common: dict[str, Any]
    rank_state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one island.

    Args:
        directory: the island's folder, on a file system that all its ranks see.
        fingerprint: of the configuration; only a checkpoint with the same one is loaded.
    """

    def __init__(self, directory: Path, island: Island, *, fingerprint: str) -> None:
        self.directory = directory
        self._island = island
        self._identity = {
            "format": FORMAT,
            "fingerprint": fingerprint,
            "layout": {axis: asdict(island.topology)[axis] for axis in ("tp", "pp", "dp")},
        }

    def save(
        self,
        iteration: int,
        state: TrainState,
        *,
        common: dict[str, Any],
        rank_state: dict[str, Any],
        retain: int,
    ) -> Path:
        """Writes one checkpoint and returns its folder. Training goes on as if it had not been written.

        Collective: all ranks of the island.

        Args:
            iteration: inner steps done.
            common: plain values that JSON can hold, equal on all ranks.
            rank_state: tensors and plain values of this rank.
            retain: newest checkpoints to keep.

        Raises:
            CheckpointError: on all ranks, if one of them could not write; older checkpoints are untouched.
        """
        folder = checkpoint_files.unfinished_of(self.directory, iteration)
        try:
            with self._all_or_none():
                if self._island.rank == 0:
                    checkpoint_files.begin(self.directory, iteration)
            with self._all_or_none():
                dist_checkpointing.save(self._level_1(state, is_loading=False), str(folder))
                torch.save({"caller": rank_state, "random": self._random_state()}, self._rank_file(folder))
            with self._all_or_none():
                if self._island.rank == 0:
                    values = {
                        "iteration": iteration,
                        "common": common,
                        "files": checkpoint_files.contents(folder),
                    }
                    text = json.dumps(self._identity | values, indent=1)
                    (folder / IDENTITY_FILE).write_text(text + "\n")
                    checkpoint_files.commit(self.directory, iteration, retain=retain)
        except CheckpointError as error:
            if self._island.rank == 0:
                checkpoint_files.abandon(self.directory, iteration)
            raise CheckpointError(f"checkpoint {iteration} was not written: {error}") from error
        return checkpoint_files.folder_of(self.directory, iteration)

    def load(self, state: TrainState, iteration: int | None = None) -> Loaded:
        """Restores level 1 in place and returns what the caller has to restore.

        Collective: all ranks of the island.
        In place: model, optimizer, schedule and this rank's random generators.

        Args:
            iteration: default: the latest one.

        Raises:
            CheckpointError: there is none, it is incomplete, or it belongs to another configuration or
                layout; nothing has been loaded in these cases. Also where a complete file cannot be
                read; then the model is unusable.
        """
        with self._all_or_none():
            folder = self._folder_to_load(iteration)
            identity = self._read_identity(folder)
            own = torch.load(self._rank_file(folder), weights_only=True, map_location="cpu")
        with self._all_or_none():
            loaded = dist_checkpointing.load(self._level_1(state, is_loading=True), str(folder))
        unwrap(state.model).load_state_dict(loaded["model"])
        restore_state(state.optimizer, loaded["optimizer"], num_steps=loaded["num_optimizer_steps"])
        state.scheduler.num_steps = 0  # loading adds to it
        state.scheduler.load_state_dict(loaded["scheduler"])
        self._set_random_state(own["random"])
        return Loaded(identity["iteration"], identity["common"], own["caller"])

    def _level_1(self, state: TrainState, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        # Megatron's writer collects its results in a queue that it keeps in a process of its own. Saving
        # is synchronous here, so a plain queue does, and no process can be left behind.
        filesystem_async._results_queue = SimpleQueue()
        model = unwrap(state.model).sharded_state_dict(metadata=metadata)
        optimizer = state.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        level_1 = {"model": model, "optimizer": optimizer}
        if not is_loading:
            level_1["scheduler"] = state.scheduler.state_dict()
            level_1["num_optimizer_steps"] = count_steps(state.optimizer)
        return level_1

    def _folder_to_load(self, iteration: int | None) -> Path:
        if iteration is None:
            iteration = checkpoint_files.latest(self.directory)
        if iteration is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        return checkpoint_files.folder_of(self.directory, iteration)

    def _read_identity(self, folder: Path) -> dict[str, Any]:
        path = folder / IDENTITY_FILE
        if not path.is_file():
            raise CheckpointError(f"incomplete checkpoint: {path} is missing")
        found: dict[str, Any] = json.loads(path.read_text())
        for field, wanted in self._identity.items():
            if found.get(field) != wanted:
                raise CheckpointError(
                    f"{folder} belongs to another run: its {field} is {found.get(field)}, "
                    f"this run's is {wanted}"
                )
        checkpoint_files.check_complete(folder, found["files"])
        return found

    def _rank_file(self, folder: Path) -> Path:
        return folder / f"rank_{self._island.rank:04d}.pt"

    def _random_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if self._island.backend.is_cuda:
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def _set_random_state(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])
        get_cuda_rng_tracker().set_states(state["tracker"])
        if self._island.backend.is_cuda:
            torch.cuda.set_rng_state(state["cuda"])

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Raises on all ranks what any of them met inside the `with`."""
        problem: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is no `Exception`
            problem = error
        texts: list[str | None] = [None] * self._island.topology.ranks_per_island
        mine = None if problem is None else _describe(problem)
        dist.all_gather_object(texts, mine, group=self._island.control_group)
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}") from problem


def _describe(problem: BaseException) -> str:
    """One line, where torch's exception holds the tracebacks of all ranks."""
    if isinstance(problem, CheckpointException):
        failures = problem.failures.items()  # known to one rank only
        return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failures) or "another rank failed"
    return str(problem) if isinstance(problem, CheckpointError) else f"{type(problem).__name__}: {problem}"
