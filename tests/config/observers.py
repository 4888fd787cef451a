"""Ways to see what a setting does: each runs the package's own code and returns something to compare."""

from __future__ import annotations

import contextlib
import io
import sys
import types
from pathlib import Path

import torch

from dilocox import run_folder
from dilocox.config.load import load_config
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from tests.distributed.forkserver import run_islands, run_ranks

NO_FILE = Path("/nonexistent")


def planned(config: Config) -> str:
    """What `dilocox plan` prints: layout, parameters, memory, fragments, events, bytes, utilisation."""
    from dilocox.plan.command import show

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        show(config)
    return output.getvalue()


def paths(config: Config) -> list[Path]:
    """Folders of the run, its checkpoints and its index files."""
    return [
        run_folder.run_dir_of(config),
        run_folder.checkpoint_dir_of(config),
        run_folder.load_dir_of(config),
        run_folder.data_cache_dir_of(config),
    ]


def device(config: Config) -> str:
    """The device of a rank, or why there is none."""
    from dilocox.backend import choose_backend

    try:
        return str(choose_backend(config.run.device).device)
    except ConfigError as error:
        return str(error)


def stops(config: Config) -> list[bool]:
    """After which of the first inner steps a rank asks to stop."""
    from dilocox.stop import StopRequest

    request = StopRequest(config.run)
    try:
        return [request.check(step) for step in range(1, 9)]
    finally:
        request.restore()


def launched(config: Config) -> list[object]:
    """Command lines and environments of the jobs that `dilocox launch` starts."""
    from dilocox.launch import commands

    lighthouse = commands.lighthouse_spec(config, "h:0") if commands.needs_lighthouse(config) else None
    return [lighthouse, commands.island_spec(config, NO_FILE, island_id=0, train_arguments=())]


def network(config: Config) -> list[object]:
    """Interface, address and port of an island's host."""
    from dilocox.outer.wan.address import pick_port, resolve_address
    from tests.doctor.hosts import network as planted

    interfaces = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "eth1": ["10.0.1.5"]}
    wan = config.wan
    address = resolve_address(
        wan.interface, wan.advertise_address, wan.lighthouse, network=planted(interfaces=interfaces)
    )
    return [address, wan.port_range and pick_port(wan.port_range)]


def examined(config: Config) -> list[str]:
    """What `dilocox doctor` finds on a host with few descriptors and little disk."""
    from dilocox.doctor.command import QUICK, examine
    from tests.doctor.hosts import healthy

    poor = healthy(open_file_limit=lambda: (100, 10**6), free_bytes=lambda path: 0)
    return [finding.line() for finding in examine(poor, config, QUICK)]


def megatron(config: Config) -> str:
    """Megatron's description of the network on a GPU."""
    from dilocox.backend import Backend
    from dilocox.inner.model import transformer_config

    return str(transformer_config(config, Backend(torch.device("cuda"), "nccl")))


def samples(config: Config) -> list[object]:
    """Documents of both sets, tokenizer, and how a step falls on micro-batches."""
    from dilocox.data.datasets import BatchShape
    from dilocox.data.resolve import prepare
    from dilocox.data.samples import documents_of, train_set, validation_set

    resolved = prepare(config, NO_FILE)
    sets = [train_set(config, resolved, 0), validation_set(config, resolved)]
    shape = BatchShape(config.inner.micro_batch_size, config.inner.global_batch_size, 1, 0)
    documents = [
        [documents_of(pair, found).tolist() for pair in found.blend.pairs] for found in sets if found
    ]
    return [sets, documents, resolved.tokenizer_identity, shape.sample_numbers(0)]


def services(config: Config) -> list[object]:
    """Services that curves are sent to; Weights & Biases is replaced by a module that records its calls."""
    from dilocox.metrics import sinks

    calls: list[object] = []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = types.SimpleNamespace(name="wandb")
    wandb.login = lambda **settings: True
    wandb.init = lambda **settings: calls.append(settings["project"]) or types.SimpleNamespace(finish=list)
    before = sys.modules.get("wandb")
    sys.modules["wandb"] = wandb
    try:
        if config.logging.wandb:
            sinks.WandbSink(config, run_dir=NO_FILE, island_id=0).close()
    finally:
        sys.modules.pop("wandb")
        if before is not None:
            sys.modules["wandb"] = before
    return [calls, config.logging.tensorboard and _tensorboard(config)]


