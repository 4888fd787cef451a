"""The report: from a run folder, finished or running, to figures and one page that needs nothing else."""

import dataclasses
import math
import re

import pytest

from dilocox import cli
from dilocox.config.load import dump
from dilocox.config.schema import Config
from dilocox.errors import ConfigError
from dilocox.metrics.jsonl import JsonlWriter
from dilocox.metrics.records import EvalRecord, EventRecord, InnerRecord, SyncRecord
from dilocox.metrics.summary import merge, write_island_summary
from dilocox.report import command as report
from dilocox.report.figures import bytes_figure, fragments_figure, loss_figure, smooth, time_figure
from dilocox.report.run_data import read_run
from tests.metrics.test_summary import make

CONFIG = Config.model_validate(
    {"inner": {"train_iters": 40}, "outer": {"codec": "int4", "sync_interval": 20, "num_fragments": 2}}
)


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "a <b> run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(CONFIG))
    for island_id in range(2):
        writer = JsonlWriter(folder / f"island_{island_id}" / "metrics.jsonl")
        writer.write(EventRecord(0, "start", {"parameters": 1000}))
        writer.write(EvalRecord(0, 7.0))
        for step in range(1, 41):
            writer.write(
                InnerRecord(
                    inner_step=step, lm_loss=7 / step, grad_norm=1.0, lr=0.1, tokens=10, step_time_s=0.1
                )
            )
            if step % 10 == 0:
                writer.write(sync(step))
        writer.write(EvalRecord(40, 2.0))
        writer.close()
    return folder


def sync(step):
    return SyncRecord(
        inner_step=step,
        outer_step=(step - 1) // 20 + 1,
        fragment=step // 10 % 2,
        num_participants=2,
        pseudo_gradient_norm=1.0,
        cosine_to_mean=-0.5 if step == 20 else 0.5,
        payload_bytes_sent=250,
        exchange_s=0.5,
        waiting_s=0.01,
        blocked_s=0.1,
        codec="int4",
        committed=True,
    )


def test_a_running_run_has_a_page(run_dir):
    page = report.write(run_dir)
    text = page.read_text()
    assert "running: 2 islands" in text and "40 of 40 inner steps" in text
    assert text.count("<svg") == 4
    assert not re.search(r"""(src|href)=["'](http|/|\.)""", text)
    assert "a &lt;b&gt; run" in text and "<b> run" not in text
    for name in ("loss.png", "figures/loss.png", "figures/bytes.png", "figures/time.png"):
        assert (run_dir / name).read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_has_figures_and_sample(run_dir, capsys):
    for island_id in range(2):
        write_island_summary(run_dir, make(island_id, sample="if a < b:"))
    merge(run_dir)
    assert cli.main(["report", str(run_dir)]) == 0
    assert "report.html" in capsys.readouterr().out
    text = (run_dir / "report.html").read_text()
    assert "completed: 2 islands" in text and "if a &lt; b:" in text and "anchors_identical" in text


def test_a_run_that_has_only_started(tmp_path):
    (tmp_path / "config.yaml").write_text(dump(CONFIG))
    (tmp_path / "island_0").mkdir()
    assert "nothing yet" in report.write(tmp_path).read_text()


def test_not_a_run(tmp_path):
    with pytest.raises(ConfigError, match="not a run folder"):
        report.write(tmp_path)


def test_loss_has_every_island_and_the_anchor(run_dir):
    (axes,) = loss_figure(read_run(run_dir)).axes
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["island 0, training", "island 1, training", "anchor, validation"]
    assert list(axes.lines[-1].get_ydata()) == [7.0, 2.0]


def test_bytes_add_up_next_to_the_baseline(run_dir):
    (axes,) = bytes_figure(read_run(run_dir)).axes
    sent, baseline = axes.lines
    assert sent.get_ydata()[-1] == pytest.approx(2 * 4 * 250 / 1e6)
    assert baseline.get_ydata()[-1] == pytest.approx(2 * 4 * 1000 * 40 / 1e6)


def test_one_line_a_fragment_and_negative_cosines_are_in_view(run_dir):
    norms, cosines = fragments_figure(read_run(run_dir)).axes
    assert len(norms.lines) == len(cosines.lines) == 2
    assert cosines.get_ylim()[0] < -0.5


def test_seconds_of_the_islands(run_dir):
    _, shares = time_figure(read_run(run_dir)).axes
    widths = [round(bar.get_width(), 6) for bar in shares.patches]
    assert widths == [4.0, 4.0, 0.4, 0.4, 0.0, 0.0]


def test_smooth_starts_unbiased_and_passes_over_nan():
    assert smooth([5.0] * 400) == pytest.approx([5.0] * 400)
    values = smooth([1.0, math.nan, 1.0])
    assert math.isnan(values[1]) and values[2] == 1.0


def test_a_run_without_wan_bytes_draws_without_a_warning(tmp_path):
    """Warnings are errors in tests."""
    alone = CONFIG.model_copy(update={"parallel": CONFIG.parallel.model_copy(update={"num_islands": 1})})
    (tmp_path / "config.yaml").write_text(dump(alone))
    writer = JsonlWriter(tmp_path / "island_0" / "metrics.jsonl")
    writer.write(EventRecord(0, "start", {"parameters": 1000}))
    for step in range(1, 21):
        writer.write(
            InnerRecord(inner_step=step, lm_loss=7.0, grad_norm=1.0, lr=0.1, tokens=10, step_time_s=0.1)
        )
    writer.write(dataclasses.replace(sync(20), payload_bytes_sent=0))
    writer.close()
    assert report.write(tmp_path).exists()
