"""Simulated diatoms: reproducible, balanced, and neither trivial nor impossible to tell apart."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from maple.data.simulate.diatoms import SimulatedImages, simulated_diatoms
from maple.data.simulate.taxa import KINDS, VIEWS
from maple.errors import UsageError


@pytest.fixture(scope="module")
def fitting() -> SimulatedImages:
    return simulated_diatoms(2048, seed=0)


@pytest.fixture(scope="module")
def held_out() -> SimulatedImages:
    return simulated_diatoms(1024, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_types_and_names(kind):
    images, labels, names, views = simulated_diatoms(50, size=16, kind=kind)
    assert images.shape == (50, 16, 16, 3) and images.dtype == np.uint8 and images.flags.c_contiguous
    assert labels.shape == views.shape == (50,) and labels.dtype == views.dtype == np.int64
    assert set(labels) == set(range(len(names))) and len(set(names)) == len(names)
    assert views.min() >= 0 and views.max() < len(VIEWS)


@pytest.mark.parametrize("size", [8, 9, 33, 64, 200, 512])
def test_any_size(size):
    images = simulated_diatoms(3, size=size).images
    assert images.shape == (3, size, size, 3)
    assert images.std(axis=(1, 2, 3)).min() > 2


def test_values_fill_the_range_without_saturating(fitting):
    assert fitting.images.min() < 60 and fitting.images.max() > 230
    assert (fitting.images == 255).mean() < 0.03 and (fitting.images == 0).mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_bytes_and_other_seed_other_images(kind):
    first, again, other = (simulated_diatoms(40, seed=seed, kind=kind) for seed in (3, 3, 4))
    assert first.images.tobytes() == again.images.tobytes()
    assert np.array_equal(first.views, again.views)
    assert (first.images != other.images).any(axis=(1, 2, 3)).all()


def test_no_image_occurs_twice():
    images = np.concatenate([simulated_diatoms(600, size=8, seed=seed).images for seed in (0, 1)])
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == 1200


def test_kinds_do_not_share_random_numbers():
    noise = {kind: simulated_diatoms(8, seed=0, kind=kind).images[:, :3, :3] for kind in KINDS}
    assert not np.array_equal(noise["known"], noise["near"])
    assert not np.array_equal(noise["near"], noise["far"])


@pytest.mark.parametrize("size", [16, 40, 128])  # groups that fill a block, that do not, and of two images
def test_fewer_images_are_the_first_of_more(size):
    many = simulated_diatoms(300 if size < 100 else 20, size=size, seed=2)
    for n in (1, 7, 19, 255, 256, 257):
        few = simulated_diatoms(min(n, len(many.images)), size=size, seed=2)
        k = len(few.images)
        assert few.images.tobytes() == many.images[:k].tobytes()
        assert np.array_equal(few.labels, many.labels[:k]) and np.array_equal(few.views, many.views[:k])


def test_global_random_state_is_left_alone():
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    simulated_diatoms(3)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


def test_size_changes_the_resolution_not_the_organisms():
    small, large = simulated_diatoms(64, size=32, seed=6), simulated_diatoms(64, size=96, seed=6)
    assert np.array_equal(small.views, large.views)
    reduced = large.images.reshape(64, 32, 3, 32, 3, 3).mean(axis=(2, 4))
    correlation = [np.corrcoef(a.ravel(), b.ravel())[0, 1] for a, b in zip(small.images, reduced)]
    assert np.median(correlation) > 0.9 and min(correlation) > 0.5


@pytest.mark.parametrize(("n", "n_taxa"), [(100, 8), (1000, 3), (257, 12), (5, 8)])
def test_classes_are_balanced_within_one_image(n, n_taxa):
    counts = np.bincount(simulated_diatoms(n, size=8, n_taxa=n_taxa).labels, minlength=n_taxa)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_views_occur_in_the_shares_of_each_taxon(kind):
    _, labels, names, views = simulated_diatoms(6000, size=8, kind=kind, n_taxa=12)
    for label, taxon in enumerate(KINDS[kind]):
        assert names[label] == taxon.name
        seen = np.bincount(views[labels == label], minlength=len(VIEWS)) / (labels == label).sum()
        expected = np.array([taxon.views.get(view, 0.0) for view in VIEWS])
        assert ((seen > 0) == (expected > 0)).all()
        assert np.abs(seen - expected).max() < 0.1  # five deviations of a share of 500 images


def brightness(images: np.ndarray) -> np.ndarray:
    """Mean and deviation of each colour, and the colour of the background: what must not give the class away."""
    x = images.astype(np.float64)
    corners = x[:, [0, 0, -1, -1], [0, -1, 0, -1]].mean(axis=1)
    return np.concatenate([x.mean(axis=(1, 2)), x.std(axis=(1, 2)), corners], axis=1)


def test_brightness_and_colour_say_little_about_the_class(fitting, held_out):
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(brightness(fitting.images), fitting.labels)
    assert model.score(brightness(held_out.images), held_out.labels) < 0.35


def test_pixels_say_something_but_not_everything(fitting, held_out):
    def pixels(images):
        return images.reshape(-1, 16, 2, 16, 2, 3).mean(axis=(2, 4, 5)).reshape(-1, 256)

    model = RandomForestClassifier(20, max_features=16, random_state=0).fit(pixels(fitting.images), fitting.labels)
    assert 0.2 < model.score(pixels(held_out.images), held_out.labels) < 0.9


def test_far_objects():
    images, labels, names, _ = simulated_diatoms(500, size=32, kind="far")
    contrast = images.astype(float).std(axis=(1, 2, 3))
    median = {name: np.median(contrast[labels == label]) for label, name in enumerate(names)}
    assert set(names) == {"bubble", "clump", "fibre", "grain", "empty"}
    assert median["empty"] < min(value for name, value in median.items() if name != "empty")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n"),
        ({"n": 2.5}, "n"),
        ({"n": "many"}, "n"),
        ({"size": 7}, "size"),
        ({"size": 513}, "size"),
        ({"seed": -1}, "seed"),
        ({"seed": None}, "seed"),
        ({"n_taxa": 1}, "n_taxa"),
        ({"n_taxa": 13}, "n_taxa"),
        ({"kind": "nearr"}, "'near'"),
        ({"kind": None}, "None"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        simulated_diatoms(**{"n": 4} | arguments)


def test_numpy_integers_are_whole_numbers():
    assert len(simulated_diatoms(np.int64(3), size=np.int32(8)).images) == 3
