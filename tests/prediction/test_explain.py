"""Explanations: parts that sum to the distance, components that mean something, and words that say so."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import eigh, sqrtm
from scipy.stats import chi2

from maple.detectors.maple import MapleDetector
from maple.errors import DataError, UsageError
from maple.prediction.explain import (
    Explanation,
    Match,
    component_coordinates,
    deviations,
    explain_outputs,
    find_components,
    name_clusters,
    score_parts,
)
from maple.stats.gaussians import Gaussians
from maple.types import Outputs, Prediction

# Clusters differ along the first three of six directions only; classes 0 and 2 have two clusters each.
CENTRES = np.array([[6, 0, 0], [-6, 0, 0], [0, 8, 0], [0, 0, 7], [0, -4, -7]], dtype=float) @ np.eye(3, 6)
CLUSTER_TO_CLASS = np.array([0, 0, 1, 2, 2])
NAMES = ("Navicula", "Nitzschia", "Cymbella")
KINDS = [
    {"covariance": "tied"},
    {"covariance": "tied", "norm_exponent": 1.0},
    {"covariance": "tied", "pca": False},
    {"covariance": "global"},
    {"covariance": "full"},
    {"distance": "euclidean"},
]


@pytest.fixture
def outputs(rng: np.random.Generator) -> Outputs:
    """Correlated clusters of unequal size, in seven features."""
    cluster_ids = rng.permutation(np.repeat(np.arange(5), [80, 120, 100, 90, 110]))
    spread = np.diag([1, 1, 1, 2, 1, 0.5]) + 0.3 * rng.normal(size=(6, 6))
    within = rng.normal(size=(500, 6)) @ spread + 0.2 * rng.normal(size=(500, 6)) * cluster_ids[:, None]
    embeddings = (within + CENTRES[cluster_ids]) @ rng.normal(size=(6, 7)) + 3
    return Outputs(embeddings, None, CLUSTER_TO_CLASS[cluster_ids], cluster_ids, CLUSTER_TO_CLASS)


def fit(outputs: Outputs, **options) -> MapleDetector:
    return MapleDetector(**{"norm_exponent": 0.0, **options}).fit(outputs)


# --------------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_parts_sum_to_the_squared_distance(outputs: Outputs, options: dict) -> None:
    detector = fit(outputs, **options)
    expected = detector.squared_distances(outputs)
    components = find_components(detector.gaussians_)
    projection = detector.gaussians_.project(outputs.embeddings)
    for cluster in range(5):
        parts = deviations(detector.gaussians_, components, projection, np.full(len(outputs), cluster)) ** 2
        np.testing.assert_allclose(parts.sum(axis=1), expected[:, cluster], rtol=1e-9)
    for found, row in zip(explain_outputs(detector, outputs), expected):
        assert found.nearest.cluster == row.argmin()
        assert found.nearest.squared_distance == pytest.approx(row.min(), rel=1e-9)
        assert found.runner_up is not None
        assert found.runner_up.squared_distance == pytest.approx(row[found.runner_up.cluster], rel=1e-9)
        gap = found.runner_up.squared_distance - found.nearest.squared_distance
        assert found.separation.sum() == pytest.approx(gap, rel=1e-9, abs=1e-9)


def test_separating_components_are_canonical_variates(outputs: Outputs) -> None:
    """Oracle: generalised eigenvectors of the scatter between means and the covariance within clusters, in loops."""
    n_features, ids = 6, outputs.cluster_ids
    x = outputs.embeddings[:, :n_features]  # full rank
    detector = fit(Outputs(x, None, None, ids, CLUSTER_TO_CLASS), pca=False)
    means = [x[ids == c].mean(axis=0) for c in range(5)]
    within = sum(np.outer(e - means[c], e - means[c]) for e, c in zip(x, ids)) / len(x)
    centre = sum(means) / 5
    between = sum(np.outer(mean - centre, mean - centre) for mean in means)
    _, vectors = eigh(between, within)  # v' within v = 1
    vectors = vectors[:, ::-1]
    explained = explain_outputs(detector, x)
    r = explained[0].components.n_separating
    assert r == 3
    for e, found in zip(x, explained):
        distances = [(e - mean) @ np.linalg.solve(within, e - mean) for mean in means]
        c = int(np.argmin(distances))
        assert found.nearest.cluster == c
        expected = [(vectors[:, j] @ (e - means[c])) ** 2 for j in range(r)]
        np.testing.assert_allclose(found.nearest.contributions[:r], expected, rtol=1e-6, atol=1e-9)
        assert found.nearest.contributions[r:].sum() == pytest.approx(distances[c] - sum(expected), rel=1e-6)
        others = [k for k in range(5) if CLUSTER_TO_CLASS[k] != CLUSTER_TO_CLASS[c]]
        rival = min(others, key=lambda k: distances[k])
        assert found.runner_up is not None and found.runner_up.cluster == rival
        against = [(vectors[:, j] @ (e - means[rival])) ** 2 - expected[j] for j in range(r)]
        np.testing.assert_allclose(found.separation[:r], against, rtol=1e-5, atol=1e-6)


def test_own_covariances_are_whitened_symmetrically(outputs: Outputs) -> None:
    """Oracle: the symmetric root of each cluster's precision, in the basis of the components."""
    detector = fit(outputs, covariance="full")
    gaussians = detector.gaussians_
    components = find_components(gaussians)
    z = gaussians.project(outputs.embeddings)
    clusters = outputs.cluster_ids
    found = deviations(gaussians, components, z, clusters)
    for i in range(0, len(outputs), 7):
        whitening = gaussians.whitenings[clusters[i]]
        precision = components.axes.T @ whitening @ whitening.T @ components.axes
        expected = sqrtm(precision) @ components.axes.T @ (z[i] - gaussians.centroids[clusters[i]])
        np.testing.assert_allclose(found[i], expected.real, rtol=1e-6, atol=1e-8)


