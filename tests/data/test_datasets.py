"""What each island, rank and step reads."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from dilocox.config.schema import Config
from dilocox.data import sample_set
from dilocox.data.datasets import BatchShape, Data, MicroBatch, build_data
from dilocox.data.resolve import prepare
from dilocox.data.sample_set import folder_name
from dilocox.data.samples import check_sizes, choose_documents, share_bounds, train_set
from dilocox.errors import ConfigError, DataError
from dilocox.topology import Coordinate
from tests.data.pairs import make_config, numbered_documents, write_pair
from tests.distributed.forkserver import run_ranks


@pytest.fixture
def one_rank_world(tmp_path: Path) -> Iterator[None]:
    """megatron-core 0.16 builds blends in a torch.distributed world only."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def open_data(config: Config, run_dir: Path, *, island_id: int = 0, dp_rank: int = 0) -> Data:
    run = config.run.model_copy(update={"output_dir": str(run_dir.parent), "name": run_dir.name})
    config = config.model_copy(update={"run": run})
    resolved = prepare(config, run_dir, island_id=island_id)
    check_sizes(config, resolved, island_ids=[island_id])
    coordinate = Coordinate(pp=0, tp=0, dp=dp_rank)
    return build_data(config, resolved, island_id=island_id, coordinate=coordinate, barrier=lambda: None)


def tokens_of(steps: Sequence[Sequence[MicroBatch]]) -> list[list[list[int]]]:
    """Samples of each step, in order."""
    return [[row for batch in step for row in batch["tokens"].tolist()] for step in steps]


def seen(steps: Sequence[Sequence[MicroBatch]]) -> set[int]:
    return {token for step in tokens_of(steps) for sample in step for token in sample}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """100 documents of 16 tokens, two samples each; the last 20 are for validation."""
    return write_pair(tmp_path / "corpus", numbered_documents(100, 16))


def test_a_micro_batch(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus, inner={"micro_batch_size": 2})
    steps = list(open_data(config, tmp_path).batches())
    assert [len(step) for step in steps] == [2] * 10
    batch = steps[0][0]
    assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
    assert all(tensor.shape == (2, 8) for tensor in batch.values())
    assert batch["tokens"].dtype == batch["labels"].dtype == batch["position_ids"].dtype == torch.int64
    assert batch["loss_mask"].dtype == torch.float32 and bool(batch["loss_mask"].all())
    assert batch["position_ids"].tolist() == [list(range(8))] * 2
    assert torch.equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])


@pytest.mark.parametrize("num_islands", [1, 2, 3])
def test_islands_are_disjoint_and_together_complete(corpus: str, tmp_path: Path, num_islands: int) -> None:
    # enough steps for two passes over the documents of an island
    config = make_config(corpus, parallel={"num_islands": num_islands}, inner={"train_iters": 80})
    parts = [seen(list(open_data(config, tmp_path, island_id=i).batches())) for i in range(num_islands)]
    assert set.union(*parts) == set(range(80))
    assert sum(map(len, parts)) == 80
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_validation_is_the_same_everywhere_and_apart_from_training(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus, parallel={"num_islands": 2})
    islands = [open_data(config, tmp_path, island_id=i) for i in range(2)]
    batches = [tokens_of(data.validation_batches(2)) for data in (*islands, islands[0])]
    assert batches[0] == batches[1] == batches[2]
    assert [len(step) for step in batches[0]] == [4, 4]
    assert {token for step in batches[0] for sample in step for token in sample} <= set(range(80, 100))
    assert tokens_of(islands[0].validation_batches(1)) == batches[0][:1]


def test_resume_continues_exactly(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus)
    whole = tokens_of(list(open_data(config, tmp_path).batches()))
    for step in (0, 3, 9, 10):
        resumed = tokens_of(list(open_data(config, tmp_path).batches(step * 4)))
        assert resumed == whole[step:]


def test_order_follows_the_seed(corpus: str, tmp_path: Path) -> None:
    def order(seed: int) -> list[list[list[int]]]:
        return tokens_of(list(open_data(make_config(corpus, run={"seed": seed}), tmp_path).batches()))

    assert order(1) == order(1) != order(2)
    assert order(2**40) == order(0)


