"""A stand-in for `dilocox train` under torchrun: records plausible figures, or misbehaves as told.

Behaviours: `fine`; `forever` (stops cleanly at SIGTERM); `ignores_sigterm`; `crash` (rank 1 of island 1
raises); `killed` (the same, by SIGKILL); `refused` (island 1 finds its settings bad, island 0 waits for it);
`orphan` (forever, with a helper process per rank).
"""

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dilocox.config.load import load_config
from dilocox.metrics.interface_bytes import InterfaceBytes
from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import EvalRecord, InnerRecord, SyncRecord
from dilocox.metrics.summary import RunOutcome, island_summary, write_island_summary
from dilocox.metrics.throughput import Throughput
from dilocox.pdeathsig import set_pdeathsig

PARAMETERS = 1_000_000


class Stop:
    wanted = False

    def __call__(self, *_):
        self.wanted = True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--behaviour", default="fine")
    parser.add_argument("config")
    parser.add_argument("--island-id", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args()
    set_pdeathsig(signal.SIGTERM)
    rank = int(os.environ["RANK"])
    stop = Stop()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if args.behaviour == "ignores_sigterm" else stop)
    config = load_config(args.config, args.set)
    if args.behaviour == "orphan":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    run_dir = Path(config.run.output_dir) / config.run.name
    recorder = Recorder(
        run_dir, island_id=args.island_id, rank=rank, config=config, resumed_step=1 if args.resume else None
    )
    with contextlib.closing(recorder):
        status = train(config, recorder, args=args, rank=rank, stop=stop)
        if rank == 0:
            finish(config, run_dir, recorder, island_id=args.island_id, status=status)
    return 0


def train(config, recorder, *, args, rank, stop):
    if args.behaviour == "refused":
        if args.island_id == 0:
            time.sleep(1000)
        print("dilocox: error: inner.lr = 3: a planted fault; correct it", file=sys.stderr)
        raise SystemExit(2)
    recorder.event("start", 0, parameters=PARAMETERS)
    if args.behaviour in ("crash", "killed") and (args.island_id, rank) == (1, 1):
        recorder.inner(record(1))
        if args.behaviour == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a planted fault")
    recorder.eval(EvalRecord(0, 8.0))
    step = 0
    while step < config.inner.train_iters or args.behaviour in ("forever", "ignores_sigterm", "orphan"):
        step += 1
        recorder.inner(record(step))
        if step % config.outer.sync_interval == 0:
            recorder.sync(sync(step, step // config.outer.sync_interval))
        if stop.wanted:
            run_dir = Path(config.run.output_dir) / config.run.name
            checkpoint = run_dir / "checkpoints" / f"island_{args.island_id}"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "latest_checkpointed_iteration.txt").write_text(str(step))
            recorder.event("checkpoint", step)
            return "interrupted"
        time.sleep(0.01)
    recorder.eval(EvalRecord(step, 3.0))
    return "completed"


def record(step):
    loss = 3 + 5 * math.exp(-step / 10) + 0.2 * math.sin(step * 7)
    return InnerRecord(inner_step=step, lm_loss=loss, grad_norm=1.0, lr=1e-3, tokens=512, step_time_s=0.008)


def sync(step, outer_step):
    return SyncRecord(
        inner_step=step,
        outer_step=outer_step,
        fragment=outer_step % 2,
        num_participants=2,
        pseudo_gradient_norm=1 / outer_step,
        cosine_to_mean=0.8,
        payload_bytes_sent=PARAMETERS * 4 // 8,
        exchange_s=0.05,
        waiting_s=0.01,
        blocked_s=0.001,
        codec="int4",
        committed=True,
    )


def finish(config, run_dir, recorder, *, island_id, status):
    throughput = Throughput()
    steps, syncs = recorder.totals.inner_steps, recorder.totals.num_committed_syncs
    throughput.load_state_dict(
        {
            "wall_s": steps * 0.01,
            "compute_s": steps * 0.008,
            "tokens": steps * 512,
        }
    )
    outcome = RunOutcome(
        status=status,
        run_id="fake",
        parameters=PARAMETERS,
        outer_steps=syncs,
        anchor_hash="abc",
        predicted_bytes=1,
        sample="def main():\n    return 1 < 2",
    )
    summary = island_summary(
        config,
        island_id=island_id,
        outcome=outcome,
        totals=recorder.totals,
        throughput=throughput,
        interface=InterfaceBytes("lo"),
    )
    write_island_summary(run_dir, summary)


if __name__ == "__main__":
    raise SystemExit(main())
