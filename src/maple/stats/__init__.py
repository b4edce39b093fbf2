"""Statistics on arrays: moments and covariance, Gaussians and the chi-square tail, clustering, metrics. Never torch.

The algebra is pure functions with shapes in comments; ``Moments``, ``Gaussians`` and ``Background`` hold fitted values.
``clustering`` turns classes into clusters.
"""
