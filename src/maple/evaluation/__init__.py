"""Evaluation: results of detectors on test and OOD sets, and the paper's suites."""
