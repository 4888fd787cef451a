"""Membership: sessions on torchft's quorum, vote and healing. Level 2, sync thread only.

torchft decides membership; this module adds what it does not know: identity of the run, the info of each
member in island order, and errors that all ranks of the island see alike. torchft's own step counter is set
from `StateExchange.count` before every quorum, and is never read.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft.checkpointing.pg_transport import PGTransport
from torchft.coordination import LighthouseServer
from torchft.manager import Manager

from dilocox.config.schema import WanConfig
from dilocox.errors import IdentityError, QuorumError, WanError
from dilocox.outer.control_group import ControlGroup
from dilocox.outer.wan.address import WanAddress, pick_port
from dilocox.outer.wan.base import Member, State, StateExchange
from dilocox.outer.wan.process_group import WanProcessGroup

_MEMBER_BYTES = 2048
"""Length of a member info on the wire: JSON, padded with blanks, so that receivers know it beforehand."""


class TorchftTransport:
    """`Transport` over the WAN process group, for the members of one session."""

    def __init__(self, group: WanProcessGroup, *, order: Sequence[int], me: int) -> None:
        self.weights: Sequence[float] = [0.0] * len(order)
        self.index = order.index(me)
        self.bytes_sent = 0
        self._group = group
        self._order = list(order)  # position in island order -> rank in the group

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        empty = torch.empty(0, dtype=torch.uint8)
        send, sizes = [empty] * len(messages), [0] * len(messages)
        for position, rank in enumerate(self._order):
            if position != self.index:
                send[rank], sizes[rank] = messages[position], recv_bytes[position]
                self.bytes_sent += messages[position].numel()
        try:
            received = self._group.all_to_all(send, sizes)
        except RuntimeError as error:
            raise WanError(f"exchange with the other islands failed: {error}") from error
        result = [received[rank] for rank in self._order]
        result[self.index] = messages[self.index]
        return result


class TorchftSession:
    """One quorum: its members in island order, their transport, and the vote."""

    def __init__(self, manager: Manager, members: list[Member], transport: TorchftTransport) -> None:
        self.members = members
        self.transport = transport
        self._manager = manager

    def commit(self, ok: bool) -> bool:
        """Votes; True only if every rank of this island said ok and enough islands take part.

        Collective: all ranks of this island. Called once per session.
        """
        return self.vote(self._manager, ok)

    @staticmethod
    def vote(manager: Manager, ok: bool) -> bool:
        if not ok:
            manager.report_error(WanError("this rank votes against the sync"))
        return bool(manager.should_commit())


class TorchftWan:
    """The WAN of one rank: opens sessions with the ranks of equal coordinate on the other islands.

    Collective: construction, `open_session` and the vote, by all ranks of the island in the same order.

    Args:
        settings: the `wan` section; `lighthouse` must be set.
        address: where this rank listens.
        island_id: id of this island.
        control: this island's ranks, over a group that only the sync thread uses.
        identity: what all islands must agree on, as field -> value.
    """

    def __init__(
        self,
        settings: WanConfig,
        *,
        address: WanAddress,
        island_id: int,
        control: ControlGroup,
        identity: Mapping[str, str],
    ) -> None:
        if settings.lighthouse is None:
            raise QuorumError("wan.lighthouse is not set")
        self._control = control
        self._island_id = island_id
        self._lighthouse = settings.lighthouse
        self._wait_s = settings.timeout_s + settings.grace_s
        self._handed_over: State | None = None
        self._state: StateExchange | None = None
        timeout = timedelta(seconds=settings.timeout_s)
        self._group = WanProcessGroup(
            address.interface, streams=settings.streams, identity=identity, timeout=timeout
        )
        logging.getLogger("torchft").setLevel(logging.ERROR)
        replica_id = f"{identity.get('run_id', 'run')}-island-{island_id}"
        self._manager = self._build_manager(settings, address, timeout, replica_id)

    def _build_manager(
        self, settings: WanConfig, address: WanAddress, timeout: timedelta, replica_id: str
    ) -> Manager:
        # Two islands that start on one host look at different ports first.
        offset = 2 * self._island_id
        self._store, host, port = _island_store(address, settings.port_range, self._control, offset=offset)
        is_first = self._control.rank == 0
        return Manager(
            pg=self._group,
            load_state_dict=self._take_state,
            state_dict=self._serve_state,
            min_replica_size=settings.min_islands,
            use_async_quorum=False,
            init_sync=False,
            timeout=timeout,
            quorum_timeout=timedelta(seconds=self._wait_s),
            connect_timeout=timedelta(seconds=min(settings.timeout_s, 30.0)),
            rank=self._control.rank,
            world_size=self._control.num_ranks,
            store_addr=host,
            store_port=port,
            lighthouse_addr=settings.lighthouse,
            replica_id=replica_id,
            hostname=address.host_in_url(),
            port=pick_port(settings.port_range, offset=offset + 1) if is_first else None,
            heartbeat_interval=timedelta(seconds=1),
            checkpoint_transport=PGTransport(self._group, timeout, torch.device("cpu")),
        )

    def bind(self, state: StateExchange) -> None:
        """See `Wan.bind`."""
        self._state = state

    def open_session(self, member: Member) -> TorchftSession:
        """See `Wan.open_session`.

        Raises:
            QuorumError: no quorum in time, on all ranks of this island alike.
            IdentityError: an island of another run or with equal id is there.
            WanError: the state or the member infos did not arrive.
        """
        self._handed_over = None
        if self._state is not None:
            # torchft compares its step counter: a member with a lower one is sent a state.
            self._manager.load_state_dict({"step": self._state.count, "batches_committed": 0})
        self._agree_on_quorum(self._start_quorum())
        error: WanError | None = None
        try:
            # Before anything else can fail: a received state stays received, and the member info must say so.
            member = self._agree_on_state(member)
            # Only now, because healing reports its errors in the same place.
            self._check_connected()
            members, transport = self._swap_members(member)
        except WanError as problem:
            error = problem
        # One rank without its peers would leave the others of the island waiting in the collective.
        num_failed = self._control.sum([float(error is not None)])[0]
        if num_failed:
            # All ranks vote no, and torchft builds a new group next time.
            TorchftSession.vote(self._manager, False)
            raise error or WanError(f"{num_failed:.0f} other rank(s) of this island could not connect")
        return TorchftSession(self._manager, members, transport)

    def abort(self) -> None:
        """Breaks off the session that is open; its collective fails. May be called from any thread."""
        self._group.abort(errored=False)

    def shutdown(self) -> None:
        """Leaves: heartbeats end, and no session waits for this island any more."""
        self._manager.shutdown(wait=False)

    def _start_quorum(self) -> WanError | None:
        try:
            self._manager.start_quorum()
        except Exception as error:  # torchft raises what gRPC gave it; the kind of failure is its text
            # torchft asks for the last quorum's result before it starts the next one: without this, the old
            # failure would be raised again in every session.
            self._manager._quorum_future = None
            return QuorumError(f"no quorum from {self._lighthouse} within {self._wait_s:.0f} s: {error}")
        return None

    def _agree_on_quorum(self, error: WanError | None) -> None:
        """Raises on every rank of the island if one of them got no quorum."""
        num_failed = self._control.sum([float(error is not None)])[0]
        if num_failed:
            # A rank without a quorum cannot vote; torchft would have counted its vote of no like this.
            self._manager._commit_failures += 1
            raise error or QuorumError(f"{num_failed:.0f} other rank(s) of this island got no quorum")

    def _check_connected(self) -> None:
        """Raises the error that torchft met while it connected to the members or healed."""
        if (problem := self._manager.errored()) is not None:
            cause = problem.original_exception
            raise cause if isinstance(cause, WanError) else WanError(f"cannot connect to an island: {cause}")

    def _agree_on_state(self, member: Member) -> Member:
        """Takes over a received state if all ranks of the island have their part; else none of them does.

        Returns: the member info; of kind `observe` if a state was taken over.
        """
        received = float(self._handed_over is not None)
        num_received = self._control.sum([received])[0]
        if self._state is None or num_received < self._control.num_ranks:
            return member
        assert self._handed_over is not None
        self._state.receive(self._handed_over)
        return dataclasses.replace(
            member,
            kind="observe",
            weight=0.0,
            anchor_hash="",
            num_contributions=self._state.num_contributions,
        )

    def _swap_members(self, member: Member) -> tuple[list[Member], TorchftTransport]:
        size = self._group.size()
        me = self._group.rank_in_quorum
        text = json.dumps(dataclasses.asdict(member)).encode().ljust(_MEMBER_BYTES)
        message = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        swap = TorchftTransport(self._group, order=range(size), me=me)
        received = swap.all_to_all([message] * size, [_MEMBER_BYTES] * size)
        infos = [Member(**json.loads(bytes(data.numpy()))) for data in received]
        # Ranks of the group change from quorum to quorum; sums must be formed in an order that does not.
        order = sorted(range(size), key=lambda rank: infos[rank].island)
        members = [infos[rank] for rank in order]
        if len({member.island for member in members}) < size:
            raise IdentityError(f"two islands have the same id: {[member.island for member in members]}")
        transport = TorchftTransport(self._group, order=order, me=me)
        transport.weights = [member.weight for member in members]
        return members, transport

    def _take_state(self, state: State) -> None:
        self._handed_over = state

    def _serve_state(self) -> State:
        return {} if self._state is None else self._state.serve()


def _island_store(
    address: WanAddress, port_range: str | None, control: ControlGroup, *, offset: int
) -> tuple[TCPStore | None, str, int]:
    """Opens the island's store on rank 0, at the WAN address, where the other islands can reach it."""
    store = None
    if control.rank == 0:
        store = TCPStore(
            address.address, pick_port(port_range, offset=offset) or 0, is_master=True, wait_for_workers=False
        )
    host, port = json.loads(control.share(json.dumps([address.address, store.port if store else 0])))
    return store, host, int(port)


def serve_lighthouse(bind: str, *, min_islands: int, grace_s: float) -> LighthouseServer:
    """Starts torchft's lighthouse in this process.

    Args:
        bind: `HOST:PORT` to listen on; port 0 takes a free one.
        min_islands: fewest islands in a quorum.
        grace_s: seconds a quorum waits for islands that are alive but late.
    """
    return LighthouseServer(
        bind=bind,
        min_replicas=min_islands,
        join_timeout_ms=int(grace_s * 1000),
        quorum_tick_ms=100,
        # Ten heartbeats: data on a slow link may delay one of them, not ten.
        heartbeat_timeout_ms=10_000,
    )
