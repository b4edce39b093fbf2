"""Options of MAPLE's detector: the detector has them all, names of scores agree, limits name the option."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from maple.detectors.maple import MapleDetector
from maple.detectors.options import DetectorOptions, ScoreBy
from maple.detectors.scores import SCORES
from maple.errors import ConfigError
from maple.options import as_dict, build_options, list_options


def test_the_detector_has_exactly_these_options():
    assert list(list_options(MapleDetector)) == list(list_options(DetectorOptions))
    assert as_dict(MapleDetector()) == as_dict(DetectorOptions())


def test_every_score_can_be_chosen():
    assert set(get_args(ScoreBy)) == {"auto", *SCORES}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("explained_variance", 0),
        ("explained_variance", 1.5),
        ("covariance", "tight"),
        ("distance", "cosine"),
        ("norm_exponent", 3),
        ("norm_exponent", "none"),
        ("score_by", "softmax"),
    ],
)
def test_values_outside_the_limits_name_the_option(name, value):
    with pytest.raises(ConfigError, match=f"'{name}'"):
        build_options(DetectorOptions, {name: value})


def test_text_is_converted():
    built = build_options(DetectorOptions, {"pca": "no", "norm_exponent": "0.5", "score_by": "spread"})
    assert built == DetectorOptions(pca=False, norm_exponent=0.5, score_by="spread")


def test_the_command_line_reads_them_without_scipy():
    code = "import maple.detectors.options, sys; assert not {'scipy', 'torch', 'pydantic'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
