"""Figures of results by the names of columns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from maple.errors import UsageError
from maple.evaluation.paper.columns import describe_columns, read_figure
from maple.evaluation.results import Classification, Detection, Histogram, Method, Reliability, Results


def test_every_figure_is_read_from_its_own_place():
    detection = Detection(0.11, 0.12, 0.13, 0.14, 0.15, 0.16, [], [])
    classes = Classification(0.21, 0.22, 0.23, 0.24, 0.25, {"0.5": 0.26}, {"0.5": 0.27}, Reliability([], [], [], []))
    histogram = Histogram([], [], {})
    methods = {
        "softmax": Method(replace(classes, accuracy=0.31), {}, histogram),
        "md": Method(classes, {"svhn": detection}, histogram, n_components=41.0, gaussian_error=0.42),
        "energy": Method(None, {"svhn": detection}, histogram),
        "maple": Method(None, {"svhn": detection, "far": replace(detection, auroc=0.91)}, histogram),
    }
    latencies = {"latency_ms": 0.51, "network_latency_ms": 0.41}
    results = Results([], methods, 1, {"svhn": 1}, 7, 12, 0.05, 0.6, [], [], [], [], **latencies)
    expected = {
        "accuracy": 0.21, "ece": 0.22, "nll": 0.23, "accuracy@0.5": 0.26, "share@0.5": 0.27, "softmax_accuracy": 0.31,
        "auroc/svhn": 0.11, "aupr/svhn": 0.12, "components": 41.0, "gaussian_error": 0.42, "clusters": 12.0,
        "gaussian_error_per_component": 0.42 / 41, "latency_ms": 0.51, "minutes": 9.0,
        "mean_auroc": 0.11, "fused_auroc": 0.51,
    }  # fmt: skip
    assert {column: read_figure(results, "md", column, {"minutes": 9.0}) for column in expected} == expected
    assert math.isnan(read_figure(results, "energy", "ece"))
    grouped = replace(results, groups={"near": ["svhn"], "far": ["svhn", "far"]})
    assert read_figure(grouped, "maple", "far/auroc") == pytest.approx((0.11 + 0.91) / 2)
    assert (
        read_figure(grouped, "maple", "near/fpr95_ood_positive")
        == 0.14
        == read_figure(results, "maple", "fpr95_ood_positive/svhn")
    )
    assert read_figure(grouped, "maple", "near/fpr95_ind_positive") == 0.15
    assert math.isnan(read_figure(results, "maple", "near/auroc"))  # evaluated without groups
    assert read_figure(results, "energy", "latency_ms") == 0.41 != read_figure(results, "maple", "latency_ms") == 0.51
    with pytest.raises(UsageError, match="--detector knn"):
        read_figure(results, "knn", "ece")


def test_titles_say_what_a_figure_is_about():
    columns = describe_columns(["share@0.8", "corrupted/auroc/svhn", "ece", "training/gaussian_error"])
    assert [column.title for column in columns.values()] == [
        "share kept above 0.8",
        "AUROC svhn, corrupted",
        "ECE",
        "Gaussian test, training images",
    ]
    assert columns["ece"].better == "lower"
