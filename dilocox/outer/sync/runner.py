"""One sync from proposal to vote, in the exchange thread; touches no weights. Level 2.

guard -> round with hellos -> error feedback -> compressor rounds over the collective -> vote. Everything
decided here is equal on all ranks of the island.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dilocox.errors import QuorumError, WanError
from dilocox.hashing import hash_tensors
from dilocox.outer.codec.base import MeanResult
from dilocox.outer.control_group import ControlGroup
from dilocox.outer.reduce.fragment_reducer import FragmentReducer
from dilocox.outer.wan.base import Member, QuorumSession, Wan
from dilocox.param_shard import ParamShard

_RETRY_PAUSE_S = 0.2
_JOIN_PAUSE_S = 1.0


@dataclass(frozen=True)
class SyncRequest:
    """What this island brings to a sync of one fragment.

    Attributes:
        deltas: pseudo-gradient, one fp32 tensor a shard; not written to while the sync runs.
        averaging: how it crosses the WAN.
        judge: norm -> reason to abstain, or None.
        anchor: of the fragment; all islands must have the same. Empty: theirs may differ.
    """

    hello: Member
    deltas: list[Tensor]
    shards: Sequence[ParamShard]
    averaging: FragmentReducer
    judge: Callable[[float], str | None]
    anchor: Sequence[Tensor] = ()


@dataclass
class SyncResult:
    """What came of a sync.

    Attributes:
        average: mean and own share; None unless committed.
        sent: what the own message was made from (pseudo-gradient + residual).
        weight: of this island in the mean; 0 = it only listened.
        norm: of this island's pseudo-gradient.
        cosine: between it and the mean; None if it abstained.
        payload_bytes_sent: over all ranks of this island.
        exchange_s, waiting_s: from start to the result, and to the moment when all islands were there.
        abstained, error: reasons, or None.
        healed: state handed over by another island, or None.
        interval_scale: sync interval over its initial value (adaptive low rank), or None.
    """

    average: MeanResult | None = None
    sent: list[Tensor] = field(default_factory=list)
    weight: float = 0.0
    num_participants: int = 0
    norm: float = 0.0
    cosine: float | None = None
    payload_bytes_sent: int = 0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    abstained: str | None = None
    error: str | None = None
    healed: dict[str, Any] | None = None
    interval_scale: float | None = None

    @property
    def committed(self) -> bool:
        return self.average is not None


@dataclass(frozen=True)
class JoinRules:
    """When a starting island may begin.

    Attributes:
        num_islands: begin when all of them are there.
        min_islands: begin with these when the timeout has passed.
    """

    num_islands: int
    min_islands: int
    timeout_s: float


@dataclass(frozen=True)
class Joined:
    """How an island got in.

    Attributes:
        inner_step: inner steps done as the run counts them.
        fragment, outcome: of the running sync that it listened to; None if all islands started together.
        healed: state handed over at a common start, or None.
    """

    inner_step: int
    num_islands: int
    fragment: int = 0
    outcome: SyncResult | None = None
    healed: dict[str, Any] | None = None


class SyncRunner:
    """Runs proposals on the WAN.

    Collective: every method, by all ranks of this island in the same order, in the exchange thread.

    Args:
        wan: opens rounds.
        island: this island's ranks, over a group that only the exchange thread uses.
        retry_s: how long an island that is ahead waits for one that is behind.
        stopping: True once this rank was told to stop; an open round is then given up.
    """

    def __init__(
        self, wan: Wan, island: ControlGroup, *, retry_s: float, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self.wan = wan
        self._island = island
        self._retry_s = retry_s
        self._stopping = stopping

    def run(self, proposal: SyncRequest) -> SyncResult:
        """Runs one sync; a failure is in the outcome, not raised."""
        started = time.perf_counter()
        outcome = SyncResult()
        try:
            self._guard(proposal, outcome)
            session = self._open(_complete(proposal, outcome))
            outcome.waiting_s = time.perf_counter() - started
            self._take_part(proposal, session, outcome)
        except WanError as error:
            outcome.error = str(error)
        outcome.exchange_s = time.perf_counter() - started
        return outcome

    def join(
        self,
        hello: Member,
        rules: JoinRules,
        *,
        listen: Callable[[Member, dict[str, Any] | None], SyncRequest],
        waiting: Callable[..., None],
    ) -> Joined:
        """Meets the other islands at start.

        Args:
            hello: of kind `join`.
            listen: makes a proposal for a sync that is under way, after taking over a state.
            waiting: told who is there when not all are.

        Raises:
            WanError: too few islands until the timeout, or one that does not fit.
        """
        deadline = time.monotonic() + rules.timeout_s
        healed: dict[str, Any] | None = None
        seen = -1
        while True:
            self._give_up_if_stopping()
            late = self._island.sum([float(time.monotonic() > deadline)])[0] > 0
            try:
                session = self.wan.open_session(hello)
            except QuorumError as error:
                if late:
                    raise
                waiting(reason=str(error))
                time.sleep(_JOIN_PAUSE_S)
                continue
            healed = session.healed or healed
            members = session.members
            running = next((member for member in members if member.kind == "sync"), None)
            if running is not None:
                outcome = SyncResult(healed=healed)
                try:
                    self._take_part(listen(running, healed), session, outcome)
                except WanError as error:
                    if late:
                        raise
                    waiting(reason=f"could not follow a sync that is under way: {error}")
                    continue
                return Joined(running.inner_step, len(members), running.fragment, outcome)
            if len(members) >= (rules.min_islands if late else rules.num_islands):
                if healed is None:
                    _check_anchors(members)
                session.commit(True)
                return Joined(max(m.inner_step for m in members), len(members), healed=healed)
            session.commit(False)
            if late:
                raise QuorumError(
                    f"{len(members)} of {rules.num_islands} islands after {rules.timeout_s:.0f} s "
                    f"(wan.join_timeout_s), and wan.min_islands is {rules.min_islands}"
                )
            if len(members) != seen:
                seen = len(members)
                missing = sorted(set(range(rules.num_islands)) - {member.island for member in members})
                waiting(
                    missing=f"island {', '.join(map(str, missing))}", here=f"{seen} of {rules.num_islands}"
                )
            time.sleep(_JOIN_PAUSE_S)

    def _take_part(self, proposal: SyncRequest, session: QuorumSession, outcome: SyncResult) -> None:
        """Averages in an open round and votes; fills in the outcome.

        Raises:
            WanError: this island has voted no.
        """
        transport = session.transport
        outcome.healed = session.healed or outcome.healed
        outcome.num_participants = sum(weight > 0 for weight in transport.weights)
        outcome.weight = transport.weights[transport.index]
        try:
            sent = proposal.averaging.compensate(proposal.deltas)
            average = proposal.averaging.average(sent, transport, proposal.hello)
        except WanError:
            session.commit(False)
            raise
        if not session.commit(True):
            raise WanError("another rank of this island failed, or fewer than wan.min_islands took part")
        outcome.sent, outcome.average = sent, average
        self._measure(proposal, outcome, average, transport.bytes_sent)

    def _guard(self, proposal: SyncRequest, outcome: SyncResult) -> None:
        squares = [float(delta.double().square().sum()) for delta in proposal.deltas]
        counted = [s for s, shard in zip(squares, proposal.shards, strict=True) if shard.counted]
        bad = [p.name for s, p in zip(squares, proposal.shards, strict=True) if not math.isfinite(s)]
        square, num_bad = self._island.sum([sum(counted), float(len(bad))])
        outcome.norm = math.nan if num_bad else math.sqrt(square)
        outcome.abstained = proposal.judge(outcome.norm)
        if bad and outcome.abstained is not None:
            outcome.abstained += f": {bad[0]}"

    def _open(self, hello: Member) -> QuorumSession:
        """Opens a round in which all islands mean the same fragment of the same step."""
        deadline = time.monotonic() + self._retry_s
        while True:
            session = self.wan.open_session(hello)
            stopping, late = self._island.sum([float(self._stopping()), float(time.monotonic() > deadline)])
            syncing = [member for member in session.members if member.kind == "sync"]
            places = {member.island: (member.inner_step, member.fragment) for member in syncing}
            aligned = session.healed is not None or len(set(places.values())) <= 1
            if aligned and not stopping:
                _check_anchors(syncing)
                return session
            session.commit(False)
            if stopping:
                raise WanError("this island is stopping")
            text = ", ".join(f"island {i} at inner step {s} fragment {f}" for i, (s, f) in places.items())
            if (hello.inner_step, hello.fragment) < max(places.values()):
                raise WanError(f"this island is behind and catches up: {text}")
            if late:
                raise WanError(f"another island is behind: {text}")
            time.sleep(_RETRY_PAUSE_S)

    def _give_up_if_stopping(self) -> None:
        if self._island.sum([float(self._stopping())])[0]:
            raise QuorumError("stopped while waiting for the other islands")

    def _measure(
        self, proposal: SyncRequest, outcome: SyncResult, average: MeanResult, bytes_sent: int
    ) -> None:
        dot = square = 0.0
        for delta, mean, shard in zip(proposal.deltas, average.mean, proposal.shards, strict=True):
            if shard.counted:
                dot += float(delta.flatten() @ mean.flatten())
                square += float(mean.double().square().sum())
        scale = proposal.averaging.interval_scale
        dot, square, total, scales = self._island.sum([dot, square, float(bytes_sent), scale or 0.0])
        outcome.payload_bytes_sent = int(total)
        length = outcome.norm * math.sqrt(square)
        outcome.cosine = dot / length if outcome.weight > 0 and length > 0 else None
        outcome.interval_scale = None if scale is None else scales / self._island.num_ranks


def _complete(proposal: SyncRequest, outcome: SyncResult) -> Member:
    """The hello with what takes time to find out: hash of the anchor, and no weight for who abstains."""
    hello = proposal.hello
    return replace(
        hello,
        weight=hello.weight if outcome.abstained is None else 0.0,
        anchor_hash=hash_tensors(proposal.anchor) if proposal.anchor else "",
    )


def _check_anchors(members: Sequence[Member]) -> None:
    hashes = {member.island: member.anchor_hash for member in members if member.anchor_hash}
    if len(set(hashes.values())) > 1:
        raise WanError(f"the islands' anchors differ, island -> hash: {hashes}")
