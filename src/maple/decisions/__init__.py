"""Decisions: calibrated class probabilities, conformal p-values and thresholds, prediction sets, drift. Never torch.

``Probability`` is fitted on validation images; ``Calibration`` holds scores of calibration images, ``Decision`` decides
at one level; ``StreamMonitor`` and ``compare_scores`` test new scores for drift.
"""
