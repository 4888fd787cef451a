"""The outer loop of islands that never meet (`outer.method: none`).

It lives outside `dilocox.outer`, so that a plain Megatron trainer remains without level 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from dilocox.param_shard import ShardState
from dilocox.position import Position

if TYPE_CHECKING:
    from dilocox.outer.schedule import Event


class NoOuterLoop:
    """An `OuterLoop` without events."""

    interface: str | None = None
    reduce_gradients: Callable[[], None] | None = None
    num_outer_steps = 0

    def __init__(self) -> None:
        self._inner_step = 0

    @property
    def position(self) -> Position:
        return Position(self._inner_step, 0)

    def join(self, inner_step: int) -> int:
        self._inner_step = inner_step
        return inner_step

    def step_done(self, num_tokens: int) -> None:
        self._inner_step += 1

    def events(self) -> Iterator[Event]:
        return iter(())

    def measure(self, event: Event) -> None:
        raise AssertionError("no events without a method")

    def start(self, event: Event) -> None:
        raise AssertionError("no events without a method")

    def apply(self, event: Event) -> None:
        raise AssertionError("no events without a method")

    def drain(self) -> None:
        """No-op: nothing is in flight."""

    def anchors(self) -> list[Tensor] | None:
        return None

    def predicted_bytes(self) -> int:
        return 0

    def state_dict(self) -> ShardState:
        return ShardState()

    def load_state_dict(self, state: ShardState) -> None:
        """No-op: there is no state."""

    def close(self) -> None:
        """No-op: there is no WAN."""
