"""The run folder at the start: nothing is overwritten by accident."""

import pytest

from dilocox.config.load import load
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.run_folder import prepare, run_dir_of


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"run": {"output_dir": str(tmp_path), "name": "demo"}})


def put(path, text="1"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_new_run_gets_its_resolved_settings(config):
    assert prepare(config, "new") is False
    assert load(run_dir_of(config) / "config.yaml") == config
    assert prepare(config, "new") is False  # nothing has been trained yet


@pytest.mark.parametrize(
    "path", ["island_0/metrics.jsonl", "checkpoints/island_1/latest_checkpointed_iteration.txt"]
)
def test_progress_is_not_overwritten(config, path):
    prepare(config, "new")
    put(run_dir_of(config) / path)
    with pytest.raises(ConfigError, match=r"run\.name = 'demo': .*--resume.*--overwrite"):
        prepare(config, "new")
    assert (run_dir_of(config) / path).exists()


def test_resume_keeps_everything_but_old_summaries(config):
    prepare(config, "new")
    folder = run_dir_of(config)
    put(folder / "checkpoints/island_0/latest_checkpointed_iteration.txt")
    put(folder / "summary.json")
    put(folder / "island_0/summary.json")
    put(folder / "island_0/metrics.jsonl")
    assert prepare(config, "resume") is True
    assert (folder / "island_0/metrics.jsonl").exists()
    assert not (folder / "summary.json").exists() and not (folder / "island_0/summary.json").exists()


def test_resume_of_nothing_says_so(config):
    assert prepare(config, "resume") is False


def test_overwrite_removes_the_run_and_only_a_run(config, tmp_path):
    prepare(config, "new")
    put(run_dir_of(config) / "island_0/metrics.jsonl")
    put(tmp_path / "other/file")
    assert prepare(config, "overwrite") is False
    assert not (run_dir_of(config) / "island_0").exists() and (tmp_path / "other/file").exists()


def test_overwrite_leaves_a_foreign_folder_alone(config):
    put(run_dir_of(config) / "thesis.tex")
    with pytest.raises(ConfigError, match="not a run folder"):
        prepare(config, "overwrite")
    assert (run_dir_of(config) / "thesis.tex").exists()


def test_overwrite_leaves_checkpoints_elsewhere_alone(config, tmp_path):
    put(tmp_path / "elsewhere/island_0/latest_checkpointed_iteration.txt")
    settings = config.model_dump()
    settings["checkpoint"]["save"] = str(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"checkpoint\.save"):
        prepare(Config.model_validate(settings), "overwrite")
