"""Tables of taxa are consistent."""

from __future__ import annotations

import pytest

from maple.data.simulate.taxa import FAMILIES, KINDS, VIEWS

KNOWN, NEAR, FAR = KINDS["known"], KINDS["near"], KINDS["far"]


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
