"""`dilocox plan CONFIG`: what a run will look like before any machine is asked. No torch here."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from dilocox.config.load import load_config
from dilocox.config.schema import Config
from dilocox.config.warnings import find_warnings
from dilocox.errors import ConfigError
from dilocox.plan import tables
from dilocox.plan.traffic import Traffic, busiest_host, uneven_blocks
from dilocox.plan.utilisation import step_time

_WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.LEAF=VALUE")
    parser.add_argument("--step-time", type=float, metavar="SECONDS", help="measured time of an inner step")
    parser.add_argument("--tflops", type=float, help="else: TFLOP/s that one rank achieves")


def main(args: argparse.Namespace) -> int:
    """Prints the plan of a run.

    Raises:
        ConfigError: the configuration is invalid.
    """
    for flag, value in (("--step-time", args.step_time), ("--tflops", args.tflops)):
        if value is not None and not value > 0:
            raise ConfigError(flag, value, "must be over 0; give a measured figure")
    show(load_config(args.config, args.set), seconds=args.step_time, tflops=args.tflops)
    return 0


def show(config: Config, *, seconds: float | None = None, tflops: float | None = None) -> None:
    """Prints the plan of a resolved configuration.

    Args:
        seconds: measured time of an inner step.
        tflops: TFLOP/s that one rank achieves; used where `seconds` is not given.

    Raises:
        ConfigError: the size of the vocabulary is not known without opening the tokenizer.
    """
    traffic = Traffic(config, _vocab_size(config))
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    console.print(tables.layout(traffic))
    console.print(tables.model(traffic))
    console.print(tables.memory(traffic))
    if config.outer.method == "diloco":
        console.print(tables.fragments(traffic))
        console.print(tables.events(config))
    if config.outer.method != "none" and config.parallel.num_islands > 1:
        host = busiest_host(traffic)
        time = step_time(config, traffic.num_parameters, seconds=seconds, tflops=tflops)
        console.print(tables.wan_bytes(traffic, host))
        console.print(tables.utilisation(config, host, time))
        if (uneven := uneven_blocks(traffic)) is not None:
            console.print(f"[yellow]note[/] {uneven}")
    for warning in find_warnings(config):
        console.print(f"[yellow]warning[/] {warning}")


def _vocab_size(config: Config) -> int:
    if config.data.vocab_size is None:
        raise ConfigError(
            "data.vocab_size",
            None,
            "the plan counts parameters without opening the tokenizer; set it to the tokenizer's size",
        )
    return config.data.vocab_size
