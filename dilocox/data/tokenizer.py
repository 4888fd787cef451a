"""Text to token ids and back: three tokenizers behind one small protocol. No torch.

Encoder processes of `preprocess` import this module, so it stays quick to import.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dilocox.errors import ConfigError

_SPACE_MARK = "\u2581"
"""SentencePiece writes spaces as this character and cannot tell it from the real one."""

_HF_EOD_CANDIDATES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids; every id is smaller. The model may pad its embedding beyond this."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document, if the vocabulary has one."""

    @property
    def identity(self) -> str:
        """Equal for equal vocabularies; part of cache keys."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, no special tokens added.

        Raises:
            ValueError: the text cannot be expressed (a lone surrogate, not a number, ...).
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of the ids."""


@dataclass(frozen=True)
class TokenizerSpec:
    """Describes a tokenizer; small enough to send to encoder processes."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    vocab_size: int | None = None

    def build(self) -> Tokenizer:
        """Loads the tokenizer.

        Raises:
            ConfigError: names `data.tokenizer_model`, `data.vocab_size` or `data.tokenizer_type`.
        """
        match self.tokenizer_type:
            case "NullTokenizer":
                return NullTokenizer(self._required_vocab_size())
            case "SentencePieceTokenizer":
                return SentencePieceTokenizer(self._model_file())
            case "HuggingFaceTokenizer":
                return HuggingFaceTokenizer(self._model_file())
        raise ConfigError("data.tokenizer_type", self.tokenizer_type, "is not a known tokenizer")

    def _required_vocab_size(self) -> int:
        if self.vocab_size is None or self.vocab_size < 2:
            raise ConfigError(
                "data.vocab_size", self.vocab_size, "NullTokenizer needs the number of its tokens, 2 or more"
            )
        return self.vocab_size

    def _model_file(self) -> Path:
        if self.tokenizer_model is None:
            raise ConfigError(
                "data.tokenizer_model", None, f"{self.tokenizer_type} needs a model file; set its path"
            )
        path = Path(self.tokenizer_model).expanduser()
        if self.tokenizer_type == "HuggingFaceTokenizer" and path.is_dir():
            path = path / "tokenizer.json"
        if not path.is_file():
            raise ConfigError("data.tokenizer_model", self.tokenizer_model, "no such file; check the path")
        return path


class NullTokenizer:
    """For text that consists of ids: numbers separated by blanks. The last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.eod: int | None = vocab_size - 1
        self.identity = f"null:{vocab_size}"

    def encode(self, text: str) -> list[int]:
        ids = [int(word) for word in text.split()]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token {token} is not in 0..{self.vocab_size - 1}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(token) for token in ids)


class SentencePieceTokenizer:
    """A SentencePiece model file. Decodes any text back exactly if the model was trained without
    normalisation and with byte fallback, as `train_sentencepiece` does.
    """

    def __init__(self, model_file: Path) -> None:
        import sentencepiece

        model = model_file.read_bytes()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigError(
                "data.tokenizer_model", str(model_file), "is not a SentencePiece model; check the file"
            ) from error
        self.vocab_size: int = self._model.get_piece_size()
        eod: int = self._model.eos_id()
        self.eod: int | None = eod if eod >= 0 else None
        self.identity = f"sentencepiece:{hashlib.sha256(model).hexdigest()}"
        space_mark = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._space_mark_ids = space_mark if all(map(self._model.is_byte, space_mark)) else None

    def encode(self, text: str) -> list[int]:
        text.encode("utf-8")  # a lone surrogate is a ValueError here, a RuntimeError in the library
        if _SPACE_MARK not in text or self._space_mark_ids is None:
            ids: list[int] = self._model.encode(text)
            return ids
        first, *rest = text.split(_SPACE_MARK)
        ids = self._model.encode(first)
        for part in rest:
            ids += self._space_mark_ids + self._model.encode(part)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids))
        return text


class HuggingFaceTokenizer:
    """A `tokenizer.json` read by the optional package `tokenizers`."""

    def __init__(self, tokenizer_file: Path) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ConfigError(
                "data.tokenizer_type",
                "HuggingFaceTokenizer",
                "needs the package tokenizers; pip install 'dilocox[huggingface]'",
            ) from error
        content = tokenizer_file.read_bytes()
        try:
            self._model: Any = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                "data.tokenizer_model", str(tokenizer_file), f"is not a tokenizer file ({error})"
            ) from error
        # Added tokens may leave holes, so the largest id counts, not the number of entries.
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        self.eod = self._find_eod(tokenizer_file.with_name("tokenizer_config.json"))
        self.identity = f"huggingface:{hashlib.sha256(content).hexdigest()}:{self.eod}"

    def encode(self, text: str) -> list[int]:
        text.encode("utf-8")
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._model.decode(list(ids), skip_special_tokens=False)
        return text

    def _find_eod(self, tokenizer_config: Path) -> int | None:
        """Returns the `eos_token` of the file next to the tokenizer, else the first well-known one it has."""
        candidates = list(_HF_EOD_CANDIDATES)
        if tokenizer_config.is_file():
            named = json.loads(tokenizer_config.read_text(encoding="utf-8")).get("eos_token")
            named = named.get("content") if isinstance(named, dict) else named
            candidates = [named] if named is not None else candidates
        found = (self._model.token_to_id(name) for name in candidates)
        return next((token for token in found if token is not None), None)
