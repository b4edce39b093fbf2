"""Catalogue of published data sets: the table, the readers of their originals, download, conversion, description.

Names are imported on first use: sources look names up in the table, while conversion needs the sources.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maple.data.catalogue.describe import describe_data_set, locate
    from maple.data.catalogue.get import get_data_set
    from maple.data.catalogue.table import CATALOGUE, find_data_set

_EXPORTS = {
    "CATALOGUE": "table",
    "describe_data_set": "describe",
    "find_data_set": "table",
    "locate": "describe",
    "get_data_set": "get",
}
__all__ = ["CATALOGUE", "describe_data_set", "find_data_set", "get_data_set", "locate"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
