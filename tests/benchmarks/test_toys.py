"""The pictures of toy problems: what they show is what the methods say, and what was committed shows what it must."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from scipy.spatial.distance import cdist

from maple.detectors.registry import create_detector
from maple.files import load_json
from maple.training.recipe import create_recipe
from maple.types import Outputs

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)


@pytest.fixture(scope="module")
def toys():
    spec = spec_from_file_location("toys", ROOT / "benchmarks" / "toys.py")
    module = module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "toys", module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


@pytest.fixture(scope="module")
def moons(toys):
    return toys.draw_sets("two-moons")


@pytest.fixture(scope="module")
def drawings(toys, moons):
    """Deterministic and MAPLE, a short training each."""
    panels = [panel for panel in toys.PANELS if panel.name in ("deterministic", "maple")]
    return toys.study("two-moons", panels, moons, epochs=6)


def test_points_are_images_of_one_pixel(toys):
    corners = toys.REACH * np.array([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0]])
    images = toys.to_images(corners)
    assert images.pixels[:, 0, 0].tolist() == [[0, 0, 0], [255, 0, 0], [0, 255, 0]]
    points = toys.REACH * np.random.default_rng(0).uniform(-1, 1, (50, 2))
    half_a_level = toys.REACH / 255
    np.testing.assert_allclose(toys.to_points(toys.to_images(points)), points, atol=1.001 * half_a_level)


@pytest.mark.parametrize("toy", ["two-moons", "rings"])
def test_sets(toys, toy):
    sets = toys.draw_sets(toy)
    points = {name: toys.to_points(images) for name, images in sets.items()}
    nearest = cdist(points["far"], points["train"]).min(1)
    assert len(nearest) == toys.N_FAR and nearest.min() > toys.FAR - 0.04  # two roundings to a level
    inside = cdist(points["test"], points["train"]).min(1)
    assert np.median(inside) < 0.05
    assert not np.isin(sets["test"].keys, sets["train"].keys).all()  # drawn anew
    assert np.abs(points["train"]).max() < toys.REACH - toys.FAR  # there is room for far points


def test_rings_are_rings(toys):
    points, labels = toys.two_rings(1000, seed=0)
    radii = np.linalg.norm(points, axis=1)
    assert abs(radii[labels == 0].mean() - 1) < 0.02 and abs(radii[labels == 1].mean() - 2) < 0.02


def test_uncertainties(toys):
    logits = np.log([[0.5, 0.5], [0.8, 0.2], [1e-9, 1 - 1e-9]])
    outputs = Outputs(np.zeros((3, 2)), logits)
    entropy = toys.as_entropy(create_detector("entropy").fit(outputs), outputs, outputs)
    np.testing.assert_allclose(entropy, [1, -0.8 * np.log2(0.8) - 0.2 * np.log2(0.2), 0], atol=1e-6)
    largest = create_detector("max-logit").fit(outputs)
    np.testing.assert_allclose(toys.as_kernel(largest, outputs, outputs), [0.5, 0.2, 0], atol=1e-8)
    np.testing.assert_allclose(toys.as_tail(largest, outputs, outputs), [2 / 4, 1 / 4, 0])


def test_maple_is_uncertain_away_from_the_data_and_a_deterministic_network_is_not(drawings):
    deterministic, maple = (drawing.row for drawing in drawings)
    assert deterministic["accuracy"] > 0.95 and maple["accuracy"] > 0.95
    assert deterministic["auroc"] < 0.5 and deterministic["mean_far"] < 0.2
    assert maple["auroc"] > 0.9 and maple["mean_far"] > 0.9 > 0.7 > maple["mean_test"]


def test_grid_is_the_right_way_up(toys, moons, drawings):
    """MAPLE is less uncertain at the pixels of training points than at any mirror image of them."""
    grid = drawings[1].grid
    columns, rows = ((toys.to_points(moons["train"]) + toys.REACH) / (2 * toys.REACH) * toys.GRID).astype(int).T
    here = grid[rows, columns].mean()
    mirrored = [grid[::-1][rows, columns], grid[:, ::-1][rows, columns], grid.T[rows, columns]]
    assert here < min(each.mean() for each in mirrored) - 0.1


def test_drawing(toys, moons, drawings, tmp_path):
    with matplotlib.rc_context(toys.STYLE):
        toys.draw(drawings, moons["train"]).savefig(tmp_path / "moons.svg", metadata={"Date": None})
    drawing = ElementTree.parse(tmp_path / "moons.svg").getroot()
    words = ["".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    expected = {"Deterministic", "MAPLE", "entropy", "1 − typicality", "uncertainty"}
    assert expected | {f"AUROC {each.row['auroc']:.2f}" for each in drawings} <= set(words)
    paths = [each.attrib["d"] for each in drawing.iter("{http://www.w3.org/2000/svg}path")]
    assert sum(path.count("M") for path in paths if path.count("M") > 10) == 2 * toys.N_SHOWN  # no point is lost


def test_ensembles_are_trained_as_such(toys, moons):
    run = toys.train("ensemble", {"members": 2}, moons, seed=0, epochs=1)
    assert run.backbone.embedding_size == 2 * toys.WIDTH


def test_panels_name_what_exists(toys):
    assert len({panel.name for panel in toys.PANELS}) == len(toys.PANELS)
    for panel in toys.PANELS:
        recipe = create_recipe(panel.recipe, **panel.recipe_options)
        create_detector(panel.detector, **panel.detector_options)
        if panel.name in ("duq", "vmdls-like"):
            assert panel.detector == recipe.own_detector


# --- what was committed ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def committed(toys):
    rows = load_json(ROOT / "results" / "toys.json")["rows"]
    assert {(row["toy"], row["panel"]) for row in rows} == {(t, p.name) for t in toys.TOYS for p in toys.PANELS}
    return {(row["toy"], row["panel"]): row for row in rows}


@pytest.mark.parametrize("toy", ["two-moons", "rings"])
def test_committed_figures_show_what_they_must(committed, toy):
    for panel in ("sngp", "due", "duq", "maple"):
        row = committed[toy, panel]
        assert row["accuracy"] > 0.98 and row["auroc"] > 0.95 and row["mean_far"] > row["mean_test"] + 0.3, panel
    assert committed[toy, "deterministic"]["auroc"] < 0.5 and committed[toy, "deterministic"]["mean_far"] < 0.1


def test_page_has_the_committed_figures(toys, committed):
    page = (ROOT / "docs" / "toys.md").read_text(encoding="utf-8")
    assert toys.format_table(list(committed.values())) in page
    for picture in re.findall(r"\(images/([^)]+)\)", page):
        assert (ROOT / "docs" / "images" / picture).exists()
