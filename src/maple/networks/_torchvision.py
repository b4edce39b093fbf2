"""What other packages need before they can be imported here.

A torchvision built for CUDA does not import next to a torch built for the CPU: its compiled operators are missing, but
it describes two of them (``nms``, ``qnms``) to torch while it is imported. pip brings such pairs together. Transforms,
models and data sets need no compiled operator, so that it is enough to define the two by name and to import again.
:func:`import_torchvision` is the one place where that is done.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from maple.errors import UsageError

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_libraries: list[Any] = []  # torch forgets an operator when the library that defined it is collected


def import_torchvision() -> ModuleType:
    """The package ``torchvision``, also where its compiled operators do not fit the installed torch.

    Call it before importing what imports torchvision itself (timm, torchmetrics, pytorch-ood). Where nothing is wrong,
    it is a plain import; where a repair was needed, it says so once.
    """
    try:
        return import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise UsageError("this needs torchvision, which is not installed: pip install torchvision") from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    _define_operators()
    _forget_torchvision()
    repaired = import_module("torchvision")
    warnings.warn(
        "torchvision was built for another torch and its compiled operators are missing: transforms, models and "
        "datasets work, operators such as nms do not; install the torchvision of this torch to have them",
        stacklevel=2,
    )
    return repaired


def _define_operators() -> None:
    """Name the operators that torchvision describes to torch."""
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        library.define(name + SCHEMA)
    _libraries.append(library)


def _forget_torchvision() -> None:
    """Drop what a failed import left behind, so that the next one starts anew."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
