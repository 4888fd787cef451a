"""`dilocox preprocess`: turns text, source files or JSONL into Megatron's `.bin/.idx` pairs.

The flags are Megatron's. Strict by default: the first chunk with a bad line stops the program, and no file
is left behind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dilocox.atomic import PendingFiles
from dilocox.data.preprocess.documents import BadDocumentError, expand_inputs, parse_document, read_documents
from dilocox.data.preprocess.encode import EncodedChunk, EncodeJob, encode_documents
from dilocox.data.preprocess.pair_writer import PairWriter, termination_as_interrupt, token_dtype
from dilocox.data.preprocess.progress import PreprocessProgress
from dilocox.data.preprocess.train_tokenizer import train_sentencepiece
from dilocox.data.tokenizer import TokenizerSpec
from dilocox.errors import ConfigError, DataError

TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "NullTokenizer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags on the parser of the command."""
    what = "JSONL files (.jsonl .ndjson .json, also .gz), text files, folders, or patterns in quotes"
    parser.add_argument("--input", nargs="+", required=True, help=what)
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        help="keys of a JSON line to take; one pair of files per key",
    )
    parser.add_argument(
        "--output-prefix", required=True, help="path without extension; writes PREFIX_KEY_document.bin/.idx"
    )
    parser.add_argument("--tokenizer-type", choices=TOKENIZER_TYPES, default="SentencePieceTokenizer")
    parser.add_argument("--tokenizer-model", help="model file; with --train-tokenizer: where to write it")
    parser.add_argument("--vocab-size", type=int, help="NullTokenizer, --train-tokenizer: number of tokens")
    parser.add_argument(
        "--train-tokenizer", action="store_true", help="train a SentencePiece model on the input first"
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the tokenizer's eod"
    )
    parser.add_argument("--workers", type=int, default=1, help="encoder processes")
    parser.add_argument("--log-interval", type=int, default=1000, help="documents between two progress lines")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="drop and count unusable lines instead of stopping"
    )


def main(args: argparse.Namespace) -> int:
    """Runs the command with the flags of `add_arguments`.

    Raises:
        ConfigError: a flag is unusable.
        DataError: an input line is. Nothing has been written in either case.
    """
    args.output_prefix = str(Path(args.output_prefix).expanduser())
    if args.tokenizer_model is not None:
        args.tokenizer_model = str(Path(args.tokenizer_model).expanduser())
    _check_flags(args)
    files = expand_inputs(args.input)
    try:
        with termination_as_interrupt(), PendingFiles() as pending:
            summary = _preprocess(args, files, pending)
            pending.commit()
    except OSError as error:
        raise ConfigError("--output-prefix", args.output_prefix, f"cannot be written ({error})") from error
    except ConfigError as error:
        raise _as_flag(error) from error
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print("\n".join(summary))
    return 0


def _preprocess(args: argparse.Namespace, files: Sequence[Path], pending: PendingFiles) -> list[str]:
    """Fills the pending files; returns the lines to print once they have their names."""
    total_bytes = sum(path.stat().st_size for path in files)
    Path(args.output_prefix).parent.mkdir(parents=True, exist_ok=True)
    spec = TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.vocab_size)
    summary = []
    if args.train_tokenizer:
        target = _model_file(args)
        texts = _readable_texts(files, args.json_keys)
        model_file = pending.add(target)
        model_file.write_bytes(train_sentencepiece(texts, args.vocab_size, num_bytes=total_bytes))
        spec = TokenizerSpec(args.tokenizer_type, str(model_file), None)
        summary.append(f"trained {target}")
    job = _encode_job(spec, args)
    writers = [
        PairWriter(f"{args.output_prefix}_{key}_document", job.dtype, pending) for key in job.json_keys
    ]
    try:
        with PreprocessProgress(total_bytes, log_interval=args.log_interval) as progress:
            for chunk in encode_documents(read_documents(files), job, num_workers=args.workers):
                progress.advance(chunk)
                if chunk.problems and not args.skip_bad_lines:
                    raise _bad_line(chunk, progress)
                for writer, tokens, lengths in zip(writers, chunk.tokens, chunk.lengths, strict=True):
                    writer.add_documents(tokens, lengths)
        if writers[0].num_documents == 0:
            raise DataError("--input", " ".join(args.input), "holds no usable document; nothing was written")
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.close()
    summary += [f"wrote {writer.describe()}, {job.dtype}" for writer in writers]
    return summary + ([f"skipped {progress.problem_summary()}"] if progress.problems else [])


def _encode_job(spec: TokenizerSpec, args: argparse.Namespace) -> EncodeJob:
    """Loads the tokenizer once here, so that a wrong one is reported before any worker starts."""
    tokenizer = spec.build()
    if args.append_eod and tokenizer.eod is None:
        raise ConfigError("--append-eod", True, "this tokenizer has no end-of-document token; leave it out")
    return EncodeJob(
        tokenizer=spec,
        json_keys=tuple(args.json_keys),
        append_eod=tokenizer.eod if args.append_eod else None,
        dtype=token_dtype(tokenizer.vocab_size),
    )


def _check_flags(args: argparse.Namespace) -> None:
    for flag, value in (("--workers", args.workers), ("--log-interval", args.log_interval)):
        if value < 1:
            raise ConfigError(flag, value, "must be 1 or more")
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError("--json-keys", " ".join(args.json_keys), "names a key twice; name it once")
    if not args.train_tokenizer:
        return
    if args.tokenizer_type != "SentencePieceTokenizer":
        raise ConfigError(
            "--train-tokenizer", args.tokenizer_type, "trains SentencePieceTokenizer only; choose that type"
        )
    if args.vocab_size is None:
        raise ConfigError("--vocab-size", None, "--train-tokenizer needs it; 2048 to 32768 is usual")
    model = _model_file(args)
    if model.exists():
        rule = f"exists; use it with --tokenizer-model {model} and without --train-tokenizer, or delete it"
        raise ConfigError("--tokenizer-model", str(model), rule)


def _model_file(args: argparse.Namespace) -> Path:
    """Returns where `--train-tokenizer` writes its model."""
    return Path(args.tokenizer_model or f"{args.output_prefix}.model")


def _readable_texts(files: Sequence[Path], json_keys: Sequence[str]) -> Iterator[str]:
    """Texts for the tokenizer's training; unusable lines are reported by the pass that encodes."""
    for raw in read_documents(files):
        try:
            texts = parse_document(raw, json_keys)
        except BadDocumentError:
            continue
        yield from texts


def _bad_line(chunk: EncodedChunk, progress: PreprocessProgress) -> DataError:
    first = chunk.problems[0]
    found = f"{progress.problem_summary()} in the first {progress.num_documents} read"
    return DataError(first.place, first.reason, f"{found}; mend them or pass --skip-bad-lines")


def _as_flag(error: ConfigError) -> ConfigError:
    """Returns the same error in the words of the command line: `data.vocab_size` is `--vocab-size` here."""
    section, _, leaf = error.field.partition(".")
    if section != "data":
        return error
    return ConfigError("--" + leaf.replace("_", "-"), error.value, error.rule)
