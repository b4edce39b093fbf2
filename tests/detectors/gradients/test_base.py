"""The step on the image against finite differences, and what every detector of image gradients promises."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from gradient_images import MEAN, STD, in_float64, make_body, normalised, odin_step, tensor_of
from maple.baselines.ensemble import join_members
from maple.data.image_set import ImageSet
from maple.detectors.gradients._layers import find_layers
from maple.detectors.gradients.base import ImageDetector, image_gradients, move_images
from maple.detectors.gradients.lee import (
    LeeDetector,
    LeeOodDetector,
)
from maple.detectors.gradients.odin import OdinDetector
from maple.detectors.registry import create_detector, restore_detector
from maple.errors import ConfigError, DataError, FitError, NotFittedError, UsageError
from maple.networks import Backbone, wrap_backbone
from maple.types import Outputs


def test_the_step_has_the_sign_of_finite_differences(backbone, test):
    x = tensor_of(test)[:2]
    step = odin_step(backbone, x).numpy()
    labels = in_float64(backbone, normalised(x)).argmax(1)

    def log_probability(moved: torch.Tensor) -> torch.Tensor:
        logits = in_float64(backbone, normalised(moved)) / 1000
        return logits.log_softmax(1)[torch.arange(len(moved)), labels.repeat(len(moved) // 2)]

    flat = torch.eye(3 * 8 * 8, dtype=torch.float64).reshape(-1, 1, 3, 8, 8) * 1e-4
    with torch.no_grad():
        above, below = (log_probability((x.double() + sign * flat).reshape(-1, 3, 8, 8)) for sign in (1, -1))
    slope = ((above - below) / 2e-4).reshape(3, 8, 8, 2).permute(3, 0, 1, 2).numpy()
    clear = np.abs(slope) > 1e-3 * np.abs(slope).max()
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(step[clear], np.sign(slope)[clear])


def test_a_step_on_the_image_is_the_papers_step_on_the_normalised_image(backbone, test):
    x, epsilon = tensor_of(test), 0.0014
    z = normalised(x).requires_grad_()
    logits = in_float64(backbone, z) / 1000
    loss = F.cross_entropy(logits, logits.argmax(1), reduction="sum")
    (gradient,) = torch.autograd.grad(loss, z)
    std = torch.tensor(STD, dtype=torch.float64)[:, None, None]
    theirs = z.detach() - epsilon * gradient.sign() / std
    ours = normalised(x.double() + epsilon * odin_step(backbone, x).double())
    assert (torch.abs(theirs - ours) < 1e-9).double().mean() > 0.999  # but for gradients that float32 rounds across 0
    torch.testing.assert_close(ours.var(), theirs.var(), rtol=1e-4, atol=0)


def test_the_direction_survives_probabilities_that_round_to_1(train):
    torch.manual_seed(0)
    sure = Backbone(make_body(), nn.Linear(24, 2), embedding_size=24, mean=MEAN, std=STD).eval()
    with torch.no_grad():
        sure.head.weight *= 2e4
    x = tensor_of(train)[:20]
    z = normalised(x).requires_grad_()
    logits = in_float64(sure, z)
    assert (logits.softmax(1).min(1).values == 0).double().mean() > 0.5  # what a softmax would have to work with
    apart = (logits[:, 0] - logits[:, 1]).abs().sum()
    (expected,) = torch.autograd.grad(apart, z)
    agree = odin_step(sure, x, temperature=1.0).double() == expected.sign()
    assert agree.double().mean() > 0.99


def test_steps_go_down_and_nothing_moves_without_one():
    x = torch.tensor([[1.0, -3.0, 0.0]], requires_grad=True)
    moved = list(move_images(x, x**2, np.ones((1, 3)), (0.0, 0.5)))
    torch.testing.assert_close(moved[0], x.detach())
    torch.testing.assert_close(moved[1], torch.tensor([[0.5, -2.5, 0.0]]))
    assert not moved[1].requires_grad


def each_detector() -> list[ImageDetector]:
    return [OdinDetector(epsilon="auto"), LeeDetector(magnitude=0.001), LeeOodDetector(magnitude=0.001)]


DETECTORS = pytest.mark.parametrize("detector", each_detector(), ids=lambda detector: detector.name)


@DETECTORS
def test_the_backbone_is_left_as_it_was(detector, backbone, train, validation, test, ood):
    used = copy.deepcopy(backbone).train()
    used.body[1].eval()
    used.head.bias.requires_grad_(False)
    used.head.weight.grad = torch.ones_like(used.head.weight)
    state = copy.deepcopy(used.state_dict())
    modes = [layer.training for layer in used.modules()]
    flags = [parameter.requires_grad for parameter in used.parameters()]
    during: list[bool] = []
    scores = detector.fit_images(used, train, validation, ood=ood).score_images(
        used, test, batch_size=25, progress=lambda done, n: during.append(used.training)
    )
    assert during == [True] * 3  # between batches too
    assert [layer.training for layer in used.modules()] == modes
    assert [parameter.requires_grad for parameter in used.parameters()] == flags
    assert all(torch.equal(before, used.state_dict()[name]) for name, before in state.items())
    assert not any(layer._forward_hooks for layer in used.modules())
    torch.testing.assert_close(used.head.weight.grad, torch.ones_like(used.head.weight))
    assert all(p.grad is None for p in used.parameters() if p is not used.head.weight)
    np.testing.assert_allclose(scores, detector.score_images(backbone, test), rtol=1e-3, atol=1e-5)  # evaluation mode


def test_the_backbone_is_left_as_it_was_after_a_failure(backbone):
    used = copy.deepcopy(backbone).train()
    with pytest.raises(ZeroDivisionError), image_gradients(used):
        assert not used.training and not any(p.requires_grad for p in used.parameters()) and torch.is_grad_enabled()
        1 / 0  # noqa: B018
    assert used.training and all(p.requires_grad for p in used.parameters())


@DETECTORS
def test_the_callers_modes_do_not_matter(detector, backbone, train, validation, test, ood):
    expected = detector.fit_images(backbone, train, validation, ood=ood).score_images(backbone, test)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            np.testing.assert_array_equal(detector.score_images(backbone, test), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(detector.score_images(backbone, test), expected)


@DETECTORS
def test_every_form_of_images_scores_the_same_in_order(detector, backbone, train, validation, test, ood):
    test = test.subset(range(20))
    detector.fit_images(backbone, train, validation, ood=ood)
    expected = detector.score_images(backbone, test)
    assert expected.shape == (20,) and expected.dtype == np.float64 and np.isfinite(expected).all()
    x = tensor_of(test)
    loader = DataLoader(TensorDataset(x, torch.from_numpy(test.labels)), batch_size=7)
    for form, size in ((test.pixels, 128), (x, 17), (loader, 128), (test, 1)):
        scores = detector.score_images(backbone, form, batch_size=size)
        np.testing.assert_allclose(scores, expected, rtol=2e-3, atol=1e-6)
    assert detector.score_images(backbone, x[:0]).shape == (0,)
    np.testing.assert_allclose(detector.score_images(backbone, x.flip(0)), expected[::-1], rtol=2e-3, atol=1e-6)


@DETECTORS
def test_state_restores_the_scores(detector, backbone, train, validation, test, ood):
    detector.fit_images(backbone, train, validation, ood=ood)
    arrays, metadata = detector.get_state()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in arrays.values())
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    assert type(restored) is type(detector) and isinstance(restored, ImageDetector)
    np.testing.assert_array_equal(restored.score_images(backbone, test), detector.score_images(backbone, test))


@DETECTORS
def test_outputs_are_refused_with_a_way_out(detector):
    outputs = Outputs(np.zeros((3, 2)), np.zeros((3, 2)))
    with pytest.raises(UsageError, match=f"'{detector.name}'.*fit_images"):
        detector.fit(outputs, outputs, head=None)
    with pytest.raises(UsageError, match=f"'{detector.name}'.*score_images"):
        detector.score(outputs)


def test_they_work_on_wrapped_networks(train, validation, test, ood):
    class Tuple(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.fc = make_body(), nn.Linear(24, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return self.fc(self.body(x)), None

    wrapped = wrap_backbone(Tuple(), example=np.zeros((2, 8, 8, 3), np.uint8))
    assert find_layers(wrapped, tensor_of(test)[:2])[0] == "module.body.0"
    for detector in each_detector():
        scores = detector.fit_images(wrapped, train, validation, ood=ood).score_images(wrapped, test)
        assert np.isfinite(scores).all()


def test_they_work_on_ensembles_and_hear_every_member(train, validation, test, ood):
    members = [Backbone(make_body(seed), nn.Linear(24, 3), embedding_size=24, mean=MEAN, std=STD) for seed in range(2)]
    ensemble = join_members(members).eval()
    for detector in each_detector():
        scores = detector.fit_images(ensemble, train, validation, ood=ood).score_images(ensemble, test)
        assert np.isfinite(scores).all()
        for member in range(2):
            other = copy.deepcopy(ensemble)
            with torch.no_grad():
                other.body.members[member][0][0][0].bias += 0.1
            assert np.abs(detector.score_images(other, test) - scores).min() > 0


def test_progress_counts_all_images_once(backbone, train, validation, ood, test):
    seen: list[tuple[int, int]] = []
    LeeOodDetector(magnitude=0.0).fit_images(
        backbone, train, validation, ood=ood, batch_size=100, progress=lambda *done: seen.append(done)
    )
    assert seen == [(100, 300), (150, 300), (240, 300), (300, 300)]
    seen.clear()
    detector = OdinDetector().fit_images(backbone, train)
    scores = detector.score_images(backbone, test, batch_size=40, progress=lambda *done: seen.append(done))
    assert seen == [(40, 60), (60, 60)]
    np.testing.assert_allclose(detector.score_images(backbone, test, workers=1), scores, rtol=1e-6)


def test_unfitted_detectors_say_so(backbone, test):
    for detector in (OdinDetector(), LeeDetector()):
        with pytest.raises(NotFittedError, match="fit_images"):
            detector.score_images(backbone, test)
        with pytest.raises(NotFittedError):
            detector.get_state()


def test_a_failed_fit_leaves_nothing_fitted(backbone, train, test):
    detector = OdinDetector(epsilon="auto").fit_images(backbone, train, test)
    with pytest.raises(UsageError):
        detector.fit_images(backbone, train)
    with pytest.raises(NotFittedError):
        detector.score_images(backbone, test)


def test_missing_images_are_errors(backbone, train, validation):
    with pytest.raises(UsageError, match=r"'lee-md-ood'.*'lee-md'"):
        LeeOodDetector().fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match="epsilon 'auto'"):
        OdinDetector(epsilon="auto").fit_images(backbone, train)
    with pytest.raises(UsageError, match=r"'lee-md'.*validation"):
        LeeDetector().fit_images(backbone, train)
    with pytest.raises(FitError, match="10 images"):
        LeeDetector(magnitude=0.0).fit_images(backbone, train, validation.subset(range(10)))
    with pytest.raises(FitError, match="no images"):
        OdinDetector().fit_images(backbone, train.subset([]))
    unlabelled = ImageSet.from_arrays(train.pixels)
    with pytest.raises(FitError, match="150 of 150"):
        LeeDetector().fit_images(backbone, unlabelled, validation)


def test_wrong_options_are_errors(backbone, train, validation):
    with pytest.raises(UsageError, match=r"'epsilo'.*'odin'"):
        create_detector("odin", epsilo=1)
    for detector in (OdinDetector(temperature=0.0), OdinDetector(epsilon=-1.0), LeeDetector(layers=())):
        with pytest.raises(ConfigError, match=type(detector).__name__):
            detector.fit_images(backbone, train, validation)
    with pytest.raises(UsageError, match="batch_size"):
        OdinDetector().fit_images(backbone, train, batch_size=0)


def test_wrong_backbones_are_errors(backbone, train, test):
    detector = OdinDetector().fit_images(backbone, train)
    other = Backbone(make_body(), nn.Linear(24, 5), embedding_size=24)
    with pytest.raises(UsageError, match="5 columns"):
        detector.score_images(other, test)
    with pytest.raises(UsageError, match="cluster_to_class"):
        OdinDetector().fit_images(backbone, train, cluster_to_class=np.arange(4))
    with pytest.raises(UsageError, match="two classes"):
        OdinDetector(epsilon=0.01).fit_images(backbone, train, cluster_to_class=np.zeros(3)).score_images(
            backbone, test
        )
    with pytest.raises(UsageError, match="no head"):
        OdinDetector().fit_images(Backbone(make_body(), None, embedding_size=24), train)

    class Detached(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.detach())

    with pytest.raises(UsageError, match="gradient"):
        detector.score_images(Backbone(make_body(), Detached(24, 3), embedding_size=24), test)
    broken = copy.deepcopy(backbone)
    with torch.no_grad():
        broken.head.bias[0] = torch.nan
    with pytest.raises(DataError, match="60 of 60"):
        detector.score_images(broken, test)
