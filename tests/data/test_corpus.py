"""The demo's corpus: complete, cached by content, safe in several processes."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dilocox.data import corpus as corpus_module
from dilocox.data.corpus import Corpus, prepare_corpus, prepare_stdlib
from dilocox.data.preprocess.documents import RawDocument
from dilocox.data.tokenizer import TokenizerSpec
from dilocox.errors import ConfigError
from tests.distributed.forkserver import run_ranks


def sources(count: int = 6) -> list[RawDocument]:
    text = "def f{0}(x):\n    return x + {0}\n\n\n"
    return [RawDocument(f"m{i}.py", 0, (text.format(i) * 40).encode()) for i in range(count)]


def texts(corpus: Corpus) -> list[str]:
    tokenizer = corpus.tokenizer.build()
    dataset = IndexedDataset(corpus.prefix)
    documents = [dataset[index].tolist() for index in range(len(dataset))]
    assert all(ids[-1] == tokenizer.eod for ids in documents)
    return [tokenizer.decode(ids[:-1]) for ids in documents]


def test_documents_come_back_exactly(tmp_path: Path) -> None:
    assert texts(prepare_corpus(sources(), tmp_path, vocab_size=310)) == [
        raw.content.decode() for raw in sources()
    ]


def test_equal_content_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_corpus(sources(), tmp_path, vocab_size=310)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_build", None)
        assert prepare_corpus(sources(), tmp_path, vocab_size=310) == first
    others = [
        prepare_corpus(sources(7), tmp_path, vocab_size=310),
        prepare_corpus(sources(), tmp_path, vocab_size=311),
        prepare_corpus(sources(), tmp_path, tokenizer=first.tokenizer),
    ]
    assert len({first.prefix, *(other.prefix for other in others)}) == 4
    monkeypatch.setattr(corpus_module, "_RECIPE_VERSION", 99)
    assert prepare_corpus(sources(), tmp_path, vocab_size=310).prefix != first.prefix


def test_a_failed_attempt_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 9999"):
        prepare_corpus(sources(), tmp_path, vocab_size=9999)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]


def test_unwritable_cache_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        prepare_corpus(sources(), tmp_path / "file" / "cache", vocab_size=310)


def _prepare_on_rank(rank: int, cache_dir: Path) -> str:
    return prepare_corpus(sources(), cache_dir, vocab_size=310).prefix


def test_several_processes_at_once(tmp_path: Path) -> None:
    prefixes = run_ranks(_prepare_on_rank, 3, tmp_path)
    assert len(set(prefixes)) == 1
    assert len(texts(prepare_corpus(sources(), tmp_path, vocab_size=310))) == 6
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_losing_the_race_without_a_common_lock(tmp_path: Path) -> None:
    """On a file system without locks another process may finish first: its folder is as good."""
    ready = prepare_corpus(sources(), tmp_path / "a", vocab_size=310)
    folder = tmp_path / "b" / Path(ready.prefix).parent.name
    shutil.copytree(Path(ready.prefix).parent, folder)
    corpus_module._build(sources(), folder, vocab_size=310, tokenizer=None)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [folder.name]


def test_the_standard_library(tmp_path: Path) -> None:
    corpus = prepare_stdlib(tmp_path)
    tokenizer = corpus.tokenizer.build()
    assert tokenizer.vocab_size == 2048
    dataset = IndexedDataset(corpus.prefix)
    num_tokens = int(dataset.sequence_lengths.sum())
    assert len(dataset) > 400 and num_tokens > 2_000_000
    argparse_source = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")
    decoded = (tokenizer.decode(dataset[index].tolist()[:-1]) for index in range(len(dataset)))
    assert argparse_source in decoded


def test_no_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"data\.data_path = 'stdlib': no Python sources below"):
        prepare_stdlib(tmp_path)


def test_stdlib_with_a_tokenizer_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = prepare_corpus(sources(), tmp_path, vocab_size=310).tokenizer
    (tmp_path / "lib" / "test").mkdir(parents=True)
    (tmp_path / "lib" / "a.py").write_text("x = 1\n")
    (tmp_path / "lib" / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "lib" / "empty.py").touch()
    (tmp_path / "lib" / "test" / "b.py").write_text("y = 2\n")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    corpus = prepare_stdlib(tmp_path, tokenizer=TokenizerSpec(own.tokenizer_type, own.tokenizer_model))
    assert texts(corpus) == ["x = 1\n"]
