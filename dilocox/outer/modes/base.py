"""What a delay mode is: the order of events around a launch, and what APPLY does to the weights. Level 2.

A mode is one file. Its class methods are pure integers and are used by the schedule and by `dilocox plan`, so
modes are imported without torch. Its instances belong to one fragment on one rank and keep what the mode has
to remember beside anchor and weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from dilocox.outer import pseudo_gradient

if TYPE_CHECKING:
    from torch import Tensor

    from dilocox.outer.codec.base import MeanResult

Landing = Literal["at once", "after the delay", "at the next launch"]


class EventKind(StrEnum):
    """What level 2 does after an inner step."""

    MEASURE = "measure"
    START = "start"
    APPLY = "apply"


class FragmentTensors(Protocol):
    """The part of a fragment that a mode works on.

    Attributes:
        local: the island's weights: fp32 views of the masters, one per shard.
        anchor: fp32, one per shard, equal on all islands.
    """

    @property
    def local(self) -> list[Tensor]: ...

    @property
    def anchor(self) -> list[Tensor]: ...

    def outer_step(self, gradient: Sequence[Tensor]) -> None:
        """Takes one step of the outer optimizer. In place: anchor."""


class DelayMode(ABC):
    """One delay mode on one fragment.

    Args:
        fragment: its weights and anchors.
        alpha: `outer.mixing_alpha`; `streaming` alone uses it.

    Attributes:
        name: as in the configuration.
        landing: when a sync is applied, seen from its launch.
        anchors_are_shared: the anchors of all islands are equal between two syncs.
        single_fragment: the mode works on the whole model only.
    """

    name: ClassVar[str]
    landing: ClassVar[Landing]
    anchors_are_shared: ClassVar[bool] = True
    single_fragment: ClassVar[bool] = False

    def __init__(self, fragment: FragmentTensors, *, alpha: float) -> None:
        self.fragment = fragment
        self.alpha = alpha

    # -- pure integers ---------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def at_launch(cls, launch: int) -> list[tuple[EventKind, int]]:
        """Returns (kind, number of the launch it belongs to) of everything due at a launch, in order.

        Args:
            launch: counted from 0 over all fragments.
        """

    @classmethod
    def after_drain(cls, launch: int) -> int:
        """Returns under which number the sync of `launch` is applied when training ends with it in flight."""
        return launch

    # -- tensors ---------------------------------------------------------------------------------

    def measure(self) -> list[Tensor]:
        """Returns the pseudo-gradient: anchor - local, in new memory."""
        return pseudo_gradient.measure(self.fragment.anchor, self.fragment.local)

    def payload(self, deltas: list[Tensor]) -> list[Tensor]:
        """Returns what is averaged for a measured pseudo-gradient: itself, except in `eager`."""
        return deltas

    @abstractmethod
    def committed(
        self, result: MeanResult, fresh: list[Tensor] | None, *, share: float, contributed: bool
    ) -> None:
        """Applies a committed mean. In place: anchor, local.

        Args:
            fresh: pseudo-gradient measured after the one in `result`, not on the WAN yet; None without one.
            share: weight of this island in the mean that `fresh` goes into.
            contributed: this island's own payload is in the mean.
        """

    def discarded(  # noqa: B027  # most modes have nothing to undo
        self, deltas: Sequence[Tensor], fresh: list[Tensor] | None, *, share: float
    ) -> None:
        """Takes note of a failed sync. By default nothing: measured from the anchor, which has not moved, the
        next pseudo-gradient contains its progress.

        Args:
            deltas: the pseudo-gradient of the failed sync.
            fresh, share: as in `committed`.
        """

    def nothing_in_flight(self, fresh: list[Tensor] | None, *, share: float) -> None:  # noqa: B027
        """Runs an APPLY that no sync belongs to; only `eager` has one, at its first launch."""

    def reset(self) -> None:
        """Restarts from the anchor and drops everything private. In place: local."""
        pseudo_gradient.reset(self.fragment.local, self.fragment.anchor)

    # -- state -----------------------------------------------------------------------------------

    def tensors(self) -> dict[str, list[Tensor]]:
        """Returns what a checkpoint must hold, by kind; one fp32 tensor per shard. Not copies."""
        return {}

    def plain(self) -> dict[str, Any]:
        """Returns plain values that a checkpoint must hold."""
        return {}

    def load(self, tensors: Mapping[str, list[Tensor]], plain: Mapping[str, Any]) -> None:  # noqa: B027
        """Continues from `tensors` and `plain`."""
