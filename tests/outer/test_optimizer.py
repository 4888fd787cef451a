"""The outer optimizer: DiLoCo's equation on plain numbers, and its state."""

import pytest
import torch

from dilocox.config.defaults import resolve
from dilocox.config.schema import Config, OuterConfig
from dilocox.outer.optimizer import OuterOptimizer

SHAPES = [(7,), (5, 3), (1,), (130, 65)]


def random_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def outer(**settings):
    return resolve(Config(outer=OuterConfig(**settings))).outer


@pytest.mark.parametrize("kind", ["nesterov", "sgd"])
@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.4, 0.6), (1.0, 0.0)])
def test_steps_follow_the_equation(kind, lr, momentum):
    """b = mu * b + d; theta -= eta * (d + mu * b) with Nesterov, eta * b without (2311.08105)."""
    anchors = random_tensors(0)
    optimizer = OuterOptimizer(outer(outer_optimizer=kind, outer_lr=lr, outer_momentum=momentum), anchors)
    theta = [tensor.double() for tensor in anchors]
    buffer = [torch.zeros_like(tensor) for tensor in theta]
    for step in range(6):
        gradient = random_tensors(100 + step)
        optimizer.step(gradient)
        for i, delta in enumerate(gradient):
            buffer[i] = momentum * buffer[i] + delta.double()
            move = delta.double() + momentum * buffer[i] if kind == "nesterov" else buffer[i]
            theta[i] -= lr * move
    for ours, wanted in zip(anchors, theta, strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


def test_the_gradient_is_left_as_it_is():
    optimizer = OuterOptimizer(outer(), random_tensors(0))
    gradient = random_tensors(1)
    for _ in range(3):
        optimizer.step(gradient)
    assert all(torch.equal(a, b) for a, b in zip(gradient, random_tensors(1), strict=True))


def test_first_step_has_size_lr_times_one_plus_momentum():
    anchor = [torch.zeros(3)]
    OuterOptimizer(outer(outer_lr=0.7, outer_momentum=0.9), anchor).step([torch.ones(3)])
    torch.testing.assert_close(anchor[0], torch.full((3,), -1.33))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_continues_from_its_state(steps):
    config = outer(outer_lr=0.7, outer_momentum=0.9)
    whole = random_tensors(0)
    first = OuterOptimizer(config, whole)
    for step in range(steps):
        first.step(random_tensors(step))
    half = [tensor.clone() for tensor in whole]
    second = OuterOptimizer(config, half)
    second.load(first.tensors(), first.plain())
    for optimizer in (first, second):
        optimizer.step(random_tensors(9))
    assert all(torch.equal(a, b) for a, b in zip(whole, half, strict=True))
    assert first.tensors().keys() == ({"momentum_buffer"})


def test_adam_of_torch_needs_no_code_of_its_own(monkeypatch):
    """Another optimizer is one entry in the table; its moments and its step count survive a checkpoint."""
    from dilocox.outer import optimizer as module

    monkeypatch.setitem(
        module.OPTIMIZERS, "adam", lambda anchors, lr, momentum: torch.optim.Adam(anchors, lr=lr)
    )
    config = outer().model_copy(update={"outer_optimizer": "adam"})
    whole = random_tensors(0)
    first = OuterOptimizer(config, whole)
    first.step(random_tensors(1))
    half = [tensor.clone() for tensor in whole]
    second = OuterOptimizer(config, half)
    second.load(first.tensors(), first.plain())
    for optimizer in (first, second):
        optimizer.step(random_tensors(2))
    assert all(torch.equal(a, b) for a, b in zip(whole, half, strict=True))
    assert set(first.tensors()) == {"exp_avg", "exp_avg_sq"} and first.plain() == {"step": 2.0}


def test_a_rank_without_shards_has_nothing_to_step():
    optimizer = OuterOptimizer(outer(), [])
    optimizer.step([])
    optimizer.load({}, {})
    assert optimizer.tensors() == {} and optimizer.plain() == {}