def _tensorboard(config: Config) -> str:
    """Without its package the setting is refused, with it there is a sink."""
    import tempfile

    from dilocox.metrics import sinks

    only = config.model_copy(update={"logging": config.logging.model_copy(update={"wandb": False})})
    with tempfile.TemporaryDirectory() as folder:
        try:
            opened = sinks.open_sinks(only, run_dir=Path(folder), island_id=0)
        except ConfigError as error:
            return str(error)
        for sink in opened:
            sink.close()
        return str([type(sink) for sink in opened])


def synced(config: Config) -> list[object]:
    """Anchors and events of two or three islands on the loopback WAN that move by hand."""
    from tests.outer.islands import make_islands, on_islands

    num_islands = config.parallel.num_islands
    islands = make_islands(num_islands, config.outer, shapes=[(16, 24), (5,)])

    def move(island, step):
        """Directions of rank one, unequal islands, and one huge step of one island."""
        size = 100.0 if (island.number, step) == (1, 29) else 1.0
        for number, tensor in enumerate(island.tensors):
            generator = torch.Generator().manual_seed(100 * number + step % 3)
            direction = torch.randn(tensor.shape[-1], generator=generator)
            tensor.sub_(0.01 * size * (1 + island.number) * direction)
        island.fragments.add_tokens(10 * island.number)

    on_islands(islands, lambda island: island.loop.join(0))
    on_islands(islands, lambda island: island.train(40, move))
    log = islands[0].log
    return [
        [anchor.tolist() for anchor in islands[0].loop.anchors()],
        [(event[0], event[1]) for event in log.events if event[0] in ("interval", "abstain")],
        [sync.payload_bytes_sent for sync in log.syncs],
    ]


def trained(configs: list[Config]) -> list[float]:
    """Loss, learning rate and gradient norm of four inner steps, for each configuration; one process."""
    return run_ranks(_train_all, 1, configs)[0]


def _train_all(rank: int, configs: list[Config]) -> list[object]:
    from tests.inner.runs import join_island, make_inner, train

    island = join_island(rank, configs[0])
    results = []
    for config in configs:
        torch.manual_seed(0)  # dropout draws from it
        results.append(train(make_inner(config, island), config, range(4)))
    return results


def whole_runs(path: Path, cases: list[list[str]]) -> list[object]:
    """Checkpoints, validations and log lines of whole runs of one island each, all at once."""
    return [ranks[0] for ranks in run_islands(_run, len(cases), 1, path, cases)]


def _run(island: int, rank: int, path: Path, cases: list[list[str]]) -> list[object]:
    from dilocox.metrics.jsonl import read_records
    from dilocox.metrics.records import EvalRecord
    from tests.training import train_rank

    overrides = [*cases[island], f"run.name=case{island}"]
    train_rank(0, rank, path, overrides, None, False)
    config = load_config(path, overrides)
    run_dir = run_folder.run_dir_of(config)
    checkpoints = run_folder.island_dir(run_folder.checkpoint_dir_of(config), 0).glob("iter_*")
    records = read_records(run_folder.island_dir(run_dir, 0) / run_folder.METRICS)
    log = run_folder.rank_log(run_folder.island_dir(run_dir, 0), 0).read_text()
    return [
        sorted(folder.name for folder in checkpoints),
        [record.inner_step for record in records if isinstance(record, EvalRecord)],
        log.count("lm loss"),
    ]


def lonely(path: Path, cases: list[list[str]]) -> list[str]:
    """Why an island gives up that waits for a second one which never comes, all cases at once."""
    return [ranks[0] for ranks in run_islands(_wait_alone, len(cases), 1, path, cases)]


def _wait_alone(island: int, rank: int, path: Path, cases: list[list[str]]) -> str:
    from dilocox.errors import WanError
    from tests.training import lighthouse, train_rank

    with lighthouse(min_islands=1 if "wan.min_islands=2" in cases[island] else 2) as address:
        overrides = [*cases[island], f"run.name=alone{island}", f"wan.lighthouse={address}"]
        try:
            train_rank(0, rank, path, overrides, None, False)
        except WanError as error:
            return str(error).replace(address, "")
    raise AssertionError("the island did not wait")
