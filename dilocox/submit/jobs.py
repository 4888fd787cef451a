"""Which jobs a run needs at a site, and how they are handed to sbatch, here or over SSH."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dilocox import run_folder
from dilocox.config.schema import Config
from dilocox.errors import DilocoxError
from dilocox.submit.script import island_options, quote_path, render, sbatch_options, site_settings
from dilocox.submit.site import Site


@dataclass(frozen=True)
class SlurmJob:
    """One job script of a site.

    Attributes:
        name: for messages and for the file, for example `island_0`.
        prepare: shell command that runs on the site before the job is submitted.
        length: jobs of its chain; each waits for the end of the one before.
    """

    name: str
    script: str
    prepare: str
    length: int = 1


@dataclass(frozen=True)
class SubmittedRun:
    """What the job scripts must know of a run.

    Attributes:
        config_path: as it is found from the site's folder.
        overrides: `section.leaf=value`, without white space.
    """

    config: Config
    config_path: str
    overrides: tuple[str, ...]

    @property
    def log_dir(self) -> str:
        """Folder of the jobs' output; relative to the site's folder unless `run.output_dir` is absolute."""
        return str(run_folder.job_log_dir(run_folder.run_dir_of(self.config)))

    @property
    def lighthouse_file(self) -> str:
        """File in which a lighthouse job leaves its address."""
        return str(run_folder.lighthouse_file(run_folder.run_dir_of(self.config)))

    @property
    def make_log_dir(self) -> str:
        """Shell command; SLURM does not make the folder of a job's output."""
        return f"mkdir -p {shlex.quote(self.log_dir)}"

    def settings(self, site: Site) -> dict[str, str]:
        """Shell variables of every job that trains."""
        parallel = self.config.parallel
        arguments = " ".join(f"--set {override}" for override in self.overrides)
        return site_settings(site) | {
            "CONFIG": self.config_path,
            "OUTPUT_DIR": self.config.run.output_dir,
            "RUN_NAME": self.config.run.name,
            "RANKS_PER_NODE": str(parallel.ranks_per_island // parallel.nodes_per_island),
            "AT_LIMIT": "exit" if site.chain > 1 else site.at_limit,
            "TRAIN_ARGUMENTS": arguments,
        }


def jobs_of(site: Site, run: SubmittedRun) -> list[SlurmJob]:
    """The jobs of a run at a site, the lighthouse first."""
    if site.layout == "one_allocation":
        return [_allocation(site, run)]
    lighthouse = [_lighthouse(site, run)] if site.lighthouse == "job" else []
    return lighthouse + [_island(site, run, island) for island in site.island_ids(run.config)]


def submit(site: Site, run: SubmittedRun, job: SlurmJob) -> list[str]:
    """Submits a job, or the chain of it.

    Returns:
        The job ids.

    Raises:
        DilocoxError: sbatch (or SSH) refused; holds what it said.
    """
    ids: list[str] = []
    for _ in range(job.length):
        dependency = [f"--dependency=afterany:{ids[-1]}"] if ids else []
        command = _on_site(site, f"{job.prepare} && sbatch --parsable {' '.join(dependency)}")
        try:
            done = subprocess.run(command, input=job.script, capture_output=True, text=True, check=False)
        except OSError as error:
            raise DilocoxError(f"site {site.name}: {error}") from None
        if done.returncode != 0:
            raise DilocoxError(f"site {site.name}: job {job.name} was refused: {done.stderr.strip()}")
        ids.append(done.stdout.strip().split(";")[0])
    return ids


def _on_site(site: Site, command: str) -> list[str]:
    """The command line that runs a shell command in the site's folder, here or over SSH."""
    if site.workdir is not None:
        command = f"cd {quote_path(site.workdir)} && {command}"
    return ["bash", "-c", command] if site.host is None else ["ssh", site.host, command]


def _island(site: Site, run: SubmittedRun, island: int) -> SlurmJob:
    name = f"island_{island}"
    options = sbatch_options(site, job_name=f"{run.config.run.name}-{name}", log_dir=run.log_dir)
    options |= island_options(site, run.config, num_islands=1)
    settings = run.settings(site) | {"ISLAND_ID": str(island)}
    if site.lighthouse == "job":
        settings["LIGHTHOUSE_FILE"] = run.lighthouse_file
    else:
        settings["LIGHTHOUSE"] = site.lighthouse or run.config.wan.lighthouse or ""
    return SlurmJob(
        name, render("island", options, settings, site.sbatch_lines), run.make_log_dir, length=site.chain
    )


def _allocation(site: Site, run: SubmittedRun) -> SlurmJob:
    num_islands = run.config.parallel.num_islands
    options = sbatch_options(site, job_name=f"{run.config.run.name}-islands", log_dir=run.log_dir)
    options |= island_options(site, run.config, num_islands=num_islands)
    settings = run.settings(site) | {
        "NUM_ISLANDS": str(num_islands),
        "LIGHTHOUSE_PORT": str(site.lighthouse_port),
        "MIN_ISLANDS": str(run.config.wan.min_islands),
        "GRACE_S": str(run.config.wan.grace_s),
    }
    return SlurmJob(
        "islands",
        render("islands", options, settings, site.sbatch_lines),
        run.make_log_dir,
        length=site.chain,
    )


def _lighthouse(site: Site, run: SubmittedRun) -> SlurmJob:
    options = sbatch_options(site, job_name=f"{run.config.run.name}-lighthouse", log_dir=run.log_dir)
    settings = site_settings(site) | {
        "LIGHTHOUSE_FILE": run.lighthouse_file,
        "LIGHTHOUSE_PORT": str(site.lighthouse_port),
        "MIN_ISLANDS": str(run.config.wan.min_islands),
        "GRACE_S": str(run.config.wan.grace_s),
    }
    # A file that an earlier lighthouse left would send the islands to an address where nothing listens.
    prepare = f"{run.make_log_dir} && rm -f {shlex.quote(run.lighthouse_file)}"
    return SlurmJob("lighthouse", render("lighthouse", options, settings, site.sbatch_lines), prepare)


def write(job: SlurmJob, folder: Path) -> Path:
    """Keeps the script beside the run, to read it or to submit it by hand."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{job.name}.sbatch"
    path.write_text(job.script)
    return path
