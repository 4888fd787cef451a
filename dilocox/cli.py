"""The command line: argv and environment are read here and nowhere else.

Each command imports its module when it runs, so `dilocox plan` and `dilocox doctor` work without torch.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from dilocox import __version__
from dilocox.errors import ConfigError, DilocoxError

# command -> (module with add_arguments(parser) and main(args) -> exit code, help)
_MODULES = {
    "launch": ("dilocox.launch.command", "run all islands on this machine"),
    "preprocess": ("dilocox.data.preprocess.command", "turn text or JSONL into Megatron .bin/.idx"),
    "plan": ("dilocox.plan.command", "show groups, fragments, bytes and predicted utilisation; no torch"),
    "report": ("dilocox.report.command", "figures and one HTML page for a run"),
    "doctor": ("dilocox.doctor", "check what goes wrong first"),
    "submit": ("dilocox.submit.command", "write and submit sbatch files for a site"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0 done, 1 failed while running, 2 bad input (nothing was started).
    """
    # The Rust part of torchft logs every quorum tick at info level.
    os.environ.setdefault("RUST_LOG", "warn")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(arguments).parse_args(arguments)
        args.cache_dir = _cache_dir()
        return int(args.run(args))
    except ConfigError as error:
        return _fail(str(error), 2)
    except DilocoxError as error:
        return _fail(str(error), 1)
    except BrokenPipeError:
        return 1


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dilocox")
    parser.description = "Train one language model on several GPU clusters joined by a slow network."
    parser.add_argument("--version", action="version", version=f"dilocox {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module_name, text) in _MODULES.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    _add_train(commands.add_parser("train", help="one rank of one island, under torchrun"))
    _add_lighthouse(commands.add_parser("lighthouse", help="the membership server that all islands reach"))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    parser.description = "Trains one rank of one island. Every launcher calls this under torchrun."
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--island-id", type=int, required=True, help="0 .. parallel.num_islands - 1")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.LEAF=VALUE")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    parser.set_defaults(run=_train)


def _train(args: argparse.Namespace) -> int:
    from dilocox.config.load import load_config

    config = load_config(args.config, args.set)
    rank, world_size = _environment_int("RANK"), _environment_int("WORLD_SIZE")
    if not 0 <= args.island_id < config.parallel.num_islands:
        raise ConfigError(
            "--island-id", args.island_id, f"must be in 0..{config.parallel.num_islands - 1} (num_islands)"
        )
    if world_size != config.parallel.ranks_per_island:
        raise ConfigError(
            "parallel.ranks_per_island",
            config.parallel.ranks_per_island,
            f"torchrun started {world_size} ranks (nnodes * nproc-per-node); make them equal",
        )
    if _environment_int("LOCAL_RANK") == 0:
        from dilocox.doctor import warn

        warn(config)
    from dilocox.pdeathsig import set_pdeathsig

    set_pdeathsig(signal.SIGTERM)  # a rank whose torchrun has died saves and leaves
    from dilocox.backend import quiet_third_parties

    quiet_third_parties()  # before the next import, which brings in megatron-core
    from dilocox.train import train
    from dilocox.trainer import RankContext

    context = RankContext(
        island_id=args.island_id,
        rank=rank,
        local_rank=_environment_int("LOCAL_RANK"),
        cache_dir=args.cache_dir,
    )
    return train(config, context, resume=args.resume)


def _add_lighthouse(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Serves membership to all islands of one run. It keeps no model state: if it stops, training "
        "continues inside the islands and syncs wait until it is back on the same address."
    )
    parser.add_argument("--bind", default="[::]:29510", metavar="HOST:PORT", help="default [::]:29510")
    parser.add_argument("--advertise-address", metavar="HOST", help="address to print; default: this host's")
    parser.add_argument("--min-islands", type=int, default=1, help="fewest islands in a sync")
    parser.add_argument("--grace-s", type=float, default=30.0, help="wait for islands alive but late")
    parser.set_defaults(run=_lighthouse)


def _lighthouse(args: argparse.Namespace) -> int:
    if args.min_islands < 1:
        raise ConfigError("--min-islands", args.min_islands, "must be at least 1")
    from dilocox.net import bracketed

    host = args.bind.rpartition(":")[0].strip("[]")
    from dilocox.outer.wan.membership import serve_lighthouse

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        server = serve_lighthouse(args.bind, min_islands=args.min_islands, grace_s=args.grace_s)
    except RuntimeError as error:
        raise ConfigError("--bind", args.bind, f"cannot listen there ({error}); take a free port") from error
    own_host, port = server.address().removeprefix("http://").rsplit(":", 1)
    if args.advertise_address is not None:
        own_host = bracketed(args.advertise_address)
    elif host not in ("::", "0.0.0.0"):
        own_host = bracketed(host)
    print(f"lighthouse http://{own_host}:{port}", flush=True)
    stop.wait()
    server.shutdown()
    return 0


def _environment_int(name: str) -> int:
    text = os.environ.get(name)
    if text is None or not text.isdigit():
        raise ConfigError(name, text, "torchrun sets it; start with torchrun or use `dilocox launch`")
    return int(text)


def _cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "dilocox"


def _fail(message: str, code: int) -> int:
    # One rank of the island reports for all.
    if os.environ.get("RANK", "0") == "0":
        print(f"dilocox: error: {message}", file=sys.stderr)
    return code
