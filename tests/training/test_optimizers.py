"""Optimisers and schedules by name; Muon against an SVD, its definition, and which parameters it takes."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks import create_backbone
from maple.training.optimizers import (
    COEFFICIENTS,
    OPTIMIZERS,
    SCHEDULES,
    SGD_MOMENTUM,
    Muon,
    check_schedule,
    learning_rate_at,
    make_muon,
    make_optimizer,
    orthogonalise,
)
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe


def test_schedules():
    for schedule in ("triangular", "cosine"):
        options = TrainOptions(schedule=schedule, learning_rate=0.2)
        rates = [learning_rate_at(p, options) for p in np.linspace(0, 1, 101)]
        assert max(rates) == pytest.approx(0.2)
        assert rates[-1] == pytest.approx(0, abs=1e-12)
        assert min(rates) >= 0
    assert learning_rate_at(0.9, TrainOptions(schedule="constant", learning_rate=0.05)) == 0.05
    assert math.isclose(learning_rate_at(0.5, TrainOptions(schedule="cosine", learning_rate=1.0)), 0.5)


def test_tables_have_the_names_of_the_options():
    fields = {
        field.name: get_args(get_type_hints(TrainOptions)[field.name]) for field in dataclasses.fields(TrainOptions)
    }
    assert set(fields["optimizer"]) == set(OPTIMIZERS)
    assert set(fields["schedule"]) == set(SCHEDULES)


def test_step_schedule_falls_after_each_milestone():
    options = TrainOptions(schedule="step", milestones=(2, 4), epochs=5, learning_rate=1.0)
    rates = [learning_rate_at((epoch - 1 + share) / 5, options) for epoch in range(1, 6) for share in (0, 0.99)]
    np.testing.assert_allclose(rates, [1, 1, 1, 1, 0.2, 0.2, 0.2, 0.2, 0.04, 0.04])


def test_linear_schedule_falls_from_the_peak_to_zero():
    options = TrainOptions(schedule="linear", learning_rate=0.4)
    assert [learning_rate_at(p, options) for p in (0, 0.25, 1)] == pytest.approx([0.4, 0.3, 0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"schedule": "step"}, "--milestones"),
        ({"schedule": "cosine", "milestones": (1,)}, "--milestones"),
        ({"schedule": "step", "milestones": (2, 4)}, "4"),
        ({"schedule": "step", "milestones": (2, 1)}, "2,1"),
    ],
)
def test_milestones_outside_the_training_are_errors(options, named):
    with pytest.raises(UsageError, match=named):
        check_schedule(TrainOptions(epochs=4, **options))


@pytest.mark.parametrize("shape", [(8, 8), (6, 40), (40, 6)])
def test_orthogonalise_keeps_singular_vectors_and_maps_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    """An odd matrix polynomial acts on singular values alone: SVD, scalar iteration, product."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, values, vt = np.linalg.svd(matrix.numpy(), full_matrices=False)
    s = values / np.linalg.norm(values)
    for _ in range(3):
        s = COEFFICIENTS[0] * s + COEFFICIENTS[1] * s**3 + COEFFICIENTS[2] * s**5
    np.testing.assert_allclose(orthogonalise(matrix).numpy(), u @ np.diag(s) @ vt, rtol=1e-5, atol=1e-5)


def test_more_iterations_orthogonalise() -> None:
    matrix = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix, iterations=5))
    assert values.min() > 0.6 and values.max() < 1.3


def test_a_matrix_of_zeros_stays_finite() -> None:
    assert orthogonalise(torch.zeros(3, 5)).abs().sum() == 0


def test_two_steps_of_a_filter_by_hand() -> None:
    torch.manual_seed(0)
    filters = nn.Parameter(torch.randn(4, 2, 3, 3))
    before, rate, momentum = filters.detach().clone(), 0.1, 0.6
    gradients = [torch.randn_like(before) for _ in range(2)]
    optimizer = Muon([{"params": [filters], "orthogonal": True, "momentum": momentum}], lr=rate)
    buffer = torch.zeros_like(before)
    for gradient in gradients:
        filters.grad = gradient.clone()
        optimizer.step()
        buffer = momentum * buffer + gradient
        update = orthogonalise((gradient + momentum * buffer).reshape(4, 18)).reshape(before.shape)
        before = before * 2 / before.norm() - rate * update  # norm sqrt(4)
    torch.testing.assert_close(filters.detach(), before)


def test_the_rest_is_torch_sgd_with_nesterov_momentum() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Parameter(torch.randn(5)), nn.Parameter(torch.empty(5))
    theirs.data.copy_(ours.data)
    optimizers = (
        Muon([{"params": [ours], "weight_decay": 0.1, "rate_factor": 0.1}], lr=0.05),
        torch.optim.SGD([theirs], lr=0.05, momentum=SGD_MOMENTUM, nesterov=True, weight_decay=0.1),
    )
    for _ in range(3):
        gradient = 0.1 * torch.randn(5)
        for parameter, optimizer in zip((ours, theirs), optimizers):
            parameter.grad = gradient.clone()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [0.0, 3.0])
def test_no_step_of_the_rest_is_relatively_larger_than_one_of_the_filters(size: float) -> None:
    parameter = nn.Parameter(torch.full((4,), size))
    parameter.grad = torch.full((4,), 1e6)
    Muon([{"params": [parameter], "rate_factor": 6.0}], lr=6.0 * 0.2).step()
    smallest = 0.1  # what a parameter of zeros counts as
    torch.testing.assert_close(parameter.detach(), torch.full((4,), size - 0.2 * max(size, smallest)))


def test_filters_are_orthogonalised_and_head_and_biases_are_not() -> None:
    backbone = create_backbone("airbench-4", n_classes=3, embedding_size=6)
    create_recipe("cross-entropy", rotation_share=0.5).prepare(backbone)
    optimizer = make_optimizer(backbone, TrainOptions(optimizer="muon", learning_rate=0.24, momentum=0.6))
    names = {parameter: name for name, parameter in backbone.named_parameters()}
    orthogonal, *others = optimizer.param_groups
    found = {names[parameter] for parameter in orthogonal["params"]}
    assert {"body.groups.0.0.weight", "embedding_layer.weight"} <= found
    assert not found & {"head.weight", "rotation_head.weight", "body.whiten.weight"}
    assert all(not group["orthogonal"] for group in others)
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(everything) == len(names) and orthogonal["momentum"] == 0.6


def test_weight_decay_is_the_share_lost_per_step_whatever_the_rate() -> None:
    module = nn.ModuleDict({"body": nn.Conv2d(3, 4, 3), "head": nn.Linear(4, 2)})
    options = TrainOptions(learning_rate=0.24, momentum=0.6, weight_decay=0.01)
    for group in make_muon(module, options).param_groups[1:]:
        assert group["weight_decay"] * group["rate_factor"] * 0.24 == pytest.approx(0.01)


def test_nothing_to_optimise_is_an_error() -> None:
    module = nn.ModuleDict({"body": nn.BatchNorm2d(3), "head": nn.Linear(3, 2)})
    with pytest.raises(UsageError, match="muon"):
        make_muon(module, TrainOptions())
