"""The tables that `dilocox plan` prints. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich import box
from rich.table import Table

from dilocox.config.schema import Config, OuterConfig
from dilocox.config.warnings import dropped_share
from dilocox.outer.schedule import Schedule
from dilocox.plan.memory import Memory, rank_memory
from dilocox.plan.traffic import HostTraffic, Traffic, island_outer_step_bytes
from dilocox.plan.utilisation import LINKS_BPS, StepTime, compute_utilisation
from dilocox.shapes import ParameterShape, stage_layers

_MOST_ROWS = 24


@dataclass(frozen=True)
class _Way:
    """A way to average over the WAN, a column of the utilisation table."""

    name: str
    syncs: Sequence[int]
    sync_interval: int
    overlap_delay: int


def layout(traffic: Traffic) -> Table:
    """Coordinates of the ranks of an island, and the number of WAN groups."""
    topology, config = traffic.topology, traffic.config
    hosts = config.parallel.nodes_per_island
    table = _table(
        f"Layout: {topology.describe()}, {hosts} host{'s' if hosts > 1 else ''} per island",
        ("pipeline stage", "ranks of the island", "on hosts", "layers", "also"),
        caption=f"{topology.ranks_per_island} WAN groups of {topology.num_islands} ranks: "
        "equal coordinates of all islands",
    )
    per_stage, per_host = topology.tp * topology.dp, topology.ranks_per_island // hosts
    for stage in range(topology.pp):
        first, last = stage * per_stage, (stage + 1) * per_stage - 1
        layers = stage_layers(config.model.num_layers, pp_size=topology.pp, pp_rank=stage)
        ends = ["embedding"] * (stage == 0) + ["head"] * (stage == topology.pp - 1)
        table.add_row(
            str(stage),
            _span(first, last),
            _span(first // per_host, last // per_host),
            _span(layers[0], layers[-1]),
            ", ".join(ends),
        )
    return table


def model(traffic: Traffic) -> Table:
    """Parameters of the model, by role."""
    table = _table("Parameters (padding rows of the vocabulary included)", ("part", "parameters", "share"))
    for role in ("embedding", "layer", "head"):
        numel = sum(p.numel for stage in traffic.stages for p in stage if p.role == role)
        name = f"{traffic.config.model.num_layers} layers" if role == "layer" else role
        table.add_row(name, f"{numel:,}", f"{numel / traffic.num_parameters:.1%}")
    table.add_row("total", f"{traffic.num_parameters:,}", "", style="bold")
    return table


def memory(traffic: Traffic) -> Table:
    """Bytes of a rank of each stage."""
    names = [field.name for field in fields(Memory)]
    stages = [rank_memory(traffic, stage) for stage in range(traffic.topology.pp)]
    used = [name for name in names if any(getattr(stage, name) for stage in stages)]
    table = _table(
        "Memory of a rank, without activations",
        ("stage", *(name.replace("_", " ") for name in used), "total"),
        caption="level 2 keeps what follows the inner states, in fp32"
        if traffic.config.outer.method == "diloco"
        else None,
    )
    for number, stage in enumerate(stages):
        table.add_row(str(number), *(_bytes(getattr(stage, name)) for name in used), _bytes(stage.total))
    return table


def fragments(traffic: Traffic) -> Table:
    """What each fragment holds in each stage."""
    outer = traffic.config.outer
    table = _table(
        f"Fragments: {outer.num_fragments}, {outer.fragment_pattern}",
        ("fragment", "stage", "layers", "also", "parameters", "share of stage"),
    )
    for stage, parts in enumerate(traffic.fragments):
        total = sum(parameter.numel for part in parts for parameter in part)
        for number, part in enumerate(parts):
            if table.row_count == _MOST_ROWS:
                table.caption = f"the first {_MOST_ROWS} of {outer.num_fragments * traffic.topology.pp} rows"
                return table
            numel = sum(parameter.numel for parameter in part)
            layers, others = _contents(part)
            table.add_row(str(number), str(stage), layers, others, f"{numel:,}", f"{numel / total:.1%}")
    return table


def events(config: Config) -> Table:
    """The events of the first H inner steps and of the delay after them."""
    outer, schedule = config.outer, Schedule.from_config(config.outer)
    table = _table(
        f"Events: {outer.delay_mode}, sync_interval (H) {outer.sync_interval}, num_fragments (P) "
        f"{outer.num_fragments}, overlap_delay (tau) {outer.overlap_delay}",
        ("after inner step", "events, in this order"),
    )
    last = min(outer.sync_interval + outer.overlap_delay, config.inner.train_iters)
    for inner_step in range(1, last + 1):
        found = [f"{event.kind.name} {event.fragment}" for event in schedule.after(inner_step)]
        if found and table.row_count < _MOST_ROWS:
            table.add_row(str(inner_step), "  ".join(found))
    table.caption = f"then every {outer.sync_interval} inner steps; {config.inner.train_iters} in all"
    if outer.delay_mode == "streaming":
        dropped = f"{dropped_share(outer):.1%}"
        table.caption += f"; mixing drops {dropped} of the progress: (1 - alpha) * tau / H"
        table.min_width = len(table.caption)  # keeps it on one line
    return table


def wan_bytes(traffic: Traffic, host: HostTraffic) -> Table:
    """Bytes on the WAN against gradients averaged at every inner step."""
    outer, num_parameters = traffic.config.outer, traffic.num_parameters
    interval = outer.sync_interval
    table = _table(
        "Payload sent to the other islands",
        ("", "one sync", "one outer step", "per inner step", "fewer than data parallel"),
    )
    baseline = host.data_parallel
    table.add_row("data parallel, fp32, busiest host", _bytes(baseline), "", _bytes(baseline), "1 x")
    if outer.method == "data_parallel" or not baseline:
        return table
    kinds = {"blocking fp32": host.fp32_syncs, f"codec {outer.codec}": host.syncs}
    for name, syncs in list(kinds.items())[: 1 if outer.codec == "none" else 2]:
        whole = sum(syncs)
        ratio = interval * baseline / whole
        table.add_row(
            f"{name}, busiest host",
            _bytes(max(syncs)),
            _bytes(whole),
            _bytes(whole / interval),
            f"{ratio:,.0f} x",
        )
    island = island_outer_step_bytes(traffic)
    bits = 8 * island / num_parameters
    table.add_row(f"codec {outer.codec}, whole island", "", _bytes(island), _bytes(island / interval), "")
    table.caption = f"{bits:.3f} bits per parameter per outer step, headers included"
    if traffic.config.parallel.use_distributed_optimizer:
        table.caption += "; estimated, because the optimizer's shards are cut by Megatron's buffers"
    return table


def utilisation(config: Config, host: HostTraffic, time: StepTime) -> Table:
    """Predicted compute utilisation for each link speed of a host."""
    ways = _ways(config.outer, host)
    table = _table(
        f"Predicted compute utilisation, inner step {time.seconds:.3g} s ({time.source})",
        ("link of a host", *(way.name for way in ways)),
        caption="full bandwidth and no latency assumed; real links are 1.1 to 1.9 times slower",
    )
    for name, link_bps in LINKS_BPS.items():
        shares = [
            compute_utilisation(
                way.syncs,
                sync_interval=way.sync_interval,
                overlap_delay=way.overlap_delay,
                step_time_s=time.seconds,
                link_bps=link_bps,
            )
            for way in ways
        ]
        table.add_row(f"{name}bit/s", *(f"{share:.1%}" for share in shares))
    return table


def _ways(outer: OuterConfig, host: HostTraffic) -> list[_Way]:
    """The baseline first, the configured one last."""
    ways = [_Way("data parallel", [host.data_parallel], 1, 0)]
    if outer.method == "diloco":
        ways.append(_Way("blocking fp32", host.fp32_syncs, outer.sync_interval, 0))
        if outer.codec != "none":
            ways.append(_Way(f"blocking {outer.codec}", host.syncs, outer.sync_interval, 0))
        if outer.overlap_delay:
            name = f"{outer.delay_mode} {outer.codec}"
            ways.append(_Way(name, host.syncs, outer.sync_interval, outer.overlap_delay))
    return ways


def _table(title: str, columns: Sequence[str], *, caption: str | None = None) -> Table:
    table = Table(
        title=title,
        caption=caption,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        min_width=max(len(title), len(caption or "")),  # keeps both on one line
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    return table


def _contents(part: Sequence[ParameterShape]) -> tuple[str, str]:
    layers = sorted({parameter.layer for parameter in part if parameter.layer is not None})
    others = [role for role in ("embedding", "head") if any(p.role == role for p in part)]
    return ", ".join(map(str, layers)), ", ".join(others)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
