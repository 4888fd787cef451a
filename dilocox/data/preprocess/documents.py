"""Input files of `preprocess`, read as documents with file and line. No torch.

A `.jsonl`, `.ndjson` or `.json` file holds one JSON object per line; any other file is one document. Files
with the suffix `.gz` after theirs are unpacked while they are read.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dilocox.errors import ConfigError, DataError

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
    """Files in a fixed order: as given, patterns and folders in sorted order, folders without hidden files.

    Args:
        inputs: paths, or patterns (`*`, `?`, `[...]`, `**`) that the shell has left as they are.

    Raises:
        ConfigError: naming `--input`, if a path does not exist or there is no file at all.
    """
    files: list[Path] = []
    for name in inputs:
        for path in _paths_of(name):
            if path.is_dir():
                files += [
                    file for file in sorted(path.rglob("*")) if file.is_file() and _is_wanted(file, path)
                ]
            else:
                files.append(path)
    if not files:
        raise ConfigError("--input", " ".join(inputs), "holds no files; name a file or another folder")
    return files


def _paths_of(name: str) -> list[Path]:
    """Returns the path of that name, else the paths that match it as a pattern."""
    expanded = str(Path(name).expanduser())
    if Path(expanded).exists():
        return [Path(expanded)]
    if glob.has_magic(expanded):
        found = sorted(glob.glob(expanded, recursive=True))  # noqa: PTH207 (a pattern may be absolute)
        if not found:
            raise ConfigError("--input", name, "no file or folder matches this pattern; check the path")
        return [Path(path) for path in found]
    raise ConfigError("--input", name, "no such file or folder; check the path")


def read_documents(files: Sequence[Path]) -> Iterator[RawDocument]:
    """Yields every document of the files. Files of zero bytes (`__init__.py`) hold none.

    Raises:
        DataError: a `.gz` file is not one, or is cut off.
    """
    for path in files:
        is_packed = path.suffix.lower() == ".gz"
        suffix = path.with_suffix("").suffix if is_packed else path.suffix
        try:
            with gzip.open(path) if is_packed else path.open("rb") as stream:
                if suffix.lower() in JSON_SUFFIXES:
                    for number, line in enumerate(stream, start=1):
                        yield RawDocument(str(path), number, line.rstrip(b"\r\n"))
                elif content := stream.read():
                    yield RawDocument(str(path), 0, content)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(str(path), ".gz", f"cannot be unpacked ({error}); pack it again") from error


def parse_document(document: RawDocument, json_keys: Sequence[str]) -> list[str]:
    """Returns the texts under the keys; a file that is one document has the key `text` only.

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
