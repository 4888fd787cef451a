"""A checkpoint is there completely or not at all, whatever stops its writing."""

import pytest

from dilocox.checkpoint import files
from dilocox.errors import CheckpointError


def write(directory, iteration, *, retain=2, text="x"):
    folder = files.begin(directory, iteration)
    (folder / "inside").mkdir()
    (folder / "inside" / "data").write_text(text)
    files.commit(directory, iteration, retain=retain)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_names_are_megatrons(tmp_path):
    write(tmp_path / "island_0", 100)
    assert names(tmp_path / "island_0") == ["iter_0000100", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "island_0" / files.TRACKER).read_text() == "100\n"
    assert files.latest(tmp_path / "island_0") == 100


def test_no_folder_and_an_empty_folder_hold_no_checkpoint(tmp_path):
    assert files.latest(tmp_path / "nowhere") is None
    assert files.latest(tmp_path) is None
    assert files.iterations(tmp_path / "nowhere") == []


@pytest.mark.parametrize("retain", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, retain):
    for iteration in (10, 20, 12345678, 30):  # the last one comes from a run that went back
        write(tmp_path, iteration, retain=retain)
    assert 30 in files.iterations(tmp_path)
    assert len(files.iterations(tmp_path)) == retain
    assert files.latest(tmp_path) == 30


def test_an_unfinished_checkpoint_counts_for_nothing_and_is_cleared_by_the_next(tmp_path):
    write(tmp_path, 10)
    (files.begin(tmp_path, 20) / "half").write_text("...")
    assert files.latest(tmp_path) == 10
    assert files.iterations(tmp_path) == [10]
    write(tmp_path, 20)
    assert names(files.folder_of(tmp_path, 20)) == ["inside"]
    assert names(tmp_path) == ["iter_0000010", "iter_0000020", files.TRACKER]


def test_abandoning_gives_the_space_back(tmp_path):
    write(tmp_path, 10)
    files.begin(tmp_path, 20)
    files.abandon(tmp_path, 20)
    assert names(tmp_path) == ["iter_0000010", files.TRACKER]


def test_the_same_iteration_can_be_written_again(tmp_path):
    write(tmp_path, 10, text="old")
    write(tmp_path, 10, text="new")
    assert (files.folder_of(tmp_path, 10) / "inside" / "data").read_text() == "new"
    assert names(tmp_path) == ["iter_0000010", files.TRACKER]


@pytest.mark.parametrize("stop_at", ["_write_tracker", "fsync"])
def test_a_stop_while_committing_leaves_the_older_one_usable(tmp_path, monkeypatch, stop_at):
    write(tmp_path, 10)

    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, stop_at, stopped)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 20, retain=1)
    assert files.latest(tmp_path) == 10
    assert files.folder_of(tmp_path, 10).is_dir()


def test_a_tracker_without_its_checkpoint_names_what_is_there(tmp_path):
    write(tmp_path, 10)
    (tmp_path / files.TRACKER).write_text("70")
    with pytest.raises(CheckpointError, match="names iteration 70, but the checkpoints there are: 10"):
        files.latest(tmp_path)
    (tmp_path / files.TRACKER).write_text("release")
    with pytest.raises(CheckpointError, match="'release', which is not an iteration"):
        files.latest(tmp_path)
