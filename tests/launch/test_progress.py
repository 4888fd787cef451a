"""Where all islands are, from their growing metrics files."""

from dilocox.config.schema import Config
from dilocox.launch.progress import RunState
from dilocox.metrics.jsonl import JsonlWriter
from dilocox.metrics.records import EvalRecord, InnerRecord
from tests.metrics.test_records import SYNC


def inner(step):
    return InnerRecord(inner_step=step, lm_loss=4.0, grad_norm=1.0, lr=0.1, tokens=100, step_time_s=0.1)


def test_state_follows_the_files(tmp_path):
    state = RunState(Config(), tmp_path)
    state.update(0.0)
    assert state.describe().startswith("starting")
    writers = [JsonlWriter(tmp_path / f"island_{i}" / "metrics.jsonl") for i in range(2)]
    for writer in writers:
        writer.write(inner(1))
        writer.write(SYNC)
    writers[0].write(EvalRecord(1, 3.5))
    state.update(2.0)
    assert state.inner_steps == [1, 1]
    assert state.tokens_per_s == 100.0
    assert state.describe() == "loss 4.000 · val 3.500 · 100 tok/s · 1 syncs · 0.0 MB sent"
    for writer in writers:
        writer.close()
    state.update(60.0)
    assert state.tokens_per_s == 0.0
