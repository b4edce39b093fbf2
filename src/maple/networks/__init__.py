# ruff: noqa: F401
"""Networks: architectures, the backbone around them, and networks of other libraries.

``Backbone`` maps images to embeddings and logits; ``embed`` runs one over images of any source; ``open_model`` and
``wrap_backbone`` make one of a trained classifier. Names are imported on first use, so that options are read without
torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maple.networks.backbone import (
        IMAGENET_MEAN,
        IMAGENET_STD,
        Backbone,
        create_backbone,
        linear_head,
        list_backbones,
        normalise_images,
    )
    from maple.networks.embedding import (
        Images,
        as_image_batch,
        channel_responses,
        count_images,
        embed,
        embed_batches,
        read_batches,
    )
    from maple.networks.ensemble import EnsembleBody
    from maple.networks.head_finder import same_values, wrap_backbone
    from maple.networks.hooks import evaluating, listening
    from maple.networks.hub import GRAPHS, OnnxBackbone, find_kind, needs_weights, open_model, rebuild_model
    from maple.networks.origin import MadeBy, Origin
    from maple.networks.runtime import bfloat16_is_fast, use_fast_allocator
    from maple.networks.weights import load_state, load_weights, read_state

_NAMES = {
    "backbone": "IMAGENET_MEAN IMAGENET_STD Backbone create_backbone linear_head list_backbones normalise_images",
    "embedding": "Images as_image_batch channel_responses count_images embed embed_batches read_batches",
    "ensemble": "EnsembleBody",
    "head_finder": "same_values wrap_backbone",
    "hooks": "evaluating listening",
    "hub": "GRAPHS OnnxBackbone find_kind needs_weights open_model rebuild_model",
    "origin": "MadeBy Origin",
    "runtime": "bfloat16_is_fast use_fast_allocator",
    "weights": "load_state load_weights read_state",
}
_EXPORTS = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
