"""Singular values against an SVD of the operator written out; the bound, and what folding leaves."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maple.baselines.spectral import BoundedBatchNorm2d, SpectralBound, bound_layers, fold
from maple.errors import UsageError
from maple.networks import Backbone, create_backbone


def dense_norm(operator, weight, shape):
    """The largest singular value of a linear operator, from the matrix of what it does to each unit input."""
    inputs = torch.eye(shape.numel(), dtype=weight.dtype).reshape(-1, *shape[1:])
    with torch.no_grad():
        matrix = operator(inputs, weight).flatten(1)  # (inputs, outputs)
    return torch.linalg.svdvals(matrix)[0]


def layer_norm_of(layer, weight):
    """The same of a layer that is bounded, with another weight."""
    bound = layer.parametrizations.weight[0]
    return dense_norm(bound.operator, weight, bound.direction.shape)


CONVOLUTIONS = {
    "plain": (3, {"padding": 1}, 6),
    "no padding": (3, {}, 6),
    "stride": (3, {"padding": 1, "stride": 2}, 6),
    "stride, odd size": (3, {"padding": 1, "stride": 2}, 7),
    "one by one": (1, {}, 5),
    "one by one, stride": (1, {"stride": 2}, 5),
    "dilation": (3, {"padding": 2, "dilation": 2}, 7),
    "groups": (3, {"padding": 1, "groups": 2}, 5),
    "same": (3, {"padding": "same"}, 5),
}


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_norm_of_a_convolution_is_that_of_its_dense_matrix(case):
    size, settings, side = CONVOLUTIONS[case]
    torch.manual_seed(0)
    weight = torch.randn(4, 4 // settings.get("groups", 1), size, size, dtype=torch.float64)
    operator, shape = partial(F.conv2d, **settings), torch.Size([1, 4, side, side])
    bound = SpectralBound(operator, weight, shape, bound=1.0, n_iterations=300)
    scaled, true = bound(weight), dense_norm(operator, weight, shape)
    torch.testing.assert_close(bound.norm(weight), true, rtol=1e-3, atol=0)
    torch.testing.assert_close(scaled, weight / true, rtol=1e-3, atol=0)


def test_the_reshaped_kernel_has_another_norm():
    torch.manual_seed(0)
    weight = torch.randn(4, 4, 3, 3)
    true = dense_norm(partial(F.conv2d, padding=1), weight, torch.Size([1, 4, 8, 8]))
    assert true > 1.5 * torch.linalg.matrix_norm(weight.flatten(1), ord=2)


def test_norm_of_a_linear_layer():
    torch.manual_seed(0)
    weight = torch.randn(5, 9)
    bound = SpectralBound(F.linear, weight, (1, 9), bound=0.7, n_iterations=200)
    scaled = bound(weight)
    torch.testing.assert_close(scaled, weight * 0.7 / torch.linalg.matrix_norm(weight, ord=2))


def test_gradients_flow_through_the_scale():
    torch.manual_seed(0)
    weight = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(5, 9, dtype=torch.float64)
    bound = SpectralBound(F.linear, weight, (1, 9), bound=0.7, n_iterations=500)
    exact = weight * 0.7 / torch.linalg.matrix_norm(weight, ord=2)
    found, expected = (torch.autograd.grad((w * targets).sum(), weight)[0] for w in (bound(weight), exact))
    torch.testing.assert_close(found, expected)


def test_never_scaled_up():
    torch.manual_seed(0)
    weight = 0.01 * torch.randn(6, 6)
    assert torch.equal(SpectralBound(F.linear, weight, (1, 6), bound=0.95)(weight), weight)


def test_never_more_than_the_true_norm():
    """However few iterations there were, so that a bound that is met is met by the estimate at least."""
    torch.manual_seed(0)
    bound = SpectralBound(F.linear, torch.randn(20, 20), (1, 20), bound=1.0)
    for _ in range(20):
        weight = torch.randn(20, 20)
        assert bound.norm(weight) <= torch.linalg.matrix_norm(weight, ord=2) * (1 + 1e-6)
        bound(weight)


def test_weight_of_zeros_can_grow():
    bound = SpectralBound(F.linear, torch.zeros(4, 4), (1, 4), bound=1.0)
    weight = torch.zeros(4, 4, requires_grad=True)
    bound(weight).sum().backward()
    assert torch.equal(weight.grad, torch.ones(4, 4))
    for _ in range(50):
        scaled = bound(5 * torch.eye(4))
    torch.testing.assert_close(scaled, torch.eye(4))


def test_iterates_in_training_only():
    torch.manual_seed(0)
    bound = SpectralBound(F.linear, torch.randn(6, 6), (1, 6), bound=1.0)
    other = torch.randn(6, 6)
    before = bound.direction.clone()
    assert torch.equal(bound.eval()(other), bound(other))
    assert torch.equal(bound.direction, before)
    bound.train()(other)
    assert not torch.equal(bound.direction, before)


def test_lower_precision_does_not_reach_the_bound():
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    bound = SpectralBound(F.linear, weight, (1, 6), bound=1.0).eval()
    with torch.autocast("cpu", torch.bfloat16):
        inside = bound(weight)
    assert torch.equal(inside, bound(weight))


def test_two_passes_before_one_backward():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", SpectralBound(F.linear, layer.weight, (1, 4), 0.1))
    x = torch.randn(3, 4)
    (layer(x) + layer(2 * x)).sum().backward()


# --- batch normalisation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_within_its_bound_is_the_ordinary_one(momentum):
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(3, momentum=momentum)
    bounded = BoundedBatchNorm2d(copy.deepcopy(plain), bound=100.0)
    for _ in range(3):
        x = 1 + 2 * torch.randn(8, 3, 4, 4)
        torch.testing.assert_close(bounded(x), plain(x))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(bounded.state_dict()[key], value)
    torch.testing.assert_close(bounded.eval()(x), plain.eval()(x))


def test_batch_norm_is_bounded():
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([1.0, -4.0, 2.0]))
        layer.running_var.copy_(torch.tensor([0.5, 0.25, 4.0]))
    bounded = BoundedBatchNorm2d(layer, bound=3.0).eval()
    assert bounded.norm().item() == pytest.approx(8.0, rel=1e-4)
    x = torch.randn(1, 3, 1, 1)
    steps = (bounded(x + torch.eye(3).reshape(3, 3, 1, 1)) - bounded(x)).flatten(1)  # the Jacobian
    assert torch.linalg.svdvals(steps)[0].item() == pytest.approx(3.0, rel=1e-4)
    before = bounded(x)
    folded = bounded.fold().eval()
    assert type(folded) is nn.BatchNorm2d
    torch.testing.assert_close(folded(x), before)


def test_batch_norm_needs_scales_and_statistics():
    for settings in ({"affine": False}, {"track_running_stats": False}):
        with pytest.raises(UsageError, match="batch normalisation"):
            BoundedBatchNorm2d(nn.BatchNorm2d(3, **settings), bound=1.0)


# --- a whole backbone ------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Strided and 1x1 convolutions beside a shortcut, batch normalisation, a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 1)
        self.linear = nn.Linear(4, 6)

    def forward(self, x):
        x = F.relu(self.norm(self.conv(x)))
        return self.linear((x + self.inner(x)).amax((2, 3)))


def small_backbone():
    return Backbone(Small(), nn.Linear(6, 2), embedding_size=6, size=8)


def learn(backbone, n_steps, seed=0):
    """Steps large enough to leave the bound behind, were it not for the bound."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD(backbone.train().parameters(), 0.5)
    for _ in range(n_steps):
        images = torch.rand(16, 3, 8, 8, generator=generator)
        targets = (images[:, 0].mean((1, 2)) > 0.5).long()
        optimiser.zero_grad()
        F.cross_entropy(backbone(images)[1], targets).backward()
        optimiser.step()


