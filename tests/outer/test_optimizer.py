"""The outer optimizers against their reference twin, torch.optim.SGD: equal bits."""

import pytest
import torch

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, OuterConfig
from dilocox.outer.optimizer import Sgd, build_outer_optimizer

SHAPES = [(7,), (5, 3), (1,), (130, 65)]


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def twin(anchor, *, lr, momentum, nesterov):
    parameters = [torch.nn.Parameter(tensor.clone()) for tensor in anchor]
    nesterov = nesterov and momentum > 0  # torch refuses Nesterov without momentum, where it is plain SGD
    return parameters, torch.optim.SGD(parameters, lr=lr, momentum=momentum, nesterov=nesterov)


def twin_step(parameters, optimizer, gradient):
    for parameter, delta in zip(parameters, gradient, strict=True):
        parameter.grad = delta.clone()
    optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.6), (1.0, 0.0)])
def test_equals_torch_sgd_bit_for_bit_with_a_buffer_for_each_fragment(lr, momentum, nesterov):
    optimizer = Sgd(lr=lr, momentum=momentum, nesterov=nesterov)
    anchors = {fragment: random_tensors(fragment) for fragment in (0, 1)}
    twins = {
        fragment: twin(anchor, lr=lr, momentum=momentum, nesterov=nesterov)
        for fragment, anchor in anchors.items()
    }
    for step in range(6):
        for fragment in (0, 1, 1)[: 2 + step % 2]:
            gradient = random_tensors(100 + 10 * step + fragment)
            optimizer.step(fragment, anchors[fragment], gradient)
            twin_step(*twins[fragment], gradient)
            for ours, theirs in zip(anchors[fragment], twins[fragment][0], strict=True):
                assert torch.equal(ours, theirs)


def test_the_gradient_is_left_as_it_is():
    optimizer = Sgd(lr=0.7, momentum=0.9, nesterov=True)
    gradient = random_tensors(1)
    for _ in range(3):
        optimizer.step(0, random_tensors(0), gradient)
    assert all(torch.equal(a, b) for a, b in zip(gradient, random_tensors(1), strict=True))


def test_first_step_has_size_lr_times_one_plus_momentum():
    anchor = [torch.zeros(3)]
    Sgd(lr=0.7, momentum=0.9, nesterov=True).step(0, anchor, [torch.ones(3)])
    torch.testing.assert_close(anchor[0], torch.full((3,), -1.33))


def test_a_loaded_state_continues_with_equal_bits():
    straight, saved = (Sgd(lr=0.7, momentum=0.9, nesterov=True) for _ in range(2))
    anchor, copy = random_tensors(0), random_tensors(0)
    for step in range(2):
        straight.step(3, anchor, random_tensors(step))
        saved.step(3, copy, random_tensors(step))
    loaded = Sgd(lr=0.7, momentum=0.9, nesterov=True)
    assert loaded.momentum_of(3) is None
    loaded.load_state_dict(saved.state_dict())
    saved.step(3, random_tensors(0), random_tensors(9))  # must not reach what has been loaded
    straight.step(3, anchor, random_tensors(2))
    loaded.step(3, copy, random_tensors(2))
    assert all(torch.equal(a, b) for a, b in zip(anchor, copy, strict=True))


def test_shapes_of_anchor_and_gradient_must_pair_up():
    with pytest.raises(ValueError, match=r"zip\(\)"):
        Sgd(lr=0.7, momentum=0.9, nesterov=True).step(0, random_tensors(0), random_tensors(0)[:2])


@pytest.mark.parametrize(
    ("outer", "lr", "momentum", "nesterov"),
    [
        (OuterConfig(), 0.7, 0.6, True),
        (OuterConfig(outer_optimizer="sgd"), 1.0, 0.0, False),
        (OuterConfig(outer_lr=0.5, outer_momentum=0.8), 0.5, 0.8, True),
    ],
)
def test_built_from_the_configuration(outer, lr, momentum, nesterov):
    optimizer = build_outer_optimizer(resolve(Config(outer=outer)).outer)
    assert (optimizer.lr, optimizer.momentum, optimizer.nesterov) == (lr, momentum, nesterov)
