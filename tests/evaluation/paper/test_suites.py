"""Suites as tables: rows of the paper, shared networks, detectors that the rows ask for."""

from __future__ import annotations

import pytest

from maple.errors import UsageError
from maple.evaluation.paper.columns import describe_columns
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import STANDARD_DETECTORS
from maple.evaluation.paper.suites import SUITES, find_suite


def test_tables_name_their_rows():
    for suite in SUITES.values():
        rows = suite.rows(PROFILES["cpu"])
        assert len({row.title for row in rows}) == len(rows), suite.name
        compared = {row.paper for row in rows if row.paper and suite.paper}
        assert set(suite.paper) <= compared, suite.name  # no row of the paper is left out
        for figures in suite.paper.values():
            assert set(figures) - {"latency_ms"} <= set(suite.columns) | {"components"}, suite.name


def test_detectors_follow_from_the_rows():
    profile = PROFILES["cpu"]
    assert SUITES["md"].detectors(profile) == ["lee-md"]
    assert SUITES["cifar10"].detectors(profile) == SUITES["ablation"].detectors(profile) == []
    beyond = SUITES["detectors"].detectors(profile)
    assert {"knn", "vim", "odin"} <= set(beyond) and not {*STANDARD_DETECTORS, "maple", "lee-md-ood"} & set(beyond)


def test_columns_have_titles():
    for suite in SUITES.values():
        assert all(column.title for column in describe_columns(suite.columns).values())


def test_an_unknown_suite_is_named():
    with pytest.raises(UsageError, match="cifar10"):
        find_suite("cifar")
