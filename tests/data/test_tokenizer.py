"""Round trips of the three tokenizers, and what is said when one cannot be loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dilocox.data.preprocess.train_tokenizer import train_sentencepiece
from dilocox.data.tokenizer import SentencePieceTokenizer, Tokenizer, TokenizerSpec
from dilocox.errors import ConfigError

TEXT = "def add(a, b):\n    return a + b\n\n\nclass Sum:\n\tvalue = 0  # a tab\n" * 20


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.model"
    path.write_bytes(train_sentencepiece([TEXT], 320, num_bytes=len(TEXT)))
    return path


@pytest.fixture(scope="module")
def sentencepiece(model_file: Path) -> Tokenizer:
    return TokenizerSpec("SentencePieceTokenizer", str(model_file)).build()


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "",
        " ",
        "   leading and trailing   ",
        "\r\n\r\n\t \t",
        "\x00\x01\x7f",
        "漢字 é 😀",
        "\u2581 the space mark \u2581\u2581",
        "<s></s><unk><0x0A>",
        "\ufeff\u2028\u200b",
        "ＦＵＬＬ ﬁ ｗｉｄｔｈ",
    ],
)
def test_sentencepiece_gives_every_text_back(sentencepiece: Tokenizer, text: str) -> None:
    assert sentencepiece.decode(sentencepiece.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_sentencepiece_gives_any_text_back(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids) == text
    assert all(0 <= token < sentencepiece.vocab_size for token in ids)


def test_sentencepiece_learns_whitespace_and_has_an_eod(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.eod == 1
    assert len(sentencepiece.encode("    ")) < 4
    assert len(sentencepiece.encode("\n")) == len(sentencepiece.encode("\t")) == 1


def test_training_is_deterministic_and_sampling_reduces_it() -> None:
    first = train_sentencepiece([TEXT], 320, num_bytes=len(TEXT))
    assert first == train_sentencepiece([TEXT], 320, num_bytes=len(TEXT))
    with pytest.raises(ConfigError, match=r"data\.vocab_size = 320: cannot be learned from no text"):
        train_sentencepiece([TEXT], 320, num_bytes=20_000_000 * len(TEXT))


def test_a_surrogate_is_a_value_error(sentencepiece: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        sentencepiece.encode("\ud800")


@pytest.mark.parametrize("vocab_size", [299, 100_000])
def test_impossible_vocabulary(vocab_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        train_sentencepiece([TEXT], vocab_size, num_bytes=len(TEXT))
    assert (caught.value.field, caught.value.value) == ("data.vocab_size", vocab_size)


def test_null_tokenizer_reads_ids() -> None:
    tokenizer = TokenizerSpec("NullTokenizer", vocab_size=10).build()
    assert (tokenizer.vocab_size, tokenizer.eod) == (10, 9)
    assert tokenizer.encode("1 2\n3") == [1, 2, 3]
    assert tokenizer.decode([1, 2, 3]) == "1 2 3"
    for text in ("10", "-1", "x"):
        with pytest.raises(ValueError):
            tokenizer.encode(text)


def test_identity_follows_the_vocabulary(model_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.model"
    other.write_bytes(train_sentencepiece([TEXT], 321, num_bytes=len(TEXT)))
    same = tmp_path / "same.model"
    same.write_bytes(model_file.read_bytes())
    identities = [SentencePieceTokenizer(path).identity for path in (model_file, other, same)]
    assert identities[0] == identities[2] != identities[1]


@pytest.fixture
def huggingface_file(tmp_path: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<stop>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([TEXT], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_huggingface_round_trip(huggingface_file: Path) -> None:
    tokenizer = TokenizerSpec("HuggingFaceTokenizer", str(huggingface_file)).build()
    text = "a ▁ b\n\n漢字 <x>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod == 0
    assert tokenizer.vocab_size > 256


def test_huggingface_folder_with_a_named_end(huggingface_file: Path) -> None:
    config = huggingface_file.with_name("tokenizer_config.json")
    config.write_text('{"eos_token": {"content": "<stop>"}}')
    assert TokenizerSpec("HuggingFaceTokenizer", str(huggingface_file.parent)).build().eod == 1


def test_huggingface_without_its_package(huggingface_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'dilocox\[huggingface\]'"):
        TokenizerSpec("HuggingFaceTokenizer", str(huggingface_file)).build()


@pytest.mark.parametrize("tokenizer_type", ["SentencePieceTokenizer", "HuggingFaceTokenizer"])
@pytest.mark.parametrize("content", [None, b"not a model"])
def test_unusable_model_file(tmp_path: Path, tokenizer_type: str, content: bytes | None) -> None:
    if tokenizer_type == "HuggingFaceTokenizer":
        pytest.importorskip("tokenizers")
    path = tmp_path / "model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        TokenizerSpec(tokenizer_type, str(path)).build()
    assert caught.value.field == "data.tokenizer_model"


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (TokenizerSpec("SentencePieceTokenizer"), "data.tokenizer_model"),
        (TokenizerSpec("NullTokenizer"), "data.vocab_size"),
        (TokenizerSpec("GPT2BPETokenizer"), "data.tokenizer_type"),
    ],
)
def test_incomplete_spec(spec: TokenizerSpec, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        spec.build()
    assert caught.value.field == field
