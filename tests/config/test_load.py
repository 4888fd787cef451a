"""Reading: YAML, overrides, defaults, fingerprint."""

import subprocess
import sys

import pytest
import yaml

from dilocox.config.defaults import OUTER_DEFAULTS, resolve
from dilocox.config.load import dump, fingerprint, load, load_config
from dilocox.config.schema import Config
from dilocox.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write_text


def test_an_empty_file_is_a_run_with_defaults(write):
    assert load(write("")) == load(write("run:\nmodel:\n")) == Config()


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1E-3", "+1e-03", ".001", "1_0e-4"])
def test_numbers_are_read_as_people_write_them(write, text):
    assert load(write(f"inner: {{lr: {text}}}")).inner.lr == pytest.approx(0.001)
    assert load(write(""), [f"inner.lr={text}"]).inner.lr == pytest.approx(0.001)


def test_a_whole_number_is_good_for_a_fraction(write):
    outer = load(write("outer: {mixing_alpha: 0, outer_lr: 1}")).outer
    assert (outer.mixing_alpha, outer.outer_lr) == (0.0, 1.0)


def test_overrides_win_in_order_and_are_yaml(write):
    path = write("inner: {lr: 1e-3}\ndata: {split: '8,1,1'}")
    overrides = [
        "inner.lr=2e-3",
        "inner.lr=3e-3",
        "data.island_data=[a, [1, b, 2.5, c]]",
        "outer.delay_mode=null",
        "outer.error_feedback=true",
        "wan.lighthouse=http://10.0.0.1:29510",
    ]
    config = load(path, overrides)
    assert config.inner.lr == 3e-3
    assert config.data.island_data == ["a", [1.0, "b", 2.5, "c"]]
    assert config.data.split == "8,1,1"
    assert config.outer.delay_mode is None and config.outer.error_feedback is True
    assert config.wan.lighthouse == "http://10.0.0.1:29510"


def test_the_dumped_file_reads_back_to_the_same_run(write):
    config = load_config(write("inner: {lr: 1e-5}\nouter: {num_fragments: 2, overlap_delay: 3, codec: int4}"))
    path = write(dump(config))
    assert load(path) == load_config(path) == config
    assert list(yaml.safe_load(path.read_text())) == list(Config.model_fields)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", {"model.ffn_hidden_size": 384, "model.num_query_groups": 4, "model.kv_channels": 32}),
        ("model: {swiglu: false}", {"model.ffn_hidden_size": 512}),
        (
            "model: {ffn_hidden_size: 100, num_query_groups: 2}",
            {"model.ffn_hidden_size": 100, "model.num_query_groups": 2},
        ),
        ("inner: {train_iters: 77}", {"inner.lr_decay_iters": 77}),
        ("", {"data.vocab_size": 2048, "outer.gather_codec": "none"}),
        ("data: {tokenizer_model: x.model}", {"data.vocab_size": None}),
        ("outer: {codec: low_rank}", {"outer.gather_codec": "int4"}),
        ("outer: {codec: nf4}", {"outer.gather_codec": "nf4"}),
        ("outer: {outer_optimizer: sgd}", {"outer.outer_lr": 1.0, "outer.outer_momentum": 0.0}),
        ("outer: {outer_lr: 0.3}", {"outer.outer_lr": 0.3, "outer.outer_momentum": 0.6}),
    ],
)
def test_defaults_that_follow_from_other_settings(write, given, expected):
    config = resolve(load(write(given)))
    found = {leaf: getattr(getattr(config, leaf.split(".")[0]), leaf.split(".")[1]) for leaf in expected}
    assert found == expected


