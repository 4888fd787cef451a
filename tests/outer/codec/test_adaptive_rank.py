"""Effective rank and the rank that follows it."""

from __future__ import annotations

import torch

from dilocox.outer.codec.adaptive_rank import WINDOW, AdaptiveRank, effective_rank


def factor(values):
    return torch.diag(torch.tensor(values)) @ torch.linalg.qr(torch.randn(20, len(values)))[0].T


def test_effective_rank_counts_what_holds_the_energy():
    assert effective_rank(factor([1.0] * 8)) == 8
    assert effective_rank(factor([1.0, 0.1, 0.1, 0.1])) == 1
    assert effective_rank(factor([3.0, 3.0, 3.0, 0.1])) == 3
    assert effective_rank(torch.zeros(4, 20)) == 0


def test_rank_is_the_mean_over_the_window_and_the_interval_follows():
    rank = AdaptiveRank(32)
    for _ in range(WINDOW - 1):
        rank.update(16)
    assert rank.rank == 32
    rank.update(16)
    assert rank.rank == 16
    assert rank.interval_scale == 0.5
    rank.update(6)
    assert rank.rank == 14


def test_a_spectrum_that_fills_the_rank_lets_it_grow_back_up_to_the_first():
    rank = AdaptiveRank(32)
    for _ in range(WINDOW):
        rank.update(8)
    shrunk = rank.rank
    for _ in range(100):
        rank.update(rank.rank)
    assert shrunk == 8
    assert rank.rank == 32


def test_rank_stays_at_least_one():
    rank = AdaptiveRank(4)
    for _ in range(WINDOW):
        rank.update(0)
    assert rank.rank == 1


def test_state_comes_back():
    first, second = AdaptiveRank(32), AdaptiveRank(32)
    for effective in range(10, 10 + WINDOW):
        first.update(effective)
    second.load_state_dict(first.state_dict())
    first.update(7)
    second.update(7)
    assert first.rank == second.rank == round((11 + 12 + 13 + 14 + 7) / 5)
