"""The plan: every preset, no torch, and its figures by hand or from the papers."""

import subprocess
import sys
from pathlib import Path

import pytest

from dilocox.cli import main
from dilocox.config.defaults import resolve
from dilocox.config.load import load_config
from dilocox.config.schema import Config, ModelConfig, OuterConfig, ParallelConfig
from dilocox.config.warnings import find_warnings
from dilocox.plan import command as plan
from dilocox.plan.memory import rank_memory
from dilocox.plan.traffic import Traffic, busiest_host, island_outer_step_bytes
from dilocox.plan.utilisation import compute_utilisation, step_time

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = {
    "demo": (1.1e6, 0.05),
    "diloco_60m": (60e6, 0.05),
    "diloco_150m": (150e6, 0.01),
    "diloco_400m": (400e6, 0.05),
    "gpt_1.3b": (1.3e9, 0.02),
    "gpt_7b": (6.74e9, 0.001),
    "gpt_107b": (107e9, 0.01),
}
HEADER = 64


def preset(name, *overrides):
    config = load_config(CONFIGS / f"{name}.yaml", overrides)
    return Traffic(config, config.data.vocab_size)


def small(*, outer=None, vocab_size=512, **parallel):
    outer = OuterConfig(**(outer or {}))
    model = ModelConfig(num_layers=4, hidden_size=64, ffn_hidden_size=128)
    return Traffic(resolve(Config(model=model, parallel=ParallelConfig(**parallel), outer=outer)), vocab_size)


@pytest.mark.parametrize(("name", "expected"), PRESETS.items())
def test_every_preset_has_the_size_in_its_name_and_can_be_planned(name, expected, capsys):
    numel, tolerance = expected
    assert preset(name).num_parameters == pytest.approx(numel, rel=tolerance)
    assert main(["plan", str(CONFIGS / f"{name}.yaml")]) == 0
    printed = capsys.readouterr().out
    for title in ("Layout", "Parameters", "Memory", "Fragments", "Events", "Payload", "utilisation"):
        assert title in printed
    assert max(map(len, printed.splitlines())) <= 120


@pytest.mark.parametrize(("alpha", "dropped"), [(0.0, "10.0%"), (0.5, "5.0%")])
def test_the_plan_says_what_mixing_drops(alpha, dropped, capsys):
    """The demo applies a fragment 2 inner steps after its start, every 20."""
    assert main(["plan", str(CONFIGS / "demo.yaml"), "--set", f"outer.mixing_alpha={alpha}"]) == 0
    assert f"mixing drops {dropped} of the progress: (1 - alpha) * tau / H" in capsys.readouterr().out
    blocking = ["--set", "outer.overlap_delay=0"]
    assert main(["plan", str(CONFIGS / "demo.yaml"), *blocking]) == 0
    assert "mixing drops" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("delay", "rows"),
    [
        (0, [("20", "MEASURE 0  START 0  APPLY 0")]),
        (2, [("20", "MEASURE 0  START 0"), ("22", "APPLY 0")]),
        (20, [("20", "MEASURE 0  START 0"), ("40", "MEASURE 0  APPLY 0  START 0")]),
    ],
)
def test_events_stand_at_the_inner_steps_after_which_they_happen(delay, rows, capsys):
    flags = ["--set", "outer.num_fragments=1", "--set", f"outer.overlap_delay={delay}"]
    assert main(["plan", str(CONFIGS / "demo.yaml"), *flags]) == 0
    table = capsys.readouterr().out.partition("Events")[2].partition("then every")[0]
    found = [line.split(maxsplit=1) for line in table.splitlines() if line.strip()[:1].isdigit()]
    assert [(step, events.strip()) for step, events in found] == rows


def test_the_plan_says_which_blocks_depend_on_the_layout(capsys):
    tp2 = ("parallel.ranks_per_island=2", "parallel.tensor_model_parallel_size=2")
    flags = [word for setting in (*tp2, "model.ffn_hidden_size=80") for word in ("--set", setting)]
    for found, expected in ((flags, True), ([], False)):
        assert main(["plan", str(CONFIGS / "demo.yaml"), *found]) == 0
        assert ("blocks differ between layouts for" in capsys.readouterr().out) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_presets_end_with_whole_sync_intervals(name):
    assert find_warnings(preset(name).config) == []


