"""Bytes of weights and optimizer states on a rank. No torch here. Activations come on top."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import prod

from dilocox.config.schema import Config
from dilocox.plan.in_flight import in_flight_bytes
from dilocox.plan.traffic import Traffic
from dilocox.topology import Coordinate

_FP32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        weights: in the working dtype.
        gradients: fp32, as Megatron accumulates them.
        masters: fp32 copy of the weights; 0 where the weights are fp32.
        inner_states: Adam's two moments, or SGD's momentum.
        anchors, outer_momentum, residuals, references: of level 2, fp32; residuals of both halves with three
            islands and more, references only with `delayed_keep`.
        in_flight: for the sync of the fragment that needs most, see `in_flight_bytes`.
    """

    weights: int
    gradients: int
    masters: int
    inner_states: int
    anchors: int
    outer_momentum: int
    residuals: int
    references: int
    in_flight: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def rank_memory(traffic: Traffic, pp_rank: int) -> Memory:
    """Memory of each rank of a pipeline stage. Shares of data parallel ranks are rounded."""
    config, topology = traffic.config, traffic.topology
    held = _numel_on_rank(traffic, pp_rank)
    owned = (
        sum(prod(parameter.shape_on_rank(topology.tp)) for parameter in traffic.stages[pp_rank])
        // topology.dp
    )
    sharded = held // topology.dp if config.parallel.use_distributed_optimizer else held
    half = config.model.params_dtype != "fp32"
    outer, is_diloco = config.outer, config.outer.method == "diloco"

    def state(kept: bool) -> int:
        return _FP32 * owned if kept and is_diloco else 0

    gather_residual = state(outer.error_feedback and _has_gather_residual(config)) // topology.num_islands
    return Memory(
        weights=held * (2 if half else _FP32),
        gradients=held * _FP32,
        masters=sharded * _FP32 if half else 0,
        inner_states=sharded * _FP32 * _moments(config),
        anchors=state(True),
        outer_momentum=state(bool(outer.outer_momentum)),
        residuals=state(outer.error_feedback) + gather_residual,
        references=state(outer.delay_mode == "delayed_keep"),
        in_flight=_most_in_flight(traffic, pp_rank) if is_diloco else 0,
    )


def _moments(config: Config) -> int:
    if config.inner.optimizer == "adam":
        return 2
    return 1 if config.inner.sgd_momentum else 0


def _numel_on_rank(traffic: Traffic, pp_rank: int) -> int:
    """Elements of the weights that a rank holds; the last stage has the tied embedding once more."""
    tp = traffic.topology.tp
    held = sum(prod(parameter.shape_on_rank(tp)) for parameter in traffic.stages[pp_rank])
    tied = not traffic.config.model.untie_embeddings_and_output_weights
    if tied and pp_rank == traffic.topology.pp - 1 > 0:
        held += prod(traffic.stages[0][0].shape_on_rank(tp))
    return held


def _has_gather_residual(config: Config) -> bool:
    """Whether the owner of a part also remembers what its second encoding lost."""
    return config.parallel.num_islands > 2 and config.outer.codec != "low_rank"


def _most_in_flight(traffic: Traffic, pp_rank: int) -> int:
    topology = traffic.topology
    rank = topology.rank(Coordinate(pp=pp_rank, tp=0, dp=0))
    return max(
        in_flight_bytes(
            traffic.config.outer,
            numels=[prod(parameter.shape_on_rank(topology.tp)) // topology.dp for parameter in fragment],
            num_islands=topology.num_islands,
            payload_bytes=traffic.sync_bytes(number, rank),
        )
        for number, fragment in enumerate(traffic.fragments[pp_rank])
    )
