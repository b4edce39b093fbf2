"""Deployment: export of one graph, its parity check, and the HTTP service."""
