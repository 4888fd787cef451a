"""The last lines of a run."""

from dilocox.launch.last_lines import closing_lines
from dilocox.metrics.summary import merge, write_island_summary
from tests.metrics.test_summary import make


def lines(folder, *islands):
    for island in islands:
        write_island_summary(folder, island)
    return "\n".join(closing_lines(merge(folder), folder))


def test_a_completed_run(tmp_path):
    (tmp_path / "report.html").touch()
    text = lines(tmp_path, make(0), make(1))
    for part in (
        "completed: 2 islands x (TP 2 x PP 1 x DP 1)",
        "8.000 -> 3.000 nats a token (perplexity 20.1)",
        "0.0 MB by all islands (codec int4)",
        "60.0 times as much",
        "8.00 bits per parameter and outer step",
        "sockets not counted (the WAN runs over loopback",
        "compute utilisation 0.90, overlap efficiency 0.75",
        "identical on all islands, hash h",
        "failures         none",
        "  | def f",
        f"{tmp_path}/summary.json  {tmp_path}/report.html",
    ):
        assert part in text


def test_a_run_that_went_wrong(tmp_path):
    text = lines(
        tmp_path,
        make(0, val_loss=None, sample=None, failures={"discard": 3, "heal": 0}),
        make(1, val_loss=None, anchor_hash="x"),
    )
    for part in ("not measured, or not finite", "NOT identical", "discard 3"):
        assert part in text
    assert "heal" not in text and "text from" not in text


def test_islands_that_stopped_at_different_steps_are_not_compared(tmp_path):
    text = lines(
        tmp_path, make(0, outer_steps=4, first_val_loss=3.0), make(1, outer_steps=5, first_val_loss=3.0)
    )
    assert "not to be compared: the islands ended at outer steps 4, 5" in text
    assert "validation loss  3.000 nats" in text


def test_islands_alone_sent_nothing(tmp_path):
    text = lines(tmp_path, make(0, payload_bytes_sent=0), make(1, payload_bytes_sent=0))
    assert "nothing crossed the WAN" in text
