"""The methods that MAPLE is compared with. Importing this package makes their names known to the two registries."""

from importlib.util import find_spec

from maple.detectors import (
    distance,  # noqa: F401
    heads,  # noqa: F401
    logits,  # noqa: F401
)

if find_spec("torch"):
    from maple.baselines import due, duq, sampling, sngp, vmdls  # noqa: F401
    from maple.detectors import (
        gradient,  # noqa: F401
        lee,  # noqa: F401
    )
