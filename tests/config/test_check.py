"""Invalid configurations: each is refused in one line that names field, value and rule.

`INVALID` is also what the command line is tested with: exit code 2, before any process group exists.
"""

import pytest

from dilocox.config.check import warnings
from dilocox.config.load import load_config
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


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("inner: {train_iters: 100}\nouter: {sync_interval: 30}", "never reach the anchor"),
        ("inner: {train_iters: 90}\nouter: {overlap_delay: 30, delay_mode: delayed_reset}", "unstable"),
        ("inner: {train_iters: 90}\nparallel: {num_islands: 1}\nouter: {codec: int4}", "codec is not used"),
        ("inner: {train_iters: 90}\nouter: {num_fragments: 3, overlap_delay: 4}", "drops 13%"),
        ("inner: {train_iters: 90}\nouter: {num_fragments: 3, overlap_delay: 3}", None),
        ("inner: {train_iters: 90}\nouter: {num_fragments: 3, overlap_delay: 4, mixing_alpha: 0.5}", None),
        ("inner: {train_iters: 90}", None),
        ("inner: {train_iters: 100}\nouter: {method: none}", None),
    ],
)
def test_hints(text, hint, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    found = warnings(load_config(path))
    assert len(found) == (hint is not None)
    assert hint is None or hint in found[0]
