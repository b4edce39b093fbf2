"""The parity check: a graph that is wrong in any output, or mixes the images of a batch, is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from exported import pictures
from maple.deploy.graph import OUTPUTS, PredictorGraph
from maple.deploy.parity import check_levels, check_parity
from maple.errors import RunError


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "probability"])
def test_the_check_sees_every_output(predictor, name):
    """A graph that is wrong in one output, for one image of many."""
    graph, images = PredictorGraph(predictor, preprocess=True).eval(), pictures(24, seed=3).pixels

    def run(pixels):
        with torch.no_grad():
            said = {key: value.numpy() for key, value in zip(OUTPUTS, graph(torch.from_numpy(pixels)), strict=True)}
        if len(pixels) > 1:
            wrong = said[name][11]
            said[name][11] = ~wrong if name == "is_ood" else (wrong + 1) % 4 if wrong.dtype == np.int64 else wrong + 0.1
        return said

    with pytest.raises(RunError):
        check_parity(predictor, run, images)


def test_the_check_sees_a_batch_that_mixes_images(predictor):
    graph = PredictorGraph(predictor, preprocess=True).eval()

    def run(pixels):
        with torch.no_grad():
            said = graph(torch.from_numpy(pixels if len(pixels) > 1 else pixels // 2))
        return {key: value.numpy() for key, value in zip(OUTPUTS, said, strict=True)}

    with pytest.raises(RunError, match="'batch'"):
        check_parity(predictor, run, pictures(24, seed=3).pixels)


def test_the_check_sees_a_level_that_has_no_effect(predictor):
    graph = PredictorGraph(predictor, preprocess=True).eval()
    images = np.concatenate([pictures(24, seed=3).pixels, 255 - pictures(24, seed=3).pixels])

    def run(pixels, level):
        with torch.no_grad():
            said = graph(torch.from_numpy(pixels), torch.tensor([level]).double())
        return {key: value.numpy() for key, value in zip(OUTPUTS, said, strict=True)}

    check_levels(predictor, run, images)
    with pytest.raises(RunError, match="level"):
        check_levels(predictor, lambda pixels, level: run(pixels, 0.05), images)
