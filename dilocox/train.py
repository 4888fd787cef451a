"""Assembles both levels and runs THE LOOP. Read this page first.

Level 1 (`inner`): one island, every step, fast fabric; plain Megatron.
Level 2 (`outer`): between islands, every H steps, WAN; DiLoCo and its streaming and delayed variants.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dilocox import backend
from dilocox.checkpoint import files as checkpoint_files
from dilocox.checkpoint.store import Checkpoints, Loaded, TrainState
from dilocox.closing import close_run
from dilocox.config.check import check_device
from dilocox.config.load import fingerprint
from dilocox.config.schema import Config
from dilocox.config.warnings import find_warnings
from dilocox.data.datasets import build_data
from dilocox.data.resolve import ResolvedData, prepare
from dilocox.data.samples import check_sizes
from dilocox.errors import ConfigError
from dilocox.inner.master_weights import MasterWeights
from dilocox.inner.model import build_model
from dilocox.inner.step import Inner, InnerReport
from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import EvalRecord, InnerRecord
from dilocox.metrics.summary import Status
from dilocox.metrics.throughput import Throughput
from dilocox.outer.build import build_outer_loop
from dilocox.outer.schedule import EventKind
from dilocox.run_folder import check_writable, checkpoint_dir_of, island_dir, load_dir_of, run_dir_of
from dilocox.shapes import count_parameters, stage_parameters
from dilocox.stop import StopRequest
from dilocox.topology import Topology


@dataclass(frozen=True)
class Place:
    """Where this process stands, as torchrun's environment says.

    Attributes:
        rank: in the island's own world.
        local_rank: on this host.
        cache_dir: where prepared corpora are kept between runs.
    """

    island_id: int
    rank: int
    local_rank: int
    cache_dir: Path


def train(config: Config, place: Place, *, resume: bool) -> int:
    """Trains this rank's part of one island.

    Returns:
        Exit code 0, for a run that completed or that stopped on request with a checkpoint.

    Raises:
        ConfigError: bad settings or data, before any process group exists.
    """
    if config.outer.method != "none" and config.parallel.num_islands > 1 and config.wan.lighthouse is None:
        raise ConfigError(
            "wan.lighthouse",
            None,
            "islands need a place to meet; start `dilocox lighthouse` and set its address",
        )
    check_writable(config)
    data = prepare(config, place.cache_dir, island_id=place.island_id)
    check_sizes(config, data, island_ids=[place.island_id])
    with Run(config, place, data, resume=resume) as run:
        run.start()
        close_run(run, loop(run))
    return 0


def loop(run: Run) -> Status:
    """Trains until the last step or a reason to stop."""
    inner, outer = run.inner, run.outer
    batches = run.data.batches(run.inner_step * run.config.inner.global_batch_size)
    for inner_step in range(run.inner_step, run.config.inner.train_iters):
        # Level 1: one optimizer step inside this island, fast fabric.
        report = inner.step(next(batches), outer.reduce_gradients)
        outer.add_tokens(report.num_tokens)
        # Level 2: between islands, WAN. The schedule is pure integers and fixes the order.
        for event in outer.events_after(inner_step):
            match event.kind:
                case EventKind.MEASURE:
                    outer.measure(event, inner_step + 1)  # weights untouched
                case EventKind.START:
                    outer.start(event)  # goes on the WAN, training continues
                case EventKind.APPLY:
                    outer.apply(event, inner_step + 1)  # the only place where level 2 changes weights
        run.after_step(inner_step + 1, report)
        if run.must_stop():
            run.save()
            return "interrupted"
    outer.drain(run.inner_step - 1)
    return "completed"


class Run:
    """Both levels of one rank, and what is measured and saved around the loop.

    Collective: every method, by all ranks of the island.
    """

    def __init__(self, config: Config, place: Place, data: ResolvedData, *, resume: bool) -> None:
        self.config, self.place = config, place
        self.run_dir = run_dir_of(config)
        self.stop = StopRequest(config.run)
        self.topology = Topology.from_config(config.parallel)
        chosen = backend.choose_backend(config.run.device, place.local_rank)
        check_device(config, "cuda" if chosen.is_cuda else "cpu")  # what `run.device: auto` came to
        self.island = backend.init_island(chosen, self.topology, rank=place.rank, run=config.run)
        self.tokenizer = data.tokenizer.build()
        self.data = build_data(
            config,
            data,
            island_id=place.island_id,
            dp_rank=self.island.coordinate.dp,
            barrier=lambda: dist.barrier(self.island.control_group),
        )
        self.vocab_size = data.vocab_size
        self.inner = Inner(config, self.island, build_model(config, self.island, vocab_size=data.vocab_size))
        self.masters = MasterWeights(self.island, self.inner.model, self.inner.optimizer)
        self.throughput = Throughput()
        folder = island_dir(checkpoint_dir_of(config), place.island_id)
        self.checkpoints = Checkpoints(folder, self.island, fingerprint=fingerprint(config))
        loaded = self._load() if resume or config.checkpoint.load else None
        self.inner_step = 0 if loaded is None else loaded.iteration
        self._saved_step = -1
        self.recorder = Recorder(
            self.run_dir,
            island_id=place.island_id,
            rank=place.rank,
            config=config,
            resumed_step=None if loaded is None else loaded.iteration,
        )
        self.outer = build_outer_loop(
            config,
            island_id=place.island_id,
            sync_group=self.island.sync_group,
            shards=self.masters.shards,
            parameters=[
                parameter
                for parameter in stage_parameters(
                    config.model,
                    config.parallel,
                    vocab_size=self.vocab_size,
                    pp_rank=self.island.coordinate.pp,
                )
                if not parameter.tied_copy
            ],
            publish=self.masters.publish,
            gradient_buffers=self.inner.gradient_buffers,
            report=self.recorder,
            stopping=lambda: self.stop.is_set,
            tokenizer=data.tokenizer_identity,
        )
        if loaded is not None:
            self.outer.load_state_dict(loaded.rank_state["outer"])
            self.throughput.load_state_dict(loaded.common["throughput"])
            self.recorder.event("resume", self.inner_step, folder=str(folder))
        self.interface = InterfaceBytes(self.outer.interface)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.outer.close()
        self.recorder.close()
        self.stop.restore()
        if exception[0] is None:
            backend.shutdown(self.island)

    def start(self) -> None:
        """Meets the other islands and takes the first validation."""
        position = self.outer.join(self.inner_step)
        if position != self.inner_step:  # this island was behind and goes on with the others
            self.inner.scheduler.step(position - self.inner_step)
            self.inner_step = position
        parameters = count_parameters(self.config.model, self.config.parallel, vocab_size=self.vocab_size)
        self.recorder.event("start", self.inner_step, parameters=parameters)
        for warning in find_warnings(self.config):
            self.recorder.event("note", self.inner_step, text=warning)
        if self.inner_step == 0:
            self.evaluate()
        self.throughput.start()

    def after_step(self, inner_step: int, report: InnerReport) -> None:
        """Records a finished step; validates and saves when it is time."""
        self.inner_step = inner_step
        self.throughput.add_step(tokens=report.num_tokens, compute_s=report.step_time_s)
        self.recorder.inner(
            InnerRecord(
                inner_step=inner_step,
                lm_loss=report.lm_loss,
                grad_norm=math.nan if report.grad_norm is None else report.grad_norm,
                lr=report.lr,
                tokens=report.num_tokens,
                step_time_s=report.step_time_s,
            )
        )
        if report.skipped:
            self.recorder.event("skipped_step", inner_step)
        last = inner_step == self.config.inner.train_iters
        if (every := self.config.logging.eval_interval) and inner_step % every == 0 and not last:
            self.evaluate()
        if (every := self.config.checkpoint.save_interval) and inner_step % every == 0 and not last:
            self.save()

    def must_stop(self) -> bool:
        """Whether any rank of the island has a reason to stop."""
        mine = self.stop.check(self.inner_step)
        anyone = torch.tensor(int(mine), dtype=torch.int32)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX, group=self.island.control_group)
        if not anyone:
            return False
        self.stop.note("another rank of the island was told to stop")
        self.recorder.event("stop", self.inner_step, reason=self.stop.reason)
        return True

    def evaluate(self) -> None:
        """Validates the anchor (without one, the local weights); no-op with `logging.eval_iters` 0."""
        if self.config.logging.eval_iters == 0:
            return
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
        self._saved_step = self.inner_step
        with self.throughput.paused():
            path = self.checkpoints.save(
                self.inner_step,
                self._train_state(),
                rank_state={"outer": self.outer.state_dict()},
                common={"throughput": self.throughput.state_dict()},
                retain=self.config.checkpoint.save_retain,
            )
        self.recorder.event("checkpoint", self.inner_step, folder=str(path))

    def _load(self) -> Loaded | None:
        """The newest checkpoint of this island; None where there is none yet."""
        source = self.checkpoints
        if self.config.checkpoint.load:
            folder = island_dir(load_dir_of(self.config), self.place.island_id)
            source = Checkpoints(folder, self.island, fingerprint=fingerprint(self.config))
        iteration = checkpoint_files.latest(source.directory)
        return None if iteration is None else source.load(self._train_state(), iteration)

    def _train_state(self) -> TrainState:
        return TrainState(self.inner.model, self.inner.optimizer, self.inner.scheduler)
