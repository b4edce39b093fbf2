"""The estimator is one of scikit-learn's, its algebra is that of explicit Gaussians, and moments add up."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from scipy.stats import chi2, multivariate_normal
from sklearn.datasets import load_iris, load_wine
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from maple import MahalanobisClassifier
from maple.errors import FitError, UsageError


@parametrize_with_checks(
    [
        MahalanobisClassifier(),
        MahalanobisClassifier(cluster_method="tmeans", random_state=0),
        MahalanobisClassifier(covariance="global", pca=False),
    ]
)
def test_scikit_learn_agrees(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def wine():
    return load_wine(return_X_y=True)


# --- algebra ---------------------------------------------------------------------------------------------------------


def test_the_whole_space_is_linear_discriminant_analysis(wine):
    X, y = wine
    ours = MahalanobisClassifier(pca=False).fit(X, y)
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-8)
    assert (ours.predict(X) == theirs.predict(X)).all()


def test_full_covariances_are_quadratic_discriminant_analysis(rng):
    means, spreads = np.array([[0, 0], [4, 0], [0, 5]]), np.array([[1, 3], [2, 0.5], [0.5, 2]])
    y = np.arange(90_000) % 3  # so many that ours, which are shrunk a little, are theirs
    X = means[y] + spreads[y] * rng.normal(size=(90_000, 2))
    ours = MahalanobisClassifier(pca=False, covariance="full").fit(X, y)
    theirs = QuadraticDiscriminantAnalysis().fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=5e-3)


def test_density_and_tail_are_those_of_explicit_gaussians(wine):
    X, y = wine
    model = MahalanobisClassifier(explained_variance=0.8).fit(X, y)
    z = model.transform(X)
    centres = np.stack([z[y == c].mean(axis=0) for c in range(3)])
    within = sum((z[y == c] - centres[c]).T @ (z[y == c] - centres[c]) for c in range(3)) / len(z)
    np.testing.assert_allclose(within, np.eye(model.n_components_), atol=1e-8)
    densities = [multivariate_normal(centre).pdf(z) * (y == c).mean() for c, centre in enumerate(centres)]
    np.testing.assert_allclose(model.score_samples(X), np.log(np.sum(densities, axis=0)), rtol=1e-9)
    squared = ((z[:, None] - centres) ** 2).sum(axis=2)
    np.testing.assert_allclose(model.squared_distances(X), squared, rtol=1e-8)
    np.testing.assert_allclose(model.typicality(X), chi2(model.n_components_).sf(squared.min(axis=1)), rtol=1e-8)
    np.testing.assert_allclose(model.means_, [X[y == c].mean(axis=0) for c in range(3)])


def test_temperature_softens(wine):
    X, y = wine
    sharp, soft = (MahalanobisClassifier(temperature=t).fit(X, y).predict_proba(X) for t in (1.0, 5.0))
    assert (soft.max(axis=1) <= sharp.max(axis=1) + 1e-12).all() and soft.max(axis=1).mean() < sharp.max(axis=1).mean()
    model = MahalanobisClassifier().fit(X, y)
    expected = np.bincount(y) * np.exp(-model.squared_distances(X) / 10)
    np.testing.assert_allclose(soft, expected / expected.sum(axis=1, keepdims=True))


# --- clusters --------------------------------------------------------------------------------------------------------


def two_faced(rng, n=600):
    """Class "a" lies on both sides of class "b"."""
    sides = np.arange(n) % 3
    X = 8.0 * (sides[:, None] - 1) * np.array([1.0, 0.0]) + rng.normal(size=(n, 2))
    return X, np.where(sides == 1, "b", "a"), sides


def test_clusters_are_found_or_told(rng):
    X, y, sides = two_faced(rng)
    whole = MahalanobisClassifier().fit(X, y)
    found = MahalanobisClassifier(cluster_method="tmeans", random_state=0).fit(X, y)
    told = MahalanobisClassifier().fit(X, y, cluster_ids=sides)
    assert whole.score(X, y) < 0.9 < 0.99 < found.score(X, y)
    assert found.cluster_to_class_.tolist() == told.cluster_to_class_.tolist() == [0, 0, 1]
    np.testing.assert_allclose(np.sort(found.means_[:2, 0]), np.sort(told.means_[:2, 0]), atol=0.2)
    np.testing.assert_allclose(found.predict_proba(X).sum(axis=1), 1)


def test_the_same_id_in_two_classes_is_two_clusters():
    X = np.array([[0.0], [0.1], [5.0], [5.2], [9.0], [9.3]])
    model = MahalanobisClassifier().fit(X, list("aaaabb"), cluster_ids=[0, 0, 1, 1, 1, 1])
    assert model.cluster_to_class_.tolist() == [0, 0, 1]
    np.testing.assert_allclose(model.means_.ravel(), [0.05, 5.1, 9.15])


@pytest.mark.parametrize("cluster_ids", [[0, 1], [0.5] * 6])
def test_wrong_cluster_ids_are_refused(cluster_ids):
    with pytest.raises(ValueError, match=r"inconsistent numbers of samples|cluster_ids"):
        MahalanobisClassifier().fit(np.arange(6.0)[:, None], list("aabbcc"), cluster_ids=cluster_ids)


# --- parts add up ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_exponent", [0.0, 1.0])
def test_parts_in_any_order_are_the_whole(rng, norm_exponent):
    X, y, sides = two_faced(rng)
    X = X + 100.0  # where sums around 0 would lose digits
    whole = MahalanobisClassifier(norm_exponent=norm_exponent).fit(X, y, cluster_ids=sides)
    for sorted_by_class in (False, True):
        order = np.argsort(y, kind="stable") if sorted_by_class else rng.permutation(len(X))
        parts = MahalanobisClassifier(norm_exponent=norm_exponent)
        for rows in np.split(order, [1, 7, 50, 333]):
            parts.partial_fit(X[rows], y[rows], cluster_ids=sides[rows])
        assert parts.classes_.tolist() == ["a", "b"]
        for method in ("predict_log_proba", "score_samples", "squared_distances", "transform"):
            np.testing.assert_allclose(getattr(parts, method)(X), getattr(whole, method)(X), rtol=1e-10, atol=1e-10)


def test_a_class_that_comes_later_takes_its_place_among_the_others(wine):
    X, y = wine
    names = np.array(["merlot", "albana", "pinot"])[y]
    grown = MahalanobisClassifier()
    for name in ("merlot", "pinot", "albana"):
        grown.partial_fit(X[names == name], names[names == name])
    whole = MahalanobisClassifier().fit(X, names)
    assert grown.classes_.tolist() == whole.classes_.tolist() == ["albana", "merlot", "pinot"]
    np.testing.assert_allclose(grown.predict_proba(X), whole.predict_proba(X), rtol=1e-8, atol=1e-12)


def test_a_class_that_is_announced_has_no_probability_yet(wine):
    X, y = wine
    model = MahalanobisClassifier().partial_fit(X[y < 2], y[y < 2], classes=[0, 1, 2])
    assert model.predict_proba(X).shape == (len(X), 3) and (model.predict_proba(X)[:, 2] == 0).all()
    assert (model.partial_fit(X[y == 2], y[y == 2]).predict(X) == MahalanobisClassifier().fit(X, y).predict(X)).all()


def test_fit_starts_anew(wine):
    X, y = wine
    model = MahalanobisClassifier().fit(X[:, :4], y)
    model.calibrate(X[:, :4])
    model.fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), MahalanobisClassifier().fit(X, y).predict_proba(X))
    with pytest.raises(UsageError, match="calibrate"):
        model.p_values(X)


def test_full_covariances_need_all_data(wine):
    with pytest.raises(UsageError, match="fit"):
        MahalanobisClassifier(covariance="full").partial_fit(*wine)


# --- company ---------------------------------------------------------------------------------------------------------


def test_pipeline_and_grid_search(wine):
    X, y = wine
    pipeline = make_pipeline(StandardScaler(), MahalanobisClassifier())
    grid = {"mahalanobisclassifier__explained_variance": [0.5, 0.95], "mahalanobisclassifier__temperature": [1.0, 2.0]}
    search = GridSearchCV(pipeline, grid, scoring="neg_log_loss", cv=3).fit(X, y)
    assert search.best_estimator_.score(X, y) > 0.95
    names = search.best_estimator_.get_feature_names_out()
    assert names[0] == "mahalanobisclassifier0" and len(names) == search.best_estimator_[-1].n_components_


def test_p_values_keep_their_promise(rng):
    """Over many calibration sets, a share of at most 10 % of known points has a p-value of at most 0.1."""
    y = np.arange(4000) % 4
    X = 6 * np.eye(4, 10)[y] + rng.normal(size=(4000, 10))
    shares, caught = [], []
    for seed in range(40):
        learn, rest, labels, _ = train_test_split(X, y, train_size=1000, random_state=seed)
        model = MahalanobisClassifier(pca=False).fit(learn, labels).calibrate(rest[:500])
        shares.append((model.p_values(rest[500:]) <= 0.1).mean())
        caught.append((model.p_values(rng.normal(3, 3, size=(100, 10))) <= 0.1).mean())
    assert np.mean(shares) == pytest.approx(0.1, abs=0.01) and np.mean(caught) > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"explained_variance": 0.0}, "explained_variance"),
        ({"covariance": "diagonal"}, "covariance"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(UsageError, match=message):
        MahalanobisClassifier(**options).fit(*load_iris(return_X_y=True))


def test_what_cannot_be_fitted_is_said_by_fit():
    with pytest.raises(FitError, match="covariance"):
        MahalanobisClassifier().fit([[0.0], [1.0]], ["a", "b"])


def test_it_needs_no_torch():
    code = (
        "import sys; from maple import MahalanobisClassifier;"
        "print(MahalanobisClassifier().fit([[0.0], [1.0], [5.0], [6.0]], [0, 0, 1, 1]).predict([[0.2], [5.9]]),"
        "'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[0 1] False"
