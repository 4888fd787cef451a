"""Every codec, delay mode and kind of shards that the configuration accepts, through the whole of level 2."""

from typing import get_args

import pytest
import torch

from dilocox.config.schema import CodecName
from dilocox.outer.modes.registry import MODES
from dilocox.param_shard import ParamShard
from tests.outer.islands import make_islands, on_islands, outer_config
from tests.outer.test_diloco import assert_equal_bits, drift

STEPS = 24
CODECS = get_args(CodecName)
SCHEDULES = {
    "blocking": {"sync_interval": 4},
    "streaming": {"sync_interval": 8, "num_fragments": 2, "overlap_delay": 2},
    "delayed_keep": {"sync_interval": 8, "num_fragments": 2, "overlap_delay": 4},
    "delayed_reset": {
        "sync_interval": 8,
        "num_fragments": 2,
        "overlap_delay": 4,
        "delay_mode": "delayed_reset",
        "outer_lr": 0.4,
        "outer_momentum": 0.3,
    },
    "eager": {"sync_interval": 4, "overlap_delay": 4, "delay_mode": "eager"},
}
# Largest difference of the anchor to that of the fp32 run, relative to how far the anchor has moved.
CODEC_SETTINGS = {
    "none": ({}, 0.0),
    "bf16": ({}, 0.01),
    "int8": ({"error_feedback": True}, 0.02),
    "int4": ({"error_feedback": True}, 0.1),
    "nf4": ({"error_feedback": True}, 0.15),
    "e3m0": ({"error_feedback": True}, 0.3),
    "low_rank": ({"error_feedback": True, "codec_rank": 4}, None),
}


def flat(name, tensor, fragment):
    """A shard of the distributed optimizer: it begins and ends in the middle of a row."""
    return ParamShard(
        name,
        tensor.view(-1),
        "layer",
        fragment,
        replicated=False,
        counted=True,
        global_shape=(40, 20),
        offsets=(0, 0),
        block_shape=(40, 20),
        start=33,
    )


def whole(name, tensor, fragment):
    return ParamShard.whole(name, tensor, layer=fragment)


# shapes of one fragment, and what the tensors are parts of
LAYOUTS = {
    "one rank": ([(24, 32), (2, 16, 24), (32,)], whole),
    "rows that no block divides": ([(7, 20), (3,), (1, 9)], whole),
    "distributed optimizer": ([(333,)], flat),
    "a rank without a part": ([], whole),
}


def accepted():
    for codec in CODECS:
        for mode in MODES:
            for layout in LAYOUTS:
                # config/rules/outer.py refuses low_rank on flat shards
                if codec != "low_rank" or layout != "distributed optimizer":
                    yield pytest.param(codec, mode, layout, id=f"{codec}-{mode}-{layout}")


def run(num_islands, settings, layout):
    shapes, shard = LAYOUTS[layout]
    config = outer_config(**settings)
    islands = make_islands(num_islands, config, shapes=shapes, shard=shard)

    def train(island):
        island.loop.join(0)
        island.train(STEPS, drift)
        predicted = island.loop.predicted_bytes()
        island.loop.drain()
        return island.anchors(), predicted

    return islands, on_islands(islands, train)


def test_every_codec_and_mode_is_here():
    assert set(CODEC_SETTINGS) == set(CODECS) and set(SCHEDULES) == set(MODES)


def swap_and_two_shots():
    """Two islands with every kind of shards; three, which take two shots, with two kinds."""
    for case in accepted():
        for num_islands in (2, 3):
            if num_islands == 2 or case.values[2] in ("one rank", "distributed optimizer"):
                yield pytest.param(*case.values, num_islands, id=f"{case.id}-{num_islands}")


@pytest.mark.parametrize(("codec", "mode", "layout", "num_islands"), list(swap_and_two_shots()))
def test_islands_agree_and_stay_near_fp32(codec, mode, layout, num_islands):
    extra, tolerance = CODEC_SETTINGS[codec]
    islands, results = run(num_islands, SCHEDULES[mode] | {"codec": codec} | extra, layout)
    (first, _), *others = results
    for other, _ in others:
        assert_equal_bits(first, other)
    for island in islands:
        assert all(stats.committed and stats.num_participants == num_islands for stats in island.log.syncs)
        assert len(island.log.syncs) >= STEPS // 4 - 1
        assert not island.log.named("discard") and not island.log.named("codec_fallback")
    if tolerance is not None and first:
        _, ((exact, _), *_) = run(num_islands, SCHEDULES[mode], layout)
        moved = max(float(anchor.abs().max()) for anchor in exact)
        for lossy, wanted in zip(first, exact, strict=True):
            assert float((lossy - wanted).abs().max()) <= tolerance * moved


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "low_rank"])
def test_bytes_are_those_of_the_formula(codec, layout, num_islands):
    islands, _ = run(num_islands, SCHEDULES["blocking"] | {"codec": codec}, layout)
    for island in islands:
        sent = sum(stats.payload_bytes_sent for stats in island.log.syncs)
        assert sent == island.loop.predicted_bytes()


@pytest.mark.parametrize("num_islands", [2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_adaptive_rank_and_interval_follow_the_mean(mode, num_islands):
    """A pseudo-gradient of rank one: the rank falls, and the interval with it, on all islands alike."""
    settings = SCHEDULES[mode] | {
        "sync_interval": 16,
        "overlap_delay": SCHEDULES[mode].get("overlap_delay", 0),
    }
    if settings["overlap_delay"] and mode != "streaming":
        settings["overlap_delay"] = 16 // settings.get("num_fragments", 1)
    settings |= {"codec": "low_rank", "codec_rank": 8, "adaptive_rank": True, "adaptive_interval": True}
    islands = make_islands(num_islands, outer_config(**settings), shapes=[(24, 32)])

    def rank_one(island, step):
        generator = torch.Generator().manual_seed(step)
        left, right = torch.rand(24, 1, generator=generator), torch.ones(1, 32)
        for tensor in island.tensors:
            tensor.sub_(left @ right * (1 + island.number))

    def train(island):
        island.loop.join(0)
        island.train(160, rank_one)
        island.loop.drain()
        return island.anchors()

    first, *others = on_islands(islands, train)
    for other in others:
        assert_equal_bits(first, other)
    changes = [[details["sync_interval"] for _, _, details in i.log.named("interval")] for i in islands]
    assert changes[0] and changes[0][-1] < 16 and all(change == changes[0] for change in changes)
    schedules = {island.fragments.schedule for island in islands}
    assert len(schedules) == 1
