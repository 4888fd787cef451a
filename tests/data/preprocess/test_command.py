"""`dilocox preprocess`: what it writes, what it refuses, and that it never leaves half a pair."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from dilocox.data.preprocess import command as preprocess
from dilocox.data.tokenizer import TokenizerSpec
from dilocox.errors import ConfigError, DataError


def run(tmp_path: Path, *flags: str) -> int:
    parser = argparse.ArgumentParser()
    preprocess.add_arguments(parser)
    return preprocess.main(parser.parse_args(["--output-prefix", str(tmp_path / "out" / "x"), *flags]))


def null(tmp_path: Path, source: Path, *flags: str) -> int:
    return run(
        tmp_path, "--input", str(source), "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", *flags
    )


def outputs(tmp_path: Path) -> list[str]:
    folder = tmp_path / "out"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def documents(tmp_path: Path, key: str = "text") -> list[list[int]]:
    dataset = IndexedDataset(str(tmp_path / "out" / f"x_{key}_document"))
    assert len(dataset) == len(dataset.document_indices) - 1
    return [dataset[index].tolist() for index in range(len(dataset))]


def jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_jsonl_becomes_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "1 2 3", "other": 1}, {"text": "4"}])
    assert null(tmp_path, source) == 0
    assert outputs(tmp_path) == ["x_text_document.bin", "x_text_document.idx"]
    assert documents(tmp_path) == [[1, 2, 3], [4]]
    assert "2 documents, 4 tokens, uint16" in capsys.readouterr().out


def test_append_eod_ends_each_document(tmp_path: Path) -> None:
    assert null(tmp_path, jsonl(tmp_path / "a.jsonl", [{"text": "1 2"}, {"text": "3"}]), "--append-eod") == 0
    assert documents(tmp_path) == [[1, 2, 99], [3, 99]]


def test_a_pair_for_each_key(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"q": "1", "a": "2 3"}, {"q": "4", "a": "5"}])
    assert null(tmp_path, source, "--json-keys", "q", "a") == 0
    assert len(outputs(tmp_path)) == 4
    assert documents(tmp_path, "q") == [[1], [4]]
    assert documents(tmp_path, "a") == [[2, 3], [5]]


def test_folders_are_walked_in_order_and_files_are_documents(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    for name, text in {"b.txt": "2\n3", "a/z.txt": "1", ".hidden": "x", "__pycache__/c": "x"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "a" / "__init__.py").touch()
    jsonl(folder / "c.jsonl", [{"text": "4"}])
    assert null(tmp_path, folder) == 0
    assert documents(tmp_path) == [[1], [2, 3], [4]]


def test_large_vocabulary_needs_wider_tokens(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "70000"}])
    flags = ("--input", str(source), "--tokenizer-type", "NullTokenizer", "--vocab-size", "80000")
    assert run(tmp_path, *flags) == 0
    assert documents(tmp_path) == [[70000]]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"text": "1"}\r\n{"text": "2"}')
    assert null(tmp_path, source) == 0
    assert documents(tmp_path) == [[1], [2]]


BAD_LINES = [
    (b"", "blank line"),
    (b"   ", "blank line"),
    (b"{bad", "broken JSON"),
    (b'{"text": "1"} x', "broken JSON"),
    (b"[" * 100_000, "broken JSON"),
    (b'["text"]', "not a JSON object"),
    (b'{"tex": "1"}', "missing key"),
    (b'{"text": 5}', "not a text"),
    (b'{"text": null}', "not a text"),
    (b'{"text": ""}', "empty text"),
    (b'{"text": " "}', "no tokens"),
    (b'{"text": "\xff"}', "not UTF-8"),
    (b'{"text": "100"}', "cannot be tokenized"),
]


@pytest.mark.parametrize(("line", "kind"), BAD_LINES)
def test_bad_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: bytes, kind: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "1"}\n' + line + b'\n{"text": "2"}\n')
    with pytest.raises(DataError) as caught:
        null(tmp_path, source)
    assert caught.value.field == f"{source}:2"
    assert str(caught.value.value).startswith(kind)
    assert "pass --skip-bad-lines" in caught.value.rule and "\n" not in str(caught.value)
    assert outputs(tmp_path) == []

    assert null(tmp_path, source, "--skip-bad-lines") == 0
    captured = capsys.readouterr()
    assert documents(tmp_path) == [[1], [2]]
    assert f"{source}:2: {kind}" in captured.err.replace("\n", " ")
    assert f"skipped 1 bad line (1 {kind})" in captured.out


def test_binary_file_in_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "a.txt").write_text("1")
    (folder / "b.bin").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"b\.bin:1 = 'not UTF-8"):
        null(tmp_path, folder)
    assert null(tmp_path, folder, "--skip-bad-lines") == 0
    assert documents(tmp_path) == [[1]]


def test_a_bad_key_drops_the_document_from_all_pairs(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"q": "1"}, {"q": "2", "a": "3"}])
    assert null(tmp_path, source, "--json-keys", "q", "a", "--skip-bad-lines") == 0
    assert documents(tmp_path, "q") == [[2]]
    assert documents(tmp_path, "a") == [[3]]


def test_many_problems_are_counted_but_not_all_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "1"}\n' + b"{\n" * 700 + b"\n" * 2)
    assert null(tmp_path, source, "--skip-bad-lines") == 0
    captured = capsys.readouterr()
    assert "skipped 702 bad lines (700 broken JSON, 2 blank line)" in captured.out
    assert captured.err.count("broken JSON") == 20


def test_nothing_usable_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("{\n{\n")
    with pytest.raises(DataError, match="holds no usable document"):
        null(tmp_path, source, "--skip-bad-lines")
    assert outputs(tmp_path) == []


def test_output_does_not_depend_on_the_workers(tmp_path: Path) -> None:
    records: list[object] = [{"text": " ".join(str(j % 90) for j in range(i % 7 + 1))} for i in range(4000)]
    records[700] = 5
    source = jsonl(tmp_path / "a.jsonl", records)
    content = []
    for workers in ("1", "3"):
        assert null(tmp_path, source, "--workers", workers, "--append-eod", "--skip-bad-lines") == 0
        content.append([(tmp_path / "out" / name).read_bytes() for name in outputs(tmp_path)])
    assert content[0] == content[1] and len(content[0]) == 2
    assert len(documents(tmp_path)) == 3999


def test_workers_report_the_same_bad_line(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "1"}\n' * 900 + b"{\n" + b'{"text": "1"}\n' * 900)
    with pytest.raises(DataError) as caught:
        null(tmp_path, source, "--workers", "2")
    assert caught.value.field == f"{source}:901"
    assert outputs(tmp_path) == []


def test_train_tokenizer_writes_a_model_that_reads_the_pair(tmp_path: Path) -> None:
    text = "for i in range(10):\n    print(i)\n"
    source = jsonl(tmp_path / "a.jsonl", [{"text": text * 30}, {"text": "\tend"}])
    assert run(tmp_path, "--input", str(source), "--train-tokenizer", "--vocab-size", "300") == 0
    assert "x.model" in outputs(tmp_path)
    tokenizer = TokenizerSpec("SentencePieceTokenizer", str(tmp_path / "out" / "x.model")).build()
    assert [tokenizer.decode(ids) for ids in documents(tmp_path)] == [text * 30, "\tend"]


def test_a_bad_line_leaves_no_trained_model_either(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "for i in range(10):\n    print(i)\n" * 30}, {}])
    with pytest.raises(DataError):
        run(tmp_path, "--input", str(source), "--train-tokenizer", "--vocab-size", "300")
    assert outputs(tmp_path) == []


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--tokenizer-type", "NullTokenizer"], "--vocab-size"),
        ([], "--tokenizer-model"),
        (["--tokenizer-model", "/nowhere/x.model"], "--tokenizer-model"),
        (["--train-tokenizer"], "--vocab-size"),
        (["--train-tokenizer", "--vocab-size", "5"], "--vocab-size"),
        (["--train-tokenizer", "--vocab-size", "50000"], "--vocab-size"),
        (["--train-tokenizer", "--tokenizer-type", "NullTokenizer"], "--train-tokenizer"),
        (
            ["--train-tokenizer", "--vocab-size", "300", "--tokenizer-model", os.devnull],
            "--tokenizer-model",
        ),
        (["--workers", "0"], "--workers"),
        (["--log-interval", "0"], "--log-interval"),
        (["--json-keys", "a", "a"], "--json-keys"),
        (["--input", "/nowhere"], "--input"),
    ],
)
def test_unusable_flags(tmp_path: Path, flags: list[str], field: str) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "some words " * 50}])
    with pytest.raises(ConfigError) as caught:
        run(tmp_path, "--input", str(source), *flags)
    assert caught.value.field == field
    assert outputs(tmp_path) == []


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    with pytest.raises(ConfigError, match="holds no files"):
        null(tmp_path, tmp_path / "src")


def test_a_failing_rename_leaves_neither_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "1"}])
    rename = Path.rename

    def fail_on_index(self: Path, target: Path) -> Path:
        if target.suffix == ".idx":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_on_index)
    with pytest.raises(ConfigError, match="No space left"):
        null(tmp_path, source)
    assert outputs(tmp_path) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": " ".join(["1"] * 1000)}] * 300)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, old[1]))
    try:
        with pytest.raises(ConfigError, match=r"--output-prefix = .*: cannot be written \(.*File too large"):
            null(tmp_path, source)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert outputs(tmp_path) == []


def test_an_old_pair_survives_a_bad_input_and_is_replaced_by_a_good_one(tmp_path: Path) -> None:
    assert null(tmp_path, jsonl(tmp_path / "a.jsonl", [{"text": "1"}])) == 0
    with pytest.raises(DataError):
        null(tmp_path, jsonl(tmp_path / "a.jsonl", [{"text": "2"}, {}]))
    assert documents(tmp_path) == [[1]]
    assert null(tmp_path, jsonl(tmp_path / "a.jsonl", [{"text": "3"}])) == 0
    assert documents(tmp_path) == [[3]]


def test_progress_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = jsonl(tmp_path / "a.jsonl", [{"text": "1"}] * 600)
    assert null(tmp_path, source, "--log-interval", "250") == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Processed")]
    assert [line.split()[1] for line in lines] == ["256", "512"]
    assert np.sum([len(ids) for ids in documents(tmp_path)]) == 600


def test_a_tokenizer_is_not_overwritten(tmp_path: Path) -> None:
    """README's own command, run twice."""
    source = jsonl(tmp_path / "a.jsonl", [{"text": "some words to learn from " * 20}])
    flags = ("--input", str(source), "--train-tokenizer", "--vocab-size", "300")
    assert run(tmp_path, *flags) == 0
    before = (tmp_path / "out" / "x.model").read_bytes()
    with pytest.raises(ConfigError, match="exists; use it with --tokenizer-model"):
        run(tmp_path, *flags)
    assert (tmp_path / "out" / "x.model").read_bytes() == before


def test_packed_files_are_unpacked(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wb") as stream:
        stream.write(b'{"text": "1 2"}\n{"text": "3"}\n')
    with gzip.open(tmp_path / "b.txt.gz", "wb") as stream:
        stream.write(b"4 5")
    assert null(tmp_path, tmp_path / "*.gz") == 0
    assert documents(tmp_path) == [[1, 2], [3], [4, 5]]
    (tmp_path / "c.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match="cannot be unpacked"):
        null(tmp_path, tmp_path / "c.jsonl.gz")


def test_a_quoted_pattern_is_expanded(tmp_path: Path) -> None:
    for name in ("b", "a"):
        jsonl(tmp_path / f"{name}.jsonl", [{"text": "1" if name == "a" else "2"}])
    assert null(tmp_path, tmp_path / "*.jsonl") == 0
    assert documents(tmp_path) == [[1], [2]]
    with pytest.raises(ConfigError, match="no file or folder matches this pattern"):
        null(tmp_path, tmp_path / "*.json")
