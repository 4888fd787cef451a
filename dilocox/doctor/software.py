"""Checks on Python and packages."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dilocox.config.schema import Config
from dilocox.doctor.finding import Finding, ok, problem, warning
from dilocox.doctor.host import Host

PYTHON_AT_LEAST = (3, 11)
PACKAGES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "torch": ((2, 6), None),
    "megatron-core": ((0, 16), (0, 20)),
    "torchft": ((0, 2), (0, 3)),
    "numpy": ((1, 26), None),
    "sentencepiece": ((0, 2), None),
    "pydantic": ((2, 7), None),
    "psutil": ((5, 9), None),
}
"""Distribution -> at least, below; a test holds it against pyproject.toml."""


def python(host: Host, config: Config | None) -> Iterator[Finding]:
    version = ".".join(map(str, host.python_version))
    needed = ".".join(map(str, PYTHON_AT_LEAST))
    if host.python_version < PYTHON_AT_LEAST:
        yield problem(
            "python", f"Python {version} is too old", f"make the environment with Python {needed} or newer"
        )
    else:
        yield ok("python", f"Python {version}")


def packages(host: Host, config: Config | None) -> Iterator[Finding]:
    fine = []
    for name, (at_least, below) in PACKAGES.items():
        version = host.package_version(name)
        wanted = f"{name}>={_dotted(at_least)}" + (f",<{_dotted(below)}" if below else "")
        if version is None:
            yield problem("packages", f"{name} is not installed", f"pip install '{wanted}'")
        elif not at_least <= _numbers(version) or (below and _numbers(version) >= below):
            yield problem("packages", f"{name} {version} was not tried", f"pip install '{wanted}'")
        else:
            fine.append(f"{name} {version}")
    yield ok("packages", ", ".join(fine))


def apex(host: Host, config: Config | None) -> Iterator[Finding]:
    """PyPI's apex is an unrelated web package; megatron-core would try to import NVIDIA's from it."""
    version = host.package_version("apex")
    if version is not None and not host.has_submodule("apex", "optimizers"):
        yield problem(
            "apex",
            f"apex {version} is not NVIDIA Apex but an unrelated package of the same name",
            "pip uninstall apex (NVIDIA Apex is optional and is built from its own source)",
        )


def torch_build(host: Host, config: Config | None) -> Iterator[Finding]:
    """A GPU needs a CUDA build of torch, and is faster with Transformer Engine."""
    num_gpus, cuda = host.num_gpus(), host.torch_cuda()
    wants_cpu = config is not None and config.run.device == "cpu"
    wants_cuda = config is not None and config.run.device == "cuda"
    if num_gpus == 0:
        if wants_cuda:
            yield problem(
                "torch",
                "run.device is cuda and no GPU is visible",
                "run it on a GPU node or set run.device=cpu",
            )
        return
    if wants_cpu:
        yield warning(
            "torch", f"{num_gpus} GPUs are idle: run.device is cpu", "set run.device=auto to use them"
        )
    elif cuda is None:
        yield problem(
            "torch",
            f"{num_gpus} GPUs are there, but torch {host.package_version('torch')} is a CPU build",
            "install the CUDA build of torch for your driver",
        )
    elif host.package_version("transformer-engine") is None:
        yield warning(
            "torch",
            "Transformer Engine is missing: megatron-core's local layers are used, which are slower",
            "pip install 'dilocox[transformer-engine]'",
        )
    else:
        yield ok("torch", f"built for CUDA {cuda}, Transformer Engine is there")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
