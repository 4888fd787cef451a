"""The demo's corpus: the Python sources of this interpreter's standard library, one document per file.

Real text that every machine has, about 12 MB. Prepared once and kept in a folder named after its content.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dilocox.atomic import PendingFiles, atomic_folder
from dilocox.data.preprocess.documents import RawDocument
from dilocox.data.preprocess.encode import EncodeJob, encode_documents
from dilocox.data.preprocess.pair_writer import PairWriter, token_dtype
from dilocox.data.preprocess.train_tokenizer import train_sentencepiece
from dilocox.data.tokenizer import TokenizerSpec
from dilocox.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_VOCAB_SIZE = 2048
_RECIPE_VERSION = 1
"""Increased when the same sources must give other files; old cache folders stay as they are."""

_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A prepared pair and the tokenizer that wrote it.

    Attributes:
        prefix: path of the `.bin/.idx` pair without extension.
    """

    prefix: str
    tokenizer: TokenizerSpec


def prepare_stdlib(
    cache_dir: Path, vocab_size: int | None = None, *, tokenizer: TokenizerSpec | None = None
) -> Corpus:
    """Returns the standard library as a corpus, from the cache if possible.

    Args:
        vocab_size: of the SentencePiece model to train; default 2048.
        tokenizer: use this one instead of training one.

    Raises:
        ConfigError: no sources on this machine, or the cache folder cannot be written.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = _python_sources(root)
    if not sources:
        raise ConfigError(
            "data.data_path", "stdlib", f"no Python sources below {root}; name a corpus of your own"
        )
    if tokenizer is not None:
        return prepare_corpus(sources, cache_dir, tokenizer=tokenizer)
    return prepare_corpus(sources, cache_dir, vocab_size=vocab_size or DEFAULT_VOCAB_SIZE)


def prepare_corpus(
    documents: Sequence[RawDocument],
    cache_dir: Path,
    *,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    tokenizer: TokenizerSpec | None = None,
) -> Corpus:
    """Tokenizes the documents once into a folder of `cache_dir`; safe in several processes at once.

    Raises:
        ConfigError: the cache folder cannot be written, or the vocabulary does not suit the text.
    """
    folder = cache_dir / f"stdlib-{_cache_key(documents, vocab_size, tokenizer)}"
    corpus = Corpus(
        prefix=str(folder / "text_document"),
        tokenizer=tokenizer or TokenizerSpec("SentencePieceTokenizer", str(folder / "tokenizer.model")),
    )
    try:
        if folder.is_dir():
            return corpus
        with _lock(folder.with_suffix(".lock")):
            if not folder.is_dir():
                _build(documents, folder, vocab_size=vocab_size, tokenizer=tokenizer)
    except OSError as error:
        raise ConfigError(
            "data.data_path", "stdlib", f"cannot be prepared in {cache_dir} ({error}); set XDG_CACHE_HOME"
        ) from error
    return corpus


def _build(
    documents: Sequence[RawDocument], folder: Path, *, vocab_size: int, tokenizer: TokenizerSpec | None
) -> None:
    logger.info("preparing %d documents in %s (once; some seconds)", len(documents), folder)
    with atomic_folder(folder) as building:
        if tokenizer is None:
            texts = (raw.content.decode("utf-8") for raw in documents)
            num_bytes = sum(len(raw.content) for raw in documents)
            model = building / "tokenizer.model"
            model.write_bytes(train_sentencepiece(texts, vocab_size, num_bytes=num_bytes))
            tokenizer = TokenizerSpec("SentencePieceTokenizer", str(model))
        loaded = tokenizer.build()
        job = EncodeJob(tokenizer, ("text",), loaded.eod, token_dtype(loaded.vocab_size))
        with PendingFiles() as pending:
            writer = PairWriter(str(building / "text_document"), job.dtype, pending)
            for chunk in encode_documents(documents, job, num_workers=1):
                writer.add_documents(chunk.tokens[0], chunk.lengths[0])
            writer.finish()
            pending.commit()


def _python_sources(root: Path) -> list[RawDocument]:
    """Returns sources in an order that mixes the packages: the end of it is used for validation."""
    files = [
        path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])
    ]
    names = {path.relative_to(root).as_posix(): path for path in files}
    ordered = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())
    contents = ((name, names[name].read_bytes()) for name in ordered)
    return [RawDocument(name, 0, content) for name, content in contents if content and _is_utf8(content)]


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:  # a source with another declared encoding
        return False
    return True


def _cache_key(documents: Sequence[RawDocument], vocab_size: int, tokenizer: TokenizerSpec | None) -> str:
    vocabulary = vocab_size if tokenizer is None else tokenizer.build().identity
    digest = hashlib.sha256(json.dumps([_RECIPE_VERSION, vocabulary]).encode())
    for raw in documents:
        digest.update(f"{raw.file}\0{hashlib.sha256(raw.content).hexdigest()}\0".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds a lock of this machine; the kernel releases it if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
