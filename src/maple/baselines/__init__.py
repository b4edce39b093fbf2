"""The methods that MAPLE is compared with. Importing this package makes their names known to the two registries."""

from importlib.util import find_spec

from maple.baselines import distance, heads, logits  # noqa: F401

if find_spec("torch"):
    from maple.baselines import due, duq, gradient, lee, sampling, sngp, vmdls  # noqa: F401
