"""Which lines of many ranks a person gets to see."""

from dilocox.launch.log_merge import IslandLog
from dilocox.launch.supervise import failure_report

TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in <module>',
    "    step()",
    "KeyError: 'x'",
    "",
    "During handling of the above exception, another exception occurred:",
    "",
    "Traceback (most recent call last):",
    '  File "train.py", line 2, in <module>',
    "ValueError: planted",
]
SHOWN_OF_RANK_1 = [f"[island 0 rank 1] {line}" for line in TRACEBACK if line]
ROOT_CAUSE = """\
============================================================
train FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-01-01_00:00:00
  host      : here
  rank      : {rank} (local_rank: {rank})
  exitcode  : {code} (pid: 77)
  error_file: <N/A>
============================================================"""


def feed(log, lines):
    return [shown for line in lines if (shown := log.feed(line)) is not None]


def of_rank(rank, lines):
    return [f"[rank{rank}]:{line}" for line in lines]


def test_rank_0_in_full_and_others_only_with_alarms():
    log = IslandLog(3)
    lines = of_rank(0, ["[island 3] iteration 1", "a bare print"])
    lines += of_rank(1, ["[island 3 rank 1] quiet", "[island 3 rank 1] WARNING: disk is full"])
    assert feed(log, lines) == [
        "[island 3] iteration 1",
        "[island 3] a bare print",
        "[island 3 rank 1] WARNING: disk is full",
    ]


def test_known_noise_is_left_out():
    noise = [
        "[W1130 00:41:00.1 socket.cpp:752] [c10d] The client socket cannot be initialized",
        "[Gloo] Rank 0 is connected to 1 peer ranks.",
        "/x/megatron/core/a.py:12: UserWarning: apex is not there",
        "  return func(*args, **kwargs)",
        "",
    ]
    assert feed(IslandLog(0), of_rank(0, noise)) == []
    assert feed(IslandLog(0), of_rank(0, [noise[2], "text", "  indented"])) == [
        "[island 0] text",
        "[island 0]   indented",
    ]
    assert feed(IslandLog(0), ["W1130 00:41:01.000 1 torch/distributed/run.py:774] ****"]) == []


def test_a_traceback_is_whole_whatever_its_rank_and_shown_once():
    log = IslandLog(0)
    assert feed(log, of_rank(1, TRACEBACK)) == SHOWN_OF_RANK_1
    assert feed(log, of_rank(2, TRACEBACK)) == []
    assert feed(log, of_rank(1, ["quiet again"])) == []


def test_rank_0_is_never_silenced_by_another_ranks_traceback():
    log = IslandLog(0)
    feed(log, of_rank(1, TRACEBACK))
    marked = [f"[rank0]: {line}" for line in TRACEBACK]  # as torch marks uncaught exceptions
    assert feed(log, of_rank(0, marked)) == [f"[island 0] {line}" for line in TRACEBACK if line]


def test_interleaved_tracebacks_stay_apart():
    log = IslandLog(0)
    both = [line for text in TRACEBACK for line in (*of_rank(1, [text]), *of_rank(2, [text]))]
    assert feed(log, both) == SHOWN_OF_RANK_1


def test_report_names_the_first_failing_rank_and_its_last_words():
    log = IslandLog(1)
    feed(log, of_rank(1, ["out of luck"]))
    feed(log, of_rank(0, ["waiting"]))
    feed(log, ROOT_CAUSE.format(rank=1, code=-9).splitlines())
    report = failure_report("island 1", 1, log)
    assert "island 1 failed: rank 1 (killed by SIGKILL" in report[0]
    assert report[1:] == ["    out of luck"]


def test_report_does_not_repeat_a_traceback():
    log = IslandLog(1)
    feed(log, of_rank(1, TRACEBACK))
    feed(log, ROOT_CAUSE.format(rank=1, code=1).splitlines())
    assert failure_report("island 1", 1, log) == [
        "[launch] ERROR: island 1 failed: rank 1 (exit code 1), see its traceback above"
    ]


def test_report_without_a_rank_shows_torchrun_itself():
    log = IslandLog(0)
    feed(log, ["usage: torchrun", "error: bad"])
    report = failure_report("island 0", 2, log)
    assert "exit code 2" in report[0] and report[1:] == ["    usage: torchrun", "    error: bad"]
