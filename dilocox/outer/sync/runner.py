"""One sync from request to vote, in the sync thread; changes no weights and no anchors. Level 2.

guard -> session with member infos -> roles -> error feedback -> passes of the reducer -> vote. Everything
decided here is equal on all ranks of the island.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dilocox.errors import WanError
from dilocox.hashing import combine, hash_tensors
from dilocox.outer.codec.base import MeanResult
from dilocox.outer.control_group import ControlGroup
from dilocox.outer.shared_state import SharedState
from dilocox.outer.sync.request import SyncRequest, SyncResult, SyncTarget
from dilocox.outer.sync.roles import Role, Roles, assign_roles
from dilocox.outer.wan.base import QuorumSession, Wan
from dilocox.outer.wan.header import SyncId


class SyncRunner:
    """Runs syncs on the WAN.

    Collective: every method, by all ranks of this island in the same order, in the sync thread.

    Args:
        wan: opens sessions.
        control: this island's ranks, over a group that only the sync thread uses.
        state: owner of position and shared state; receives what other islands hand over.
        targets: by fragment, for syncs in which this island takes the result only.
        stopping: True once this rank was told to stop; no session is opened then.
    """

    def __init__(
        self,
        wan: Wan,
        control: ControlGroup,
        state: SharedState,
        *,
        targets: Sequence[SyncTarget],
        stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.wan = wan
        self.control = control
        self.state = state
        self._targets = targets
        self._stopping = stopping
        wan.bind(state)

    def run(self, request: SyncRequest) -> SyncResult:
        """Runs one sync; a failure is in the result, not raised."""
        started = time.perf_counter()
        seen: dict[str, Any] = {}
        try:
            # The guard comes before the session: its result, the weight, is part of the member info.
            seen["norm"], seen["abstained"] = self._guard(request)
            # A session that this island opened and left would hold up the others until their timeout.
            if self.is_stopping():
                raise WanError("this island is stopping")
            member = replace(
                request.member,
                num_contributions=self.state.num_contributions,
                weight=request.member.weight if seen["abstained"] is None else 0.0,
                anchor_hash=self.anchor_hash(request.anchor) if request.anchor else "",
            )
            session = self.wan.open_session(member)
            seen["waiting_s"] = time.perf_counter() - started
            roles = assign_roles(session.members)
            if roles is None:
                session.commit(False)
                raise WanError("no island of this session brings a pseudo-gradient")
            self._take_part(session, roles, member.island, request, seen)
        except WanError as error:
            seen["error"] = str(error)
        return SyncResult(**seen, exchange_s=time.perf_counter() - started)

    def observe(self, session: QuorumSession, roles: Roles, island: int) -> SyncResult:
        """Takes the result of a sync that other islands run; a failure is in the result, not raised."""
        started = time.perf_counter()
        seen: dict[str, Any] = {}
        try:
            self._take_part(session, roles, island, None, seen)
        except WanError as error:
            seen["error"] = str(error)
        return SyncResult(**seen, exchange_s=time.perf_counter() - started)

    def anchor_hash(self, anchor: Sequence[Tensor]) -> str:
        """Returns the hash over the anchors of all ranks of this island."""
        return combine(self.control.gather(hash_tensors(anchor)))

    def is_stopping(self) -> bool:
        """Whether any rank of the island was told to stop."""
        return self.control.sum([float(self._stopping())])[0] > 0

    def _take_part(
        self,
        session: QuorumSession,
        roles: Roles,
        island: int,
        request: SyncRequest | None,
        seen: dict[str, Any],
    ) -> None:
        """Averages in an open session and votes. In place: `seen`, fields of the result.

        Raises:
            WanError: this island has voted no.
        """
        role, transport = roles.of(island), session.transport
        # All members derive equal weights, so each knows which messages to expect from whom.
        transport.weights = roles.weights(session.members)
        seen.update(
            role=role,
            leader=roles.leader,
            weight=transport.weights[transport.index],
            num_participants=sum(weight > 0 for weight in transport.weights),
        )
        try:
            target, payload = self._contribution(role, roles, request, seen)
            compensated = target.reducer.compensate(payload)
            sync = SyncId(roles.leader.run_id, roles.leader.fragment, roles.leader.outer_step)
            mean = target.reducer.reduce(
                compensated, transport, sync=sync, inner_step=roles.leader.inner_step
            )
        except WanError:
            # A session needs exactly one vote of every rank, also where the collective has failed.
            session.commit(False)
            raise
        if role is Role.DIVERGED:
            # The result belongs on top of an anchor that this island does not have. The others commit it.
            self.state.want_state()
            session.commit(False)
            raise WanError(
                f"the anchor of fragment {roles.leader.fragment} differs from that of island "
                f"{roles.leader.island}; this island takes over the state of the others at the next sync"
            )
        if not session.commit(True):
            raise WanError("another rank of this island failed, or fewer than wan.min_islands took part")
        # `mean` only after the vote: a result with a mean is a committed one.
        seen.update(compensated=compensated, mean=mean)
        self._measure(target, payload, mean, transport.bytes_sent, seen)

    def _contribution(
        self, role: Role, roles: Roles, request: SyncRequest | None, seen: dict[str, Any]
    ) -> tuple[SyncTarget, list[Tensor]]:
        """Returns what this island puts into the collective: its payload, or zeros of weight 0."""
        if role is Role.CONTRIBUTE and request is not None:
            return request.target, request.payload
        fragment = roles.leader.fragment
        target = self._targets[fragment]
        received = self.state.received
        if received is not None and received["fragments"]:
            # The passes of low_rank need the bases of the others. The training thread loads the rest of the
            # received state, and leaves this reducer alone: by then it has learned from this sync.
            target.reducer.load_shared_state(received["fragments"][fragment]["reducer"])
            seen["reducer_is_loaded"] = True
        return target, [torch.zeros_like(shard.tensor) for shard in target.shards]

    def _guard(self, request: SyncRequest) -> tuple[float, str | None]:
        """Returns the payload's norm over all ranks of the island, and the reason to abstain or None."""
        shards = request.target.shards
        squares = [_square(tensor) for tensor in request.payload]
        counted = [s for s, shard in zip(squares, shards, strict=True) if shard.counted]
        bad = [shard.label for s, shard in zip(squares, shards, strict=True) if not math.isfinite(s)]
        # Non-finite values may be in a copy that is not counted, so they are counted apart from the norm.
        square, num_bad = self.control.sum([sum(counted), float(len(bad))])
        norm = math.nan if num_bad else math.sqrt(square)
        reason = request.abstain_reason(norm)
        if bad and reason is not None:
            reason += f": {bad[0]}"
        return norm, reason

    def _measure(
        self,
        target: SyncTarget,
        payload: list[Tensor],
        result: MeanResult,
        bytes_sent: int,
        seen: dict[str, Any],
    ) -> None:
        """Measures cosine, bytes and the interval scale over all ranks of the island. In place: `seen`."""
        dot = square = 0.0
        for delta, mean, shard in zip(payload, result.mean, target.shards, strict=True):
            if shard.counted:
                dot += float(delta.flatten() @ mean.flatten())
                square += _square(mean)
        scale = target.reducer.interval_scale
        dot, square, total, scales = self.control.sum([dot, square, float(bytes_sent), scale or 0.0])
        length = seen.get("norm", 0.0) * math.sqrt(square)
        seen["payload_bytes_sent"] = int(total)
        seen["cosine"] = dot / length if seen["weight"] > 0 and length > 0 else None
        seen["interval_scale"] = None if scale is None else scales / self.control.num_ranks


def _square(tensor: Tensor) -> float:
    """Returns the squared L2 norm, summed in fp64 without a copy in fp64."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64)) ** 2
