"""Batches come one step ahead, in the same order, from any position."""

import threading

import pytest
import torch

from dilocox.data.datasets import fields_of
from dilocox.data.prefetch import Prefetcher


class Source:
    """Ten steps; the batch of a step is its first sample."""

    def __init__(self, *, bad_step=None):
        self.bad_step = bad_step
        self.read = {step: threading.Event() for step in range(10)}

    def batches(self, consumed_samples=0):
        for step in range(consumed_samples // 4, 10):
            if step == self.bad_step:
                raise ValueError("bad token")
            self.read[step].set()
            yield [{"tokens": torch.tensor([4 * step])}]


@pytest.fixture
def make():
    made = []

    def prefetcher(source):
        made.append(Prefetcher(source, global_batch_size=4, device=torch.device("cpu")))
        return made[-1]

    yield prefetcher
    for each in made:
        each.close()


def taken(prefetcher, number):
    return [int(prefetcher.take()[0]["tokens"]) for _ in range(number)]


def test_order_is_that_of_the_source_from_any_position(make):
    prefetcher = make(Source())
    prefetcher.seek(0)
    assert taken(prefetcher, 3) == [0, 4, 8]
    prefetcher.seek(7)
    assert taken(prefetcher, 3) == [28, 32, 36]
    with pytest.raises(IndexError):
        prefetcher.take()


def test_the_next_batch_is_read_while_a_step_runs(make):
    source = Source()
    prefetcher = make(source)
    prefetcher.seek(0)
    prefetcher.take()
    assert source.read[1].wait(10), "it is read before the next take"
    assert not source.read[2].is_set(), "one step ahead, not more"


def test_an_error_comes_with_the_step_that_needs_the_batch(make):
    prefetcher = make(Source(bad_step=1))
    prefetcher.seek(0)
    assert taken(prefetcher, 1) == [0]
    with pytest.raises(ValueError, match="bad token"):
        prefetcher.take()


def test_a_stage_reads_only_what_it_uses():
    assert fields_of(0, num_stages=1) == ("tokens", "position_ids", "labels", "loss_mask")
    assert [fields_of(stage, num_stages=3) for stage in range(3)] == [
        ("tokens", "position_ids"),
        (),
        ("labels", "loss_mask"),
    ]