def test_no_preset_is_left_out():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} >= set(PRESETS)


@pytest.mark.parametrize("method", ["diloco", "data_parallel", "none"])
def test_planning_needs_no_torch(method):
    program = f"""
import sys
from dilocox.cli import main
code = main(["plan", {str(CONFIGS / "demo.yaml")!r}, "--set", "outer.method={method}"])
sys.exit(code or ("torch" in sys.modules) or ("megatron" in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ("Events" in done.stdout) == (method == "diloco")
    assert ("Payload" in done.stdout) == (method != "none")


def test_one_sync_of_two_islands_by_hand():
    """TP 2, int4 in blocks of 64: half of each matrix, whole norms, a bf16 scale per block, a header."""
    outer = {"codec": "int4", "num_fragments": 2}
    traffic = small(outer=outer, ranks_per_island=2, tensor_model_parallel_size=2)
    matrices = [192 * 64 // 2, 64 * 64 // 2, 256 * 64 // 2, 64 * 128 // 2]  # qkv, proj, fc1, fc2
    norm = 64 // 2 + 2
    short = 2 * 64 // 2  # each row of proj is 32 values, half a block
    layer = sum(numel // 2 + 2 * numel // 64 for numel in matrices) + short + 2 * norm
    embedding = 512 * 64 // 2
    with_embedding = HEADER + 2 * layer + embedding // 2 + 2 * embedding // 64
    with_head = HEADER + 2 * layer + norm
    for rank in (0, 1):
        assert [traffic.sync_bytes(fragment, rank) for fragment in (0, 1)] == [with_embedding, with_head]


def test_an_fp32_sync_of_one_rank_is_four_bytes_per_parameter():
    traffic = small()
    assert island_outer_step_bytes(traffic) == HEADER + 4 * traffic.num_parameters
    assert (
        traffic.data_parallel_bytes(0) == traffic.fp32_sync_bytes(0, 0) == HEADER + 4 * traffic.num_parameters
    )


@pytest.mark.parametrize("islands", [3, 4])
def test_more_islands_send_two_shares_of_each_other_shard(islands):
    outer = {"codec": "int4", "codec_block_size": 64}
    two, more = small(outer=outer), small(outer=outer, num_islands=islands)
    factor = 2 * (islands - 1) / islands
    assert island_outer_step_bytes(more) == pytest.approx(factor * island_outer_step_bytes(two), rel=0.01)


def test_rows_that_do_not_divide_are_all_sent():
    three = small(ranks_per_island=3)  # 64 rows are blocks of 22, 21 and 21
    assert island_outer_step_bytes(three) == 3 * HEADER + 4 * three.num_parameters
    assert three.sync_bytes(0, 0) > three.sync_bytes(0, 1)


@pytest.mark.parametrize("sharded", [False, True])
def test_data_parallel_ranks_share_the_traffic(sharded):
    """DP cuts 64 rows or more into multiples of whole blocks here, so nothing but headers is added."""
    one = small(outer={"codec": "int4"})
    four = small(outer={"codec": "int4"}, ranks_per_island=4, use_distributed_optimizer=sharded)
    sent = [four.sync_bytes(0, rank) for rank in range(4)]
    assert max(sent) - min(sent) == 0
    # norms of 64 values become four blocks of 16, each with its own scale
    assert sum(sent) == one.sync_bytes(0, 0) + 3 * HEADER + 9 * 3 * 2


def test_the_copy_of_a_tied_embedding_is_not_sent():
    staged = small(ranks_per_island=2, pipeline_model_parallel_size=2)
    assert island_outer_step_bytes(staged) == 2 * HEADER + 4 * small().num_parameters
    assert staged.num_parameters == small().num_parameters


def test_the_busiest_host_carries_its_ranks():
    traffic = small(ranks_per_island=4, nodes_per_island=2, pipeline_model_parallel_size=2)
    host = busiest_host(traffic)
    by_host = [sum(traffic.sync_bytes(0, rank) for rank in ranks) for ranks in ((0, 1), (2, 3))]
    assert host.syncs == [max(by_host)] and by_host[0] > by_host[1]


def test_low_rank_sends_factors():
    outer = {"codec": "low_rank", "codec_rank": 4}
    factors = small(outer=outer).sync_bytes(0, 0)
    assert factors < small(outer={"codec": "int4"}).sync_bytes(0, 0) / 3


def test_memory_by_hand():
    outer = {"codec": "int4", "error_feedback": True, "overlap_delay": 30}
    traffic = small(outer=outer)
    held, stage = traffic.num_parameters, rank_memory(traffic, 0)
    assert (stage.weights, stage.gradients, stage.masters, stage.inner_states) == (
        4 * held,
        4 * held,
        0,
        8 * held,
    )
    assert stage.anchors == stage.outer_momentum == stage.residuals == stage.references == 4 * held
    # pseudo-gradient, with residual, decoded by the others, mean; another island's values; the next
    # pseudo-gradient of `delayed_keep`; both messages
    scratch = 9 * 512 * 64  # per value of the embedding, the largest tensor
    assert stage.in_flight == 6 * 4 * held + 2 * traffic.sync_bytes(0, 0) + scratch
    assert stage.total == 32 * held + stage.in_flight


def test_distributed_optimizer_and_level_2_are_sharded():
    traffic = small(ranks_per_island=2, use_distributed_optimizer=True)
    held, stage = traffic.num_parameters, rank_memory(traffic, 0)
    assert (stage.weights, stage.inner_states, stage.anchors) == (4 * held, 4 * held, 2 * held)


def test_the_last_stage_holds_the_tied_embedding_but_not_its_anchor():
    traffic = small(ranks_per_island=2, pipeline_model_parallel_size=2)
    first, last = rank_memory(traffic, 0), rank_memory(traffic, 1)
    assert last.weights - first.weights == 4 * 64  # the final norm
    assert first.anchors - last.anchors == 4 * (512 * 64 - 64)


def test_a_bf16_model_has_masters():
    traffic = preset("diloco_150m")
    stage = rank_memory(traffic, 0)
    assert stage.weights == 2 * traffic.num_parameters and stage.masters == 4 * traffic.num_parameters


def utilisation(sync_bytes, *, delay=0, interval=100, step_time_s=0.1, link_bps=1e9):
    return compute_utilisation(
        sync_bytes,
        sync_interval=interval,
        overlap_delay=delay,
        step_time_s=step_time_s,
        link_bps=link_bps,
    )


def test_utilisation_matches_the_published_simulation():
    """2501.18512, table 4: 1B parameters, H=100, 0.1 s a step; 4 bits need 0.4 Gbit/s for 50 % (K=2)."""
    assert utilisation([1e9 / 2], link_bps=0.4e9) == pytest.approx(0.5)
    assert utilisation([4e9], link_bps=3.2e9) == pytest.approx(0.5)


def test_a_delay_hides_what_fits_into_it():
    assert utilisation([1e9 / 8] * 4, delay=10) == 1.0
    assert utilisation([2e9 / 8] * 4, delay=10) == pytest.approx(10 / (10 + 4 * 1))
    assert utilisation([2e9 / 8] * 4, delay=0) == pytest.approx(10 / (10 + 4 * 2))


def test_step_time_as_given_else_from_flops():
    config = small(ranks_per_island=2).config
    assert step_time(config, 10**6, seconds=0.25, tflops=None).seconds == 0.25
    assert step_time(config, 10**6, seconds=None, tflops=2.0).seconds == pytest.approx(6e6 * 128 / 4e12)
    assert "assumed" in step_time(config, 10**6, seconds=None, tflops=None).source


def test_a_single_island_has_no_wan_tables(capsys):
    plan.show(small(num_islands=1).config.model_copy())
    assert "Payload" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step-time", "0"], "--step-time = 0.0: must be over 0"),
        (["--tflops", "-1"], "--tflops = -1.0: must be over 0"),
        (["--set", "data.tokenizer_model=x", "--set", "data.vocab_size=null"], "data.vocab_size = None"),
        (
            ["--set", "outer.num_fragments=3"],
            "outer.sync_interval = 20: must be a multiple of num_fragments (3)",
        ),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(arguments, message, capsys):
    assert main(["plan", str(CONFIGS / "demo.yaml"), *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) == 1
