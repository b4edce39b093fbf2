"""Statistics on arrays: moments and covariance, Gaussians and the chi-square tail, clustering, metrics. Never torch.

The algebra is pure functions with shapes in comments; ``Moments``, ``Gaussians`` and ``Background`` hold fitted values.
``XMeans``, ``GMeans`` and ``TMeans`` share the search of ``_bisect``; ``splitting`` turns classes into clusters.
"""