def test_own_images_add_one_per_component_on_average(outputs: Outputs) -> None:
    """The covariance around the centroids is the identity along any axes."""
    detector = fit(outputs)
    components = find_components(detector.gaussians_)
    z = detector.gaussians_.project(outputs.embeddings)
    parts = deviations(detector.gaussians_, components, z, outputs.cluster_ids) ** 2
    np.testing.assert_allclose(parts.mean(axis=0), 1, rtol=1e-9)


def test_order_and_size_of_the_batch_do_not_matter(outputs: Outputs, rng: np.random.Generator) -> None:
    single = Outputs(outputs.embeddings.astype(np.float32), None, outputs.labels, outputs.cluster_ids, CLUSTER_TO_CLASS)
    detector = fit(single, norm_exponent=1.0)
    order = rng.permutation(len(single))
    whole, shuffled = explain_outputs(detector, single), explain_outputs(detector, single[order])
    for i, found in zip(order, shuffled):
        assert (found.nearest.cluster, found.class_name) == (whole[i].nearest.cluster, whole[i].class_name)
        np.testing.assert_allclose(found.nearest.contributions, whole[i].nearest.contributions, rtol=1e-9, atol=1e-12)
        assert found.sentences() == whole[i].sentences()
    (alone,) = explain_outputs(detector, single[[3]])
    np.testing.assert_allclose(alone.nearest.contributions, whole[3].nearest.contributions, rtol=1e-9, atol=1e-12)


def test_classes_and_probabilities_are_the_detector_s(outputs: Outputs) -> None:
    detector = fit(outputs)
    posterior = detector.posterior(outputs, temperature=2.0)
    for found, p in zip(explain_outputs(detector, outputs, 2.0, class_names=NAMES), posterior):
        assert found.class_name == NAMES[p.argmax()]
        assert found.probability == pytest.approx(p.max(), rel=1e-6)
        for match in (found.nearest, found.runner_up):
            assert match is not None and match.class_id == CLUSTER_TO_CLASS[match.cluster]
            assert match.probability == pytest.approx(p[match.class_id], rel=1e-5, abs=1e-12)
        assert found.nearest.class_id != found.runner_up.class_id


