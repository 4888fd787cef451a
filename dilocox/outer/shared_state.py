"""The one owner of "where is this island": position, shared state, and the count that membership compares.

Shared state is what must be equal on all islands: anchors, outer optimizer, committed syncs, schedule. It is
made of the fragments, which the training thread changes in APPLY alone. A state that another island hands
over arrives in the sync thread. From that moment it is this island's state: it is the one that is
counted and served, although the training thread loads it into anchors and weights a little later, at its
next APPLY. That holds even if the sync that brought it fails. Level 2.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from dilocox.position import Position

State = dict[str, Any]


class StateSource(Protocol):
    """What holds the shared state in memory; `FragmentSet` is one.

    Attributes:
        num_syncs: committed syncs, over all fragments.
        num_contributions: pseudo-gradients that are in the anchors, over all islands and fragments.
    """

    @property
    def num_syncs(self) -> int: ...

    @property
    def num_contributions(self) -> int: ...

    def shared_state(self) -> State:
        """What must be equal on all islands. Not copies."""


class SharedState:
    """Position and shared state of one rank; a `wan.base.StateExchange`.

    Args:
        source: read in the sync thread while nothing changes it: only APPLY does, and no sync runs then.
    """

    def __init__(self, source: StateSource) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._inner_step = 0
        self._launched_at = 0
        self._received: State | None = None
        self._wanted = False

    # -- the training thread ---------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """Where the training thread is; a received state counts once it has been loaded."""
        return Position(self._inner_step, self._source.num_syncs)

    def step_done(self) -> None:
        """One more inner step is done."""
        self._inner_step += 1

    def launch(self, inner_step: int) -> None:
        """A sync that was measured after `inner_step` steps goes on the WAN."""
        with self._lock:
            self._launched_at = inner_step

    def move_to(self, inner_step: int) -> None:
        """Continues from a checkpoint, or from where the other islands are."""
        self._inner_step = inner_step

    def take_received(self) -> State | None:
        """The received state that must be loaded into the fragments now, or None; only once."""
        with self._lock:
            received, self._received = self._received, None
            return received

    # -- the sync thread -------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Counts from 1: a run without any sync differs from an island that asks for a state (0)."""
        with self._lock:
            return 0 if self._wanted else 1 + self._contributions()

    @property
    def num_contributions(self) -> int:
        """Of the effective state."""
        with self._lock:
            return self._contributions()

    @property
    def inner_step(self) -> int:
        """Inner steps done when the sync in flight was measured; of a received state: its owner's."""
        with self._lock:
            return self._launched_at if self._received is None else int(self._received["inner_step"])

    @property
    def is_received(self) -> bool:
        """Whether a received state has not been loaded yet."""
        with self._lock:
            return self._received is not None

    @property
    def received(self) -> State | None:
        """The received state that has not been loaded yet; to look at, not to change."""
        with self._lock:
            return self._received

    def want_state(self) -> None:
        """This island's state is wrong: from the next session on it asks for another island's."""
        with self._lock:
            self._wanted = True

    def serve(self) -> State:
        """See `StateExchange.serve`."""
        with self._lock:
            received, inner_step = self._received, self._launched_at
        if received is not None:
            return received
        own = self._source
        return {
            **own.shared_state(),
            "num_contributions": own.num_contributions,
            "inner_step": inner_step,
        }

    def receive(self, state: State) -> None:
        """See `StateExchange.receive`."""
        with self._lock:
            self._received = state
            self._wanted = False

    def _contributions(self) -> int:
        if self._received is not None:
            return int(self._received["num_contributions"])
        return self._source.num_contributions
