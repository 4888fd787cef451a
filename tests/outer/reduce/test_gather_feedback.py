"""Over many syncs nothing is lost: updates + residuals = true means, also when members change."""

from __future__ import annotations

import pytest
import torch

from dilocox.errors import CheckpointError
from dilocox.outer.codec.error_feedback import ErrorFeedback
from dilocox.outer.codec.grid import Slice
from dilocox.outer.reduce.all_reduce import Wire, all_reduce_mean
from dilocox.outer.reduce.gather_feedback import GatherErrorFeedback
from dilocox.outer.wan.header import SyncId
from dilocox.outer.wan.loopback import LoopbackHub
from tests.outer.codec.building import build_codec, rows
from tests.outer.wan.islands import member_of, run_islands

SIZES = [1, 65, 4095, 300]
CHANGING = [
    *[[0, 1, 2, 3, 4]] * 4,
    *[[0, 1, 3]] * 3,  # two leave: what they held is gone, what the others hold is not
    *[[1, 3]] * 3,
    *[[3]] * 2,
    *[[0, 1, 3]] * 3,
    *[[0, 1, 2, 3, 4]] * 5,
]


class Islands:
    """Error feedback and gather residual of some islands, and their potential."""

    def __init__(self, count, codec):
        self.codec = codec
        self.like = like = [torch.empty(size) for size in SIZES]
        self.feedback = [ErrorFeedback(list("abcd"), like) for _ in range(count)]
        self.gather = [GatherErrorFeedback() for _ in range(count)]

    def potential(self, members, weights):
        """What is still to be applied: weighted local residuals, and gather residuals."""
        held = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
        for island, weight in zip(members, weights, strict=True):
            for h, residual in zip(held, self.feedback[island].residual, strict=True):
                h += weight / sum(weights) * residual.double()
            for place, values in self.gather[island].values():
                held[place.tensor][place.start : place.stop] += values
        return held

    def sync(self, members, weights, deltas, *, commit=True):
        """One sync. Returns: the mean."""
        hub = LoopbackHub(0, timeout_s=10)
        for island in members:
            hub.join(island)

        def work(island):
            session = hub.wan(island).open_session(member_of(island, weight=weights[members.index(island)]))
            sent = self.feedback[island].compensate(deltas[island])
            result = all_reduce_mean(
                sent,
                rows(*SIZES),
                transport=session.transport,
                wire=Wire(build_codec(self.codec, 64), build_codec(self.codec, 64)),
                sync=SyncId("run", 0, 0),
                feedback=self.gather[island],
            )
            if not commit:
                self.gather[island].discard()
                return result.mean
            self.gather[island].commit()
            if session.transport.weights[session.transport.index] > 0:
                self.feedback[island].commit(sent, result.own_decoded)
            return result.mean

        means = run_islands(work, members)
        for mean in means:
            assert all(torch.equal(a, b) for a, b in zip(mean, means[0], strict=True))
        return means[0]


def random_deltas(step):
    generator = torch.Generator().manual_seed(step)
    return [[torch.randn(size, generator=generator) * 1e-3 for size in SIZES] for _ in range(5)]


def check_conservation(islands, members, weights, step):
    """One sync: mean applied + held afterwards = true mean + held before. Returns: applied, true mean."""
    deltas = random_deltas(step)
    before = islands.potential(members, weights)
    applied = islands.sync(members, weights, deltas)
    after = islands.potential(members, weights)
    total = sum(weights)
    true = [
        sum(w / total * deltas[k][i].double() for k, w in zip(members, weights, strict=True))
        for i in range(len(SIZES))
    ]
    for a, h, t, b in zip(applied, after, true, before, strict=True):
        assert torch.allclose(a + h, t + b, rtol=0, atol=2e-8)
    return applied, true


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "nf4", "e3m0"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_twenty_syncs_lose_nothing(codec, count):
    islands = Islands(count, codec)
    members, weights = list(range(count)), [1.0] * count
    sum_applied = sum_true = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    for step in range(20):
        applied, true = check_conservation(islands, members, weights, step)
        sum_applied = [s + a for s, a in zip(sum_applied, applied, strict=True)]
        sum_true = [s + t for s, t in zip(sum_true, true, strict=True)]
    for applied, held, true in zip(sum_applied, islands.potential(members, weights), sum_true, strict=True):
        assert torch.allclose(applied + held, true, rtol=0, atol=2e-7)
        # Bounded: what is held is what a sync or two lost, not twenty.
        assert (held.norm() <= 0.6 * true.norm()) or held.abs().max() < 1e-3


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_is_lost_when_members_or_weights_change(weighted):
    islands = Islands(5, "int4")
    for step, members in enumerate(CHANGING):
        weights = [1.0 + (k * 7 + step) % 5 for k in members] if weighted else [1.0] * len(members)
        check_conservation(islands, members, weights, step)


