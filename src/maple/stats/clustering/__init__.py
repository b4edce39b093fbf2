"""Clusters of a class: X-Means, G-Means and T-Means, which share the search of ``_bisect``; ``splitting`` applies them.

``_means`` holds the algebra: bisection by 2-Means, Lloyd's iterations, sums of squares.
"""
