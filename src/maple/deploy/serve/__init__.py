"""The HTTP server: application (``app``), endpoints, schema of answers, uploads, batching, metrics, and the page.

`maple.deploy.serve.server.serve_model` runs it, `maple.deploy.serve.app.create_app` is the ASGI application.
"""
