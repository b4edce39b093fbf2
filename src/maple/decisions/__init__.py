"""Decisions: conformal thresholds and p-values, prediction sets and drift. Never torch."""
