"""Which block of a whole parameter a tensor parallel rank holds (level 1)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dilocox.inner.names import is_tensor_parallel


@dataclass(frozen=True)
class Block:
    """A rectangle of the global tensor; row-major, its elements are those of the rank's parameter, in order.

    Attributes:
        global_shape: of the whole parameter. The first linear layer of a SwiGLU is (2, ffn, hidden): Megatron
            gives a rank rows of the gate followed by the same rows of the value, which is one block of that
            tensor and two of (2 * ffn, hidden).
        offsets: where the block begins, one for each axis.
        shape: of the block, with the axes of `global_shape`.
    """

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.shape, strict=True))


def block_of(name: str, parameter: Tensor, *, swiglu: bool, tp_rank: int, tp_size: int) -> Block:
    """Returns the block of the whole parameter that this rank holds.

    Args:
        name: global parameter name.
        parameter: of this rank; Megatron marks tensor parallel ones.
    """
    shape = list(parameter.shape)
    dim: int | None = parameter.partition_dim if is_tensor_parallel(parameter) else None  # type: ignore[attr-defined]
    if swiglu and ".mlp.linear_fc1." in name:
        shape = [2, shape[0] // 2, *shape[1:]]
        dim = None if dim is None else dim + 1
    whole, offsets = list(shape), [0] * len(shape)
    if dim is not None:
        whole[dim] *= tp_size
        offsets[dim] = shape[dim] * tp_rank
    return Block(tuple(whole), tuple(offsets), tuple(shape))
