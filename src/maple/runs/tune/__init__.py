"""Search over settings."""
