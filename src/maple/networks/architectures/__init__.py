"""Architectures, one file per family: ResNets, wide ResNets, EfficientNet, airbench.

Every module of this folder is imported here, so a new architecture is one new file that registers itself.
"""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

from maple.errors import UsageError, suggest
from maple.networks.architectures.base import FAMILIES, NETWORKS, Network

for _module in pkgutil.iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def list_networks() -> list[str]:
    """Registered names; besides these, ``wrn-D-W`` for any depth D = 6n + 4 and width W, and ``airbench-W``."""
    return list(NETWORKS)


def is_network(name: str) -> bool:
    """Whether ``name`` is registered or of the form of a family; its numbers may still be impossible."""
    return name in NETWORKS or any(re.fullmatch(pattern, name) for pattern in FAMILIES)


def create_network(name: str) -> Network:
    """The network registered as ``name``, with random weights.

    >>> create_network("wrn-10-2").embedding_size
    128
    >>> create_network("wrn-27-10")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: 'wrn-27-10': the depth of a wide ResNet is 6n + 4, such as 22 or 28
    """
    if name in NETWORKS:
        return NETWORKS[name]()
    for pattern, make in FAMILIES.items():
        if match := re.fullmatch(pattern, name):
            return make(*match.groups())
    raise UsageError(f"unknown backbone '{name}': {suggest(name, NETWORKS)}")
