"""Every codec in one table: its facts that need no torch, and where it is built. Level 2.

A codec is a file of its own that defines a build function, and one entry here (and its name in
`config.schema.CodecName`). `dilocox plan` uses the sizes, the header the wire ids, the reducer the builders.

Registries are immutable: `CODECS.extended(entry)` returns a new one, which `FragmentReducer` accepts too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.sizes import CastSizes, ScaledSizes, dense_passes, low_rank_passes

if TYPE_CHECKING:
    from dilocox.config.schema import OuterConfig
    from dilocox.outer.codec.base import Codec, Compressor
    from dilocox.param_shard import ParamShard

Residual = Literal["local", "gather"]
"""local = the error of an island's own message; gather = the error of requantising an averaged part."""

MessageSizes = Callable[[Sequence[BlockGrid], int], int]
"""(grids of the tensors, block_size) -> payload bytes of one message, exactly."""

PassGrids = Callable[[Sequence[Sequence[int]], Sequence[BlockGrid], int], list[list[BlockGrid]]]
"""(shapes, grids, codec_rank) -> grids of the tensors that each averaging pass carries."""

BuildCodec = Callable[["CodecEntry", int, str], "Codec"]
"""(entry, block_size, rounding) -> codec."""

BuildCompressor = Callable[["OuterConfig", Sequence["ParamShard"]], "Compressor"]


@dataclass(frozen=True)
class CodecEntry:
    """Facts and builders of a codec.

    Builders are callables or, so that the table needs no torch, `"module:function"`.

    Attributes:
        name: value of `outer.codec`.
        wire_id: number in the header, 0 to 255, never given to another codec; None with a `carrier`.
        message_bytes: length of a message; None with a `carrier`.
        build: makes the codec; None with a `carrier`.
        carrier: codec that encodes its tensors; None = it encodes them itself.
        compressor: makes the `Compressor`; default: the pseudo-gradient itself is averaged.
        pass_grids: the tensors of each averaging pass, without torch, for predicted bytes.
        residuals: the error feedback it supports.
        collective: name of the strategy in `reduce.all_reduce.COLLECTIVES`.
        has_blocks: values share scales, so decoded values depend on where blocks begin.
    """

    name: str
    wire_id: int | None = None
    message_bytes: MessageSizes | None = None
    build: str | BuildCodec | None = None
    carrier: str | None = None
    compressor: str | BuildCompressor = "dilocox.outer.codec.base:build_dense"
    pass_grids: PassGrids = dense_passes
    residuals: frozenset[Residual] = frozenset({"local", "gather"})
    collective: str = "dense"
    has_blocks: bool = True

    def __post_init__(self) -> None:
        own = (self.wire_id, self.message_bytes, self.build)
        wanted = "none of" if self.carrier else "all of"
        if any((part is None) != (self.carrier is not None) for part in own):
            raise ValueError(f"codec {self.name!r} needs {wanted} wire_id, message_bytes and build")
        if self.wire_id is not None and not 0 <= self.wire_id <= 255:
            raise ValueError(f"codec {self.name!r}: wire_id {self.wire_id} is not in 0..255")

    def num_bytes(self, grids: Sequence[BlockGrid], block_size: int) -> int:
        """Returns the payload bytes of one message, without its header."""
        assert self.message_bytes is not None, f"{self.name} crosses in {self.carrier}"
        return self.message_bytes(grids, block_size)

    def build_codec(self, block_size: int, rounding: str = "nearest") -> Codec:
        """Builds the codec.

        Args:
            block_size: values that share one scale, a multiple of 8.
            rounding: nearest or stochastic.
        """
        assert self.build is not None, f"{self.name} crosses in {self.carrier}"
        codec: Codec = _loaded(self.build)(self, block_size, rounding)
        return codec

    def build_compressor(self, config: OuterConfig, shards: Sequence[ParamShard]) -> Compressor:
        """Builds the compressor of a fragment."""
        compressor: Compressor = _loaded(self.compressor)(config, shards)
        return compressor


class CodecRegistry:
    """Codecs by name and by wire id; immutable.

    Raises:
        ValueError: two entries have the same name or wire id, or a carrier is missing.
    """

    def __init__(self, entries: Iterable[CodecEntry]) -> None:
        self._entries = tuple(entries)
        self._by_name = {entry.name: entry for entry in self._entries}
        self._by_wire_id = {entry.wire_id: entry for entry in self._entries if entry.wire_id is not None}
        if len(self._by_name) < len(self._entries):
            raise ValueError(f"a codec name is given twice: {[entry.name for entry in self._entries]}")
        with_ids = [entry for entry in self._entries if entry.wire_id is not None]
        if len(self._by_wire_id) < len(with_ids):
            raise ValueError(f"a wire id is given twice: {[(e.name, e.wire_id) for e in with_ids]}")
        for entry in self._entries:
            if entry.carrier is not None and self.get(entry.carrier).wire_id is None:
                raise ValueError(f"{entry.name} cannot cross in {entry.carrier}, which has no wire id")

    def extended(self, *entries: CodecEntry) -> CodecRegistry:
        """Returns a registry with more codecs."""
        return CodecRegistry((*self._entries, *entries))

    def get(self, name: str) -> CodecEntry:
        """Returns the entry of a codec."""
        if name not in self._by_name:
            raise ValueError(f"no codec is called {name!r}; there are {', '.join(self._by_name)}")
        return self._by_name[name]

    def carrier(self, name: str) -> CodecEntry:
        """Returns the codec that encodes the tensors of a codec: itself or its carrier."""
        entry = self.get(name)
        return entry if entry.carrier is None else self.get(entry.carrier)

    def wire_name(self, wire_id: int) -> str | int:
        """Returns the name of a received wire id, or the number if no codec has it."""
        return self._by_wire_id[wire_id].name if wire_id in self._by_wire_id else wire_id

    def wire_names(self) -> list[str]:
        """Names of the codecs that encode themselves."""
        return [entry.name for entry in self._entries if entry.wire_id is not None]


def _loaded(target: str | Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function behind `"module:function"`."""
    if not isinstance(target, str):
        return target
    module, _, function = target.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), function)
    return loaded


_CAST = "dilocox.outer.codec.cast:build"
_BLOCKS = "dilocox.outer.codec.block_codec:build"

CODECS = CodecRegistry(
    [
        CodecEntry("none", 0, CastSizes(4), _CAST, has_blocks=False),
        CodecEntry("bf16", 1, CastSizes(2), _CAST, has_blocks=False),
        CodecEntry("int8", 2, ScaledSizes(8), _BLOCKS),
        CodecEntry("int4", 3, ScaledSizes(4), _BLOCKS),
        CodecEntry("nf4", 4, ScaledSizes(4), _BLOCKS),
        CodecEntry("e3m0", 5, ScaledSizes(4), _BLOCKS),
        CodecEntry(
            "low_rank",
            carrier="int4",
            compressor="dilocox.outer.codec.low_rank:build",
            pass_grids=low_rank_passes,
            # The factors of the next sync have other bases: the gather residual cannot be added to them.
            residuals=frozenset({"local"}),
        ),
    ]
)
"""The codecs that the configuration accepts."""