@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_a_step_does_not_depend_on_the_data_parallel_size(
    corpus: str, tmp_path: Path, micro_batch_size: int
) -> None:
    def steps(dp: int, dp_rank: int) -> list[list[MicroBatch]]:
        config = make_config(
            corpus,
            parallel={"ranks_per_island": dp},
            inner={"micro_batch_size": micro_batch_size, "global_batch_size": 8},
        )
        return list(open_data(config, tmp_path, dp_rank=dp_rank).batches())

    alone = tokens_of(steps(1, 0))
    ranks = [tokens_of(steps(2, rank)) for rank in range(2)]
    assert len(alone) == 10
    for step, whole in enumerate(alone):
        assert sorted(ranks[0][step] + ranks[1][step]) == sorted(whole)
        assert len(ranks[0][step]) == len(ranks[1][step]) == 4


def test_micro_batches_go_round_the_ranks() -> None:
    shapes = [BatchShape(micro_batch_size=2, global_batch_size=8, dp=2, dp_rank=rank) for rank in range(2)]
    assert [shape.sample_numbers(8) for shape in shapes] == [
        [range(8, 10), range(12, 14)],
        [range(10, 12), range(14, 16)],
    ]


@pytest.mark.usefixtures("one_rank_world")
def test_blends_respect_weights(tmp_path: Path) -> None:
    small = write_pair(tmp_path / "small", numbered_documents(20, 16))
    large = write_pair(tmp_path / "large", numbered_documents(200, 16, base=1000))
    config = make_config([3.0, small, 1.0, large], inner={"train_iters": 100})
    samples = [
        sample[0] for step in tokens_of(list(open_data(config, tmp_path).batches())) for sample in step
    ]
    counts = Counter("small" if token < 1000 else "large" for token in samples)
    assert (counts["small"], counts["large"]) == (300, 100)


@pytest.mark.usefixtures("one_rank_world")
def test_sites_with_data_of_their_own(tmp_path: Path) -> None:
    sites = [write_pair(tmp_path / f"s{i}", numbered_documents(50, 16, base=1000 * i)) for i in range(2)]
    config = make_config("stdlib", parallel={"num_islands": 2}, data={"island_data": sites})
    islands = [open_data(config, tmp_path, island_id=i) for i in range(2)]
    for island_id, data in enumerate(islands):
        read = seen(list(data.batches()))
        assert read <= set(range(1000 * island_id, 1000 * island_id + 40))
    validation = [tokens_of(data.validation_batches(2)) for data in islands]
    assert validation[0] == validation[1]
    first_tokens = [sample[0] for step in validation[0] for sample in step]
    assert sum(token < 1000 for token in first_tokens) == len(first_tokens) / 2


