"""`dilocox submit`: writes and submits the job scripts of one site or several, and says how to watch them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from dilocox import run_folder
from dilocox.config.load import load_config
from dilocox.config.paths import expand_paths, needs_expansion
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.submit.jobs import SlurmJob, SubmittedRun, jobs_of, submit, write
from dilocox.submit.site import Site, load_site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Writes the sbatch files of a run for one site or several and submits them. For a site that this "
        "host cannot reach, call it there with the same config and that site's file."
    )
    parser.add_argument("config", type=Path, help="YAML file of the run")
    parser.add_argument(
        "--site", type=Path, action="append", required=True, help="YAML file of a site; once for each site"
    )
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.LEAF=VALUE")
    parser.add_argument(
        "--islands", metavar="I,J", help="islands of the (only) site, instead of its `islands`"
    )
    parser.add_argument("--dry-run", action="store_true", help="write the files, submit nothing")


def main(args: argparse.Namespace) -> int:
    config = load_config(args.config, args.set, expand=False)
    sites = [load_site(path) for path in args.site]
    if args.islands is not None:
        sites = [_with_islands(sites, args.islands)]
    check(config, sites, args.set)
    for site in sites:
        local = site.host is None and site.workdir is None
        here = expand_paths(config)
        run = SubmittedRun(
            here if site.host is None else config,
            str(args.config.resolve() if local else args.config),
            tuple(args.set),
        )
        folder = run_folder.job_script_dir(run_folder.run_dir_of(here), site.name)
        jobs = jobs_of(site, run)
        paths = [write(job, folder) for job in jobs]
        print(f"site {site.name}: {', '.join(map(str, paths))}")
        if args.dry_run:
            print("  nothing submitted (--dry-run)")
        else:
            _submit_all(site, run, jobs)
    return 0


def check(config: Config, sites: Sequence[Site], overrides: Sequence[str]) -> None:
    """Rules between the run and its sites.

    Raises:
        ConfigError: a rule is broken; nothing has been written.
    """
    for override in overrides:
        if any(character.isspace() for character in override):
            raise ConfigError("--set", override, "must not contain white space here; write it into CONFIG")
    _check_islands(config, sites)
    parallel = config.parallel
    ranks_per_node = parallel.ranks_per_island // parallel.nodes_per_island
    for site in sites:
        if site.gpus_per_node is not None and site.gpus_per_node < ranks_per_node:
            rule = f"under the {ranks_per_node} ranks per node of the run; raise parallel.nodes_per_island"
            raise ConfigError("site.gpus_per_node", site.gpus_per_node, rule)
        if site.host is not None and needs_expansion(config.run.output_dir):
            rule = f"is another folder on {site.host} (site {site.name}) than here; write the path out"
            raise ConfigError("run.output_dir", config.run.output_dir, rule)
        _check_lighthouse(config, site, island_ids=site.island_ids(config))


def _check_islands(config: Config, sites: Sequence[Site]) -> None:
    num_islands = config.parallel.num_islands
    seen: dict[int, str] = {}
    for site in sites:
        for island in site.island_ids(config):
            if island >= num_islands:
                rule = f"island {island} is not in 0..{num_islands - 1} (parallel.num_islands)"
                raise ConfigError("site.islands", site.islands, rule + "; correct it")
            if island in seen:
                rule = f"island {island} is at site {seen[island]} too; name each island once"
                raise ConfigError("site.islands", site.islands, rule)
            seen[island] = site.name


def _check_lighthouse(config: Config, site: Site, *, island_ids: Sequence[int]) -> None:
    """Islands of several sites meet at an address that all of them know before they start."""
    all_here = len(island_ids) == config.parallel.num_islands
    if site.layout == "one_allocation" and not all_here:
        rule = "needs all islands at this site; use job_per_island"
        raise ConfigError("site.layout", site.layout, rule)
    if site.lighthouse == "job" and not all_here:
        rule = "needs all islands at this site; start `dilocox lighthouse` where all reach it, give http://HOST:PORT"
        raise ConfigError("site.lighthouse", site.lighthouse, rule)
    if site.layout == "job_per_island" and site.lighthouse is None and config.wan.lighthouse is None:
        rule = "give http://HOST:PORT of `dilocox lighthouse`, or `job` to run one here"
        raise ConfigError("site.lighthouse", None, rule)


def _with_islands(sites: Sequence[Site], islands: str) -> Site:
    if len(sites) != 1:
        raise ConfigError("--islands", islands, "needs exactly one --site; put `islands` into the site files")
    numbers = islands.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ConfigError("--islands", islands, "must be island ids with commas; write for example 0,1")
    return sites[0].model_copy(update={"islands": [int(number) for number in numbers]})


def _submit_all(site: Site, run: SubmittedRun, jobs: Sequence[SlurmJob]) -> None:
    ids = []
    for job in jobs:
        chain = submit(site, run, job)
        ids += chain
        print(f"  {job.name}: job {' then '.join(chain)}")
    there = "" if site.host is None else f"ssh {site.host} "
    at = "" if site.workdir is None else f"{site.workdir}/"
    print(f"  watch:  {there}squeue --jobs={','.join(ids)}")
    print(f"          {there}tail -F {at}{run.log_dir}/{run.config.run.name}-*.log")
    print(f"  stop:   {there}scancel --batch --signal=TERM {' '.join(ids)}   (with a checkpoint)")
    print(f"          {there}scancel {' '.join(ids)}   (at once)")
