"""Reporting: report, plots and gallery, drawn from saved results. Runs no model."""
