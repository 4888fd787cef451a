"""Input files of `preprocess`, read as documents with file and line. No torch.

A `.jsonl`, `.ndjson` or `.json` file holds one JSON object a line; any other file is one document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.errors import ConfigError

JSON_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
_SKIPPED_FOLDERS = frozenset({"__pycache__"})


@dataclass(frozen=True)
class RawDocument:
    """Bytes of one document as they stand in the input, not yet checked.

    Attributes:
        line: line of a JSON file, counted from 1; 0 for a file that is one document.
    """

    file: str
    line: int
    content: bytes


@dataclass(frozen=True)
class Problem:
    """Why an input line or file cannot be used.

    Attributes:
        kind: short and fixed, so that problems can be counted by kind.
        detail: what exactly was found.
    """

    file: str
    line: int
    kind: str
    detail: str

    @property
    def place(self) -> str:
        return f"{self.file}:{max(self.line, 1)}"

    @property
    def reason(self) -> str:
        return f"{self.kind} ({self.detail})" if self.detail else self.kind

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"


class BadDocumentError(ValueError):
    """A document breaks a rule; `preprocess` turns it into a `Problem` with file and line."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


def expand_inputs(inputs: Sequence[str]) -> list[Path]:
    """Files in a fixed order: as given, folders walked in sorted order without hidden files.

    Raises:
        ConfigError: naming `--input`, if a path does not exist or there is no file at all.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            files += [file for file in sorted(path.rglob("*")) if file.is_file() and _is_wanted(file, path)]
        elif path.is_file():
            files.append(path)
        else:
            raise ConfigError("--input", name, "no such file or folder; check the path")
    if not files:
        raise ConfigError("--input", " ".join(inputs), "holds no files; name a file or another folder")
    return files


def read_documents(files: Sequence[Path]) -> Iterator[RawDocument]:
    """Every document of the files, one at a time. Files of zero bytes (`__init__.py`) hold none."""
    for path in files:
        if path.suffix.lower() not in JSON_SUFFIXES:
            if content := path.read_bytes():
                yield RawDocument(str(path), 0, content)
            continue
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                yield RawDocument(str(path), number, line.rstrip(b"\r\n"))


def parse_document(document: RawDocument, json_keys: Sequence[str]) -> list[str]:
    """The texts under the keys; a file that is one document has the key `text` only.

    Raises:
        BadDocumentError: blank line, broken JSON, missing key, not text, not UTF-8.
    """
    text = _decode(document.content)
    if document.line == 0:
        record: object = {"text": text}
    else:
        record = _parse_json(text.removeprefix("\ufeff") if document.line == 1 else text)
    if not isinstance(record, dict):
        raise BadDocumentError("not a JSON object", type(record).__name__)
    return [_text_under(record, key) for key in json_keys]


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError("not UTF-8", f"byte 0x{content[error.start]:02x} at {error.start}") from error


def _parse_json(text: str) -> object:
    if not text.strip():
        raise BadDocumentError("blank line")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadDocumentError("broken JSON", f"{error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # digits beyond Python's limit, absurd nesting
        raise BadDocumentError("broken JSON", str(error)) from error


def _text_under(record: dict[str, object], key: str) -> str:
    if key not in record:
        raise BadDocumentError("missing key", key)
    text = record[key]
    if not isinstance(text, str):
        raise BadDocumentError("not a text", f"{key} is {type(text).__name__}")
    if not text:
        raise BadDocumentError("empty text", key)
    return text


def _is_wanted(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    return not any(part.startswith(".") or part in _SKIPPED_FOLDERS for part in parts)
