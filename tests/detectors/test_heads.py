"""Clipped, shaped and projected embeddings, against the methods written out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import expit, logsumexp

from maple.detectors.heads import (
    AshDetector,
    ReactDetector,
    VimDetector,
    count_values,
    head_origin,
    principal_space_size,
    quantile_of_counts,
    shape_activations,
)
from maple.detectors.logits import EnergyDetector
from maple.detectors.registry import create_detector, restore_detector
from maple.errors import ConfigError, DataError, FitError, UsageError
from maple.types import LinearHead, Outputs

N, D, C = 800, 16, 4


@pytest.fixture
def head(rng) -> LinearHead:
    return LinearHead(rng.normal(size=(C, D)).astype(np.float32), rng.normal(size=C).astype(np.float32))


@pytest.fixture
def train(rng, head) -> Outputs:
    """What comes out of a ReLU: many zeros, a long tail; each class has features of its own."""
    raw = rng.normal(size=(N, D)) + 2 * head.weight[rng.integers(0, C, size=N)]
    return Outputs(np.maximum(raw, 0).astype(np.float32))


@pytest.fixture
def new(rng) -> Outputs:
    return Outputs(np.maximum(2 * rng.normal(size=(100, D)), 0).astype(np.float32))


def energies(embeddings: np.ndarray, head: LinearHead) -> np.ndarray:
    return -logsumexp(embeddings.astype(float) @ head.weight.T.astype(float) + head.bias, axis=1)


# --------------------------------------------------------------------------------------------------------- ReAct


@pytest.mark.parametrize("quantile", [0.0, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_quantiles_from_counts(rng, quantile):
    for values in (rng.normal(size=5000), 1e-6 * rng.exponential(size=5000), rng.normal(size=5000) - 40):
        values = values.astype(np.float32)
        found = quantile_of_counts(count_values(values), quantile)
        assert found == pytest.approx(np.quantile(values, quantile), rel=6e-4, abs=1e-3 * float(values.std()))


def test_quantiles_of_constants_zeros_and_both_signs():
    assert quantile_of_counts(count_values(np.zeros(9, np.float32)), 0.9) == pytest.approx(0, abs=1e-38)
    assert quantile_of_counts(count_values(np.full(9, -3.0, np.float32)), 0.5) == pytest.approx(-3, rel=5e-4)
    signs = count_values(np.array([-1.0, -1.0, -1.0, 1.0, 1.0], np.float32))
    assert quantile_of_counts(signs, 0.4) == pytest.approx(-1, rel=5e-4)
    assert quantile_of_counts(signs, 0.8) == pytest.approx(1, rel=5e-4)


def test_counts_are_in_ascending_order():
    values = np.array([-np.float32(3e38), -7.0, -1e-30, 0.0, 1e-30, 0.5, 7.0, 3e38], np.float32)
    steps = [int(np.flatnonzero(count_values(value[None]))[0]) for value in values]
    assert steps == sorted(set(steps))


def test_react_clips_at_a_quantile_of_all_activations(train, new, head):
    detector = ReactDetector().fit(train, head=head)
    assert detector.threshold_ == pytest.approx(np.quantile(train.embeddings, 0.9), rel=5e-4)
    expected = energies(np.minimum(new.embeddings, detector.threshold_), head)
    np.testing.assert_allclose(detector.score(new), expected, rtol=1e-6)
    assert abs(detector.score(new) - energies(new.embeddings, head)).max() > 0.1


def test_without_clipping_react_is_the_energy(train, head):
    logits = train.embeddings @ head.weight.T + head.bias
    energy = EnergyDetector().fit(Outputs(train.embeddings, logits)).score(Outputs(train.embeddings, logits))
    found = ReactDetector(quantile=1.0).fit(train, head=head).score(train)
    np.testing.assert_allclose(found, energy, rtol=1e-3)


# ----------------------------------------------------------------------------------------------------------- ASH


@pytest.mark.parametrize("pruned", [0.0, 0.5, 0.65, 0.9])
def test_ash_written_out(new, head, pruned):
    shaped = []
    for activations in new.embeddings.astype(float):
        n_kept = D - round(D * pruned)
        kept = set(np.argsort(activations, kind="stable")[D - n_kept :])
        pruned_row = [value if i in kept else 0.0 for i, value in enumerate(activations)]
        shaped.append(np.array(pruned_row) * np.exp(sum(activations) / sum(pruned_row)))
    np.testing.assert_allclose(shape_activations(new.embeddings.astype(float), pruned), shaped, rtol=1e-9)
    found = AshDetector(pruned=pruned).fit(new, head=head).score(new)
    np.testing.assert_allclose(found, energies(np.array(shaped), head), rtol=1e-6)


def test_ash_of_nothing_and_of_negative_activations(head):
    np.testing.assert_array_equal(shape_activations(np.zeros((2, 4)), 0.5), 0)
    signed = np.array([[4.0, -1e9, 2.0, -3.0, 1.0, 0.5]])
    np.testing.assert_allclose(shape_activations(signed, 0.5), shape_activations(np.maximum(signed, 0), 0.5))
    assert np.isfinite(shape_activations(np.array([[1e-30, -1.0]]), 0.5)).all()


# ----------------------------------------------------------------------------------------------------------- ViM


def plain_vim(train: np.ndarray, new: np.ndarray, head: LinearHead, size: int) -> np.ndarray:
    """The authors' way: null space of the principal space, from all eigenvectors of the second moment around u."""
    weight, bias, train, new = (array.astype(float) for array in (*head, train, new))
    origin = -np.linalg.pinv(weight) @ bias
    values, axes = np.linalg.eigh((train - origin).T @ (train - origin) / len(train))
    outside = axes[:, np.argsort(-values)[size:]]
    alpha = (train @ weight.T + bias).max(axis=1).mean() / np.linalg.norm((train - origin) @ outside, axis=1).mean()
    virtual = alpha * np.linalg.norm((new - origin) @ outside, axis=1)
    return virtual - logsumexp(new @ weight.T + bias, axis=1)


