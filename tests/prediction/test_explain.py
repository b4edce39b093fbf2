"""Explanations: parts that sum to the distance, components that mean something, and words that say so."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from scipy.linalg import eigh
from scipy.stats import chi2

from maple.detectors.maple import MapleDetector
from maple.errors import DataError, UsageError
from maple.prediction.components import component_coordinates, deviations, find_components
from maple.prediction.explain import explain_outputs, score_parts
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
    weights = {"energy": 1.0, "spread": 0.5} | ({"shallow": 1.0} if shallow else {}) | {"distance": 1.0}
    for i, found in enumerate(explain_outputs(detector, outputs)):
        assert found.score_by == "fused" and list(found.parts) == list(weights)
        assert sum(found.parts.values()) == pytest.approx(found.score, rel=1e-9, abs=1e-9)
        assert found.score == pytest.approx(described.score[i], rel=1e-9, abs=1e-9)
        for name, weight in weights.items():
            surprise = detector.learned_.surprises[name](described.score_named(name)[i : i + 1])[0]
            surprise = max(surprise - {"shallow": 2, "distance": 7}.get(name, 0), 0)
            assert found.parts[name] == pytest.approx(weight * surprise, rel=1e-9, abs=1e-9)


def test_parts_are_counted_as_in_the_run(outputs: Outputs, rng: np.random.Generator) -> None:
    outputs = with_logits(outputs, rng, False)
    arrays, metadata = MapleDetector(norm_exponent=0.0).fit(outputs, outputs[::2]).get_state()
    other = {**metadata, "parts": {**metadata["parts"], "energy": [0.25, 0.0]}}
    (found,) = explain_outputs(MapleDetector.from_state(arrays, other), outputs[:1])
    assert found.counted["energy"].weight == 0.25


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
    assert "do not separate clusters (4 to 6)" in " ".join(aside.sentences())
    assert "that separate clusters (1 to 3)" in " ".join(between.sentences())


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
        "Probably a (100 %); whether it is one of your classes was not decided.",
        "Called a (probability 1.00): nearest to a, squared distance 0.0, where the Gaussian model expects about 2 "
        "(95 % below 6.0).",
        "Runner-up b (below 0.01), squared distance 81.0: component 1 is the strongest evidence against it (81.0).",
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


def test_torch_is_not_needed() -> None:
    code = "import sys, maple.prediction.explain; print(*[m for m in ('torch', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
