"""The one-pass scores, each against a definition written out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from scipy.special import logsumexp

from maple.detectors.maple import MapleDetector
from maple.detectors.registry import restore_detector
from maple.detectors.scores import FUSED, SCORES, TAIL, Surprise, energy_score, fit_surprise, spread_score
from maple.errors import DataError, NotFittedError, UsageError
from maple.stats.background import fit_background
from maple.stats.metrics import auroc
from maple.stats.moments import Moments
from maple.types import Outputs

N_CLASSES, DIM, CHANNELS = 4, 10, 5


def draw(n: int, seed: int, noise: float = 1.0, far: float = 0.0) -> Outputs:
    """Images of four classes; ``noise`` makes them hard, ``far`` moves them away from all classes."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % N_CLASSES
    embeddings = 4 * np.eye(N_CLASSES, DIM)[labels] + noise * rng.normal(size=(n, DIM)) + 3
    embeddings[:, -1] += far
    logits = embeddings[:, :N_CLASSES] + rng.normal(size=(n, N_CLASSES)) - far / 4
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        labels,
        shallow=(rng.normal(size=(n, CHANNELS)) + far / 8).astype(np.float32),
    )


@pytest.fixture(scope="module")
def train() -> Outputs:
    return draw(2000, 0)


@pytest.fixture(scope="module")
def detector(train) -> MapleDetector:
    return MapleDetector(norm_exponent=1.0).fit(train, validation=draw(1000, 1))


@pytest.fixture(scope="module")
def new() -> Outputs:
    return draw(300, 2, noise=1.5)


