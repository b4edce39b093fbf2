"""Import torchvision, and packages that import it, also if its compiled operators do not match the installed torch.

A torchvision built for CUDA cannot be imported with a torch built for the CPU: its compiled operators are missing, but
on import it registers two of them (``nms``, ``qnms``) with torch. pip installs such pairs. Transforms, models and data
sets need no compiled operator, so :func:`import_torchvision` defines the two by name and imports torchvision again.
Own scripts do the same with ``import maple.networks.torchvision``.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from maple.errors import UsageError, naming_extras

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[Any] = []  # keeps the operators: torch drops them when their library is collected


def import_torchvision() -> ModuleType:
    """The package ``torchvision``, also if its compiled operators do not match the installed torch.

    Call it before importing packages that import torchvision (timm, torchmetrics, pytorch-ood). Without a mismatch it
    is a plain import; with one it warns once.
    """
    try:
        return import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise UsageError("torchvision is not installed: pip install 'maple-uncertainty[torchvision]'") from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _define_operators()
    _forget_torchvision()
    repaired = import_module("torchvision")
    warnings.warn(
        "torchvision was built for another torch and its compiled operators are missing: transforms, models and "
        "datasets work, operators such as nms do not; install the torchvision that matches this torch to use them",
        stacklevel=2,
    )
    return repaired


def import_extra(package: str) -> ModuleType:
    """Import a package that belongs to an extra; the error names the extra."""
    if package in ("timm", "transformers") and find_spec("torchvision") is not None:
        import_torchvision()
    with naming_extras():
        return import_module(package)


def _define_operators() -> None:
    """Define the operators that torchvision registers with torch."""
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(name + SCHEMA)
    _libraries.append(library)


def _forget_torchvision() -> None:
    """Remove the modules of a failed import, so that the next import starts from scratch."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
