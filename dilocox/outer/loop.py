"""The interface between the training loop and level 2, for every `outer.method`. Level 2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from torch import Tensor

from dilocox.outer.schedule import Event
from dilocox.param_shard import ShardState
from dilocox.position import Position


class OuterLoop(Protocol):
    """Implemented by `DilocoLoop` (diloco), `WanDataParallel` (data_parallel) and `NoOuterLoop` (none).

    Attributes:
        interface: network interface of the WAN, or None.
        reduce_gradients: called in every inner step before clipping, or None.
    """

    interface: str | None
    reduce_gradients: Callable[[], None] | None

    @property
    def position(self) -> Position:
        """Where the run is; nothing else owns it. `apply` may move it to where the other islands are."""

    def join(self, inner_step: int) -> int:
        """Meets the other islands. Returns the inner steps done, as the run counts them."""

    def step_done(self, num_tokens: int) -> None:
        """Counts one more inner step, on `num_tokens` tokens of this island."""

    def events(self) -> Iterator[Event]:
        """Yields what is due after the inner steps done, in order. An APPLY may change `position`."""

    def measure(self, event: Event) -> None: ...

    def start(self, event: Event) -> None: ...

    def apply(self, event: Event) -> None: ...

    def drain(self) -> None:
        """Finishes what is in flight after the last inner step."""

    def anchors(self) -> list[Tensor] | None:
        """Returns the anchors, fp32, one per shard; None where there are only local weights."""

    @property
    def num_outer_steps(self) -> int: ...

    def predicted_bytes(self) -> int:
        """Returns the payload bytes of this rank that the formula gives for the syncs done."""

    def state_dict(self) -> ShardState: ...

    def load_state_dict(self, state: ShardState) -> None: ...

    def close(self) -> None: ...
