"""Scoring and fitting beyond one machine, on Ray: extra ``[ray]``.

`maple.deploy.ray.score` predicts the images of a Ray ``Dataset``, `Scorer` is its class for ``map_batches``; the
commands with ``--engine ray`` are in `predict` and `fit`.
"""

from maple.deploy.ray.dataset import Scorer, score
