"""Steps between formats: each is applied once, in order, and leaves what it does not know."""

from __future__ import annotations

import numpy as np
import pytest

from maple.files.formats import FORMAT_VERSION, OLDEST_FORMAT, Content, bring_forward

FIRST = Content(
    {
        "format": 1,
        "detector": {"detector": "maple", "options": {"pca": True}, "norm_exponent": 0.5, "float32": False},
        "class_names": ["a", "b"],
        "temperature": 2.0,
        "false_alarm": 0.1,
    },
    {
        "moments.counts": np.array([2]),
        "moments.norm_exponent": np.array([0.5]),
        "gaussians.matrix": np.eye(2),
        "calibration_scores": np.array([3.0, 1.0]),
    },
)


def test_the_first_detector_becomes_the_present_one():
    metadata, arrays = bring_forward("detector.safetensors", 1, FIRST)
    assert metadata["detector"]["exponent"] == 0.5 and metadata["detector"]["score"] == "normalised"
    assert metadata["options"] == {"false_alarm": 0.1, "confidence": None, "per_class": False}
    assert metadata["temperature"] == 2.0 and metadata["gaussian_weight"] == 1.0
    assert metadata["detector"]["parts"]["distance"] == [1.0, 7.0]
    assert set(arrays) == {
        "moments.0.5.counts", "moments.0.5.norm_exponent", "gaussians.matrix", "gaussians.norm_exponent",
        "gaussians.float32", "calibration.scores", "calibration.class_ids", "calibration.n_classes",
        "calibration.set_scores",
    }  # fmt: skip
    assert arrays["calibration.scores"].tolist() == [3.0, 1.0] and not arrays["gaussians.float32"].any()


def test_values_that_a_file_of_format_2_has_already_stay():
    state = {"parts": {"energy": [2.0, 0.0]}, "score": "fused"}
    content = Content({"detector": state, "odds_exponent": 0.5, "prior_weight": 0.2}, {})
    metadata, _ = bring_forward("detector.safetensors", 2, content)
    assert metadata["detector"] == state
    assert (metadata["odds_exponent"], metadata["prior_weight"], metadata["frequency_share"]) == (0.5, 0.2, 0.0)


@pytest.mark.parametrize("name", ["detector.safetensors", "weights.safetensors", "config.toml", "clusters.json"])
def test_a_file_of_the_present_format_stays_as_it_is(name):
    content = Content({"recipe": {"triplet": True}, "detector": {}}, {"a": np.zeros((1,))})
    assert bring_forward(name, FORMAT_VERSION, content) is content


def test_files_that_never_changed_pass_through_all_steps():
    content = Content({"epoch": 3}, {})
    assert bring_forward("clusters.json", OLDEST_FORMAT, content) is content
