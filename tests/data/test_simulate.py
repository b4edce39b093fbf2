"""Simulated diatoms: reproducible, balanced, multi-modal, and not to be told apart by brightness alone."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from maple.data.simulate import COLONY, FAMILIES, FAR, GIRDLE, KINDS, KNOWN, NEAR, VALVE, VIEWS, simulated_diatoms
from maple.data.sources import simulate
from maple.errors import UsageError


@pytest.fixture(scope="module")
def fitting() -> simulate.SimulatedImages:
    return simulated_diatoms(2048, seed=0)


@pytest.fixture(scope="module")
def held_out() -> simulate.SimulatedImages:
    return simulated_diatoms(1024, seed=1)


# ------------------------------------------------------------------------------------------------------ arrays


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


# ------------------------------------------------------------------------------------------------- reproducible


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


# ------------------------------------------------------------------------------------------- classes and views


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


def test_every_known_taxon_has_several_views_and_all_views_are_used():
    assert all(len(taxon.views) >= 3 for taxon in KNOWN + NEAR)
    assert {view for taxon in KNOWN[:8] for view in taxon.views} == set(VIEWS)
    assert len({tuple(sorted(taxon.views.items())) for taxon in KNOWN}) == len(KNOWN)
    assert len(KNOWN) >= 12


def test_tables_are_consistent():
    everything = KNOWN + NEAR + FAR
    assert len({taxon.name for taxon in everything}) == len(everything)
    for taxon in everything:
        assert taxon.family in FAMILIES
        assert set(taxon.views) <= set(VIEWS)
        assert sum(taxon.views.values()) == pytest.approx(1.0)


def test_near_taxa_resemble_a_known_one_but_differ_in_valve_view():
    for near, known in zip(NEAR, KNOWN):
        assert near.length == known.length and near.depth == known.depth
        traits = ("family", "aspect", "period", "striae", "radiate", "slant", "axial", "centric", "raphe_at")
        assert sum(getattr(near, trait) != getattr(known, trait) for trait in traits) >= 2


# ------------------------------------------------------------------------------------------------- difficulty


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


def upright(taxon: simulate.Taxon, view: int, n: int = 200) -> np.ndarray:
    """Images of one taxon in one view with everything else held fixed, (n, 32, 32)."""
    sampler = simulate.Sampler((taxon,), np.zeros(n, np.int64), np.random.default_rng(0))
    views = np.full((n, 1, 1), view)
    body, marks = simulate.sample_body(sampler, views), simulate.sample_marks(sampler, views)
    scene = simulate.sample_scene(sampler)
    fixed = {name: np.zeros_like(scene.x) for name in ("x", "y", "angle", "gradient_x", "gradient_y", "noise")}
    scene = scene._replace(**fixed, focus=np.ones_like(scene.x), level=np.full_like(scene.x, 0.7))
    return simulate.draw(32, body, marks, scene, [], np.random.default_rng(0)).mean(axis=-1)


@pytest.mark.parametrize(("one", "other"), [("Navicula", "Cymbella"), ("Nitzschia", "Fragilaria")])
def test_girdle_views_of_some_taxa_look_alike(one, other):
    taxa = {taxon.name: taxon for taxon in KNOWN}

    def confusion(view: int) -> float:
        """Error of telling the two taxa apart with position, angle and light held fixed."""
        images = np.concatenate([upright(taxa[one], view), upright(taxa[other], view)])
        images = images.reshape(400, 16, 2, 16, 2).mean(axis=(2, 4)).reshape(400, -1)
        labels = np.repeat([0, 1], 200)
        return 1 - cross_val_score(LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto"), images, labels).mean()

    assert confusion(VALVE) < 0.05
    assert 0.1 < confusion(GIRDLE) < 0.5


def test_views_of_a_taxon_differ_from_each_other():
    valve, girdle = upright(KNOWN[0], VALVE), upright(KNOWN[0], GIRDLE)
    between = np.abs(valve.mean(axis=0) - girdle.mean(axis=0)).max()
    assert between > 20


# ------------------------------------------------------------------------------------- drawing, against oracles


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1])
def test_marks_under_blur_equal_blurred_marks(sigma):
    x = np.linspace(-1, 1, 4001)
    sharp, blurred = np.array(1e-6), np.array(sigma)

    def blur(values):
        return ndimage.gaussian_filter1d(values, sigma / (x[1] - x[0]), mode="nearest")

    middle = slice(1000, 3001)
    for mark, tolerance in (
        (lambda s: simulate.edge(x - 0.1, s), 0.011),
        (lambda s: simulate.line(x - 0.1, 0.03, s), 0.001),
        (lambda s: simulate.wave(x * 2 * np.pi / 0.3, np.array(0.3), s), 0.001),
    ):
        np.testing.assert_allclose(mark(blurred)[middle], blur(mark(sharp))[middle], atol=tolerance)


def plain_body(**traits: float) -> simulate.Body:
    """One body, given by some of its traits."""
    defaults = dict.fromkeys(simulate.Body._fields, 0.0) | {"cells": 1.0, "cut": 9.0, "ripple": 1.0}
    return simulate.Body(**{name: np.full((1, 1, 1), value, np.float32) for name, value in (defaults | traits).items()})


def place(size: int = 256, **traits: float) -> simulate.Place:
    x, y = simulate.pixel_grid(size)
    return simulate.outline(x + 0 * y, y + 0 * x, plain_body(**traits))


@pytest.mark.parametrize("family", FAMILIES)
def test_distance_to_the_outline(family):
    shape = vars(FAMILIES[family])
    got = place(512, length=0.7, width=0.25, **shape).distance[0]
    inside = got > 0
    expected = (ndimage.distance_transform_edt(inside) - ndimage.distance_transform_edt(~inside)) * (2 / 512)
    close = np.abs(expected) < 0.03
    error = np.abs(got - expected)[close]
    assert np.median(error) < 0.004 and np.quantile(error, 0.95) < 0.015
    assert (got[expected < -0.1] < -0.04).all() and (got[expected > 0.1] > 0.04).all()


def test_outline_is_the_stated_curve():
    got = place(512, length=0.8, width=0.4, pole=2.0, flank=1.0)
    area = (got.distance > 0).sum() * (2 / 512) ** 2
    assert area == pytest.approx(0.8 * 0.4 * 8 / 3, rel=0.01)  # twice the integral of 1 - t^2 over the length
    disc = place(256, length=0.6, width=0.6, pole=2.0, flank=2.0).distance[0]
    x, y = simulate.pixel_grid(256)
    radius = np.hypot(x, y)[0]
    ring = np.abs(radius - 0.6) < 0.02
    np.testing.assert_allclose(disc[ring], (0.6 - radius)[ring], atol=5e-4)


@pytest.mark.parametrize("cells", [1, 2, 3, 4])
def test_a_colony_has_that_many_cells(cells):
    got = place(256, length=0.6, width=0.12, pole=8.0, flank=8.0, cells=cells)
    pieces, count = ndimage.label(got.distance[0] > 0.01)
    assert count == cells
    sizes = np.bincount(pieces.ravel())[1:]
    assert sizes.max() < 1.1 * sizes.min()
    assert abs(ndimage.center_of_mass(pieces > 0)[0] - 127.5) < 1


def test_colonies_have_at_least_two_cells():
    sampler = simulate.Sampler((KNOWN[5],), np.zeros(200, np.int64), np.random.default_rng(0))
    cells = simulate.sample_body(sampler, np.full((200, 1, 1), COLONY)).cells
    assert set(np.unique(cells)) == {2.0, 3.0, 4.0}


def test_far_objects():
    images, labels, names, _ = simulated_diatoms(500, size=32, kind="far")
    contrast = images.astype(float).std(axis=(1, 2, 3))
    median = {name: np.median(contrast[labels == label]) for label, name in enumerate(names)}
    assert set(names) == {"bubble", "clump", "fibre", "grain", "empty"}
    assert median["empty"] < min(value for name, value in median.items() if name != "empty")


# ------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0}, "n must be at least 1, not 0"),
        ({"n": 2.5}, r"n must be a whole number, not 2\.5"),
        ({"n": "many"}, "n must be a whole number"),
        ({"size": 7}, "size must be between 8 and 512, not 7"),
        ({"size": 513}, "size must be between 8 and 512, not 513"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": None}, "seed must be a whole number"),
        ({"n_taxa": 1}, "n_taxa must be between 2 and 12"),
        ({"n_taxa": 13}, "n_taxa must be between 2 and 12"),
        ({"kind": "nearr"}, "did you mean 'near'"),
        ({"kind": None}, "known: far, known, near"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UsageError, match=message):
        simulated_diatoms(**{"n": 4} | arguments)


def test_numpy_integers_are_whole_numbers():
    assert len(simulated_diatoms(np.int64(3), size=np.int32(8)).images) == 3