def with_logits(outputs: Outputs, rng: np.random.Generator, shallow: bool = True) -> Outputs:
    logits = 4 * np.eye(5)[outputs.cluster_ids] + rng.normal(size=(len(outputs), 5))
    responses = rng.normal(size=(len(outputs), 3)).astype(np.float32) if shallow else None
    return replace(outputs, logits=logits.astype(np.float32), shallow=responses)


@pytest.mark.parametrize("shallow", [True, False])
def test_parts_sum_to_the_fused_score(outputs: Outputs, rng: np.random.Generator, shallow: bool) -> None:
    """Oracle: weight times surprise beyond its level, one image and one part at a time."""
    outputs = with_logits(outputs, rng, shallow)
    detector = MapleDetector(norm_exponent=0.0).fit(outputs, outputs[::2])
    described = detector.describe(outputs)
    weights = {"energy": 1.0, "spread": 1.0} | ({"shallow": 0.5} if shallow else {}) | {"distance": 1.0}
    for i, found in enumerate(explain_outputs(detector, outputs)):
        assert found.score_by == "fused" and list(found.parts) == list(weights)
        assert sum(found.parts.values()) == pytest.approx(found.score, rel=1e-9, abs=1e-9)
        assert found.score == pytest.approx(described.score[i], rel=1e-9, abs=1e-9)
        for name, weight in weights.items():
            surprise = detector.learned_.surprises[name](described.score_named(name)[i : i + 1])[0]
            surprise = max(surprise - 7, 0) if name == "distance" else surprise
            assert found.parts[name] == pytest.approx(weight * surprise, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("score_by", ["distance", "relative", "residual", "energy"])
def test_other_scores_are_named_and_have_no_parts(outputs: Outputs, rng: np.random.Generator, score_by: str) -> None:
    outputs = with_logits(outputs, rng)
    detector = MapleDetector(norm_exponent=0.0, score_by=score_by).fit(outputs, outputs[::2])
    assert score_parts(detector.describe(outputs)) == {}
    for found, score in zip(explain_outputs(detector, outputs), detector.score(outputs)):
        assert (found.score_by, found.parts) == (score_by, {})
        assert found.score == pytest.approx(score, rel=1e-9, abs=1e-9)
        assert sum(said.startswith(f"Its score, {score_by}, is ") for said in found.sentences()) == 1


def test_embeddings_alone_have_no_fused_score(outputs: Outputs, rng: np.random.Generator) -> None:
    outputs = with_logits(outputs, rng)
    detector = MapleDetector(norm_exponent=0.0).fit(outputs, outputs)
    found = explain_outputs(detector, outputs.embeddings)[0]
    assert np.isnan(found.score) and found.score_by == "fused" and found.parts == {}
    assert not any("score" in sentence for sentence in found.sentences())
    assert found.to_dict()["score"] is None


# ----------------------------------------------------------------------------------------------------------- components


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_axes_are_orthogonal_and_the_same_every_time(outputs: Outputs, options: dict) -> None:
    gaussians = fit(outputs, **options).gaussians_
    first, again = find_components(gaussians), find_components(replace(gaussians))
    np.testing.assert_allclose(first.axes.T @ first.axes, np.eye(len(first.axes)), atol=1e-12)
    np.testing.assert_array_equal(first.axes, again.axes)
    assert (first.axes[np.abs(first.axes).argmax(axis=0), np.arange(len(first.axes))] > 0).all()
    reach = np.ptp(first.centroids, axis=0)
    assert (reach[: first.n_separating] > 2).all()


def test_shared_components_are_ordered_by_what_they_do_to_the_embedding(outputs: Outputs) -> None:
    gaussians = fit(outputs, pca=False).gaussians_
    components = find_components(gaussians)
    r, k = components.n_separating, len(components.axes)
    assert 0 < r < k - 1
    steps = np.linalg.pinv(gaussians.matrix @ components.axes)  # (K, D) of the embedding, along each component
    lengths = np.linalg.norm(steps[r:], axis=1)
    assert (np.diff(lengths) <= 1e-12).all()
    cosines = (steps[r:] @ steps[r:].T) / np.outer(lengths, lengths)
    np.testing.assert_allclose(cosines, np.eye(k - r), atol=1e-8)


def test_an_image_moved_in_a_known_way_is_explained_by_it(rng: np.random.Generator) -> None:
    """Between two clusters: separating components. Where all clusters agree: shared ones."""
    ids = np.arange(2000) % 5
    x = rng.normal(size=(2000, 6)) + CENTRES[ids]
    detector = fit(Outputs(x, None, None, ids, CLUSTER_TO_CLASS), pca=False)
    towards = CENTRES[2] + 0.4 * (CENTRES[3] - CENTRES[2])
    apart = CENTRES[2] + np.array([0, 0, 0, 0, 0, 9.0])
    between, aside = explain_outputs(detector, np.stack([towards, apart]), class_names=NAMES)
    assert between.components.n_separating == 3
    for found in (between, aside):
        assert found.nearest.cluster == 2
    assert between.nearest.contributions[:3].sum() > 0.95 * between.nearest.squared_distance
    assert between.runner_up is not None and between.runner_up.cluster == 3
    assert aside.nearest.contributions[3:].sum() > 0.95 * aside.nearest.squared_distance
    assert np.abs(aside.separation[3:]).max() < 0.1 * np.abs(aside.separation[:3]).max()
    assert not any("tell" in sentence for sentence in aside.sentences())  # the model alone is no measure of unusual
    between, aside = (replace(found, is_measured=True) for found in (between, aside))
    assert "tell no clusters apart (4 to 6)" in " ".join(aside.sentences())
    assert "tell clusters apart (1 to 3)" in " ".join(between.sentences())


@pytest.mark.parametrize(("n_clusters", "dim"), [(1, 4), (2, 4), (2, 1), (6, 2)])
def test_any_number_of_clusters_and_components(n_clusters: int, dim: int, rng: np.random.Generator) -> None:
    ids = np.arange(300) % n_clusters
    x = rng.normal(size=(300, dim)) + 10 * rng.normal(size=(n_clusters, dim))[ids]
    detector = fit(Outputs(x, labels=ids), pca=False)
    for found in explain_outputs(detector, x[:20]):
        assert found.components.n_separating <= min(dim, n_clusters - 1)
        assert (found.runner_up is None) == (n_clusters == 1)
        assert found.sentences() and json.dumps(found.to_dict(), allow_nan=False)


def test_an_image_on_its_centroid_has_nothing_to_explain(outputs: Outputs) -> None:
    gaussians = Gaussians(np.eye(2), np.zeros(2), np.array([[0.0, 0.0], [9.0, 0.0]]), np.log([0.5, 0.5]))
    detector = fit(outputs)
    densities = detector.learned_.densities
    moments = replace(densities.moments, cluster_to_class=np.arange(2))
    densities = replace(densities, moments=moments, given={densities.exponent: gaussians})
    detector._learned = replace(detector.learned_, densities=densities)
    (found,) = explain_outputs(detector, np.zeros((1, 2)), class_names=("a", "b"))
    assert found.nearest.squared_distance == 0
    assert found.sentences() == [
        "Called a (probability 1.00): nearest to a, squared distance 0.0, where the Gaussian model expects about 2 "
        "(95 % below 6.0).",
        "Runner-up b (below 0.01), squared distance 81.0: component 1 speaks most against it (81.0).",
        "Its score, normalised, is 0.000.",
    ]


def test_coordinates_are_those_of_the_explanation(outputs: Outputs) -> None:
    detector = fit(outputs)
    coordinates, spreads = component_coordinates(detector.gaussians_, outputs.embeddings)
    found = explain_outputs(detector, outputs)
    np.testing.assert_allclose(coordinates, [one.coordinates for one in found], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(spreads, found[0].components.centroids.std(axis=0))
    for one in found[:20]:  # one covariance for all: deviations are differences of coordinates
        centroid = one.components.centroids[one.nearest.cluster]
        np.testing.assert_allclose(one.nearest.deviations, one.coordinates - centroid, atol=1e-9)


def test_broken_input_is_refused(outputs: Outputs) -> None:
    detector = fit(outputs)
    with pytest.raises(DataError, match="NaN"):
        explain_outputs(detector, np.full((1, 7), np.nan))
    with pytest.raises(UsageError, match="columns"):
        explain_outputs(detector, np.zeros((1, 3)))
    with pytest.raises(UsageError, match="row by row"):
        explain_outputs(detector, outputs, prediction=predicted(detector, outputs[:3]))


# ---------------------------------------------------------------------------------------------------------------- words


def predicted(detector: MapleDetector, outputs: Outputs, **changes: np.ndarray) -> Prediction:
    found = detector.describe(outputs)
    posterior = found.posterior()
    values = {
        "class_id": posterior.argmax(axis=1),
        "probability": posterior.max(axis=1),
        "typicality": found.typicality,
        "uncertainty": found.uncertainty,
        "score": found.squared_distance,
        "p_value": np.full(len(outputs), np.nan),
        "is_ood": np.zeros(len(outputs), bool),
        "cluster": found.cluster,
        "md_class_id": found.md_class_id,
        "softmax_class_id": found.md_class_id,
        "log_probabilities": found.log_posterior(),
        "squared_distance": found.squared_distance,
    }
    return Prediction(**(values | changes), class_names=NAMES)


@pytest.fixture
def plain() -> Explanation:
    """Two clusters of one class at 0 and 5 along the first of four components, another class at 8."""
    gaussians = Gaussians(
        np.eye(4), np.zeros(4), np.array([[0.0, 0, 0, 0], [5, 0, 0, 0], [8, 0, 0, 0]]), np.log([0.4, 0.2, 0.4])
    )
    components = replace(find_components(gaussians), axes=np.eye(4), centroids=gaussians.centroids)
    names = name_clusters(np.array([0, 0, 1]), NAMES)
    z = np.array([3.0, 0, 4, 0])
    nearest = Match(1, 0, NAMES[0], names[1], 0.93, z - gaussians.centroids[1])
    rival = Match(2, 1, NAMES[1], names[2], 0.05, z - gaussians.centroids[2])
    return Explanation(NAMES[0], 0.93, nearest, rival, z, components, names, 18.0, True, 0.004, True, 0.05)


def test_sentences(plain: Explanation) -> None:
    assert plain.sentences() == [
        "Called Navicula (probability 0.93): nearest to cluster 1 of Navicula, squared distance 20.0, where 95 % of "
        "known images stay below 18.0.",
        "80 % of that distance comes from component 3 (4.0 standard deviations).",
        "81.2 % of what is unusual about it lies in components that tell no clusters apart (2 to 4): it would be "
        "unusual in any of them.",
        "Runner-up Nitzschia (0.05), squared distance 41.0: component 1 speaks most against it (21.0).",
        "Out-of-distribution: at most 0.4 % of known images look as unusual (p-value 0.004, at most the false-alarm "
        "rate 0.05).",
    ]


def test_sentences_of_a_usual_image(plain: Explanation) -> None:
    usual = replace(plain, usual_distance=28.0, is_ood=False, p_value=0.42)
    assert len(usual.sentences()) == 4
    assert usual.sentences()[-1] == (
        "In-distribution: at most 42 % of known images look as unusual (p-value 0.420, above the false-alarm rate "
        "0.05)."
    )


def test_sentences_where_class_and_nearest_cluster_differ(plain: Explanation) -> None:
    first, *_, second, _ = replace(plain, class_name=NAMES[1], probability=0.5).sentences()
    assert second.startswith("Second nearest is Nitzschia (0.05), ")  # as it was called: no runner-up to itself
    assert first.startswith(
        "Called Nitzschia (probability 0.50), although cluster 1 of Navicula (0.93) has the nearest mean, "
    )


def test_deviations_point_to_clusters_that_lie_there(plain: Explanation) -> None:
    assert plain.say_deviation(0) == "2.0 standard deviations towards cluster 0 of Navicula"
    upwards = replace(plain.nearest, deviations=np.array([1.5, 0, 0, 0]))
    assert replace(plain, nearest=upwards).say_deviation(0) == "1.5 standard deviations towards Nitzschia"
    outermost = replace(plain.nearest, cluster=2, deviations=np.array([1.5, 0, 0, 0]))
    assert replace(plain, nearest=outermost).say_deviation(0) == "1.5 standard deviations"  # nothing lies further up
    assert plain.say_deviation(2, unit=False) == "4.0"
    assert plain.end_names(0) == ("cluster 0 of Navicula", "Nitzschia") and plain.end_names(2) is None


def test_what_speaks_for_the_runner_up_is_said(plain: Explanation) -> None:
    nearer = replace(plain.runner_up, deviations=np.array([-5.0, 0, 1, 0]))
    said = replace(plain, runner_up=nearer).sentences()[3]
    assert said.endswith("component 1 speaks most against it (21.0), component 3 most for it (15.0).")


def test_a_distance_spread_evenly_says_so(plain: Explanation) -> None:
    n = 20
    components = replace(plain.components, axes=np.eye(n), centroids=5 * np.eye(3, n, k=10))
    even = replace(plain.nearest, deviations=np.full(n, 1.0))
    spread = replace(plain, nearest=even, runner_up=None, components=components, coordinates=np.zeros(n))
    assert spread.sentences()[1] == "None of the 20 components stands out: the largest makes 5 %."
    one_far = replace(even, deviations=np.where(np.arange(n) == 4, 3.5, 1.5))
    said = replace(spread, nearest=one_far).sentences()[1]
    assert said == (
        "The largest parts of that distance, together 30.5 %, come from components 5 (3.5 standard deviations), "
        "1 (1.5), 2 (1.5)."
    )


def test_a_decision_by_another_rule_names_no_rate(plain: Explanation) -> None:
    flagged = replace(plain, p_value=0.06).sentences()[-1]  # as with Benjamini-Hochberg, or thresholds per class
    assert flagged == "Out-of-distribution: at most 6 % of known images look as unusual (p-value 0.060)."
    per_class = replace(plain, known_images="known images called Navicula").sentences()[-1]
    assert per_class.startswith("Out-of-distribution: at most 0.4 % of known images called Navicula look as unusual")
    unlike_any = replace(plain, p_value=0.0001).sentences()[-1]
    assert "at most 0.1 % of known images look as unusual (p-value below 0.001" in unlike_any
    too_few = replace(plain, p_value=0.006, is_ood=False, false_alarm=0.001, can_be_flagged=False).sentences()[-1]
    assert too_few == (
        "Whether it is out-of-distribution was not decided: the run has too few calibration images for the "
        "false-alarm rate 0.001; at most 0.6 % of known images look as unusual (p-value 0.006)."
    )
    undecided = replace(plain, p_value=np.nan, is_ood=False).sentences()[-1]
    assert "no calibration images" in undecided
    unasked = replace(plain, p_value=np.nan, is_ood=False, false_alarm=np.nan).sentences()
    assert not any("istribution" in sentence for sentence in unasked)


def test_another_score_may_flag_a_usual_distance(plain: Explanation) -> None:
    by_score = replace(plain, usual_distance=28.0, by_distance=False)
    assert by_score.sentences()[-1].endswith("; its squared distance is usual, but the score goes by more than that.")
    assert "goes by more" not in replace(by_score, by_distance=True).sentences()[-1]


def test_the_fused_score_in_words(plain: Explanation) -> None:
    """The most unusual part has the highest surprise, not the largest share: that of shallow weighs half."""
    fused = replace(plain, score=9.1, score_by="fused", parts={"energy": 5.2, "spread": 1.0, "shallow": 2.9})
    assert fused.sentences()[-2] == (
        "Its score 9.1 is made of energy 5.2, spread 1.0 and shallow 2.9: most unusual is shallow (looks different "
        "from all training images, whatever it shows)."
    )
    between = replace(fused, score=5.0, parts={"energy": 1.0, "spread": 4.0})
    assert between.sentences()[-2] == (
        "Its score 5.0 is made of energy 1.0 and spread 4.0: most unusual is spread (lies between the classes)."
    )
    assert between.sentences()[-1] == plain.sentences()[-1]


@pytest.mark.parametrize(("surprise", "expected"), [(-np.log(0.051), None), (-np.log(0.049), "shallow")])
def test_a_part_is_unusual_beyond_most_known_images(plain: Explanation, surprise: float, expected: str | None) -> None:
    parts = {"energy": 0.1, "spread": 0.2, "shallow": surprise / 2}
    found = replace(plain, score=sum(parts.values()), score_by="fused", parts=parts)
    assert found.most_unusual_part == expected
    assert found.sentences()[-2].endswith(": none of them is unusual alone.") == (expected is None)


def test_prediction_decides(outputs: Outputs) -> None:
    detector = fit(outputs)
    p_values = np.linspace(0.01, 1, len(outputs))
    prediction = predicted(detector, outputs, p_value=p_values, is_ood=p_values <= 0.05)
    found = explain_outputs(detector, outputs, prediction=prediction, false_alarm=0.05, usual_distance=30.0)
    assert [one.is_ood for one in found] == prediction.is_ood.tolist()
    assert [one.p_value for one in found] == p_values.tolist()
    assert found[0].by_distance and found[0].is_measured and found[0].usual_distance == 30
    assert found[0].class_name == NAMES[prediction.class_id[0]]
    other = replace(prediction, score=prediction.score + 1)
    assert not explain_outputs(detector, outputs, prediction=other)[0].by_distance


def test_the_model_says_what_is_usual_where_nothing_was_measured(outputs: Outputs) -> None:
    found = explain_outputs(fit(outputs), outputs)[0]
    assert not found.is_measured
    assert found.usual_distance == pytest.approx(chi2.ppf(0.95, found.degrees_of_freedom), rel=1e-9)


def test_values_hold_what_was_found(plain: Explanation) -> None:
    values = json.loads(json.dumps(plain.to_dict(), allow_nan=False))
    assert values["nearest"] == {"cluster": 1, "class": "Navicula", "probability": 0.93, "squared_distance": 20.0}
    assert values["runner_up"]["class"] == "Nitzschia"
    assert sum(part["contribution"] for part in values["components"]) == pytest.approx(20)
    assert [part["component"] for part in values["components"]] == [1, 2, 3, 4]
    assert values["components"][0]["between"] == ["cluster 0 of Navicula", "Nitzschia"]
    assert values["sentences"] == plain.sentences()
    assert replace(plain, runner_up=None, p_value=np.nan).to_dict()["p_value"] is None
    fused = replace(plain, score=3.5, score_by="fused", parts={"energy": 2.5, "spread": 1.0})
    values = json.loads(json.dumps(fused.to_dict(), allow_nan=False))
    assert (values["score"], values["score_by"]) == (3.5, "fused")
    assert values["parts"] == {"energy": 2.5, "spread": 1.0}


def test_torch_is_not_needed() -> None:
    code = "import sys, maple.prediction.explain; print(*[m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