@pytest.mark.parametrize("bound", [0.5, 2.0])
def test_bound_holds_while_a_network_learns(bound):
    torch.manual_seed(0)
    backbone = small_backbone()
    bound_layers(backbone, bound, batch_norm=True)
    with torch.no_grad():
        for layer in (backbone.body.conv, backbone.body.inner, backbone.body.linear):
            layer.parametrizations.weight.original.mul_(5)
    learn(backbone, 60)
    backbone.eval()
    body = backbone.body
    for layer in (body.conv, body.inner, body.linear):
        assert layer_norm_of(layer, layer.parametrizations.weight.original) > bound
        assert layer_norm_of(layer, layer.weight) <= 1.05 * bound
    assert (body.norm.bounded_weight() * (body.norm.running_var + body.norm.eps).rsqrt()).abs().max() <= bound * 1.0001


def test_all_layers_between_image_and_embedding_are_bounded():
    backbone = create_backbone("resnet9", n_classes=10, embedding_size=12)
    statistics = copy.deepcopy(backbone.state_dict())
    bound_layers(backbone, 0.95)
    shapes = {
        name: tuple(layer.parametrizations.weight[0].direction.shape)
        for name, layer in backbone.named_modules()
        if nn.utils.parametrize.is_parametrized(layer)
    }
    layers = dict(create_backbone("resnet9", 10, embedding_size=12).named_modules())
    assert set(shapes) == {n for n, m in layers.items() if isinstance(m, nn.Conv2d | nn.Linear)} - {"head"}
    assert shapes["body.blocks.0.0"] == (1, 3, 32, 32)
    assert shapes["body.blocks.3.0"] == (1, 32, 16, 16)  # before its own pooling
    assert shapes["embedding_layer"] == (1, 128)
    assert backbone.training
    assert type(backbone.body.blocks[0][1]) is nn.BatchNorm2d
    for key, value in backbone.state_dict().items():
        if "running" in key:
            assert torch.equal(value, statistics[key])


