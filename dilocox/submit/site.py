"""What `dilocox submit` must know about a site, and the YAML file that says it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dilocox.config.load import parse_yaml
from dilocox.config.schema import Config, PositiveInt, Section
from dilocox.errors import ConfigError

Word = Annotated[str, Field(pattern=r"^\S+$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class ContainerSettings(Section):
    kind: Literal["apptainer", "pyxis"]
    image: Word
    """Apptainer: path of a .sif file. pyxis: what --container-image takes."""
    mounts: Word | None = None
    """/outside:/inside,...; default: the run's folder."""


class Site(Section):
    """One SLURM cluster, or one part of it with nodes of one kind."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    islands: list[Annotated[int, Field(ge=0)]] | None = None
    """Islands that run here; default: all."""
    layout: Literal["job_per_island", "one_allocation"] = "job_per_island"
    """one_allocation: one job with all islands of the run and the lighthouse."""
    host: Word | None = None
    """SSH destination of a login node; default: sbatch on this host."""
    workdir: Word | None = None
    """Folder of the run on the site, seen by all nodes; default: the current one. Needed with `host`."""
    launch_dir: Word | None = None
    """dilocox's `launch` folder on the site; default: the one of this installation. Needed with `host`."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: str | None = None
    time: Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d+){0,2}$")] | None = None
    """As `sbatch --time` takes it, in quotes: "24:00:00"."""
    gpus_per_node: PositiveInt | None = None
    cpus_per_task: PositiveInt | None = None
    """CPU cores of a node for the ranks on it."""
    exclusive: bool = False
    grace_s: PositiveInt = 300
    """Seconds before the time limit at which the ranks save a checkpoint and end."""
    at_limit: Literal["requeue", "exit"] = "requeue"
    chain: PositiveInt = 1
    """Jobs for each island, one after the other, where a run is longer than the limit; implies exit."""
    sbatch_lines: list[Annotated[str, Field(pattern=r"^--\S.*$")]] = Field(default_factory=list)
    """More options, for example "--mail-type=END"."""

    modules: list[Word] = Field(default_factory=list)
    venv: Word | None = None
    conda_env: Word | None = None
    python: Word | None = None
    """Python with dilocox on the nodes; default: `python` of venv, conda or container, else the one that
    submits."""
    container: ContainerSettings | None = None
    environment: dict[Variable, str] = Field(default_factory=dict)
    """More variables for the ranks, for example NCCL_IB_HCA."""

    lighthouse: Annotated[str, Field(pattern=r"^(job|http://\S+)$")] | None = None
    """http://HOST:PORT, or `job` = submit a lighthouse job here; default: wan.lighthouse of the run."""
    lighthouse_port: Annotated[int, Field(ge=1024, le=65535)] = 29510
    """Port of a lighthouse that runs here."""
    interface: Word | None = None
    """wan.interface on the nodes."""
    advertise_address: Word | None = None
    port_range: Annotated[str, Field(pattern=r"^\d+-\d+$")] | None = None
    fabric_interface: Word | None = None
    """Interface inside an island (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."""

    def island_ids(self, config: Config) -> list[int]:
        return list(range(config.parallel.num_islands)) if self.islands is None else self.islands


def load_site(path: Path) -> Site:
    """Reads a site file.

    Raises:
        ConfigError: the file is missing or malformed, or a setting breaks a rule; names it `site.leaf`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            "--site", str(path), f"cannot be read ({error.strerror}); give a YAML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("--site", str(path), "is not UTF-8 text; give a YAML file") from None
    tree = parse_yaml(text, field="--site", value=str(path))
    if not isinstance(tree, dict):
        raise ConfigError("--site", str(path), "must be a mapping; write for example `name: here`")
    return parse_site({"name": path.stem} | tree)


def parse_site(tree: dict[str, Any]) -> Site:
    """Checks the settings of a site one by one and together.

    Raises:
        ConfigError: a setting breaks a rule.
    """
    try:
        site = Site.model_validate(tree)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(["site", *map(str, first["loc"])])
        known = f"unknown key; choose one of {', '.join(Site.model_fields)}"
        rule = known if first["type"] == "extra_forbidden" else f"{first['msg']}; correct the site file"
        raise ConfigError(field, first["input"], rule) from None
    _check(site)
    return site


def _check(site: Site) -> None:
    if site.host is not None:
        for leaf in ("workdir", "launch_dir"):
            if getattr(site, leaf) is None:
                raise ConfigError(
                    f"site.{leaf}", None, "is needed with site.host; give the path on that site"
                )
    if site.venv is not None and site.conda_env is not None:
        raise ConfigError("site.conda_env", site.conda_env, "excludes site.venv; keep one of them")
    if site.layout == "one_allocation" and site.lighthouse is not None:
        rule = "one_allocation runs a lighthouse of its own; leave it out"
        raise ConfigError("site.lighthouse", site.lighthouse, rule)
    if site.layout == "one_allocation" and site.advertise_address is not None:
        rule = "cannot be right for all islands of one allocation; use layout job_per_island"
        raise ConfigError("site.advertise_address", site.advertise_address, rule)
    if site.islands is not None and len(set(site.islands)) != len(site.islands):
        raise ConfigError("site.islands", site.islands, "an island is there twice; name each once")
