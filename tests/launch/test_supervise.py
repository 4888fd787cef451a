"""Services that islands need: ready, dead on arrival, or gone in mid-run."""

import sys

import pytest

from dilocox.launch.processes import JobSpec
from dilocox.launch.supervise import SignalCounter, StartError, Supervisor


def spec(name, code):
    return JobSpec(name, [sys.executable, "-u", "-c", code])


@pytest.fixture
def shown():
    return []


@pytest.fixture
def supervisor(shown):
    signals = SignalCounter()
    with Supervisor(signals, show=shown.append, tick=lambda: None, stop_timeout_s=5) as watched:
        watched.signals = signals
        yield watched


def test_a_service_says_where_it_is(supervisor):
    service = spec("lighthouse", "print('hello\\nlighthouse http://h:1'); import time; time.sleep(600)")
    assert supervisor.start_service(service, ready_prefix="lighthouse", timeout_s=60) == "http://h:1"


def test_a_service_that_dies_is_quoted(supervisor):
    service = spec("lighthouse", "raise SystemExit('port is taken')")
    with pytest.raises(StartError, match="lighthouse ended: port is taken"):
        supervisor.start_service(service, ready_prefix="lighthouse", timeout_s=60)


def test_a_signal_ends_the_wait(supervisor):
    supervisor.signals.count = 1
    with pytest.raises(KeyboardInterrupt):
        supervisor.start_service(spec("lighthouse", "input()"), ready_prefix="lighthouse", timeout_s=60)


def test_islands_go_on_without_a_service_and_the_user_hears_of_it(supervisor, shown):
    supervisor.start_service(
        spec("lighthouse", "print('lighthouse x')"), ready_prefix="lighthouse", timeout_s=60
    )
    island = spec("island 0", "import time; time.sleep(2); print('[rank0]:done')")
    ending = supervisor.run([island])
    assert ending.exit_codes == (0,) and ending.failed_islands == []
    assert "[island 0] done" in shown
    assert sum("lighthouse has ended; islands train on" in line for line in shown) == 1


def test_exit_codes_are_in_island_order(supervisor):
    ending = supervisor.run([spec("island 0", "import time; time.sleep(1); exit(3)"), spec("island 1", "")])
    assert ending.exit_codes == (3, 0) and ending.failed_islands == [0]
    assert ending.signal_number is None and not ending.killed