def test_index_files_are_used_again(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(corpus)
    before = tokens_of(list(open_data(config, tmp_path).batches()))
    assert len(list((tmp_path / "data_cache").rglob("*.npy"))) == 6
    monkeypatch.setattr(sample_set, "atomic_folder", None)
    assert tokens_of(list(open_data(config, tmp_path).batches())) == before


def test_a_rewritten_corpus_is_not_read_through_old_index_files(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus, inner={"train_iters": 80})
    list(open_data(config, tmp_path).batches())
    write_pair(Path(corpus), numbered_documents(50, 32))
    assert seen(list(open_data(config, tmp_path).batches())) == set(range(40))


def test_a_half_written_index_is_built_anew(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus)
    name = folder_name(train_set(config, prepare(config, tmp_path), 0))
    (tmp_path / "data_cache" / f".{name}.1.tmp").mkdir(parents=True)
    assert len(list(open_data(config, tmp_path).batches())) == 10


def test_data_cache_path_is_used(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus, data={"data_cache_path": str(tmp_path / "elsewhere")})
    open_data(config, tmp_path)
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


def test_unwritable_cache(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = make_config(corpus, data={"data_cache_path": str(tmp_path / "file")})
    with pytest.raises(ConfigError) as caught:
        open_data(config, tmp_path)
    assert caught.value.field == "data.data_cache_path"


@pytest.mark.parametrize(
    ("documents", "sections", "part"),
    [
        (numbered_documents(100, 16), {"model": {"seq_length": 4096}}, "train"),
        (numbered_documents(10, 8), {"parallel": {"num_islands": 9}}, "train"),
        (numbered_documents(100, 16), {"data": {"split": "100,0,0"}}, "valid"),
        (numbered_documents(100, 16), {"data": {"split": "99,1,0"}}, "valid"),
    ],
)
def test_too_little_text(
    tmp_path: Path, documents: list[list[int]], sections: dict[str, dict[str, object]], part: str
) -> None:
    prefix = write_pair(tmp_path / "corpus", documents)
    config = make_config(prefix, **sections)
    with pytest.raises(ConfigError) as caught:
        open_data(config, tmp_path, island_id=config.parallel.num_islands - 1)
    assert (caught.value.field, caught.value.value) == ("data.data_path", prefix)
    assert f"{part} share" in caught.value.rule and "data.split" in caught.value.rule
    assert not (tmp_path / "data_cache").exists()


@pytest.mark.parametrize("split", ["969,30,1", "100,0,0", "1,2,3", ".5,.25,0", "7,1.5,3"])
def test_shares_are_cut_where_megatron_cuts_them(split: str) -> None:
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for num_sequences in (1, 2, 7, 100, 12345):
        for part, bounds in enumerate(matrix):
            begin, end = share_bounds(split, part, num_sequences=num_sequences)
            expected = (end, end) if bounds is None else tuple(round(b * num_sequences) for b in bounds)
            assert (begin, end) == expected


def test_too_little_text_of_one_site_names_that_site(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / f"p{i}", numbered_documents(50 * (1 - i) + 1, 16)) for i in range(2)]
    data = {"data_path": "stdlib", "island_data": prefixes}
    config = make_config("stdlib", data=data, parallel={"num_islands": 2}, model={"seq_length": 64})
    with pytest.raises(ConfigError, match="for island 1 of 2 has") as caught:
        open_data(config, tmp_path, island_id=1)
    assert caught.value.field == "data.island_data[1]"


def test_a_run_without_validation(corpus: str, tmp_path: Path) -> None:
    config = make_config(corpus, data={"split": "100,0,0"}, logging={"eval_iters": 0})
    data = open_data(config, tmp_path)
    assert data.validation_batches(0) == [] and len(list(data.batches())) == 10
    assert len(list((tmp_path / "data_cache").iterdir())) == 1


def test_sizes_are_checked_without_torch(corpus: str, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from tests.data.pairs import make_config
from dilocox.data.resolve import prepare
from dilocox.data.samples import check_sizes
config = make_config({corpus!r})
check_sizes(config, prepare(config, Path({str(tmp_path)!r})), island_ids=[0])
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_token_outside_of_the_vocabulary_is_not_trained_on(corpus: str, tmp_path: Path) -> None:
    data = open_data(make_config(corpus, data={"vocab_size": 50}), tmp_path)
    with pytest.raises(DataError, match="outside the vocabulary of 50"):
        list(data.batches())


def test_documents_of_several_sequences_stay_whole() -> None:
    ends = np.array([0, 2, 3, 7, 8], dtype=np.int64)  # documents of 2, 1, 4 and 1 sequences
    chosen = [choose_documents(ends, 1, 8, island=i, num_islands=2).tolist() for i in range(2)]
    assert chosen == [[1, 3, 4, 5, 6], [2, 7]]


def _samples_of_rank(rank: int, config: Config, run_dir: Path) -> list[list[list[int]]]:
    resolved = prepare(config, run_dir, island_id=0)
    coordinate = Coordinate(pp=0, tp=0, dp=rank)
    data = build_data(config, resolved, island_id=0, coordinate=coordinate, barrier=dist.barrier)
    return tokens_of(list(islice(data.batches(), 3)))


def test_ranks_build_the_index_once_and_read_their_parts(tmp_path: Path) -> None:
    prefixes = [write_pair(tmp_path / f"p{i}", numbered_documents(50, 16, base=100 * i)) for i in range(2)]
    run = {"output_dir": str(tmp_path.parent), "name": tmp_path.name}
    config = make_config([1.0, prefixes[0], 1.0, prefixes[1]], parallel={"ranks_per_island": 2}, run=run)
    first, second = run_ranks(_samples_of_rank, 2, config, tmp_path)
    assert [len(step) for step in first + second] == [2] * 6
    assert first != second
    names = [path.name for path in (tmp_path / "data_cache").iterdir()]
    assert len(names) == 2 and not any(name.startswith(".") for name in names)
