"""Images in: sources, decoding in a pool of processes, image sets, splits and batches.

``catalogue`` gets published data sets, ``simulate`` draws diatoms, ``corrupt`` corrupts images. Names are imported on
first use, so that a decoding process loads neither torch nor pyarrow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maple.data._decoder import Batch, Decoding
    from maple.data._pool import DecoderKilled, DecoderPool
    from maple.data.image_set import ImageSet
    from maple.data.sources import open_images, open_source
    from maple.data.splits import Splits, load_splits

_EXPORTS = {
    "Batch": "_decoder",
    "DecoderKilled": "_pool",
    "DecoderPool": "_pool",
    "Decoding": "_decoder",
    "ImageSet": "image_set",
    "Splits": "splits",
    "load_splits": "splits",
    "open_images": "sources",
    "open_source": "sources",
}
__all__ = [
    "Batch",
    "DecoderKilled",
    "DecoderPool",
    "Decoding",
    "ImageSet",
    "Splits",
    "load_splits",
    "open_images",
    "open_source",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
