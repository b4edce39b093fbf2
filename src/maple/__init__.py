"""MAPLE: class, probability, uncertainty and an out-of-distribution decision from one forward pass.

Public names are imported on first use, so that ``import maple`` stays light and needs torch only where torch is used.
"""

from maple._lazy import attach_stub

__version__ = "0.1.0"
__getattr__, _EXPORTS = attach_stub(__name__, __file__)
__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
