"""Missing and damaged files are one line that names the setting, before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from dilocox.data.resolve import prepare
from dilocox.errors import ConfigError
from tests.data.pairs import make_config, numbered_documents, write_pair


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_pair(tmp_path / "corpus", numbered_documents(10, 16))


def test_a_corpus_and_its_tokenizer(prefix: str, tmp_path: Path) -> None:
    resolved = prepare(make_config(prefix), tmp_path)
    assert resolved.shared and resolved.vocab_size == 60_000
    blend = resolved.training_blend(1)
    assert blend == resolved.validation_blend()
    assert (blend.num_tokens, blend.weights) == (160, (1.0,))


def test_weights_are_normalised(prefix: str, tmp_path: Path) -> None:
    other = write_pair(tmp_path / "other", numbered_documents(5, 16))
    blend = prepare(make_config([30, prefix, 10, other]), tmp_path).training_blend(0)
    assert blend.weights == (0.75, 0.25)
    assert [pair.prefix for pair in blend.pairs] == [prefix, other]


def test_validation_takes_each_site_alike(prefix: str, tmp_path: Path) -> None:
    others = [write_pair(tmp_path / name, numbered_documents(5, 16)) for name in ("a", "b")]
    data = {"island_data": [prefix, [3.0, others[0], 1.0, others[1]]]}
    resolved = prepare(make_config("stdlib", data=data, parallel={"num_islands": 2}), tmp_path)
    blend = resolved.validation_blend()
    assert [pair.prefix for pair in blend.pairs] == [prefix, *others]
    assert blend.weights == (0.5, 0.375, 0.125)
    assert [len(resolved.training_blend(island).pairs) for island in range(2)] == [1, 2]


def cut_data(prefix: str) -> None:
    data = Path(prefix + ".bin")
    data.write_bytes(data.read_bytes()[:-2])


def cut_index(prefix: str) -> None:
    index = Path(prefix + ".idx")
    index.write_bytes(index.read_bytes()[:60])


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda prefix: Path(prefix + ".bin").unlink(), r"corpus\.bin does not exist; check the path"),
        (lambda prefix: Path(prefix + ".idx").unlink(), r"corpus\.idx does not exist; check the path"),
        (lambda prefix: Path(prefix + ".idx").write_bytes(b"x" * 100), "is not a Megatron index"),
        (lambda prefix: Path(prefix + ".idx").write_bytes(b""), "is not a Megatron index"),
        (cut_index, "is cut off or damaged"),
        (cut_data, "has 318 bytes, its index says 320"),
        (lambda prefix: write_pair(Path(prefix), []), "holds no documents"),
    ],
)
def test_damaged_pair(prefix: str, tmp_path: Path, damage: Callable[[str], object], rule: str) -> None:
    damage(prefix)
    with pytest.raises(ConfigError, match=rule) as caught:
        prepare(make_config(prefix), tmp_path)
    assert (caught.value.field, caught.value.value) == ("data.data_path", prefix)


def test_prefix_with_an_extension(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give the prefix without extension"):
        prepare(make_config(prefix + ".bin"), tmp_path)


def test_vocab_size_of_another_tokenizer(prefix: str, tmp_path: Path) -> None:
    from dilocox.data.preprocess.train_tokenizer import train_sentencepiece

    model = tmp_path / "tokenizer.model"
    model.write_bytes(train_sentencepiece(["some words to learn from " * 20], 300, num_bytes=1))
    data = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    assert prepare(make_config(prefix, data={**data, "vocab_size": None}), tmp_path).vocab_size == 300
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 60000: .* has 300 tokens"):
        prepare(make_config(prefix, data=data), tmp_path)


def test_an_island_needs_its_own_files_only(
    prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = {"island_data": [prefix, "/nowhere/else"]}
    config = make_config("stdlib", data=data, parallel={"num_islands": 2})
    with pytest.raises(ConfigError, match=r"data\.island_data\[1\] = '/nowhere/else'"):
        prepare(config, tmp_path)
    with pytest.raises(ConfigError, match=r"data\.island_data\[1\]"):
        prepare(config, tmp_path, island_id=1)
    with caplog.at_level(logging.WARNING):
        resolved = prepare(config, tmp_path, island_id=0)
    assert "data.island_data[1] is not on this machine" in caplog.text
    assert resolved.training_blend(0) == resolved.validation_blend()
    with pytest.raises(ConfigError, match="needs its own files"):
        resolved.training_blend(1)
