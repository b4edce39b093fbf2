"""Deployment: export to ONNX and ``torch.export`` with a parity check, and the HTTP server (``serve/``).

`maple.deploy.export` is the way in for exports, `maple.deploy.serve.app` for the server.
"""
