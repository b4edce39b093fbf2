"""Baselines: methods of other papers, each a recipe and a detector in one file.

Importing this folder registers all detectors and recipes that are installed.
"""

from importlib.util import find_spec

from maple.detectors import distance, heads, logits  # noqa: F401

if find_spec("torch"):
    from maple.baselines import due, duq, sampling, sngp, vmdls  # noqa: F401
    from maple.detectors import gradient, lee  # noqa: F401
