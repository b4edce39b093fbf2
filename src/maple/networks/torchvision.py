"""Repair torchvision where it was built for another torch: import this module before torchvision.

::

    import maple.networks.torchvision  # first
    import torchvision, timm, pytorch_ood

A torchvision from PyPI is built for CUDA and cannot be imported with a torch for the CPU; nor can the packages that
import it (timm, torchmetrics, pytorch-ood, Lightning). This import makes transforms, models and data sets work, says
once what does not (compiled operators such as ``nms``), and changes nothing where torchvision imports by itself or is
not installed. See :mod:`maple.networks._torchvision`.
"""

from __future__ import annotations

from importlib.util import find_spec

from maple.networks._torchvision import import_torchvision

if find_spec("torchvision") is not None:
    import_torchvision()
