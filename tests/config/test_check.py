"""Invalid configurations: each is refused in one line that names field, value and rule.

`INVALID` is also what the command line is tested with: exit code 2, before any process group exists.
"""

import pytest

from dilocox.config.check import check_device
from dilocox.config.load import load_config
from dilocox.config.warnings import find_warnings
from dilocox.errors import ConfigError
from tests.config.invalid_configs import INVALID


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case.name)
def test_invalid_configuration_is_refused_in_one_line(case, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(case.text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, case.overrides)
    message = str(caught.value)
    assert caught.value.field == case.field.replace("FILE", str(path))
    assert message.startswith(f"{caught.value.field} = {caught.value.value!r}: ")
    assert case.value in repr(caught.value.value).replace(str(path), "FILE")
    for part in case.rule:
        assert part in message
    assert "\n" not in message
    assert "; " in message, "what to do comes after the rule"


def test_at_least_sixty_and_no_name_twice():
    assert len({case.name for case in INVALID}) == len(INVALID) >= 60


@pytest.mark.parametrize(
    "text",
    [
        "",
        "parallel: {ranks_per_island: 8, nodes_per_island: 2, tensor_model_parallel_size: 2}\n"
        "inner: {global_batch_size: 4}",
        "inner: {lr_decay_style: WSD, lr_warmup_iters: 10, lr_wsd_decay_iters: 90}",
        "inner: {lr_decay_style: constant}",
        "inner: {optimizer: sgd, sgd_momentum: 0.5}",
        "outer: {sync_interval: 20, num_fragments: 4, overlap_delay: 4, mixing_alpha: 0.25}",
        "outer: {codec: int4, error_feedback: true, rounding: stochastic, codec_block_size: 128}",
        "outer: {sync_interval: 20, num_fragments: 4, overlap_delay: 5}",
        "outer: {sync_interval: 20, overlap_delay: 20, delay_mode: eager}",
        "outer: {codec: low_rank, codec_rank: 8, adaptive_rank: true, adaptive_interval: true}",
        "parallel: {num_islands: 3}\nouter: {codec: int4, gather_codec: int8}",
        "parallel: {num_islands: 3}\nouter: {gather_codec: int8, error_feedback: true, codec_block_size: 32}",
        "data: {split: '100,0,0'}\nlogging: {eval_iters: 0}",
        "parallel: {num_islands: 1}",
        "data: {island_data: [[0.3, a, 0.7, b], c], tokenizer_model: t.model}",
        "data: {data_path: x, tokenizer_type: NullTokenizer, vocab_size: 100}",
        "wan: {lighthouse: 'http://[::1]:29510', port_range: '29500-29500'}",
        "parallel: {ranks_per_island: 2, tensor_model_parallel_size: 2, sequence_parallel: true}",
        "parallel: {recompute_granularity: full, recompute_num_layers: 2, recompute_method: block}",
        "outer: {method: none, sync_interval: 1000}",
    ],
)
def test_valid_configuration_passes(text, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    load_config(path)


WARNINGS = [
    ("inner: {train_iters: 100}\nouter: {sync_interval: 30}", "never reach the anchor"),
    ("outer: {overlap_delay: 30, delay_mode: delayed_reset}", "unstable"),
    ("outer: {num_fragments: 3, overlap_delay: 4}", "drops 13%"),
    ("outer: {num_fragments: 3, overlap_delay: 3}", None),
    ("outer: {num_fragments: 3, overlap_delay: 4, mixing_alpha: 0.5}", None),
    ("", None),
    ("inner: {train_iters: 100}\nouter: {method: none}", None),
    ("parallel: {num_islands: 1}\nouter: {codec: int4}", "WAN, so outer.codec is not used"),
    ("parallel: {num_islands: 1}\nouter: {codec: low_rank}", None),
    (
        "parallel: {num_islands: 1}\nouter: {island_weights: by_tokens}\nwan: {streams: 2, grace_s: 1}",
        "so outer.island_weights, wan.grace_s, wan.streams are not used",
    ),
    (
        "outer: {method: none}\nwan: {streams: 2}",
        "outer.method = none: nothing crosses the WAN, so wan.streams",
    ),
    ("checkpoint: {save_interval: 91}", "checkpoint.save_interval = 91 is never reached"),
    ("logging: {eval_interval: 91}", "logging.eval_interval = 91 is never reached"),
    ("run: {exit_interval: 91}", "run.exit_interval = 91 is never reached"),
    ("run: {exit_interval: 90}", None),
    ("checkpoint: {save_retain: 3}", "checkpoint.save_retain = 3 without checkpoint.save_interval"),
    ("checkpoint: {save_retain: 3, save_interval: 10}", None),
    ("data: {split: '8,1,1'}", "holds 10% of the documents back"),
]


@pytest.mark.parametrize(("text", "warning"), WARNINGS)
def test_warnings(text, warning, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    overrides = [] if "train_iters" in text else ["inner.train_iters=90"]
    found = find_warnings(load_config(path, overrides))
    assert len(found) == (warning is not None), found
    assert warning is None or warning in found[0]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("model: {params_dtype: bf16}", "model.params_dtype"),
        ("model: {transformer_impl: transformer_engine}", "model.transformer_impl"),
        (
            "parallel: {ranks_per_island: 2, tensor_model_parallel_size: 2, sequence_parallel: true}",
            "parallel.sequence_parallel",
        ),
    ],
)
def test_rules_look_at_the_device_that_auto_came_to(text, field, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    config = load_config(path, ["inner.global_batch_size=2"])
    check_device(config, "cuda")
    with pytest.raises(ConfigError, match="auto") as caught:
        check_device(config, "cpu")
    assert caught.value.field == field and "; " in str(caught.value)
