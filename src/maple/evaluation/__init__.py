"""Evaluation: figures of a predictor and its baselines on saved outputs, and the suites of the paper.

``maple.evaluation.cases.evaluate`` fills ``Results``; ``format_table`` prints them. No network runs here.
"""
