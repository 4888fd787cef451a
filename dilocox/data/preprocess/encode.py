"""Documents to token arrays, in this process or in several. No torch: worker processes start quickly.

Chunks are cut by the input alone and come back in order, so the output does not depend on the number of
workers.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dilocox.data.preprocess.documents import BadDocumentError, Problem, RawDocument, parse_document
from dilocox.data.tokenizer import TokenizerSpec
from dilocox.errors import DilocoxError

_CHUNK_BYTES = 1 << 20
_CHUNK_DOCUMENTS = 256


@dataclass(frozen=True)
class EncodeJob:
    """What a worker has to know.

    Attributes:
        append_eod: id to put after every document, or None.
        dtype: NumPy name of the token type of the output files.
    """

    tokenizer: TokenizerSpec
    json_keys: tuple[str, ...]
    append_eod: int | None
    dtype: str


@dataclass
class EncodedChunk:
    """Tokens of consecutive documents.

    Attributes:
        tokens: per key, all documents one after another, shape [sum of lengths].
        lengths: per key, tokens of each document.
        num_documents, num_bytes: what was read, bad documents included.
    """

    tokens: list[NDArray[np.generic]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_documents: int = 0
    num_bytes: int = 0


class Encoder:
    """Encodes chunks with a tokenizer loaded once."""

    def __init__(self, job: EncodeJob) -> None:
        self._job = job
        self._tokenizer = job.tokenizer.build()

    def encode(self, chunk: list[RawDocument]) -> EncodedChunk:
        """Tokens of the good documents and the problems of the others; a bad key drops the whole document."""
        result = EncodedChunk(num_documents=len(chunk), num_bytes=sum(len(raw.content) for raw in chunk))
        ids: list[list[int]] = [[] for _ in self._job.json_keys]
        result.lengths = [[] for _ in self._job.json_keys]
        for raw in chunk:
            try:
                encoded = [self._encode_text(text) for text in parse_document(raw, self._job.json_keys)]
            except BadDocumentError as error:
                result.problems.append(Problem(raw.file, raw.line, error.kind, error.detail))
                continue
            for index, tokens in enumerate(encoded):
                ids[index] += tokens
                result.lengths[index].append(len(tokens))
        result.tokens = [np.array(tokens, dtype=self._job.dtype) for tokens in ids]
        return result

    def _encode_text(self, text: str) -> list[int]:
        try:
            tokens = self._tokenizer.encode(text)
        except ValueError as error:
            raise BadDocumentError("cannot be tokenized", str(error)) from error
        if not tokens:
            raise BadDocumentError("no tokens")
        return tokens if self._job.append_eod is None else [*tokens, self._job.append_eod]


def encode_documents(
    documents: Iterable[RawDocument], job: EncodeJob, *, num_workers: int
) -> Iterator[EncodedChunk]:
    """Encodes all documents, chunk after chunk in input order.

    Memory: at most four chunks per worker are in flight, however large the input.

    Raises:
        DilocoxError: a worker process died.
    """
    chunks = _cut(documents)
    if num_workers == 1:
        encoder = Encoder(job)
        yield from map(encoder.encode, chunks)
        return
    # spawn: the caller may hold threads (torch, progress bar) that a fork would break
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, context)
    in_flight: deque[Future[EncodedChunk]] = deque()
    try:
        for chunk in chunks:
            with _interrupts_held_back():  # submit starts workers as it needs them
                in_flight.append(executor.submit(_encode_in_worker, job, chunk))
            if len(in_flight) >= 4 * num_workers:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise DilocoxError("an encoder process died (out of memory?); use fewer --workers") from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _cut(documents: Iterable[RawDocument]) -> Iterator[list[RawDocument]]:
    chunk: list[RawDocument] = []
    num_bytes = 0
    for document in documents:
        chunk.append(document)
        num_bytes += len(document.content)
        if num_bytes >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Processes started in here never see Ctrl-C, which reaches the whole group; the parent decides.

    They inherit the blocked signal, so that they ignore it from their first instruction on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@lru_cache(maxsize=1)
def _encoder_of_process(job: EncodeJob) -> Encoder:
    return Encoder(job)


def _encode_in_worker(job: EncodeJob, chunk: list[RawDocument]) -> EncodedChunk:
    return _encoder_of_process(job).encode(chunk)
