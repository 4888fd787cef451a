"""Optional viewers: asked for and missing is an error before the start; what they are given."""

import importlib.util

import pytest

from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.metrics.recorder import Recorder
from dilocox.metrics.records import EvalRecord
from dilocox.metrics.sinks import check_packages, scalars_of
from tests.metrics.test_records import EVENT, INNER, SYNC


def config(**leaves):
    return Config.model_validate({"logging": leaves})


@pytest.mark.parametrize("leaf", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_what_to_do(leaf, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_packages(config())
    with pytest.raises(ConfigError, match=rf"logging\.{leaf} = True: .*pip install 'dilocox\[{leaf}\]'"):
        check_packages(config(**{leaf: True}))


def test_curves_of_records():
    assert scalars_of(INNER)["inner/tokens_per_s"] == 512 / 0.25
    assert scalars_of(SYNC)["sync/cosine_to_mean/fragment_2"] == 0.8
    assert scalars_of(EvalRecord(3, 2.0)) == {"eval/val_loss": 2.0}
    assert scalars_of(EVENT) == {}


def test_tensorboard_gets_every_record(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = Recorder(tmp_path, island_id=0, rank=0, config=config(tensorboard=True))
    recorder.inner(INNER)
    recorder.sync(SYNC)
    recorder.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard" / "island_0"))
    events.Reload()
    assert events.Scalars("inner/lm_loss")[0].value == 2.5
    assert events.Scalars("sync/blocked_s")[0].step == 30
