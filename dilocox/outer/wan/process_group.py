"""The WAN process group of one coordinate: torchft's reconfigurable gloo, on a chosen interface. Level 2.

Three things are added to torchft's `ProcessGroupGloo`: it binds to the WAN interface instead of the one that
the host name resolves to, it refuses islands of another run before it connects to them, and it can spread a
message over several TCP connections per pair of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed import ProcessGroup as BaseProcessGroup
from torch.distributed import ProcessGroupGloo as TorchGloo  # torch's stubs know only a part of it
from torchft.process_group import ProcessGroupGloo, create_store_client

from dilocox.errors import IdentityError

_LONGEST_IDENTITY_WAIT = timedelta(seconds=30)
_DATA_TAG = 0  # torchft's healing counts from 1


class WanProcessGroup(ProcessGroupGloo):  # type: ignore[misc]  # torchft has no stubs
    """Ranks of equal coordinate, one of each island in the quorum.

    Args:
        interface: network interface that carries the WAN traffic.
        streams: TCP connections per pair of ranks; a message is split into that many parts.
        identity: what all members must agree on, as field -> value; compared before connecting.
        timeout: longest wait of one operation.
    """

    def __init__(
        self, interface: str, *, streams: int, identity: Mapping[str, str], timeout: timedelta
    ) -> None:
        super().__init__(timeout=timeout)
        self._interface = interface
        self._num_streams = streams
        self._identity = dict(identity)
        self._streams: list[Any] = []
        self.rank_in_quorum = 0

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Leaves the old group and joins the one of a new quorum; called by torchft's Manager.

        Raises:
            IdentityError: a member differs in a field of `identity`.
        """
        self.rank_in_quorum = rank
        # First: with another run's ranks even connecting would hang or mix the groups.
        self._check_identity(store_addr, rank, world_size)
        super().configure(
            store_addr,
            replica_id,
            rank,
            world_size,
            quorum_id,
            group_rank,
            group_world_size,
            global_ranks,
        )

    def all_to_all(self, messages: Sequence[Tensor], recv_bytes: Sequence[int]) -> list[Tensor]:
        """Sends messages[k] to member k and returns recv_bytes[k] bytes from each; uint8, CPU, 1-D.

        All receives are posted before any send. Gloo announces a receive on the connection that carries the
        data; announced behind a message, it would delay the other direction until that message has been sent,
        and the link would be used one way at a time.
        """
        received = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in recv_bytes]
        streams = list(enumerate(self._streams))
        works = [
            group.recv([part], member, _DATA_TAG)
            for stream, group in streams
            for member, output in enumerate(received)
            if (part := self._part(output, stream)).numel()
        ]
        works += [
            group.send([part], member, _DATA_TAG)
            for stream, group in streams
            for member, message in enumerate(messages)
            if (part := self._part(message, stream)).numel()
        ]
        for work in works:
            work.wait(self._timeout)
        return received

    def abort(self, errored: bool = True) -> None:
        """Breaks off running operations: those that wait fail at once."""
        for group in self._streams:
            group.abort()
        self._streams = []
        super().abort(errored)

    def _part(self, message: Tensor, stream: int) -> Tensor:
        """Returns the part of a message that one stream carries; a view."""
        first, last = (message.numel() * n // self._num_streams for n in (stream, stream + 1))
        return message[first:last]

    def _create_pg(self, store: Store, rank: int, world_size: int) -> BaseProcessGroup:
        self._streams = [
            self._connect(PrefixStore(f"stream{stream}", store), rank, world_size)
            for stream in range(self._num_streams)
        ]
        # torchft's healing sends and receives over the first stream.
        group = BaseProcessGroup(store, rank, world_size)
        group._set_default_backend(BaseProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), BaseProcessGroup.BackendType.GLOO, self._streams[0])
        return group

    def _connect(self, store: Store, rank: int, world_size: int) -> Any:
        gloo: Any = TorchGloo
        options = gloo._Options()
        options._timeout = self._timeout
        options._devices = [gloo.create_device(interface=self._interface)]
        group = gloo(store, rank, world_size, options)
        group._set_sequence_number_for_group()
        return group

    def _check_identity(self, store_addr: str, rank: int, world_size: int) -> None:
        """Compares identities by the store of this quorum, before any connection is made."""
        timeout = min(self._timeout, _LONGEST_IDENTITY_WAIT)
        store = PrefixStore("identity", create_store_client(store_addr, timeout=timeout))
        # Every member writes before it reads, so none waits for another's comparison.
        store.set(str(rank), json.dumps(self._identity))
        for member in range(world_size):
            try:
                theirs = json.loads(store.get(str(member)))
            except RuntimeError as error:  # DistStoreError
                raise IdentityError(
                    f"member {member} of the quorum did not identify itself in {timeout.seconds} s: "
                    "it has stopped, or it has fewer ranks"
                ) from error
            for field, mine in self._identity.items():
                if theirs.get(field) != mine:
                    raise IdentityError(
                        f"member {member} of the quorum has {field} {theirs.get(field)!r}, this island has "
                        f"{mine!r}: islands that share a lighthouse must belong to one run"
                    )
