"""Detectors: from outputs of a backbone to a score, higher for images more out-of-distribution."""
