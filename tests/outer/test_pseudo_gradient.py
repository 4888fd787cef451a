"""Signs, polarity and storage of the pure functions; `tests/golden/test_sync.py` compares whole modes."""

import pytest
import torch

from dilocox.outer import pseudo_gradient


def tensors(*values):
    return [torch.full((3,), float(value)) for value in values]


def values(tensors_):
    return [tensor[0].item() for tensor in tensors_]


def test_pseudo_gradient_is_old_minus_new_in_memory_of_its_own():
    reference, local = tensors(5, 1), tensors(3, 4)
    delta = pseudo_gradient.measure(reference, local)
    local[0].zero_()
    assert values(delta) == [2, -3]


def test_alpha_weighs_the_local_value():
    local, anchor = tensors(4, 8), tensors(0, 4)
    pseudo_gradient.mix(local, anchor, alpha=0.75)
    assert (values(local), values(anchor)) == ([3, 7], [0, 4])


@pytest.mark.parametrize("apply", [pseudo_gradient.reset, lambda *both: pseudo_gradient.mix(*both, alpha=0)])
def test_taking_the_anchor_is_exact_and_shares_no_storage(apply):
    local, anchor = [torch.tensor([float("inf")])], [torch.tensor([0.1])]
    apply(local, anchor)
    anchor[0].add_(1)
    assert local[0] == torch.tensor(0.1)


def test_keep_private_subtracts_what_is_pending_and_what_is_not_measured():
    local, reference, anchor = tensors(6), tensors(10), tensors(100)  # 4 not measured
    pseudo_gradient.keep_private(local, reference, anchor, pending=[tensors(3), tensors(20)])
    assert (values(local), values(reference), values(anchor)) == ([73], [77], [100])
    assert values(pseudo_gradient.measure(reference, local)) == [4]


def test_a_discarded_sync_is_measured_again():
    reference, local = tensors(10), tensors(6)
    delta = pseudo_gradient.measure(reference, local)
    pseudo_gradient.advance_reference(reference, local)
    local[0].sub_(1)
    pseudo_gradient.restore_unsent(reference, delta)
    assert values(pseudo_gradient.measure(reference, local)) == [5]


def test_a_discarded_delayed_keep_run_ends_where_a_lossless_one_does():
    """Outer lr 1 without momentum: the anchor is minus all measured progress, one sync lost or not."""
    local, reference, anchor = tensors(0), tensors(0), tensors(0)
    for lost in (False, True, False):
        local[0].sub_(2)
        delta = pseudo_gradient.measure(reference, local)
        pseudo_gradient.advance_reference(reference, local)
        if lost:
            pseudo_gradient.restore_unsent(reference, delta)
            continue
        anchor[0].sub_(delta[0])
        pseudo_gradient.keep_private(local, reference, anchor, pending=[])
    assert (values(local), values(anchor), values(reference)) == ([-6], [-6], [-6])


def eager(fresh, mean, own):
    return values(pseudo_gradient.eager_share(fresh, mean, own, fresh_share=0.25, previous_share=0.5))


def test_eager_adds_the_own_fresh_share_to_the_late_share_of_the_others():
    assert eager(tensors(8), tensors(10), tensors(4)) == [2 + 10 - 2]
    assert eager(tensors(8), None, None) == [2]
    assert eager(tensors(8), None, tensors(4)) == [2]  # the last sync was discarded
    assert eager(None, tensors(10), tensors(4)) == [8]


def test_eager_uses_every_pseudo_gradient_once():
    """Over a run and its drain, what an island applies adds up to the sum of the means."""
    torch.manual_seed(0)
    deltas = torch.randn(6, 4)  # syncs x islands
    applied = torch.zeros(4)
    for island in range(4):
        for session in range(7):
            fresh = [deltas[session, island]] if session < 6 else None
            mean = [deltas[session - 1].mean()] if session else None
            own = [deltas[session - 1, island]] if session else None
            shares = {"fresh_share": 0.25, "previous_share": 0.25}
            applied[island] += pseudo_gradient.eager_share(fresh, mean, own, **shares)[0]
    torch.testing.assert_close(applied, deltas.mean(dim=1).sum().expand(4))


def test_eager_with_nothing_at_all_is_an_error():
    with pytest.raises(ValueError, match="neither"):
        eager(None, None, None)


@pytest.mark.parametrize(
    "function", [pseudo_gradient.measure, pseudo_gradient.reset, pseudo_gradient.restore_unsent]
)
def test_lists_must_pair_up(function):
    with pytest.raises(ValueError, match=r"zip\(\)"):
        function(tensors(1, 2), tensors(1))
