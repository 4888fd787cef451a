"""Request and result of one sync. Level 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from dilocox.outer.codec.base import MeanResult
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.schedule import Event
from dilocox.outer.sync.roles import Role
from dilocox.outer.wan.base import Member
from dilocox.param_shard import ParamShard


class SyncTarget(Protocol):
    """What a sync averages: a fragment, or the gradients of `data_parallel`.

    Attributes:
        shards: whose values are averaged.
        reducer: how they cross the WAN.
    """

    @property
    def shards(self) -> Sequence[ParamShard]: ...

    @property
    def reducer(self) -> FragmentReducer: ...


@dataclass(frozen=True)
class SyncRequest:
    """What this island brings to a sync.

    Attributes:
        member: of kind `sync`; the runner fills in the expensive fields.
        payload: fp32, one tensor per shard; not written to while the sync runs.
        abstain_reason: norm of the payload -> reason to abstain, or None.
        anchor: of the fragment; all islands must have the same. Empty: theirs may differ.
    """

    member: Member
    payload: list[Tensor]
    target: SyncTarget
    abstain_reason: Callable[[float], str | None]
    anchor: Sequence[Tensor] = ()


@dataclass(frozen=True)
class SyncStats:
    """Figures of one sync for metrics and log. Field names are those of `sync` records in metrics.jsonl.

    Attributes:
        inner_step: inner steps done when it was measured.
        outer_step: number of this outer step of the fragment, from 1.
        num_participants: islands whose pseudo-gradient is in the mean.
        pseudo_gradient_norm: L2 norm of this island's payload.
        cosine_to_mean: between it and the mean; None if this island is not in it.
        payload_bytes_sent: over all ranks of this island.
        exchange_s: seconds from start to the decoded result.
        waiting_s: the part of them until all islands were there.
        blocked_s: the part of them for which training stood still.
    """

    inner_step: int
    outer_step: int
    fragment: int
    num_participants: int
    pseudo_gradient_norm: float
    cosine_to_mean: float | None
    payload_bytes_sent: int
    exchange_s: float
    waiting_s: float
    blocked_s: float
    codec: str
    committed: bool


@dataclass(frozen=True)
class SyncResult:
    """Result of one sync.

    Attributes:
        mean: mean and own part; None unless committed.
        compensated: what was encoded (payload + residual); empty unless committed.
        role: what this island did; None where no session was opened.
        leader: member whose (outer step, fragment) was synced; None if it failed before that.
        weight: of this island in the mean; 0 = it abstained or observed.
        total_weight: sum over all islands.
        norm: of this island's payload.
        cosine: between it and the mean, or None.
        payload_bytes_sent: over all ranks of this island.
        exchange_s, waiting_s: see `SyncStats`.
        abstained, error: reasons, or None.
        interval_scale: sync interval over its initial value (adaptive low rank), or None.
        reducer_is_loaded: the reducer of the leader's fragment has loaded a received state and run with it.
    """

    mean: MeanResult | None = None
    compensated: list[Tensor] = field(default_factory=list)
    role: Role | None = None
    leader: Member | None = None
    weight: float = 0.0
    num_participants: int = 0
    norm: float = 0.0
    cosine: float | None = None
    payload_bytes_sent: int = 0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    abstained: str | None = None
    error: str | None = None
    interval_scale: float | None = None
    reducer_is_loaded: bool = False

    @property
    def committed(self) -> bool:
        return self.mean is not None


@dataclass
class PendingSync:
    """A measured pseudo-gradient; in flight once `future` is set.

    Attributes:
        event: the START it belongs to.
        inner_step: inner steps done when it was measured.
        deltas: pseudo-gradient, one fp32 tensor per shard.
        num_tokens: tokens trained since the previous measurement.
        payload: what crosses the WAN; the deltas themselves, except in `eager`.
    """

    event: Event
    inner_step: int
    deltas: list[Tensor]
    num_tokens: int
    payload: list[Tensor]
    future: Future[SyncResult] | None = None