@pytest.mark.parametrize(
    ("outer", "mode"),
    [
        ({}, "blocking"),
        ({"sync_interval": 30, "num_fragments": 3, "overlap_delay": 9}, "streaming"),
        ({"sync_interval": 30, "num_fragments": 3, "overlap_delay": 10}, "delayed_keep"),
        ({"sync_interval": 30, "overlap_delay": 30, "delay_mode": "eager"}, "eager"),
        ({"sync_interval": 30, "overlap_delay": 30, "delay_mode": "delayed_reset"}, "delayed_reset"),
    ],
)
def test_delay_mode_follows_from_the_delay_and_brings_its_outer_settings(write, outer, mode):
    resolved = resolve(load(write(yaml.safe_dump({"outer": outer})))).outer
    assert resolved.delay_mode == mode
    assert (resolved.outer_lr, resolved.outer_momentum) == OUTER_DEFAULTS[mode]


def test_the_baseline_is_one_override_away(write):
    path = write("outer: {num_fragments: 2, codec: int4, error_feedback: true, island_weights: by_tokens}")
    alone = load_config(path, ["outer.method=none"]).outer
    assert alone == Config().outer.model_copy(update={"method": "none"})
    baseline = load_config(path, ["outer.method=data_parallel"]).outer
    assert (baseline.codec, baseline.num_fragments, baseline.island_weights) == ("none", 1, "by_tokens")


def test_paths_are_expanded_everywhere(write, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DATA", "/data")
    path = write(
        "run: {output_dir: ~/runs}\nmodel: {}\n"
        "data: {island_data: ['${DATA}/a', [1, ~/b]], tokenizer_model: $DATA/t.model, "
        "data_cache_path: ~/cache}\n"
        "checkpoint: {save: ~/ckpt, load: $DATA/old}"
    )
    config = load_config(path)
    assert load_config(path, expand=False).run.output_dir == "~/runs"
    assert config.run.output_dir == "/home/me/runs"
    assert config.data.island_data == ["/data/a", [1.0, "/home/me/b"]]
    assert (config.data.tokenizer_model, config.data.data_cache_path) == ("/data/t.model", "/home/me/cache")
    assert (config.checkpoint.save, config.checkpoint.load) == ("/home/me/ckpt", "/data/old")
    other = load_config(write("data: {data_path: [1, ~/x], tokenizer_model: t}"))
    assert other.data.data_path == [1.0, "/home/me/x"]


def changed(section, **leaves):
    config = resolve(Config())
    return config.model_copy(update={section: getattr(config, section).model_copy(update=leaves)})


@pytest.mark.parametrize(
    "local",
    [
        changed("run", output_dir="elsewhere", threads_per_rank=3),
        changed(
            "wan", advertise_address="10.0.0.7", port_range="1-2", interface="eth1", lighthouse="http://h:1"
        ),
        changed("data", data_path="/site/data", data_cache_path="x", tokenizer_model="/site/model"),
        changed("checkpoint", save="here", save_interval=3),
        changed("logging", log_interval=1, wandb=True),
    ],
)
def test_islands_may_differ_where_they_stand(local):
    assert fingerprint(local) == fingerprint(resolve(Config()))


@pytest.mark.parametrize(
    "other",
    [
        changed("run", seed=1),
        changed("run", name="other"),
        changed("model", num_layers=8),
        changed("parallel", num_islands=3),
        changed("data", split="8,1,1"),
        changed("inner", lr=1e-4),
        changed("outer", codec_block_size=128),
        changed("wan", streams=2),
    ],
)
def test_islands_must_share_everything_else(other):
    assert fingerprint(other) != fingerprint(resolve(Config()))


def test_a_fingerprint_does_not_depend_on_the_process():
    program = "from dilocox.config import load, schema; print(load.fingerprint(schema.Config()))"
    outputs = {
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert outputs == {fingerprint(Config()) + "\n"}


def test_reading_needs_no_torch():
    program = "import sys, dilocox.config.load; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"^CONFIG = '.*nowhere.yaml': cannot be read \(No such file"):
        load(tmp_path / "nowhere.yaml")


def test_a_binary_file(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(path)
