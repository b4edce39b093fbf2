"""What training and evaluation write: the right images, in the right order, with their own captions."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from maple.errors import DataError, UsageError
from maple.reporting.gallery.store import MAX_EXEMPLARS, read_gallery
from maple.reporting.gallery.write import (
    count_images,
    find_exemplars,
    main_axes,
    write_cluster_gallery,
    write_component_gallery,
    write_evaluation_gallery,
    write_examples,
    write_projection,
    write_training_gallery,
)
from maple.types import Outputs, Prediction


@dataclass
class Pictures:
    """The part of an ``ImageSet`` that the gallery uses; image i is filled with the number i."""

    labels: np.ndarray
    class_names: tuple[str, ...] = ("a", "b")
    name: str = "blobs/test"
    side: int = 8
    files: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.files = tuple(f"{i}.png" for i in range(len(self.labels)))

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, i: int) -> np.ndarray:
        return np.full((self.side, self.side, 3), i % 256, dtype=np.uint8)


def make_prediction(n: int, n_classes: int = 2, **changes: np.ndarray) -> Prediction:
    values = {
        "class_id": np.zeros(n, np.int64),
        "probability": np.full(n, 0.5),
        "typicality": np.full(n, 0.5),
        "uncertainty": np.full(n, 0.5),
        "score": np.arange(n, dtype=float),
        "p_value": np.full(n, np.nan),
        "is_ood": np.zeros(n, bool),
        "cluster": np.zeros(n, np.int64),
        "md_class_id": np.zeros(n, np.int64),
        "softmax_class_id": np.zeros(n, np.int64),
        "log_probabilities": np.full((n, n_classes), -np.log(n_classes)),
        "squared_distance": np.arange(n, dtype=float),
    }
    return Prediction(**(values | changes), class_names=("a", "b"))


@pytest.fixture
def clustered(rng: np.random.Generator) -> tuple[Pictures, Outputs]:
    """Class a has the clusters 0 (60 images) and 2 (30), class b the cluster 1 (20)."""
    cluster_ids = rng.permutation(np.repeat([0, 1, 2], [60, 20, 30]))
    embeddings = rng.normal(size=(110, 5)).astype(np.float32) + 10 * cluster_ids[:, None]
    cluster_to_class = np.array([0, 1, 0])
    labels = cluster_to_class[cluster_ids]
    outputs = Outputs(embeddings, labels=labels, cluster_ids=cluster_ids, cluster_to_class=cluster_to_class)
    return Pictures(labels), outputs


# Clusters


def test_cluster_gallery_holds_the_images_nearest_to_each_mean(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    write_cluster_gallery(tmp_path, images, outputs)
    clusters = read_gallery(tmp_path).clusters
    assert [(c.class_name, c.count) for c in clusters] == [("a", 60), ("b", 20), ("a", 30)]
    assert [c.share for c in clusters] == pytest.approx([60 / 90, 1, 30 / 90])
    for cluster in clusters:
        members = [i for i in range(110) if outputs.cluster_ids[i] == cluster.cluster]
        mean = np.mean([outputs.embeddings[i] for i in members], axis=0)
        expected = sorted(members, key=lambda i: float(np.sum((outputs.embeddings[i] - mean) ** 2)))[:12]
        assert list(cluster.files) == [f"{i}.png" for i in expected]
        assert cluster.thumbnails[:, 0, 0, 0].tolist() == expected  # each picture with its own caption


def test_squared_distances_decide_where_given(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    distance = np.arange(110, dtype=float)[::-1]
    write_cluster_gallery(tmp_path, images, outputs, squared_distance=distance, per_cluster=3)
    for cluster in read_gallery(tmp_path).clusters:
        members = np.flatnonzero(outputs.cluster_ids == cluster.cluster)
        assert list(cluster.files) == [f"{i}.png" for i in members[::-1][:3]]


def test_a_sample_of_each_cluster_is_enough(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    write_training_gallery(tmp_path, images, outputs, cluster_sizes=np.array([600, 20, 300]))
    clusters = read_gallery(tmp_path).clusters
    assert [c.count for c in clusters] == [600, 20, 300]
    assert [c.share for c in clusters] == pytest.approx([2 / 3, 1, 1 / 3])


def test_exemplars_are_the_nearest_rows_and_shares_follow_from_the_sizes_of_all_clusters() -> None:
    images = Pictures(np.zeros(9, np.int64))
    first = find_exemplars(images, np.array([2, 5, 8]), np.array([3.0, 1.0, 2.0]), 0, "a", limit=2)
    assert first.files == ("5.png", "8.png") and first.thumbnails[:, 0, 0, 0].tolist() == [5, 8]
    second = find_exemplars(images, np.array([1]), np.zeros(1), 1, "a")
    counted = count_images([first, second], np.array([30, 10]))
    assert [(each.count, each.share) for each in counted] == [(30, 0.75), (10, 0.25)]


def test_clusters_are_classes_where_nothing_was_split(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    write_cluster_gallery(tmp_path, images, Outputs(outputs.embeddings, labels=outputs.labels))
    assert [(c.class_name, c.count, c.share) for c in read_gallery(tmp_path).clusters] == [("a", 90, 1), ("b", 20, 1)]


def test_an_empty_cluster_is_listed_without_thumbnails(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    more = Outputs(outputs.embeddings, None, outputs.labels, outputs.cluster_ids, np.array([0, 1, 0, 1]))
    write_cluster_gallery(tmp_path, images, more)
    last = read_gallery(tmp_path).clusters[-1]
    assert (last.count, last.files, len(last.thumbnails)) == (0, (), 0)


def test_with_many_clusters_the_sheet_stays_small(tmp_path: Path) -> None:
    n_clusters = MAX_EXEMPLARS // 2
    ids = np.repeat(np.arange(n_clusters), 3)
    images = Pictures(ids % 2, side=2)
    outputs = Outputs(np.zeros((len(ids), 1), np.float32), None, ids % 2, ids, np.arange(n_clusters) % 2)
    write_cluster_gallery(tmp_path, images, outputs)
    assert {len(c.files) for c in read_gallery(tmp_path).clusters} == {2}


def test_rows_that_do_not_match_are_refused(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    with pytest.raises(DataError, match="blobs/test"):
        write_cluster_gallery(tmp_path, images, outputs[:5])
    with pytest.raises(DataError, match="blobs/test"):
        write_examples(tmp_path, "uncertain", images, make_prediction(5))


# Components


def test_component_gallery_holds_the_images_at_both_ends(tmp_path: Path, clustered, rng: np.random.Generator) -> None:
    images, _ = clustered
    coordinates, spreads = rng.normal(size=(110, 3)), np.array([5.0, 1.0, 0.0])
    write_component_gallery(tmp_path, images, coordinates, spreads)
    components = read_gallery(tmp_path).components
    assert [component.spread for component in components] == spreads.tolist()
    for along, component in zip(coordinates.T, components):
        order = sorted(range(110), key=lambda i: along[i])
        for end, expected in ((component.low, order[:4]), (component.high, order[::-1][:4])):
            assert end.thumbnails[:, 0, 0, 0].tolist() == expected  # each picture with its own caption
            assert list(end.files) == [f"{i}.png" for i in expected]
            assert list(end.class_names) == [images.class_names[images.labels[i]] for i in expected]
            assert list(end.coordinates) == [along[i] for i in expected]


def test_components_go_with_the_training_images(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    assert read_gallery(tmp_path).components == ()
    write_training_gallery(tmp_path, images, outputs, components=(outputs.embeddings, np.ones(5)))
    gallery = read_gallery(tmp_path)
    assert len(gallery.components) == 5 and len(gallery.clusters) == 3
    with pytest.raises(DataError, match="blobs/test"):
        write_component_gallery(tmp_path, images, outputs.embeddings[:9], np.ones(5))


@pytest.mark.parametrize(("n", "shown"), [(1, 1), (5, 2), (9, 4)])
def test_ends_of_few_images_do_not_overlap(tmp_path: Path, n: int, shown: int) -> None:
    write_component_gallery(tmp_path, Pictures(np.zeros(n, np.int64)), np.arange(n, dtype=float)[:, None], np.ones(1))
    (component,) = read_gallery(tmp_path).components
    assert len(component.low.files) == len(component.high.files) == shown
    assert n == 1 or not set(component.low.files) & set(component.high.files)


def test_many_components_show_fewer_images_each(tmp_path: Path) -> None:
    n_components = MAX_EXEMPLARS // 4
    images = Pictures(np.zeros(20, np.int64), side=1)
    write_component_gallery(tmp_path, images, np.zeros((20, n_components)), np.ones(n_components))
    components = read_gallery(tmp_path).components
    assert len(components) == n_components and len(components[-1].high.files) == 2


# Projections


def test_projection_is_sampled_once_and_for_all(tmp_path: Path, rng: np.random.Generator) -> None:
    outputs = Outputs(rng.normal(size=(2_500, 3)).astype(np.float32), labels=np.arange(2_500))
    write_projection(tmp_path / "1", "before", outputs, ["a", "b"])
    write_projection(tmp_path / "2", "before", outputs, ["a", "b"])
    one, two = (read_gallery(tmp_path / part).projections["before"] for part in "12")
    assert one.points.shape == (2_000, 2) and one.n_images == 2_500
    assert (one.points == two.points).all()
    assert len(set(one.class_ids.tolist())) == 2_000  # no image twice
    assert one.class_names == ("a", "b")
    assert (one.cluster_ids == one.class_ids).all()


def test_projection_of_diverged_embeddings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        write_projection(tmp_path, "after", Outputs(np.array([[1.0, np.nan]], np.float32)))
    with pytest.raises(UsageError, match="/after"):
        write_projection(tmp_path, "../after", Outputs(np.ones((3, 2), np.float32)))


def test_main_axes_agree_with_scikit_learn(rng: np.random.Generator) -> None:
    embeddings = rng.normal(size=(300, 12)) * np.arange(1, 13)
    points, explained = main_axes(embeddings)
    oracle = PCA(n_components=2).fit(embeddings)
    assert np.abs(points) == pytest.approx(np.abs(oracle.transform(embeddings)), abs=1e-8)
    assert explained == pytest.approx(tuple(oracle.explained_variance_ratio_))


@pytest.mark.parametrize("shape", [(1, 4), (5, 1), (2, 2), (3, 50)])
def test_main_axes_of_little_data(shape: tuple[int, int], rng: np.random.Generator) -> None:
    points, explained = main_axes(rng.normal(size=shape))
    assert points.shape == (shape[0], 2)
    assert np.isfinite(points).all() and 0 <= sum(explained) <= 1 + 1e-9


# Examples


@pytest.mark.parametrize(
    "changes",
    [
        {"score": np.array([50.0, 1.0, 900.0, 9.0])},  # without calibration images
        {"p_value": np.array([0.1, 0.3, 0.4, 0.3]), "probability": np.array([0.5, 0.9, 0.3, 0.8])},
        {"is_ood": np.array([True, False, True, False]), "p_value": np.array([0.1, 0.3, 0.05, 0.25])},
    ],
)
def test_unusual_examples_rank_by_decision_p_value_probability_and_score(
    tmp_path: Path, changes: dict[str, np.ndarray]
) -> None:
    images = Pictures(np.array([0, 0, 1, -1]))
    prediction = make_prediction(4, **changes)
    write_examples(tmp_path, "uncertain", images, prediction)
    (examples,) = read_gallery(tmp_path).examples
    assert (examples.kind, examples.source) == ("uncertain", "blobs/test")
    assert [e.file for e in examples.images] == ["2.png", "0.png", "3.png", "1.png"]
    np.testing.assert_array_equal([e.p_value for e in examples.images], prediction.p_value[[2, 0, 3, 1]])
    assert [e.label for e in examples.images] == ["b", "a", None, "a"]
    assert [int(e.thumbnail[0, 0, 0]) for e in examples.images] == [2, 0, 3, 1]


def test_mistakes_compare_names_not_numbers(tmp_path: Path) -> None:
    images = Pictures(np.array([0, 1, 0, 1, -1]), class_names=("b", "a"))  # numbered the other way round
    prediction = make_prediction(5, class_id=np.array([0, 0, 0, 1, 0]), probability=np.array([0.6, 0.7, 0.9, 0.8, 1.0]))
    write_examples(tmp_path, "mistakes", images, prediction)
    (examples,) = read_gallery(tmp_path).examples
    assert [(e.file, e.label, e.class_name) for e in examples.images] == [
        ("2.png", "b", "a"),
        ("3.png", "a", "b"),
        ("0.png", "b", "a"),
    ]


def test_caught_and_missed_are_the_two_ends_of_the_score(tmp_path: Path) -> None:
    images, prediction = Pictures(np.full(5, -1)), make_prediction(5, score=np.array([3.0, np.inf, 1.0, 5.0, 2.0]))
    write_examples(tmp_path, "caught", images, prediction, source="far")
    write_examples(tmp_path, "missed", images, prediction, source="far")
    caught, missed = read_gallery(tmp_path).examples
    assert [e.file for e in caught.images] == ["1.png", "3.png", "0.png", "4.png", "2.png"]
    assert [e.file for e in missed.images] == [e.file for e in caught.images][::-1]
    assert np.isnan(caught.images[0].score)  # infinity has no JSON


def test_at_most_24_examples_are_kept(tmp_path: Path) -> None:
    write_examples(tmp_path, "caught", Pictures(np.full(30, -1)), make_prediction(30))
    (examples,) = read_gallery(tmp_path).examples
    assert [e.file for e in examples.images] == [f"{i}.png" for i in range(29, 5, -1)]


def test_unknown_kind_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missed"):
        write_examples(tmp_path, "mised", Pictures(np.zeros(2, int)), make_prediction(2))


# The whole


def test_each_part_is_kept_and_old_examples_are_replaced(tmp_path: Path, clustered) -> None:
    images, outputs = clustered
    write_training_gallery(tmp_path, images, outputs, snapshots={"before": outputs, "after": outputs})
    two = (Pictures(np.zeros(2, int)), make_prediction(2, class_id=np.ones(2, int)))
    write_evaluation_gallery(tmp_path, test=two, ood={"near": two, "far": two})
    write_evaluation_gallery(tmp_path, test=two, ood={"near": two})
    gallery = read_gallery(tmp_path)
    assert len(gallery.clusters) == 3
    assert set(gallery.projections) == {"before", "after"}
    assert gallery.projections["after"].class_names == ("a", "b")
    assert {(e.kind, e.source) for e in gallery.examples} == {
        ("uncertain", "blobs/test"),
        ("mistakes", "blobs/test"),
        ("labels", "blobs/test"),
        ("caught", "near"),
        ("missed", "near"),
    }
    sheets = list(tmp_path.glob("*.png"))
    assert len(sheets) == 5  # one per JSON file with images, none left over
