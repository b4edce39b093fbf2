"""Parts of ``make bench``: speed relative to peers in the same run, and growth of cost. See ``benchmarks/bench.py``."""