def test_size_is_the_backbones_own():
    backbone = create_backbone("resnet9", n_classes=10)
    backbone.size = 16
    bound_layers(backbone, 0.95)
    assert backbone.body.blocks[0][0].parametrizations.weight[0].direction.shape == (1, 3, 16, 16)


def test_a_layer_that_is_called_twice_is_bounded_for_the_larger_image():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(F.max_pool2d(self.conv(x), 2)).amax((2, 3))

    backbone = Backbone(Twice(), None, embedding_size=3, size=8)
    bound_layers(backbone, 0.95)
    assert backbone.body.conv.parametrizations.weight[0].direction.shape == (1, 3, 8, 8)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_folding_keeps_outputs_and_leaves_plain_layers(batch_norm):
    torch.manual_seed(0)
    backbone = small_backbone()
    bound_layers(backbone, 0.5, batch_norm=batch_norm)
    learn(backbone, 10)
    images = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        before = backbone.eval()(images)
        backbone.train()
        fold(backbone)
        after = backbone.eval()(images)
    for one, other in zip(before, after):
        torch.testing.assert_close(one, other)
    plain = small_backbone()
    assert {n: type(m) for n, m in backbone.named_modules()} == {n: type(m) for n, m in plain.named_modules()}
    plain.load_state_dict(backbone.state_dict())
    assert torch.equal(plain.eval()(images)[0], backbone(images)[0])


def test_a_training_goes_on_from_its_state():
    torch.manual_seed(0)
    first, second = small_backbone(), small_backbone()
    for backbone in (first, second):
        bound_layers(backbone, 0.5, batch_norm=True)
    learn(first, 5)
    second.load_state_dict(first.state_dict())
    for backbone in (first, second):
        learn(backbone, 5, seed=1)
    for key, value in first.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key


def test_other_paddings_are_refused():
    body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(UsageError, match="'reflect'"):
        bound_layers(Backbone(body, None, embedding_size=4), 0.95)
