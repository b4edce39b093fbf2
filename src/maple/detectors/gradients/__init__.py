"""Detectors that use input gradients: ODIN, and Mahalanobis distances of several layers (Lee et al.)."""
