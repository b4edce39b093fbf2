"""Networks: architectures, the backbone around them, and networks of other libraries.

``Backbone`` maps images to embeddings and logits; ``embed`` runs one over images of any source; ``open_model`` and
``wrap_backbone`` make one of a trained classifier.
"""

from __future__ import annotations

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
