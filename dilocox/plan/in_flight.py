"""Bytes that the sync of one fragment holds on a rank while it is under way. No torch here.

Counted from what the sync does (`outer.sync`, `outer.reduce`): a test measures the real one against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dilocox.config.schema import OuterConfig

_FP32 = 4
_SCRATCH, _CHUNK_VALUES = 9, 1 << 19
"""Working memory of the block codecs on a CPU: bytes per value of one chunk, and values per chunk."""


def in_flight_bytes(
    outer: OuterConfig, *, numels: Sequence[int], num_islands: int, payload_bytes: int
) -> int:
    """Most bytes alive at once for a sync, beside what level 2 keeps between two syncs.

    Four fp32 copies of the fragment live until the sync is applied: the pseudo-gradient, with error feedback
    its sum with the residual, with a lossy codec what the others decode from the own messages, and the mean.
    On top comes the largest of:

    * the exchange: encoded messages, own and received, values that are being decoded, and what the codec
      works on;
    * the figures of the sync: one tensor at a time twice in fp64, as values and as squares;
    * with `eager`, the gradient that is put together when the sync is applied.

    Where a sync is applied at the next launch, the next pseudo-gradient has been measured by then.

    Args:
        outer: resolved.
        numels: elements of each tensor of the fragment that this rank owns.
        num_islands: islands in the sync.
        payload_bytes: that this rank sends in it.
    """
    fragment, largest = _FP32 * sum(numels), _FP32 * max(numels, default=0)
    is_low_rank = outer.codec == "low_rank"
    is_lossy = outer.codec != "none" and (num_islands > 1 or is_low_rank)
    held = 2 + outer.error_feedback + is_lossy  # copies of the fragment: pseudo-gradient and mean at least
    exchange = encoded_bytes(payload_bytes, num_islands)
    if is_low_rank:
        exchange += 2 * largest  # a product of factors, in fp64
    elif num_islands > 1:
        # Two islands: a second message is decoded while the sum of both is formed. More: the owned part as
        # averaged, and what its second encoding lost.
        exchange += 2 * fragment // num_islands
        if outer.codec not in ("none", "bf16"):
            exchange += _SCRATCH * min(max(numels, default=0), _CHUNK_VALUES)
    figures = 4 * largest
    gradient = fragment if outer.delay_mode == "eager" else 0
    fresh = fragment if outer.delay_mode in ("delayed_keep", "delayed_reset", "eager") else 0
    return held * fragment + max(exchange, figures, gradient) + fresh


def encoded_bytes(payload_bytes: int, num_islands: int) -> int:
    """Encoded messages alive at once in a sync: those that are sent and those that come in.

    With K islands (K-1)/K of both is sent; the rest stays here but is encoded as well.
    """
    return payload_bytes * num_islands // (num_islands - 1) if num_islands > 1 else 0
