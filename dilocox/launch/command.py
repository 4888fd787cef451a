"""`dilocox launch`: all islands of a run on this machine, one command from settings to report."""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass
from pathlib import Path

from dilocox import run_folder
from dilocox.config.check import check_device
from dilocox.config.load import load_config
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.launch import commands
from dilocox.launch.last_lines import closing_lines
from dilocox.launch.progress import Display, Meetings
from dilocox.launch.supervise import Ending, SignalCounter, Supervisor
from dilocox.metrics import sinks, summary

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_STOPPED = 75
"""The run's own limit (`run.exit_interval`, `run.exit_duration_in_mins`) stopped it; `--resume` continues."""


@dataclass(frozen=True)
class LaunchOptions:
    """How to launch; what to train is in the configuration.

    Attributes:
        wrap: command to run each island under, `{island}` = its id (for example a network namespace).
        lighthouse_bind: HOST:PORT of the lighthouse; port 0: any free one.
        train: program that torchrun starts; tests put a small one here.
    """

    start: run_folder.Start = "new"
    wrap: str = ""
    lighthouse_bind: str = "127.0.0.1:0"
    show_bar: bool = True
    train: tuple[str, ...] = commands.TRAIN


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Starts the lighthouse and one torchrun job per island on this machine and stays until they end. "
        "Ctrl-C (or SIGTERM) stops all ranks with a checkpoint; a second one stops by force. "
        "Exit code: 0 completed, 1 an island failed, 2 bad settings, 75 stopped by its own limit, "
        "130/143 stopped by SIGINT/SIGTERM."
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument("--islands", type=int, metavar="N", help="same as --set parallel.num_islands=N")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.LEAF=VALUE")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--resume", action="store_true", help="continue from the newest checkpoint, if any")
    start.add_argument("--overwrite", action="store_true", help="delete an earlier run of this name first")
    parser.add_argument(
        "--wrap", default="", metavar="COMMAND", help="run each island under it, {island} = id"
    )
    parser.add_argument(
        "--lighthouse-bind", default="127.0.0.1:0", metavar="HOST:PORT", help="default 127.0.0.1:0"
    )
    parser.add_argument("--no-progress", action="store_true", help="plain lines, no progress bar")


def main(args: argparse.Namespace) -> int:
    overrides = list(args.set)
    if args.islands is not None:
        overrides.append(f"parallel.num_islands={args.islands}")
    config = load_config(args.config, overrides)
    options = LaunchOptions(
        start="resume" if args.resume else "overwrite" if args.overwrite else "new",
        wrap=args.wrap,
        lighthouse_bind=args.lighthouse_bind,
        show_bar=not args.no_progress,
    )
    try:
        check(config, options.start)
        prepare_data(config, args.cache_dir)
        return launch(config, options)
    except KeyboardInterrupt:  # before or after the islands: nothing is lost
        return 128 + signal.SIGINT


def check(config: Config, start: run_folder.Start) -> None:
    """Finds what is known to be wrong before data are prepared and a folder is touched.

    Raises:
        ConfigError: the run folder holds another run, a package that the settings ask for is missing, or the
            settings are for several hosts or another device.
    """
    if config.parallel.nodes_per_island > 1:
        rule = "`dilocox launch` runs every island on this host; set it to 1, or use torchrun or submit"
        raise ConfigError("parallel.nodes_per_island", config.parallel.nodes_per_island, rule)
    if config.run.device != "cuda" and not commands.has_gpu(config):
        check_device(config, "cpu")
    sinks.check_packages(config)
    run_folder.check(config, start)


def prepare_data(config: Config, cache_dir: Path) -> None:
    """Data is prepared once, before the ranks of all islands ask for it at the same time."""
    from dilocox.data.resolve import prepare
    from dilocox.data.samples import check_sizes

    print("[launch] preparing data, which takes a minute the first time", flush=True)
    check_sizes(config, prepare(config, cache_dir), island_ids=range(config.parallel.num_islands))


