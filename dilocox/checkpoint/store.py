"""Both levels as one record: Megatron's distributed format, plus what belongs to the run and to each rank.

iter_0000100/   *.distcp, .metadata ...   tensors of both levels in global coordinates, for any layout
                dilocox.json              identity of the run, and plain values of both levels and the caller
                rank_0000.pt ...          only for the same layout: random generators of each rank, and what
                                          level 2 cannot express in global coordinates

The model's weights are not in it: they are the masters, rounded to the working dtype.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from dilocox.backend import Island, seed_generators
from dilocox.checkpoint import files as checkpoint_files
from dilocox.checkpoint.identity import IDENTITY_FILE, Layout, identity_of, read_identity
from dilocox.checkpoint.placed import allocate, entries_to_load, entries_to_save, place, read_contents
from dilocox.config.schema import Config
from dilocox.errors import CheckpointError
from dilocox.inner.masters import MasterWeights
from dilocox.inner.optimizer import InnerOptimizer
from dilocox.param_shard import ShardState


@dataclass(frozen=True)
class TrainState:
    """The objects of level 1 whose state is saved.

    Attributes:
        scheduler: Megatron's `OptimizerParamScheduler`.
    """

    masters: MasterWeights
    optimizer: InnerOptimizer
    scheduler: Any


@dataclass(frozen=True)
class Loaded:
    """Content of a checkpoint that the caller restores.

    Attributes:
        iteration: inner steps done.
        common: equal on all ranks, as given to `save`.
        outer: of level 2, for the shards of this rank; `layout_bound` is empty if the layout changed.
        layout_changed: one sentence for the log if another layout wrote it, else None. In that case the
            random generators of all ranks were seeded anew, from the seed and the iteration.
    """

    iteration: int
    common: dict[str, Any]
    outer: ShardState
    layout_changed: str | None


class Checkpoints:
    """The checkpoints of one island.

    Args:
        directory: the island's folder, on a file system shared by all its ranks.
        config: resolved; only a checkpoint of a run with the same settings is loaded, whatever its layout.
        vocab_size: of the tokenizer, before padding.
    """

    def __init__(self, directory: Path, island: Island, *, config: Config, vocab_size: int) -> None:
        self.directory = directory
        self._island = island
        self._config = config
        self._vocab_size = vocab_size

    def save(
        self,
        iteration: int,
        state: TrainState,
        *,
        outer: ShardState,
        common: dict[str, Any],
        retain: int,
    ) -> Path:
        """Writes one checkpoint and returns its folder. Changes no state of the training.

        Collective: all ranks of the island.

        Args:
            iteration: inner steps done.
            outer: state of level 2, on the shards of `state.masters`.
            common: plain values that JSON can hold, equal on all ranks.
            retain: newest checkpoints to keep.

        Raises:
            CheckpointError: on all ranks, if one of them could not write; older checkpoints are untouched.
        """
        folder = checkpoint_files.unfinished_of(self.directory, iteration)
        try:
            # Each block is a barrier: the folder exists before ranks write to it, and all have written before
            # rank 0 lists the files and gives the folder its name.
            with self._all_or_none():
                if self._island.rank == 0:
                    checkpoint_files.begin(self.directory, iteration)
            with self._all_or_none():
                self._save_tensors(folder, state, outer)
                own = {"layout_bound": outer.layout_bound, "random": self._random_state()}
                torch.save(own, self._rank_file(folder))
            with self._all_or_none():
                if self._island.rank == 0:
                    values = {
                        "iteration": iteration,
                        "inner": {
                            "optimizer": state.optimizer.state_dict(),
                            "scheduler": state.scheduler.state_dict(),
                        },
                        "outer": outer.common,
                        "common": common,
                        # Read after everything else was written; this file itself is not in it.
                        "files": checkpoint_files.contents(folder),
                    }
                    identity = identity_of(self._config, self._vocab_size)
                    (folder / IDENTITY_FILE).write_text(json.dumps(identity | values, indent=1) + "\n")
                    checkpoint_files.commit(self.directory, iteration, retain=retain)
        except CheckpointError as error:
            if self._island.rank == 0:
                checkpoint_files.abandon(self.directory, iteration)
            raise CheckpointError(f"checkpoint {iteration} was not written: {error}") from error
        return checkpoint_files.folder_of(self.directory, iteration)

    def load(self, state: TrainState, iteration: int | None = None) -> Loaded:
        """Restores level 1 in place and returns what the caller has to restore.

        Collective: all ranks of the island.
        In place: masters, model, optimizer, schedule and this rank's random generators.

        Args:
            iteration: default: the latest one.

        Raises:
            CheckpointError: there is none, it is incomplete, or it belongs to a run with other settings;
                nothing has been loaded in these cases. Also where a complete file cannot be read; then the
                model is unusable.
        """
        # Everything that can be refused is refused here, on all ranks, before any state is changed.
        with self._all_or_none():
            folder = self._folder_to_load(iteration)
            identity = read_identity(folder, self._config, self._vocab_size)
            checkpoint_files.check_complete(folder, identity["files"])
            before, now = Layout(**identity["layout"]), Layout.of(self._config)
            own = None
            if before == now:
                own = torch.load(self._rank_file(folder), weights_only=True, map_location="cpu")
            contents = read_contents(folder)
            outer = allocate(state.masters.shards, contents)
            wanted = {
                **entries_to_load("inner", state.masters.held_state(), contents),
                **entries_to_load("outer", place(state.masters.shards, outer), contents),
            }
        with self._all_or_none():
            # Many ranks read the same elements (masters of data parallel ranks, replicated norms); Megatron's
            # check of the access pattern would report that as an error.
            dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
        state.masters.copy_to_model()
        state.optimizer.load_state_dict(identity["inner"]["optimizer"])
        # `load_state_dict` of Megatron's scheduler adds the saved steps to those it has.
        state.scheduler.num_steps = 0
        state.scheduler.load_state_dict(identity["inner"]["scheduler"])
        outer.common = identity["outer"]
        changed = None
        if own is None:
            self._seed_anew(identity["iteration"])
            changed = (
                f"layout changed from {before} to {now}; random streams and low-rank warm starts begin anew"
            )
        else:
            outer.layout_bound = own["layout_bound"]
            self._set_random_state(own["random"])
        return Loaded(identity["iteration"], identity["common"], outer, changed)

    def _save_tensors(self, folder: Path, state: TrainState, outer: ShardState) -> None:
        # Megatron's writer collects its results in a queue that lives in a process of its own. Saving is
        # synchronous here, so a plain queue is enough, and no process can be left behind.
        filesystem_async._results_queue = SimpleQueue()
        entries = {
            **entries_to_save("inner", state.masters.owned_state()),
            **entries_to_save("outer", place(state.masters.shards, outer)),
        }
        dist_checkpointing.save(entries, str(folder))

    def _folder_to_load(self, iteration: int | None) -> Path:
        if iteration is None:
            iteration = checkpoint_files.latest(self.directory)
        if iteration is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        return checkpoint_files.folder_of(self.directory, iteration)

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

    def _seed_anew(self, iteration: int) -> None:
        """Seeds the generators with streams that differ from those at the start of the run."""
        seed = zlib.crc32(f"{self._config.run.seed}/{iteration}".encode())
        seed_generators(seed, self._island.topology, self._island.coordinate)

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Raises a `CheckpointError` on all ranks if any of them failed inside the `with`."""
        problem: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is a `BaseException`
            problem = error
        texts: list[str | None] = [None] * self._island.topology.ranks_per_island
        mine = None if problem is None else _describe(problem)
        dist.all_gather_object(texts, mine, group=self._island.control_group)
        for rank, text in enumerate(texts):
            if text is not None:
                raise CheckpointError(f"rank {rank}: {text}") from problem


def _describe(problem: BaseException) -> str:
    """Returns one line; torch's exception would print the tracebacks of all ranks."""
    if isinstance(problem, CheckpointException):
        failures = problem.failures.items()  # known to one rank only
        return "; ".join(f"rank {rank}: {error}" for rank, (error, _) in failures) or "another rank failed"
    return str(problem) if isinstance(problem, CheckpointError) else f"{type(problem).__name__}: {problem}"
