"""Drawing, against oracles: blurred marks, distances to outlines, counts of cells."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage

from maple.data.simulate.drawing import Place, edge, line, outline, pixel_grid, wave
from maple.data.simulate.taxa import FAMILIES
from maple.data.simulate.traits import Traits


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1])
def test_marks_under_blur_equal_blurred_marks(sigma):
    x = np.linspace(-1, 1, 4001)
    sharp, blurred = np.array(1e-6), np.array(sigma)

    def blur(values):
        return ndimage.gaussian_filter1d(values, sigma / (x[1] - x[0]), mode="nearest")

    middle = slice(1000, 3001)
    for mark, tolerance in (
        (lambda s: edge(x - 0.1, s), 0.011),
        (lambda s: line(x - 0.1, 0.03, s), 0.001),
        (lambda s: wave(x * 2 * np.pi / 0.3, np.array(0.3), s), 0.001),
    ):
        np.testing.assert_allclose(mark(blurred)[middle], blur(mark(sharp))[middle], atol=tolerance)


SHAPE = ("taper", "waist", "bow", "sigmoid", "warp", "phase", "cut_slope")


def plain_body(**traits: float) -> Traits:
    """One body, given by some of its traits."""
    defaults = dict.fromkeys(SHAPE, 0.0) | {"cells": 1.0, "cut": 9.0, "ripple": 1.0}
    return Traits(**{name: np.full((1, 1, 1), value, np.float32) for name, value in (defaults | traits).items()})


def place(size: int = 256, **traits: float) -> Place:
    x, y = pixel_grid(size)
    return outline(x + 0 * y, y + 0 * x, plain_body(**traits))


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
    x, y = pixel_grid(256)
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
