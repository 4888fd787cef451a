"""Pseudo-gradients and what an applied outer update does to the local weights. Level 2, pure tensor maths.

All functions take lists of fp32 tensors of equal shapes, one entry per shard. The state of a fragment:

* local: the weights that the island trains;
* anchor: the weights after the last applied outer update;
* reference: where the next pseudo-gradient is measured from. It is the anchor, except with `delayed_keep`.

The sign, once and for all: pseudo-gradient = old - new, so that descending subtracts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the schedule and `dilocox plan` load the delay modes without torch
    from torch import Tensor

    Tensors = Sequence[Tensor]


def measure(reference: Tensors, local: Tensors) -> list[Tensor]:
    """Returns: reference - local, in new memory."""
    return [start - now for start, now in zip(reference, local, strict=True)]


def reset(local: Tensors, anchor: Tensors) -> None:
    """Sets local to the anchor: the next inner step starts there (`blocking`, `eager`, `delayed_reset`).

    In place: local.
    """
    for now, new in zip(local, anchor, strict=True):
        now.copy_(new)


def mix(local: Tensors, anchor: Tensors, *, alpha: float) -> None:
    """Mixes (`streaming`): local = alpha * local + (1 - alpha) * anchor (2501.18512, eq. 3).

    alpha weighs the *local* value; 0 takes the anchor bit for bit.

    In place: local.
    """
    if alpha == 0:
        reset(local, anchor)
        return
    for now, new in zip(local, anchor, strict=True):
        now.mul_(alpha).add_(new, alpha=1 - alpha)


def advance_reference(reference: Tensors, local: Tensors) -> None:
    """Moves the reference after `measure` (`delayed_keep`): no progress is measured twice.

    In place: reference.
    """
    reset(reference, local)


def keep_private(local: Tensors, reference: Tensors, anchor: Tensors, *, pending: Sequence[Tensors]) -> None:
    """Sets local to the new anchor minus all own progress that is not in it yet (`delayed_keep`).

    That progress is what has been measured and is not applied yet (`pending`) and what has been done since
    the last measurement (reference - local), which stays to be measured from the new reference.

    Args:
        local, reference: of this fragment.
        anchor: already updated with the pseudo-gradient that has arrived.
        pending: own pseudo-gradients, measured but neither applied nor restored.

    In place: local, reference.
    """
    for index, new in enumerate(anchor):
        # Before the reference moves: the difference is what the next MEASURE must still see.
        since = reference[index] - local[index]
        start = new.clone()
        for delta in pending:
            start.sub_(delta[index])
        reference[index].copy_(start)
        local[index].copy_(start.sub_(since))


def restore_unsent(reference: Tensors, delta: Tensors) -> None:
    """Moves the reference back after a discarded sync (`delayed_keep`): its progress is measured again.

    The other modes measure from the anchor, which has not moved, so there is nothing to restore.

    In place: reference.
    """
    for start, lost in zip(reference, delta, strict=True):
        start.add_(lost)


def eager_share(
    fresh: Tensors | None,
    previous_mean: Tensors | None,
    previous_own: Tensors | None,
    *,
    fresh_share: float,
    previous_share: float,
) -> list[Tensor]:
    """Returns own fresh progress plus that of the others one interval late (`eager`, 2502.12996).

    delta~ = fresh_share * fresh + (previous_mean - previous_share * previous_own). Every pseudo-gradient is
    used once by each island with the weight it has in the mean, which holds only if `previous_share` is the
    `fresh_share` with which `previous_own` was used one interval earlier. After a discarded sync its
    pseudo-gradient must be added to the next payload (and so to the next `previous_own`), not to `fresh`: the
    own share of it has been used.

    Args:
        fresh: own pseudo-gradient of this interval; None in the drain.
        previous_mean: mean of the last sync; None in the first interval or where that sync was discarded.
        previous_own: own payload of the last sync, before any codec.
        fresh_share, previous_share: weight of this island in the mean, 1/K for uniform weights.

    Returns: what the outer optimizer takes as the gradient, in new memory.
    """
    if previous_mean is None or previous_own is None:
        if fresh is None:
            raise ValueError("neither a fresh pseudo-gradient nor a previous mean")
        return [delta * fresh_share for delta in fresh]
    others = [mean - own * previous_share for mean, own in zip(previous_mean, previous_own, strict=True)]
    if fresh is not None:
        for total, delta in zip(others, fresh, strict=True):
            total.add_(delta, alpha=fresh_share)
    return others
