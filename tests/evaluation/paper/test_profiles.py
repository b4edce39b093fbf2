"""Protocols and profiles."""

from __future__ import annotations

import pytest

from maple.errors import UsageError
from maple.evaluation.paper.profiles import PROFILES, PROTOCOLS, UNKNOWN_PLANKTON, find_profile
from maple.options import read_names


def test_unknown_taxa():
    names = read_names(f"@{UNKNOWN_PLANKTON}")
    assert len(set(names)) == 26 and PROTOCOLS["microorganisms"].flags["leave_out"] == names
    shares = PROTOCOLS["microorganisms"].flags["splits"]
    assert sum(shares) == 1 and shares[0] / (shares[1] + shares[2]) == 7


def test_every_profile_has_every_protocol():
    for profile in PROFILES.values():
        assert set(profile.protocols) == set(PROTOCOLS)


def test_an_unknown_profile_is_named():
    with pytest.raises(UsageError, match="gpu"):
        find_profile("gpu")
