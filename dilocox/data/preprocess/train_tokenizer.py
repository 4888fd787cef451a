"""Trains a SentencePiece model that keeps every character of a text. No torch."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator

from dilocox.errors import ConfigError

SAMPLE_BYTES = 20_000_000
"""Text that is enough to train a vocabulary; the trainer keeps it all in memory."""

MIN_VOCAB_SIZE = 300
"""256 byte pieces, the special ones, and some room for the letters of a text."""

_LINE_LIMIT = 4000
"""Longest line the trainer takes, in characters; longer ones are cut, not dropped."""


def train_sentencepiece(texts: Iterable[str], vocab_size: int, *, num_bytes: int) -> bytes:
    """Trains a byte-pair model and returns the content of its file.

    The same texts give the same bytes. Text is not normalised, whitespace and newlines have pieces of their
    own, and unknown characters fall back to bytes, so decode(encode(text)) == text for any text.

    Args:
        num_bytes: size of all the texts, more or less; beyond `SAMPLE_BYTES` a random part of their lines
            is used.

    Raises:
        ConfigError: naming `data.vocab_size`, if it is out of reach for these texts.
    """
    import sentencepiece

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError("data.vocab_size", vocab_size, f"is too small; use {MIN_VOCAB_SIZE} or more")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sample_lines(texts, min(1.0, SAMPLE_BYTES / max(1, num_bytes))),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",  # counts integers: deterministic, and ten times faster to train than unigram
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,
            max_sentence_length=4 * _LINE_LIMIT,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ConfigError("data.vocab_size", vocab_size, _rule_of(str(error))) from error
    return model.getvalue()


def _rule_of(message: str) -> str:
    """Returns what the trainer's message means to a user."""
    if limit := re.search(r"value <= (\d+)", message):
        return f"is too large for this text; use at most {limit[1]}"
    if "sentences_.empty()" in message:
        return "cannot be learned from no text; name input that holds some"
    return f"cannot be learned from this text ({message})"


def _sample_lines(texts: Iterable[str], fraction: float) -> Iterator[str]:
    """Sentences for the trainer: lines, because newlines have a piece of their own."""
    generator = random.Random(0)
    for text in texts:
        for line in text.split("\n"):
            if fraction < 1.0 and generator.random() >= fraction:
                continue
            for start in range(0, len(line), _LINE_LIMIT):
                yield line[start : start + _LINE_LIMIT]