@pytest.mark.parametrize("components", ["auto", 1, 5, 15])
def test_vim_written_out(train, new, head, components):
    detector = VimDetector(components=components).fit(train, head=head)
    size = D // 2 if components == "auto" else components
    assert detector.space_.matrix.shape == (D, size)
    expected = plain_vim(train.embeddings, new.embeddings, head, size)
    np.testing.assert_allclose(detector.score(new), expected, rtol=1e-8, atol=1e-8)


def test_virtual_logits_are_as_large_as_the_largest_logits_on_average(train, head):
    detector = VimDetector().fit(train, head=head)
    logits = train.embeddings @ head.weight.T + head.bias
    virtual = detector.score(train) + logsumexp(logits.astype(float), axis=1)
    assert virtual.mean() == pytest.approx(logits.max(axis=1).mean(), rel=1e-5)


def test_vim_is_the_log_odds_of_the_virtual_class(train, new, head):
    detector = VimDetector().fit(train, head=head)
    logits = new.embeddings.astype(float) @ head.weight.T + head.bias
    virtual = detector.score(new) + logsumexp(logits, axis=1)
    every = np.c_[logits, virtual]
    probability = np.exp(virtual - logsumexp(every, axis=1))
    np.testing.assert_allclose(probability, expit(detector.score(new)), rtol=1e-9)


def test_rows_of_the_head_that_sum_to_nothing_do_not_move_the_origin_far_out(train, head):
    """Softmax does not see the sum of the rows, and weight decay removes it: what is left in float32 is rounding."""
    weight, bias = head.weight.astype(float), head.bias.astype(float)
    weight -= weight.mean(axis=0)
    rounded = LinearHead(weight.astype(np.float32), head.bias)
    assert 0 < np.linalg.svd(rounded.weight.astype(float), compute_uv=False)[-1] < 1e-6
    left, sizes, right = np.linalg.svd(weight, full_matrices=False)
    expected = -right[:-1].T @ ((left[:, :-1].T @ bias) / sizes[:-1])
    np.testing.assert_allclose(head_origin(rounded), expected, rtol=1e-4, atol=1e-6)
    assert np.isfinite(VimDetector().fit(train, head=rounded).score(train)).all()


def test_size_of_the_principal_space():
    sizes = {4096: 1000, 2048: 1000, 1024: 512, 768: 512, 640: 320, 512: 256, 3: 1}
    assert {size: principal_space_size(size) for size in sizes} == sizes


def test_vim_of_embeddings_that_do_not_span_the_space(train, new, head):
    """Dead features: 'auto' takes half of what is spanned; a size that leaves nothing outside is an error."""
    dead = Outputs(train.embeddings * (np.arange(D) < 6))
    flat = LinearHead(head.weight, np.zeros(C, np.float32))  # the origin of the head is 0
    assert VimDetector().fit(dead, head=flat).space_.matrix.shape == (D, 3)
    with pytest.raises(FitError, match="components is 6"):
        VimDetector(components=6).fit(dead, head=flat)
    with pytest.raises(FitError, match="components"):
        VimDetector(components=D).fit(train, head=head)


def test_vim_needs_logits_above_zero(train, head):
    with pytest.raises(FitError, match="logit"):
        VimDetector().fit(train, head=LinearHead(head.weight, head.bias - 1000))


# ------------------------------------------------------------------------------------------------------ all three

NAMES = pytest.mark.parametrize("name", ["react", "ash", "vim"])


@NAMES
def test_logits_are_not_needed_and_not_read(train, new, head, name):
    detector = create_detector(name).fit(train, head=head)
    nonsense = Outputs(new.embeddings, np.full((100, C), np.nan))
    np.testing.assert_array_equal(detector.score(nonsense), detector.score(new))


@NAMES
def test_restored_detectors_have_their_head(train, new, head, name):
    detector = create_detector(name).fit(train, head=head)
    arrays, metadata = detector.get_state()
    restored = restore_detector({key: array.copy() for key, array in arrays.items()}, metadata)
    np.testing.assert_array_equal(restored.head_.weight, head.weight)
    np.testing.assert_array_equal(restored.score(new), detector.score(new))


@NAMES
def test_a_head_of_another_network_is_an_error(train, new, name):
    other = LinearHead(np.ones((C, D + 1), np.float32), np.zeros(C, np.float32))
    with pytest.raises(UsageError, match="16 columns"):
        create_detector(name).fit(train, head=other)


@NAMES
def test_broken_embeddings_are_errors(train, new, head, name):
    broken = new.embeddings.copy()
    broken[7] = np.inf
    with pytest.raises(DataError, match="1 of 100"):
        create_detector(name).fit(train, head=head).score(Outputs(broken))


@pytest.mark.parametrize(
    ("name", "options"),
    [("react", {"quantile": 2}), ("ash", {"pruned": 1}), ("vim", {"components": 0}), ("vim", {"components": "half"})],
)
def test_wrong_options_are_named(train, head, name, options):
    with pytest.raises(ConfigError, match=f"'{next(iter(options))}'"):
        create_detector(name, **options).fit(train, head=head)