def launch(config: Config, options: LaunchOptions) -> int:
    """Runs all islands to their end.

    Returns: the exit code, see `add_arguments`.

    Raises:
        ConfigError: see `check`.
        StartError: the lighthouse did not come up.
    """
    check(config, options.start)
    resumable = run_folder.prepare(config, options.start)
    run_dir = run_folder.run_dir_of(config)
    display = Display(config, run_dir, show_bar=options.show_bar)
    try:
        if options.start == "resume" and not resumable:
            display.line(
                f"[launch] no checkpoint below {run_folder.checkpoint_dir_of(config)}: starting anew"
            )
        ending = _run_islands(config, options, resume=resumable, display=display)
        display.stop_bar()
        return _close(config, ending, display)
    finally:
        display.close()


def _run_islands(config: Config, options: LaunchOptions, *, resume: bool, display: Display) -> Ending:
    run_dir = run_folder.run_dir_of(config)
    signals = SignalCounter()
    supervisor = Supervisor(
        signals,
        show=display.line,
        tick=display.tick,
        stop_timeout_s=300 + 2 * config.wan.timeout_s,
        has_met=Meetings(run_dir, config.parallel.num_islands),
    )
    with signals.installed(), supervisor:
        arguments = ["--resume"] if resume else []
        if commands.needs_lighthouse(config):
            spec = commands.lighthouse_spec(config, options.lighthouse_bind)
            address = supervisor.start_service(spec, ready_prefix="lighthouse", timeout_s=60)
            arguments += ["--set", f"wan.lighthouse={address}"]
            display.line(f"[launch] lighthouse at {address}")
        specs = [
            commands.island_spec(
                config,
                run_dir,
                island_id=island_id,
                train_arguments=arguments,
                wrap=options.wrap,
                train=options.train,
            )
            for island_id in range(config.parallel.num_islands)
        ]
        display.line(f"[launch] starting {_describe(config)} in {run_dir}; Ctrl-C saves and stops")
        display.line("[launch] each rank loads torch and megatron-core first, which takes a moment")
        return supervisor.run(specs)


def _describe(config: Config) -> str:
    parallel = config.parallel
    return (
        f"{parallel.num_islands} islands x {parallel.ranks_per_island} ranks "
        f"({commands.threads_per_rank(config)} threads per rank, {commands.num_cores()} cores)"
    )


def _close(config: Config, ending: Ending, display: Display) -> int:
    """Summary, figures and exit code."""
    run_dir = run_folder.run_dir_of(config)
    if any(ending.exit_codes):
        display.line(f"[launch] everything that the ranks printed: {run_dir}/island_*/torchrun/")
    try:
        merged = summary.merge(
            run_dir,
            missing_status="failed" if ending.signal_number is None else "interrupted",
            failed_islands=[] if ending.signal_number else ending.failed_islands,
        )
    except FileNotFoundError:
        display.line("[launch] ERROR: no island came to its end; see the logs in " + str(run_dir))
        return _exit_code("failed", ending)
    _draw(run_dir, display)
    for line in closing_lines(merged, run_dir):
        display.line(line)
    return _exit_code(str(merged["status"]), ending)


def _draw(run_dir: Path, display: Display) -> None:
    """Draws the figures; a failure is reported and does not change how the run ended."""
    from dilocox.report import command as report

    try:
        report.write(run_dir)
    except (OSError, ValueError, RuntimeError) as error:
        display.line(f"[launch] WARNING: no figures: {error}")


def _exit_code(status: str, ending: Ending) -> int:
    if ending.refused:
        return EXIT_REFUSED
    if status == "completed" and not any(ending.exit_codes):
        return 0
    if ending.signal_number is not None:
        return 128 + ending.signal_number
    if status == "interrupted" and not any(ending.exit_codes):
        return EXIT_STOPPED
    return EXIT_FAILED
