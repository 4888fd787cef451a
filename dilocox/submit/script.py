"""A job script = the shipped file of `launch/slurm` with the site's head and settings put in."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from dilocox.config.schema import Config
from dilocox.submit.site import Site

Kind = Literal["island", "islands", "lighthouse"]
_HEAD = "# --- Head:"
_SETTINGS = "# --- Settings:"


def launch_folder() -> Path:
    """The shipped launch files of this installation."""
    return (Path(__file__).parents[1] / "launch_files").resolve()


def render(
    kind: Kind, options: Mapping[str, str | None], settings: Mapping[str, str], more: list[str]
) -> str:
    """The shipped script of a kind with a head and settings of its own.

    Args:
        kind: which script.
        options: sbatch options by name without dashes; they replace or join those that are on in the
            shipped head. An empty value makes a flag, None removes the option.
        settings: shell variables, exported before the script's own settings, which give way to them.
        more: whole sbatch options, appended.
    """
    text = (launch_folder() / "slurm" / f"{kind}.sbatch").read_text()
    before, _, rest = text.partition(_HEAD)
    head, marker, body = rest.partition(_SETTINGS)
    merged: dict[str, str | None] = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.MULTILINE))
    merged |= options
    lines = [
        f"#SBATCH --{key}={value}" if value else f"#SBATCH --{key}"
        for key, value in merged.items()
        if value is not None
    ]
    lines += [f"#SBATCH {option}" for option in more]
    exports = [f"export {name}={quote_path(value)}" for name, value in settings.items()]
    head_lines = "\n".join(["# --- Head (written by dilocox submit) ---", *lines])
    setting_lines = "\n".join(["# --- Of the site and the run (written by dilocox submit) ---", *exports])
    return f"{before}{head_lines}\n\n{setting_lines}\n\n{marker}{body}"


def quote_path(text: str) -> str:
    """Quotes a text for the shell, but leaves `~/` at its start to the shell of the site."""
    return f"~/{shlex.quote(text[2:])}" if text.startswith("~/") and len(text) > 2 else shlex.quote(text)


def sbatch_options(site: Site, *, job_name: str, log_dir: str) -> dict[str, str | None]:
    """The head that all jobs of a site share."""
    options: dict[str, str | None] = {"job-name": job_name, "output": f"{log_dir}/%x-%j.log"}
    for name in ("account", "partition", "qos"):
        if (value := getattr(site, name)) is not None:
            options[name] = value
    return options


def island_options(site: Site, config: Config, *, num_islands: int) -> dict[str, str | None]:
    """The head of jobs that train."""
    options: dict[str, str | None] = {
        "nodes": str(num_islands * config.parallel.nodes_per_island),
        "signal": f"B:USR1@{site.grace_s}",
    }
    values = {
        "gpus-per-node": site.gpus_per_node,
        "cpus-per-task": site.cpus_per_task,
        "constraint": site.constraint,
        "time": site.time,
    }
    options |= {name: str(value) for name, value in values.items() if value is not None}
    if site.exclusive:
        options["exclusive"] = ""
    return options


def site_settings(site: Site) -> dict[str, str]:
    """Shell variables of environment.sh and of the networks, for every job of the site."""
    values = {
        "MODULES": " ".join(site.modules),
        "VENV": site.venv,
        "CONDA_ENV": site.conda_env,
        "PYTHON": site.python or _own_python(site),
        "INTERFACE": site.interface,
        "ADVERTISE_ADDRESS": site.advertise_address,
        "PORT_RANGE": site.port_range,
        "FABRIC_INTERFACE": site.fabric_interface,
    }
    if site.container is not None:
        values["CONTAINER"] = site.container.kind
        values["CONTAINER_IMAGE"] = site.container.image
        values["CONTAINER_MOUNTS"] = site.container.mounts
    settings = {name: value for name, value in values.items() if value}
    settings["LAUNCH_DIR"] = site.launch_dir or str(launch_folder())
    return settings | site.environment


def _own_python(site: Site) -> str | None:
    """The Python that submits, for a site on this host whose file names no other."""
    given = (site.host, site.venv, site.conda_env, site.container)
    return sys.executable if all(setting is None for setting in given) and not site.modules else None
