"""What the checks ask of this host. Tests hand in a host with planted faults."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException
from importlib import metadata
from pathlib import Path

import psutil

from dilocox.net import Network, Reach, is_port_free, name_lookup_s, reach, system_network

_COMMAND_TIMEOUT_S = 10
_NVIDIA_FILES = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Host:
    """Questions as callables, so that a check asks only what it needs.

    Attributes:
        package_version: version of an installed distribution, None if it is not there.
        has_submodule: whether `package/name` exists, without importing the package.
        torch_cuda: CUDA version that the installed torch was built for; None = a CPU build.
        num_gpus: GPUs that the driver shows; quick.
        gpu_links: text of `nvidia-smi topo -m`, None where it is not there.
        free_bytes: free space of the file system that holds the path (or its nearest existing parent).
        file_system: type of that file system, for example `ext4`, `lustre`.
        open_file_limit: soft and hard limit of this process.
        can_bind: whether a local port can be listened on.
        reach: what a TCP connection attempt to (host, port) meets within a time.
        clock_skew_s: clock of an HTTP server minus own clock; the header counts whole seconds.
        name_lookup_s: seconds until the name server has answered for an address, or given up.
        ephemeral_ports: range from which the kernel takes ports of unnamed listeners.
    """

    python_version: tuple[int, int, int]
    host_name: str
    num_cpus: int
    network: Network
    package_version: Callable[[str], str | None]
    has_submodule: Callable[[str, str], bool]
    torch_cuda: Callable[[], str | None]
    num_gpus: Callable[[], int]
    gpu_links: Callable[[], str | None]
    free_bytes: Callable[[Path], int]
    file_system: Callable[[Path], str]
    open_file_limit: Callable[[], tuple[int, int]]
    can_bind: Callable[[int], bool]
    reach: Callable[[str, int, float], Reach]
    clock_skew_s: Callable[[str, int], float | None]
    name_lookup_s: Callable[[str], float]
    ephemeral_ports: Callable[[], tuple[int, int]]


def this_host() -> Host:
    """The host that this process runs on."""
    major, minor, patch = platform.python_version_tuple()
    return Host(
        python_version=(int(major), int(minor), int(re.match(r"\d*", patch)[0] or 0)),  # type: ignore[index]
        host_name=socket.gethostname(),
        num_cpus=len(os.sched_getaffinity(0)),
        network=system_network(),
        package_version=_package_version,
        has_submodule=_has_submodule,
        torch_cuda=_torch_cuda,
        num_gpus=lambda: len(list(_NVIDIA_FILES.glob("*"))),
        gpu_links=lambda: _output("nvidia-smi", "topo", "-m"),
        free_bytes=lambda path: shutil.disk_usage(existing_parent(path)).free,
        file_system=_file_system,
        open_file_limit=lambda: resource.getrlimit(resource.RLIMIT_NOFILE),
        can_bind=is_port_free,
        reach=reach,
        clock_skew_s=_clock_skew_s,
        name_lookup_s=name_lookup_s,
        ephemeral_ports=_ephemeral_ports,
    )


def existing_parent(path: Path) -> Path:
    """The path, or its nearest parent that exists: folders of a run are made later."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _package_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package_folders(package: str) -> Sequence[str]:
    spec = importlib.util.find_spec(package)
    return [] if spec is None else list(spec.submodule_search_locations or [])


def _has_submodule(package: str, name: str) -> bool:
    return any(
        (Path(folder) / name).is_dir() or (Path(folder) / f"{name}.py").is_file()
        for folder in _package_folders(package)
    )


def _torch_cuda() -> str | None:
    """Read from torch's version file: importing torch takes seconds."""
    for folder in _package_folders("torch"):
        found = re.search(r"^cuda\b.*=\s*'([^']+)'", (Path(folder) / "version.py").read_text(), re.MULTILINE)
        return found[1] if found else None
    return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _file_system(path: Path) -> str:
    folder = existing_parent(path).resolve()
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown"


def _clock_skew_s(host: str, port: int) -> float | None:
    connection = HTTPConnection(host, port, timeout=_COMMAND_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("date")
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
    return None if date is None else parsedate_to_datetime(date).timestamp() - time.time()


def _ephemeral_ports() -> tuple[int, int]:
    low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(low), int(high)