def test_an_owner_that_abstains_keeps_what_it_could_not_forward():
    islands = Islands(3, "int4")
    check_conservation(islands, [0, 1, 2], [1.0, 1.0, 1.0], 0)
    check_conservation(islands, [0, 1], [1.0, 0.0], 1)
    assert islands.gather[1].values()
    check_conservation(islands, [0, 1], [1.0, 1.0], 2)
    assert not islands.gather[1].values()


@pytest.mark.parametrize("members", [[0, 1, 2], [0, 1]])
def test_a_discarded_sync_changes_no_residual(members):
    islands = Islands(3, "int4")
    check_conservation(islands, [0, 1, 2], [1.0] * 3, 0)
    before = [[(p, v.clone()) for p, v in held.values()] for held in islands.gather]
    islands.sync(members, [1.0] * len(members), random_deltas(1), commit=False)
    for gather, old in zip(islands.gather, before, strict=True):
        gather.commit()  # nothing is staged any more
        assert all(p == q and torch.equal(v, w) for (p, v), (q, w) in zip(gather.values(), old, strict=True))


def test_state_continues_with_equal_bits():
    first = Islands(3, "int4")
    members, weights = [0, 1, 2], [1.0] * 3
    check_conservation(first, members, weights, 0)
    second = Islands(3, "int4")
    for k in range(3):
        second.gather[k].load_state_dict(first.gather[k].state_dict(), first.like, in_use=True)
        second.feedback[k].load_state_dict(first.feedback[k].state_dict())
    means = [islands.sync(members, weights, random_deltas(1)) for islands in (first, second)]
    assert all(torch.equal(a, b) for a, b in zip(*means, strict=True))


def test_what_was_held_under_another_layout_is_forwarded_and_not_lost():
    islands = Islands(3, "int4")
    check_conservation(islands, [0, 1, 2], [1.0] * 3, 0)
    for gather in islands.gather:
        assert gather.values()
        gather.load_stale(gather.totals(islands.like))
    check_conservation(islands, [0, 1, 2], [1.0, 2.0, 3.0], 1)


def test_a_residual_that_does_not_fit_the_part_raises():
    """A zip that stops at the shorter list would drop what the longer one holds."""
    gather = GatherErrorFeedback()
    lost = [(Slice(0, 0, 4), torch.ones(4)), (Slice(1, 0, 2), torch.ones(2))]
    gather.stage(3, 0, lost=lost, forwarded=True)
    gather.commit()
    for slices in (
        [Slice(0, 0, 4)],
        [Slice(0, 0, 4), Slice(1, 0, 3)],
        [*(s for s, _ in lost), Slice(2, 0, 1)],
    ):
        with pytest.raises(ValueError, match="gather residual is of"):
            gather.add_to_part(3, 0, slices, [torch.zeros(s.numel) for s in slices])
    values = [torch.zeros(4), torch.zeros(2)]
    gather.add_to_part(3, 0, [s for s, _ in lost], values)
    assert [v.sum().item() for v in values] == [4.0, 2.0]


@pytest.mark.parametrize("key", ["3.0.2.0.4", "3.0.0.62.66", "3.0.0.0.3"])
def test_a_saved_residual_outside_its_tensor_is_refused(key):
    gather = GatherErrorFeedback()
    like = [torch.empty(64), torch.empty(8)]
    with pytest.raises(CheckpointError, match=f"gather residual {key}"):
        gather.load_state_dict({key: torch.ones(4)}, like, in_use=True)
    assert not gather.in_use
