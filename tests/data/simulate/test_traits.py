"""Traits of individuals follow their taxon and view."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.model_selection import cross_val_score

from maple.data.simulate.drawing import draw
from maple.data.simulate.taxa import COLONY, GIRDLE, KNOWN, VALVE, Taxon
from maple.data.simulate.traits import Sampler, Traits, sample_body, sample_marks, sample_scene


def upright(taxon: Taxon, view: int, n: int = 200) -> np.ndarray:
    """Images of one taxon in one view with everything else held fixed, (n, 32, 32)."""
    sampler = Sampler((taxon,), np.zeros(n, np.int64), np.random.default_rng(0))
    views = np.full((n, 1, 1), view)
    body, marks = sample_body(sampler, views), sample_marks(sampler, views)
    scene = sample_scene(sampler)
    fixed = {name: np.zeros_like(scene.x) for name in ("x", "y", "angle", "gradient_x", "gradient_y", "noise")}
    fixed |= {"focus": np.ones_like(scene.x), "level": np.full_like(scene.x, 0.7)}
    scene = Traits(**vars(scene) | fixed)
    return draw(32, body, marks, scene, [], np.random.default_rng(0)).mean(axis=-1)


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


def test_colonies_have_at_least_two_cells():
    sampler = Sampler((KNOWN[5],), np.zeros(200, np.int64), np.random.default_rng(0))
    cells = sample_body(sampler, np.full((200, 1, 1), COLONY)).cells
    assert set(np.unique(cells)) == {2.0, 3.0, 4.0}
