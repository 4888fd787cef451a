"""What the training loop asks of level 2, whatever the method; and the level 2 of islands alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from dilocox.outer.schedule import Event

State = dict[str, Any]


class OuterLoop(Protocol):
    """One of `DilocoLoop` (DiLoCo), `WanDataParallel` (data parallel), `NoOuterLoop`.

    Attributes:
        interface: network interface of the WAN, or None.
        reduce_gradients: called in every inner step before clipping, or None.
    """

    interface: str | None
    reduce_gradients: Callable[[], None] | None

    def join(self, inner_step: int) -> int:
        """Meets the other islands; returns the inner steps done as the run counts them."""

    def events_after(self, inner_step: int) -> list[Event]:
        """What is due after this inner step (0-based), in order."""

    def measure(self, event: Event, inner_step: int) -> None: ...

    def start(self, event: Event) -> None: ...

    def apply(self, event: Event, inner_step: int) -> None: ...

    def drain(self, inner_step: int) -> None:
        """Finishes what is in flight after the last inner step (0-based)."""

    def add_tokens(self, num_tokens: int) -> None:
        """Counts tokens that this island has trained on."""

    def anchors(self) -> list[Tensor] | None:
        """fp32, one a shard; None where the local weights are all there is."""

    @property
    def num_outer_steps(self) -> int: ...

    def predicted_bytes(self) -> int:
        """Payload bytes of this rank that the formula gives for the syncs done."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: State) -> None: ...

    def close(self) -> None: ...


class NoOuterLoop:
    """Islands that never meet (`outer.method: none`)."""

    interface: str | None = None
    reduce_gradients: Callable[[], None] | None = None
    num_outer_steps = 0

    def join(self, inner_step: int) -> int:
        return inner_step

    def events_after(self, inner_step: int) -> list[Event]:
        return []

    def measure(self, event: Event, inner_step: int) -> None:
        raise AssertionError("no events without a method")

    def start(self, event: Event) -> None:
        raise AssertionError("no events without a method")

    def apply(self, event: Event, inner_step: int) -> None:
        raise AssertionError("no events without a method")

    def drain(self, inner_step: int) -> None:
        """Nothing is in flight."""

    def add_tokens(self, num_tokens: int) -> None:
        """Nobody weighs this island."""

    def anchors(self) -> list[Tensor] | None:
        return None

    def predicted_bytes(self) -> int:
        return 0

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        """Nothing to continue."""

    def close(self) -> None:
        """Nothing to leave."""
