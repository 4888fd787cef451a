"""Local error feedback: nothing is lost over many syncs, nothing moves without a commit."""

from __future__ import annotations

import pytest
import torch

from dilocox.errors import CheckpointError
from dilocox.outer.codec.error_feedback import ErrorFeedback
from tests.outer.codec.building import build_codec, grids_of


def reconstruction(codec, tensors):
    grids = grids_of(tensors)
    decoded = codec.decode(codec.encode(tensors, grids), grids)
    return [d.view(t.shape) for d, t in zip(decoded, tensors, strict=True)]


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "nf4", "e3m0"])
def test_what_arrived_plus_residual_is_what_was_meant(name):
    torch.manual_seed(0)
    codec = build_codec(name, 64)
    feedback = ErrorFeedback(["a", "b"], [torch.empty(30, 10), torch.empty(65)])
    meant = arrived = [torch.zeros(30, 10, dtype=torch.float64), torch.zeros(65, dtype=torch.float64)]
    for _ in range(20):
        deltas = [torch.randn(30, 10) * 1e-3, torch.randn(65) * 1e-3]
        sent = feedback.compensate(deltas)
        own = reconstruction(codec, sent)
        feedback.commit(sent, own)
        meant = [m + d for m, d in zip(meant, deltas, strict=True)]
        arrived = [a + o for a, o in zip(arrived, own, strict=True)]
    for m, a, residual in zip(meant, arrived, feedback.residual, strict=True):
        assert torch.allclose(a + residual, m, rtol=0, atol=1e-8)
        assert residual.abs().max() > 0


def test_compensating_changes_neither_delta_nor_residual():
    feedback = ErrorFeedback(["a"], [torch.empty(3)])
    feedback.commit([torch.tensor([1.0, 2.0, 3.0])], [torch.zeros(3)])
    delta = torch.ones(3)
    assert feedback.compensate([delta])[0].tolist() == [2.0, 3.0, 4.0]
    assert delta.tolist() == [1.0, 1.0, 1.0]
    assert feedback.residual[0].tolist() == [1.0, 2.0, 3.0]


def test_state_comes_back_by_name():
    first = ErrorFeedback(["a", "b"], [torch.empty(2), torch.empty(3)])
    first.commit([torch.ones(2), torch.ones(3)], [torch.zeros(2), torch.full((3,), 0.5)])
    second = ErrorFeedback(["b", "a"], [torch.empty(3), torch.empty(2)])
    second.load_state_dict(first.state_dict())
    assert second.residual[0].tolist() == [0.5, 0.5, 0.5]
    with pytest.raises(CheckpointError, match="no residual of c is saved"):
        ErrorFeedback(["c"], [torch.empty(2)]).load_state_dict(first.state_dict())


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
def test_a_residual_of_another_shape_is_refused(shape):
    feedback = ErrorFeedback(["a", "b"], [torch.empty(3), torch.empty(shape)])
    with pytest.raises(CheckpointError, match=r"residual of b has shape \(2,\), the shard has"):
        feedback.load_state_dict({"a": torch.ones(3), "b": torch.ones(2)})
    assert not any(residual.any() for residual in feedback.residual)
