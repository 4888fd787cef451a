"""Which parts of the model are synced together. Level 2, no torch.

A fragment takes whole layers of *every* pipeline stage, so that each stage has WAN traffic at each sync. The
assignment depends on the sizes of whole parameters, never on what one rank owns: it is equal on all islands
and on all ranks of a stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, Protocol

Role = Literal["embedding", "layer", "head"]
Pattern = Literal["strided", "sequential"]
Unit = tuple[Role, int | None]


class Placed(Protocol):
    """Anything with a place in the model: a `ParamShard` or a `shapes.ParameterShape`."""

    @property
    def role(self) -> Role: ...

    @property
    def layer(self) -> int | None: ...


class Sized(Placed, Protocol):
    """A whole parameter of a stage."""

    @property
    def numel(self) -> int: ...


def assign(parameters: Iterable[Sized], num_fragments: int, pattern: Pattern) -> dict[Unit, int]:
    """Assigns the units of one pipeline stage (embedding, each layer, head) to fragments.

    * sequential: neighbouring units, split so that the largest fragment is as small as possible;
    * strided: layers in turn, each to the lightest fragment, which gives p, p + P, p + 2P ... where layers
      are equal; embedding and head come before the layers if they are larger than a layer, else after them.

    Args:
        parameters: of the stage, whole, without the copy of a tied embedding.
        num_fragments: at most the number of units.

    Returns:
        Fragment of each (role, layer); every fragment has at least one unit.
    """
    sizes: dict[Unit, int] = {}
    for parameter in parameters:
        unit = (parameter.role, parameter.layer)
        sizes[unit] = sizes.get(unit, 0) + parameter.numel
    if num_fragments > len(sizes):
        raise ValueError(f"{num_fragments} fragments but only {len(sizes)} parts in a stage")
    return _strided(sizes, num_fragments) if pattern == "strided" else _sequential(sizes, num_fragments)


def group(shards: Sequence[Placed], assignment: dict[Unit, int], num_fragments: int) -> list[list[int]]:
    """Returns the indices of the shards of each fragment, in the order of `shards`; every index once."""
    fragments: list[list[int]] = [[] for _ in range(num_fragments)]
    for index, shard in enumerate(shards):
        fragments[assignment[shard.role, shard.layer]].append(index)
    return fragments


def _in_order(sizes: dict[Unit, int], roles: Sequence[Role]) -> list[Unit]:
    """Units by role, layers by number; the order of the parameters does not matter."""
    return sorted(sizes, key=lambda unit: (roles.index(unit[0]), -1 if unit[1] is None else unit[1]))


def _strided(sizes: dict[Unit, int], num_fragments: int) -> dict[Unit, int]:
    loads = [0] * num_fragments
    assignment: dict[Unit, int] = {}
    largest_layer = max((size for (role, _), size in sizes.items() if role == "layer"), default=0)
    units = _in_order(sizes, ("embedding", "head", "layer"))
    for unit in sorted(units, key=lambda unit: unit[0] != "layer" and sizes[unit] < largest_layer):
        lightest = min(range(num_fragments), key=lambda fragment: (loads[fragment], fragment))
        assignment[unit] = lightest
        loads[lightest] += sizes[unit]
    return assignment


def _sequential(sizes: dict[Unit, int], num_fragments: int) -> dict[Unit, int]:
    """Solves the linear partition problem.

    best[f][n] = (smallest possible size of the largest of f fragments of n units, where the last one begins).
    """
    units = _in_order(sizes, ("embedding", "layer", "head"))
    total = [0, *accumulate(sizes[unit] for unit in units)]
    best: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for fragments in range(1, num_fragments + 1):
        last = best[-1]
        best.append(
            {
                end: min(
                    (max(last[begin][0], total[end] - total[begin]), begin) for begin in last if begin < end
                )
                for end in range(fragments, len(units) + 1)
            }
        )
    assignment: dict[Unit, int] = {}
    end = len(units)
    for fragment in reversed(range(num_fragments)):
        begin = best[fragment + 1][end][1]
        assignment.update(dict.fromkeys(units[begin:end], fragment))
        end = begin
    return assignment
