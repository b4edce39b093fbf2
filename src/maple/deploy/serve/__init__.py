"""The HTTP service: application, batching, uploads, metrics and its page."""
