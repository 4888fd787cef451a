"""A healthy GPU node of a cluster, on which tests plant faults."""

from __future__ import annotations

from dataclasses import replace

from dilocox.config.load import load_config
from dilocox.doctor.host import Host
from dilocox.net import Network

LIGHTHOUSE = "http://10.0.0.1:29510"
VERSIONS = {
    "torch": "2.13.0",
    "megatron-core": "0.16.1",
    "torchft": "0.2.0",
    "numpy": "2.4.6",
    "sentencepiece": "0.2.3",
    "pydantic": "2.14.4",
    "psutil": "7.2.2",
    "transformer-engine": "2.9.0",
}
NVLINK = """\
\tGPU0\tGPU1\tNIC0
GPU0\t X \tNV18\tPIX
GPU1\tNV18\t X \tSYS
"""


def network(*, interfaces=None, names=None, routes=None):
    interfaces = interfaces or {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.5", "2001:db8::5"]}
    names = {"gpu05": ["10.0.0.5"]} | (names or {})
    routes = {"10.0.0.1": "10.0.0.5", "2001:db8::1": "2001:db8::5", "127.0.0.1": "127.0.0.1"} | (routes or {})
    return Network(
        interfaces=lambda: interfaces,
        resolve=lambda name: [name] if name[0].isdigit() or ":" in name else names.get(name, []),
        route_source=lambda address, port: routes.get(address),
    )


def healthy(**planted) -> Host:
    host = Host(
        python_version=(3, 12, 3),
        host_name="gpu05",
        num_cpus=64,
        network=network(),
        package_version=VERSIONS.get,
        has_submodule=lambda package, name: True,
        torch_cuda=lambda: "13.0",
        num_gpus=lambda: 2,
        gpu_links=lambda: NVLINK,
        free_bytes=lambda path: 10**13,
        file_system=lambda path: "lustre",
        open_file_limit=lambda: (65536, 65536),
        can_bind=lambda port: True,
        reach=lambda host, port, timeout: "open",
        clock_skew_s=lambda host, port: 0.4,
        name_lookup_s=lambda address: 0.01,
        ephemeral_ports=lambda: (32768, 60999),
    )
    return replace(host, **planted)


def config(tmp_path, *overrides):
    """Two islands of two nodes with two GPUs each, meeting at `LIGHTHOUSE`."""
    path = tmp_path / "run.yaml"
    path.write_text(f"wan: {{lighthouse: '{LIGHTHOUSE}', port_range: 29600-29609}}\n")
    layout = [
        "parallel.ranks_per_island=4",
        "parallel.nodes_per_island=2",
        "parallel.tensor_model_parallel_size=2",
        "inner.global_batch_size=2",
    ]
    return load_config(path, [*layout, *overrides])