def mahalanobis(train: Outputs, points: np.ndarray, exponent: float, classes: bool) -> np.ndarray:
    """Squared distances (N, C) or (N, 1), by explicit inverse, in the standardised components that are kept."""

    def shaped(x: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        return x / np.linalg.norm(x, axis=1, keepdims=True) ** exponent

    x = shaped(train.embeddings)
    mean, deviation = x.mean(0), x.std(0)
    z = (x - mean) / deviation
    values, axes = np.linalg.eigh(z.T @ z / len(z))
    values, axes = values[::-1], axes[:, ::-1]
    kept = int(np.searchsorted(np.cumsum(values) / values.sum(), 0.95)) + 1
    axes = axes[:, :kept]
    p, q = z @ axes, (shaped(points) - mean) / deviation @ axes
    labels = train.labels if classes else np.zeros(len(p), dtype=int)
    centres = np.stack([p[labels == c].mean(0) for c in np.unique(labels)])
    within = p - centres[labels]
    inverse = np.linalg.inv(within.T @ within / len(p))
    return np.stack([np.einsum("nk,kj,nj->n", q - c, inverse, q - c) for c in centres], axis=1)


def test_distance_is_the_papers_whatever_the_exponent(train, detector, new):
    expected = mahalanobis(train, new.embeddings, 0.0, classes=True).min(axis=1)
    np.testing.assert_allclose(detector.describe(new).distance, expected, rtol=1e-4)


def test_normalised(train, detector, new):
    expected = mahalanobis(train, new.embeddings, 1.0, classes=True).min(axis=1)
    np.testing.assert_allclose(detector.describe(new).normalised, expected, rtol=1e-3)


def test_relative_subtracts_the_background(train, detector, new):
    near = mahalanobis(train, new.embeddings, 0.0, classes=True).min(axis=1)
    background = mahalanobis(train, new.embeddings, 0.0, classes=False)[:, 0]
    np.testing.assert_allclose(detector.describe(new).relative, near - background, rtol=1e-3, atol=1e-3)


def test_spread(train, detector, new):
    distances = mahalanobis(train, new.embeddings, 1.0, classes=True)
    np.testing.assert_allclose(detector.describe(new).spread, distances.min(1) / distances.mean(1), rtol=1e-3)
    assert spread_score(np.zeros(1), np.zeros(1)).tolist() == [1.0]  # nothing is nearer than anything else


def test_residual_and_components_make_up_the_whole(train, new):
    detector = MapleDetector(norm_exponent=0.0, explained_variance=0.6).fit(train)
    residual = detector.describe(new).residual
    x = train.embeddings.astype(np.float64)
    z, q = ((a - x.mean(0)) / x.std(0) for a in (x, new.embeddings.astype(np.float64)))
    axes = np.linalg.svd(z, full_matrices=False)[2][: detector.gaussians_.n_components].T
    np.testing.assert_allclose(residual, ((q - q @ axes @ axes.T) ** 2).sum(1), rtol=1e-5)
    whole = MapleDetector(norm_exponent=0.0, pca=False).fit(train)
    np.testing.assert_allclose(whole.describe(new).residual, 0, atol=1e-9)


def test_shallow_is_a_distance_to_all_images(train, detector, new):
    x = train.shallow.astype(np.float64)
    inverse = np.linalg.inv(np.cov(x.T, bias=True))
    expected = cdist(new.shallow.astype(np.float64), x.mean(0)[None], "mahalanobis", VI=inverse)[:, 0] ** 2
    np.testing.assert_allclose(detector.describe(new).shallow, expected, rtol=1e-5)


def test_energy(detector, new):
    np.testing.assert_allclose(detector.describe(new).energy, -logsumexp(new.logits.astype(float), axis=1))
    assert energy_score(np.array([[1000.0, 1000.0]]))[0] == pytest.approx(-1000 - np.log(2))


# --------------------------------------------------------------------------------------------------------- surprise


def test_surprise_is_the_empirical_tail_then_exponential():
    scores = np.random.default_rng(0).normal(size=5000)
    surprise = fit_surprise(scores)
    at = np.quantile(scores, [0.05, 0.3, 0.6, 0.85])
    empirical = [-np.log((scores > point).mean()) for point in at]
    np.testing.assert_allclose(surprise(at), empirical, rtol=0.03, atol=0.003)
    start = np.quantile(scores, 1 - TAIL)
    excess = (scores[scores > start] - start).mean()
    far = np.array([3.0, 10.0, 1e6])
    np.testing.assert_allclose(surprise(far), -np.log(TAIL) + (far - start) / excess, rtol=1e-3)


def test_far_scores_never_tie_and_order_is_kept():
    surprise = fit_surprise(np.random.default_rng(1).chisquare(8, size=300))
    grid = np.concatenate([np.linspace(0, 40, 500), np.geomspace(50, 1e12, 100)])
    steps = np.diff(surprise(grid))
    assert (steps >= 0).all() and (steps[grid[1:] > 5] > 0).all()


@pytest.mark.parametrize("scores", [np.zeros(50), np.r_[np.zeros(99), 1.0], np.array([2.0])])
def test_surprise_of_tied_scores_is_finite_and_rises(scores):
    surprise = fit_surprise(scores)
    values = surprise(np.array([scores.min() - 1, scores.max(), scores.max() + 1]))
    assert np.isfinite(values).all() and values[0] <= values[1] < values[2]


def test_surprise_needs_scores():
    with pytest.raises(DataError, match="validation images"):
        fit_surprise(np.empty(0))
    with pytest.raises(DataError, match="finite"):
        fit_surprise(np.array([1.0, np.nan]))


def test_surprise_survives_its_arrays():
    surprise = fit_surprise(np.random.default_rng(2).normal(size=100))
    again = Surprise.from_arrays(surprise.to_arrays())
    points = np.linspace(-3, 9, 50)
    np.testing.assert_array_equal(again(points), surprise(points))


# ------------------------------------------------------------------------------------------- the detector's choices


def test_fused_adds_surprises(train, new):
    validation = draw(1000, 1)
    detector = MapleDetector().fit(train, validation)
    assert detector.score_ == "fused"
    known, found = detector.describe(validation), detector.describe(new)
    surprise = {name: fit_surprise(known.score_named(name))(found.score_named(name)) for name in FUSED}
    far_out = np.array([max(each - 7, 0) for each in surprise["distance"]])
    strange = np.array([max(each - 2, 0) for each in surprise["shallow"]])
    expected = surprise["energy"] + surprise["spread"] / 2 + strange + far_out
    assert all(0 < (part > 0).sum() < len(part) for part in (far_out, strange))  # both kinds are there
    np.testing.assert_allclose(detector.score(new), expected)


def test_a_run_counts_the_parts_as_it_says(train, new):
    detector = MapleDetector().fit(train, draw(1000, 1))
    arrays, metadata = detector.get_state()
    parts = detector.describe(new).fused_parts()
    other = {**metadata, "parts": {**metadata["parts"], "energy": [3.0, 0.0]}}
    score = MapleDetector.from_state(arrays, other).score(new)
    np.testing.assert_allclose(score, sum(parts.values()) + 2 * parts["energy"])


def test_a_stored_run_learns_a_score_with_parts_it_did_not_have(train, new):
    """As after an update with validation images, of a run that had too few of them."""
    validation = draw(1000, 1)
    stored = MapleDetector().fit(train, validation[:10])
    assert stored.score_ == "normalised"
    restored = MapleDetector.from_state(*stored.get_state()).learn_score(validation)
    assert restored.score_ == "fused"
    stored.learn_score(validation)
    np.testing.assert_array_equal(restored.score(new), stored.score(new))


def test_fused_is_not_at_ease_far_away(train):
    """Images ten times as far out in the direction of a class: logits and directions are those of that class."""
    validation, known = draw(1000, 1), draw(500, 3)
    far = replace(known, embeddings=10 * known.embeddings, logits=10 * known.logits, shallow=None)
    detector = MapleDetector().fit(replace(train, shallow=None), replace(validation, shallow=None))
    found = detector.describe(replace(known, shallow=None)), detector.describe(far)
    assert auroc(found[0].energy, found[1].energy) < 0.1
    assert auroc(found[0].spread, found[1].spread) < 0.6
    assert auroc(found[0].fused, found[1].fused) > 0.99


@pytest.mark.parametrize("name", SCORES)
def test_every_score_tells_far_images_and_survives_the_state(train, name):
    detector = MapleDetector(score_by=name).fit(train, draw(1000, 1))
    known, unknown = detector.score(draw(500, 3)), detector.score(draw(500, 4, far=30))
    blind = ("residual", "relative")  # to what lies inside the components, and to what moves all distances alike
    assert auroc(known, unknown) > (0.55 if name in blind else 0.9)
    arrays, metadata = detector.get_state()
    again = restore_detector(arrays, json.loads(json.dumps(metadata)))
    np.testing.assert_array_equal(again.score(draw(500, 3)), known)


def test_without_logits_fused_is_the_spread_and_far_out_the_distance(train, new):
    bare, validation = (Outputs(each.embeddings, labels=each.labels) for each in (train, draw(1000, 1)))
    detector = MapleDetector().fit(bare, validation)
    assert detector.score_ == "fused" and set(detector.learned_.surprises) == {"spread", "distance"}
    known, found = detector.describe(validation), detector.describe(new.embeddings)
    surprise = {name: fit_surprise(known.score_named(name))(found.score_named(name)) for name in ("spread", "distance")}
    np.testing.assert_allclose(found.score, surprise["spread"] / 2 + np.maximum(surprise["distance"] - 7, 0))


def test_one_cluster_alone_has_no_spread_and_parts_that_count_far_out_only_are_no_score(train):
    one, validation = (Outputs(each.embeddings, labels=np.zeros(len(each), int)) for each in (train, draw(1000, 1)))
    detector = MapleDetector().fit(one, validation)
    assert detector.score_ == "normalised" and "fused" not in detector.describe(validation).available_scores
    with pytest.raises(UsageError, match="score_by 'fused'"):
        MapleDetector(score_by="fused").fit(one, validation)
    responses = replace(one, shallow=train.shallow), replace(validation, shallow=draw(1000, 1).shallow)
    assert MapleDetector().fit(*responses).score_ == "normalised"


def test_without_validation_the_score_is_normalised(train, new):
    assert MapleDetector().fit(train).score_ == "normalised"
    bare = Outputs(train.embeddings, labels=train.labels)
    detector = MapleDetector().fit(bare, Outputs(new.embeddings[:40], labels=new.labels[:40]))  # or with few images
    assert detector.score_ == "normalised"
    found = detector.describe(new.embeddings)
    assert found.available_scores == ["distance", "relative", "normalised", "residual", "spread"]
    with pytest.raises(UsageError, match="validation images"):
        MapleDetector(score_by="fused").fit(train)
    with pytest.raises(NotFittedError, match="validation"):
        _ = MapleDetector().fit(train).describe(new).fused
    with pytest.raises(UsageError, match="shallow layer"):
        _ = detector.describe(new).shallow
    with pytest.raises(UsageError, match="logits"):
        _ = found.energy


def test_one_exponent_alone_costs_no_plain_gaussians(train, new):
    detector = MapleDetector(norm_exponent=1.0, score_by="normalised").fit(train)
    assert list(detector.learned_.densities.moments.by_exponent) == [1.0]
    assert "distance" not in detector.describe(new).available_scores
    with pytest.raises(UsageError, match="score_by"):
        _ = detector.describe(new).distance


@pytest.mark.parametrize(("n", "accumulated"), [(None, (0.0, 1.0)), (39, (0.0, 1.0)), (40, (0.0, 0.5, 1.0))])
def test_exponents_that_cannot_be_chosen_are_not_accumulated(train, monkeypatch, n, accumulated):
    """A choice takes 20 wrong and 20 right validation images; the product of an exponent is a third of a fit."""
    updated = []
    update = Moments.update
    monkeypatch.setattr(Moments, "update", lambda self, *given: updated.append(self) or update(self, *given))
    plain = Outputs(train.embeddings, labels=train.labels)
    detector = MapleDetector().fit(plain, None if n is None else plain[np.arange(n)])
    assert tuple(moments.norm_exponent for moments in updated) == accumulated
    assert detector.exponent_ == 1.0 and list(detector.learned_.densities.moments.by_exponent) == [0.0, 1.0]
    added = MapleDetector().partial_fit(plain)
    np.testing.assert_allclose(added.score(plain), detector.score(plain), rtol=1e-12)


def test_exponent_is_chosen_where_distance_finds_errors():
    """Norms that vary at random within a class make plain distances useless, and do nothing to normalised ones."""
    rng = np.random.default_rng(5)

    def scaled(n: int, seed: int) -> Outputs:
        outputs = draw(n, seed, noise=1.8)
        factors = np.exp(rng.normal(0, 1.0, size=(n, 1))).astype(np.float32)
        return Outputs(outputs.embeddings * factors, outputs.logits, outputs.labels)

    assert MapleDetector().fit(scaled(4000, 0), scaled(2000, 1)).exponent_ == 1.0


def mislabelled(n: int, seed: int, share: float, factor: float, spread: float) -> Outputs:
    """Images whose norms are lognormal; a ``share`` of them has a wrong label and a norm ``factor`` times as large."""
    rng = np.random.default_rng(seed)
    seen = np.arange(n) % N_CLASSES
    wrong = rng.random(n) < share
    directions = 4 * np.eye(N_CLASSES, DIM)[seen] + 0.3 * rng.normal(size=(n, DIM)) + 3
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    norms = np.exp(spread * rng.normal(size=(n, 1))) * np.where(wrong, factor, 1.0)[:, None]
    return Outputs((norms * directions).astype(np.float32), labels=(seen + wrong) % N_CLASSES)


@pytest.mark.parametrize(("factor", "spread", "exponent"), [(1.5, 0.2, 0.0), (0.2, 0.3, 0.5)])
def test_exponent_keeps_a_norm_that_tells_errors(factor, spread, exponent):
    """Only the norm tells wrong from right images: large ones stand out as they are, small ones under a root."""
    known, validation = mislabelled(4000, 0, 0.0, factor, spread), mislabelled(2000, 1, 0.2, factor, spread)
    separation = {}
    for each in (0.0, 0.5, 1.0):
        distances = mahalanobis(known, validation.embeddings, each, classes=True)
        wrong = distances.argmin(axis=1) != validation.labels
        separation[each] = auroc(distances.min(axis=1)[~wrong], distances.min(axis=1)[wrong])
    assert separation[1.0] == pytest.approx(0.5, abs=0.05)  # 3 deviations of the AUROC of 400 against 1600
    assert separation[exponent] > 0.85
    assert max(separation, key=separation.get) == exponent
    detector = MapleDetector().fit(known, validation)
    assert detector.exponent_ == exponent
    expected = mahalanobis(known, validation.embeddings, exponent, classes=True).min(axis=1)
    np.testing.assert_allclose(detector.describe(validation).normalised, expected, rtol=1e-3)


def test_exponent_without_errors_is_the_default(train):
    perfect = draw(400, 9, noise=0.01)
    assert MapleDetector().fit(train, perfect).exponent_ == 1.0
    assert MapleDetector(norm_exponent=0.3).fit(train, draw(1000, 1)).exponent_ == 0.3


def test_background_takes_what_the_gaussians_take(train):
    background = fit_background(Moments(1, DIM).update(train.embeddings, np.zeros(len(train), dtype=np.int64)))
    assert np.isfinite(background.squared_distances(np.full((1, DIM), 1e30, dtype=np.float32))).all()
    with pytest.raises(UsageError, match="columns"):
        background.residuals(np.zeros((1, DIM + 1)))
