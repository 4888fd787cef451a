"""How fast are the codecs, and does encoding pay on a 10 Gbit/s link?

    python benchmarks/codec_throughput.py [--values 32] [--repeats 7] [--threads 2]

All variants are timed in turn within one run, so that a busy machine slows all of them; the best repeat
counts. GB/s are gigabytes of fp32 that go in (encode) or come out (decode). Buffers are allocated before.
`pays` compares, for two islands that swap messages, one encode and two decodes with the link seconds saved
against fp32 at 10 Gbit/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from provenance import provenance

from dilocox.outer.codec.base import Codec
from dilocox.outer.codec.block_codec import BlockCodec
from dilocox.outer.codec.compiled import CompiledKernels
from dilocox.outer.codec.formats import build_format
from dilocox.outer.codec.grid import BlockGrid
from dilocox.outer.codec.kernels import TwinKernels
from dilocox.outer.codec.registry import CODECS

LINK_BYTES_PER_S = 10e9 / 8
BLOCK_SIZE = 64
ROW = 4096
"""Values of a row of the tensor: a whole number of blocks."""
IRREGULAR_ROW = 4090
"""Not a whole number of blocks."""
RESULT = Path(__file__).parent / "results" / "codec_throughput.json"


def variants() -> dict[str, tuple[Codec, int]]:
    """(codec, row) of every codec as it is served, and int4 and nf4 by the other paths."""
    built = {name: CODECS.get(name).build_codec(BLOCK_SIZE) for name in CODECS.wire_names()}
    built["int4 stochastic"] = CODECS.get("int4").build_codec(BLOCK_SIZE, "stochastic")
    for name in ("int4", "nf4"):
        form = build_format(name)
        paths = {"plain twin": TwinKernels(form), "torch.compile of the twin": CompiledKernels(form)}
        for path, kernels in paths.items():
            codec = BlockCodec(CODECS.get(name), form, block_size=BLOCK_SIZE, kernels=kernels)
            built[f"{name} {path}"] = codec
    irregular = (built["int4"], IRREGULAR_ROW)
    return {name: (codec, ROW) for name, codec in built.items()} | {"int4 irregular rows": irregular}


def jobs(codec: Codec, x: torch.Tensor, grid: BlockGrid) -> dict[str, Callable[[], None]]:
    """Encode and decode into buffers that exist."""
    message = codec.encode([x], [grid])
    output = torch.empty_like(x)
    return {
        "encode": lambda: codec.encode_into([x], [grid], message),
        "decode": lambda: codec.decode_into(message, [grid], [output]),
    }


def measure(x: torch.Tensor, repeats: int) -> dict[str, dict[str, float]]:
    """Best seconds by variant and direction."""
    work = {name: jobs(codec, x, BlockGrid(x.numel(), width)) for name, (codec, width) in variants().items()}
    seconds: dict[str, dict[str, float]] = {}
    for name, directions in work.items():
        seconds[name] = {}
        for direction, job in directions.items():
            started = time.perf_counter()
            job()
            seconds[name][f"first {direction}"] = time.perf_counter() - started
    for _ in range(repeats):
        for name, directions in work.items():
            for direction, job in directions.items():
                started = time.perf_counter()
                job()
                took = time.perf_counter() - started
                seconds[name][direction] = min(took, seconds[name].get(direction, took))
    return seconds


def line_of(name: str, codec: Codec, grid: BlockGrid, seconds: dict[str, float]) -> dict[str, object]:
    """One line of the table."""
    fp32_bytes, num_bytes = 4 * grid.numel, codec.num_bytes([grid])
    saved = (fp32_bytes - num_bytes) / LINK_BYTES_PER_S
    spent = seconds["encode"] + 2 * seconds["decode"]
    return {
        "codec": name,
        "bits_per_value": round(8 * num_bytes / grid.numel, 3),
        "encode_gb_per_s": round(fp32_bytes / seconds["encode"] / 1e9, 2),
        "decode_gb_per_s": round(fp32_bytes / seconds["decode"] / 1e9, 2),
        "first_call_s": round(seconds["first encode"] + seconds["first decode"], 3),
        "saved_on_10_gbit_s": round(saved, 4),
        "spent_s": round(spent, 4),
        "pays": spent <= saved if saved else None,
    }


def main() -> None:
    """Measures, prints a table and writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=float, default=32, help="millions of values")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    where = provenance()
    torch.manual_seed(0)
    x = torch.randn(int(arguments.values * 2**20)) * 1e-3
    seconds = measure(x, arguments.repeats)
    rows = [
        line_of(name, codec, BlockGrid(x.numel(), width), seconds[name])
        for name, (codec, width) in variants().items()
    ]
    for line in rows:
        print(
            f"{line['codec']:32s} {line['bits_per_value']:7} bits  encode {line['encode_gb_per_s']:6} GB/s  "
            f"decode {line['decode_gb_per_s']:6} GB/s  pays at 10 Gbit/s: {line['pays']}"
        )
    result = {"machine": where, "values": x.numel(), "block_size": BLOCK_SIZE, "codecs": rows}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {arguments.output}")


if __name__ == "__main__":
    main()
