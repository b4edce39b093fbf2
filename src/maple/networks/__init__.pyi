# isort: skip_file
from maple.networks.backbone import (
    IMAGENET_MEAN as IMAGENET_MEAN,
    IMAGENET_STD as IMAGENET_STD,
    Backbone as Backbone,
    EnsembleBody as EnsembleBody,
    create_backbone as create_backbone,
    linear_head as linear_head,
    list_backbones as list_backbones,
    normalise_images as normalise_images,
)
from maple.networks.embedding import (
    Images as Images,
    as_image_batch as as_image_batch,
    channel_responses as channel_responses,
    count_images as count_images,
    embed as embed,
    embed_batches as embed_batches,
    fit_whitening as fit_whitening,
    read_batches as read_batches,
)
from maple.networks.head_finder import same_values as same_values, wrap_backbone as wrap_backbone
from maple.networks.hooks import evaluating as evaluating, listening as listening
from maple.networks.hub import (
    GRAPHS as GRAPHS,
    OnnxBackbone as OnnxBackbone,
    find_kind as find_kind,
    needs_weights as needs_weights,
    open_model as open_model,
    rebuild_model as rebuild_model,
)
from maple.networks.origin import MadeBy as MadeBy, Origin as Origin
from maple.networks.runtime import (
    bfloat16_is_fast as bfloat16_is_fast,
    use_fast_allocator as use_fast_allocator,
    use_threads as use_threads,
)
from maple.networks.weights import load_state as load_state, load_weights as load_weights, read_state as read_state
