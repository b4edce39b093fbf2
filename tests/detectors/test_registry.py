"""Detectors by name."""

from __future__ import annotations

import pytest

from maple.detectors.base import Detector
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector, list_detectors, register_detector
from maple.errors import UsageError


def test_registry():
    detector = create_detector("maple", pca=False)
    assert isinstance(detector, MapleDetector) and not detector.pca
    assert create_detector(detector) is detector
    with pytest.raises(UsageError, match="pca"):
        create_detector(detector, pca=True)
    with pytest.raises(UsageError, match=r"'sotfmax'.*'softmax'"):
        create_detector("sotfmax")
    with pytest.raises(UsageError, match="'softmax'"):
        register_detector("softmax")(MapleDetector)
    assert list_detectors() == sorted(list_detectors())
    with pytest.raises(TypeError):
        Detector()
