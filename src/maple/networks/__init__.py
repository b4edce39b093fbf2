"""Networks: architectures, the backbone around them, and networks of other libraries.

``Backbone`` maps images to embeddings and logits; ``embed`` runs one over images of any source; ``open_model`` and
``wrap_backbone`` make one of a trained classifier.
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

_MODULES = {
    "maple.networks.backbone": (
        "IMAGENET_MEAN",
        "IMAGENET_STD",
        "Backbone",
        "create_backbone",
        "linear_head",
        "list_backbones",
        "normalise_images",
    ),
    "maple.networks.embedding": (
        "Images",
        "as_image_batch",
        "channel_responses",
        "count_images",
        "embed",
        "embed_batches",
        "read_batches",
    ),
    "maple.networks.ensemble": ("EnsembleBody",),
    "maple.networks.head_finder": ("same_values", "wrap_backbone"),
    "maple.networks.hooks": ("evaluating", "listening"),
    "maple.networks.hub": ("GRAPHS", "OnnxBackbone", "find_kind", "needs_weights", "open_model", "rebuild_model"),
    "maple.networks.origin": ("MadeBy", "Origin"),
    "maple.networks.runtime": ("bfloat16_is_fast", "use_fast_allocator"),
    "maple.networks.weights": ("load_state", "load_weights", "read_state"),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "GRAPHS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Backbone",
    "EnsembleBody",
    "Images",
    "MadeBy",
    "OnnxBackbone",
    "Origin",
    "as_image_batch",
    "bfloat16_is_fast",
    "channel_responses",
    "count_images",
    "create_backbone",
    "embed",
    "embed_batches",
    "evaluating",
    "find_kind",
    "linear_head",
    "list_backbones",
    "listening",
    "load_state",
    "load_weights",
    "needs_weights",
    "normalise_images",
    "open_model",
    "read_batches",
    "read_state",
    "rebuild_model",
    "same_values",
    "use_fast_allocator",
    "wrap_backbone",
]


def __getattr__(name: str) -> Any:  # on first use: options of this folder are read without torch
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
