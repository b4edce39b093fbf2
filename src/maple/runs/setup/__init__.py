"""The setup of a run: options (``config``, ``presets``), the request, its images (``splits``), and the network that a
training starts from (``init``).
"""
