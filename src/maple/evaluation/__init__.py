"""Evaluation: figures of a predictor and its baselines on saved outputs, and the suites of the paper.

``maple.evaluation.evaluate.evaluate`` fills ``Results``; ``format_table`` prints them. No network runs here.
"""

from __future__ import annotations

from maple.evaluation.latency import Latency, measure_latency
from maple.evaluation.results import Classification, Detection, Histogram, Method, Reliability, Results
from maple.evaluation.table import format_table

__all__ = [
    "Classification",
    "Detection",
    "Histogram",
    "Latency",
    "Method",
    "Reliability",
    "Results",
    "format_table",
    "measure_latency",
]
