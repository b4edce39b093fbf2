"""Runs: one module per command, from a request to a finished run folder."""
