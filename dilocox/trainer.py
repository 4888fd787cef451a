"""One rank's part of a run: builds both levels, and records, validates and saves around the loop."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from dilocox import backend
from dilocox.checkpoint import files as checkpoint_files
from dilocox.checkpoint.store import Checkpoints, Loaded, TrainState
from dilocox.config.schema import Config
from dilocox.config.warnings import find_warnings
from dilocox.data.datasets import build_data
from dilocox.data.prefetch import Prefetcher
from dilocox.data.resolve import ResolvedData
from dilocox.inner.masters import MasterWeights
from dilocox.inner.model import build_model
from dilocox.inner.step import Inner, InnerReport
from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.outer_reporter import OuterReporter
from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import EvalRecord, InnerRecord
from dilocox.metrics.throughput import Throughput
from dilocox.no_outer_loop import NoOuterLoop
from dilocox.run_folder import checkpoint_dir_of, island_dir, load_dir_of, run_dir_of
from dilocox.shapes import count_parameters, stage_parameters
from dilocox.step_reports import StepReports
from dilocox.stop import StopRequest
from dilocox.topology import Topology

if TYPE_CHECKING:
    from dilocox.outer.loop import OuterLoop


@dataclass(frozen=True)
class RankContext:
    """Which rank this process is, from torchrun's environment.

    Attributes:
        rank: in the island's own world.
        local_rank: on this host.
        cache_dir: where prepared corpora are kept between runs.
    """

    island_id: int
    rank: int
    local_rank: int
    cache_dir: Path


class Trainer:
    """Both levels of one rank, with metrics and checkpoints.

    A context: leaving it closes everything. A constructor that fails closes what it has opened.

    Collective: every method, by all ranks of the island.

    Attributes:
        outer: level 2; it owns the position of the run. Level 1, data and metrics follow it.
    """

    def __init__(self, config: Config, context: RankContext, data: ResolvedData, *, resume: bool) -> None:
        self.config, self.context = config, context
        self.run_dir = run_dir_of(config)
        self.vocab_size = data.vocab_size
        self.throughput = Throughput()
        self._saved_step = -1
        with ExitStack() as undo:  # in reverse order, and only if a later line fails
            self.stop = StopRequest(config.run)
            undo.callback(self.stop.restore)
            chosen = backend.choose_backend(config.run.device, context.local_rank)
            topology = Topology.from_config(config.parallel)
            self.island = backend.init_island(chosen, topology, rank=context.rank, run=config.run)
            undo.callback(backend.shutdown, self.island)
            self._build_level_1(data, undo)
            # Before level 2 is built: its anchors start as copies of the masters.
            loaded = self._load() if resume or config.checkpoint.load else None
            self._schedule_step = 0 if loaded is None else loaded.iteration
            self.recorder = Recorder(
                self.run_dir,
                island_id=context.island_id,
                rank=context.rank,
                config=config,
                resumed_step=None if loaded is None else loaded.iteration,
            )
            undo.callback(self.recorder.close)
            self.outer = self._build_level_2(data.tokenizer_identity)
            undo.callback(self.outer.close)
            # After the recorder was opened, which first drops the records that a resumed run repeats.
            if loaded is not None:
                self._restore(loaded)
            self._reports = StepReports(
                config,
                inner=self.inner,
                recorder=self.recorder,
                stop=self.stop,
                clock=lambda: self.throughput.wall_s,
            )
            self.interface = InterfaceBytes(self.outer.interface)
            undo.pop_all()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.outer.close()
        self.batches.close()
        self.recorder.close()
        self.stop.restore()
        # After a failure another rank may be inside a collective: leaving the groups would wait for it.
        if exception[0] is None:
            backend.shutdown(self.island)

    @property
    def inner_step(self) -> int:
        """Inner steps done, as the run counts them."""
        return self.outer.position.inner_step

    def start(self) -> None:
        """Meets the other islands, and validates before the first step."""
        self.outer.join(self._schedule_step)
        self._follow_position()
        parameters = count_parameters(self.config.model, self.config.parallel, vocab_size=self.vocab_size)
        self.recorder.event("start", self.inner_step, parameters=parameters)
        for text in find_warnings(self.config):
            self.recorder.event("note", self.inner_step, text=text)
        if self.inner_step == 0:
            self.evaluate()
        self.batches.seek(self.inner_step)
        self.throughput.start()

    def step(self) -> InnerReport:
        """Takes one optimizer step of level 1."""
        report = self.inner.step(self.batches.take(), self.outer.reduce_gradients)
        # Learning rate and batches have moved by themselves, so both counts move here.
        self._schedule_step += 1
        self.outer.step_done(report.num_tokens)
        return report

    def after_step(self, report: InnerReport) -> None:
        """Records a finished step; validates and saves where these are due."""
        self.throughput.add_step(tokens=report.num_tokens, compute_s=report.step_time_s)
        # The record belongs to the step that was trained, before an APPLY moved the position.
        self._record(report)
        self._follow_position()
        inner_step = self.inner_step
        if self._reports.is_due(inner_step):
            self._reports.flush(inner_step)
        last = inner_step >= self.config.inner.train_iters
        if (every := self.config.logging.eval_interval) and inner_step % every == 0 and not last:
            self.evaluate()
        if (every := self.config.checkpoint.save_interval) and inner_step % every == 0 and not last:
            self.save()

    def must_stop(self) -> bool:
        """Whether any rank of the island had a reason to stop at their last collective."""
        if self._reports.stop_requested:
            self.recorder.event("stop", self.inner_step, reason=self.stop.reason)
        return self._reports.stop_requested

    def evaluate(self) -> None:
        """Validates the anchor (without one, the local weights); no-op with `logging.eval_iters` 0."""
        if self.config.logging.eval_iters == 0:
            return
        # Pending losses first: the log keeps the order of steps and validations.
        self._reports.flush(self.inner_step)
        anchors = self.outer.anchors()
        batches = self.data.validation_batches(self.config.logging.eval_iters)
        with self.throughput.paused():
            if anchors is None:
                loss = self.inner.evaluate(batches)
            else:
                with self.masters.temporarily(anchors):
                    loss = self.inner.evaluate(batches)
        self.recorder.eval(EvalRecord(self.inner_step, loss))

    def save(self) -> None:
        """Writes a checkpoint of both levels, unless there is one of this step."""
        if self._saved_step == self.inner_step:
            return
        self._reports.flush(self.inner_step)
        self._saved_step = self.inner_step
        with self.throughput.paused():
            path = self._checkpoints(checkpoint_dir_of(self.config)).save(
                self.inner_step,
                self._train_state(),
                outer=self.outer.state_dict(),
                common={"throughput": self.throughput.state_dict()},
                retain=self.config.checkpoint.save_retain,
            )
        self.recorder.event("checkpoint", self.inner_step, folder=str(path))

    def load_anchors(self) -> None:
        """Replaces the model's weights by the anchors, if the method has any."""
        if (anchors := self.outer.anchors()) is not None:
            self.masters.load(anchors)

    def _build_level_1(self, data: ResolvedData, undo: ExitStack) -> None:
        config, island = self.config, self.island
        self.tokenizer = data.tokenizer.build()
        self.data = build_data(
            config,
            data,
            island_id=self.context.island_id,
            coordinate=island.coordinate,
            barrier=lambda: dist.barrier(island.control_group),
        )
        self.batches = Prefetcher(
            self.data,
            global_batch_size=config.inner.global_batch_size,
            device=island.backend.device,
        )
        undo.callback(self.batches.close)
        self.inner = Inner(config, island, build_model(config, island, vocab_size=data.vocab_size))
        self.masters = MasterWeights(island, self.inner.model, self.inner.optimizer)

    def _build_level_2(self, tokenizer_identity: str) -> OuterLoop:
        if self.config.outer.method == "none":
            return NoOuterLoop()
        from dilocox.outer.build import OuterParts, build_outer_loop

        config = self.config
        stage = stage_parameters(
            config.model, config.parallel, vocab_size=self.vocab_size, pp_rank=self.island.coordinate.pp
        )
        parts = OuterParts(
            island_id=self.context.island_id,
            sync_group=self.island.sync_group,
            shards=self.masters.shards,
            parameters=[parameter for parameter in stage if not parameter.tied_copy],
            publish=self.masters.publish,
            gradient_buffers=self.inner.gradient_buffers,
            report=OuterReporter(self.recorder),
            stopping=lambda: self.stop.is_set,
            tokenizer=tokenizer_identity,
        )
        return build_outer_loop(config, parts)

    def _follow_position(self) -> None:
        """Moves learning rate and batches to the position of level 2.

        An island that was behind has received the weights of the others, and with them their position.
        """
        if (ahead := self.inner_step - self._schedule_step) == 0:
            return
        self.inner.scheduler.step(ahead)
        self._schedule_step = self.inner_step
        self.batches.seek(self.inner_step)

    def _record(self, report: InnerReport) -> None:
        """Queues the record of the step just done; its loss follows with the next `StepReports.flush`."""
        inner_step = self._schedule_step
        self.recorder.queue_inner(
            InnerRecord(
                inner_step=inner_step,
                lm_loss=math.nan,
                grad_norm=math.nan if report.grad_norm is None else report.grad_norm,
                lr=report.lr,
                tokens=report.num_tokens,
                step_time_s=report.step_time_s,
            )
        )
        self._reports.add(report)
        if report.skipped:
            self.recorder.event("skipped_step", inner_step)

    def _load(self) -> Loaded | None:
        """Loads the newest checkpoint of this island; None if there is none."""
        self._loaded_from = checkpoint_dir_of(self.config)
        if self.config.checkpoint.load:
            self._loaded_from = load_dir_of(self.config)
        source = self._checkpoints(self._loaded_from)
        iteration = checkpoint_files.latest(source.directory)
        return None if iteration is None else source.load(self._train_state(), iteration)

    def _restore(self, loaded: Loaded) -> None:
        """Restores level 2 and the clocks; level 1 was restored by `_load`."""
        self.outer.load_state_dict(loaded.outer)
        self.throughput.load_state_dict(loaded.common["throughput"])
        directory = self._checkpoints(self._loaded_from).directory
        folder = checkpoint_files.folder_of(directory, loaded.iteration)
        self.recorder.event("resume", loaded.iteration, folder=str(folder))
        if loaded.layout_changed is not None:
            self.recorder.event("layout_changed", loaded.iteration, text=loaded.layout_changed)

    def _checkpoints(self, folder: Path) -> Checkpoints:
        return Checkpoints(
            island_dir(folder, self.context.island_id),
            self.island,
            config=self.config,
            vocab_size=self.vocab_size,
        )

    def _train_state(self) -> TrainState:
        return TrainState(self.masters, self.inner.optimizer, self.inner.scheduler)
