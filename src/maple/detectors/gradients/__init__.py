"""Detectors that need the gradient of the image: ODIN, and Mahalanobis distances of several layers (Lee et al.)."""
