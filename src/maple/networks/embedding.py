"""From images to ``Outputs``: embeddings, logits and labels of images from any source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from maple.data.batches import evaluation_batches
from maple.data.image_set import ImageSet, Progress
from maple.errors import DataError, UsageError
from maple.networks.backbone import Backbone, normalise_images
from maple.networks.hooks import evaluating, listening
from maple.stats.arrays import broken_rows
from maple.types import Outputs

BATCH_SIZE = 128  # images; equal batches give equal outputs, whichever process or machine runs them
WHITENING_IMAGES = 5000  # enough for the eigenvectors of small patches
SMALLEST_RESPONSE = 1e-3  # of a channel: below this a channel is silent, and the logarithm stays finite

Images = ImageSet | Tensor | np.ndarray | Iterable[Any]


class EmbedOptions(TypedDict, total=False):
    """Keywords of :func:`embed` and :func:`embed_batches`."""

    batch_size: int
    cluster_ids: np.ndarray | None
    cluster_to_class: np.ndarray | None
    progress: Progress | None
    workers: int
    indices: np.ndarray | None
    logits: bool
    finite: bool


def embed(backbone: Backbone, images: Images, **options: Unpack[EmbedOptions]) -> Outputs:
    """Embeddings, logits and labels of all images, in order: evaluation mode, no gradients, no augmentation, float32.

    ``images`` is an ``ImageSet``; or a tensor or array of shape (N, 3, H, W) or (N, H, W, 3), uint8 in 0..255 or float
    in [0, 1]; or a ``Dataset`` of such images x or (x, label); or a ``DataLoader`` (or any iterable) of batches x or
    (x, labels). The mode and the statistics of the backbone are restored. Options:

    - ``indices`` (n,): images to embed, in this order.
    - ``batch_size`` (128) changes results by rounding at most. Much larger batches are slower on a CPU, by page faults,
      unless ``use_fast_allocator`` was called.
    - ``cluster_ids`` (N,): one id per image of ``images``; ``cluster_to_class`` (M,): the class of each cluster.
    - ``logits=False`` skips the head, and all passes but one of a backbone that samples.
    - ``workers`` (0): processes that decode images.
    - ``finite=False`` keeps NaN and infinity, which otherwise are an error that names the image.
    - ``progress(done, n)`` is called after each batch; n is 0 if the number of images is not known.

    >>> from maple.networks.backbone import create_backbone
    >>> outputs = embed(create_backbone("resnet9", n_classes=10), np.zeros((3, 32, 32, 3), np.uint8))
    >>> outputs.embeddings.shape, outputs.embeddings.dtype, outputs.logits.shape
    ((3, 128), dtype('float32'), (3, 10))
    """
    parts = list(embed_batches(backbone, images, **options))
    if parts:
        return Outputs.concatenate(parts)
    return _no_outputs(backbone, options.get("cluster_to_class"), options.get("logits", True))


def embed_batches(
    backbone: Backbone,
    images: Images,
    *,
    batch_size: int = BATCH_SIZE,
    cluster_ids: np.ndarray | None = None,
    cluster_to_class: np.ndarray | None = None,
    progress: Progress | None = None,
    workers: int = 0,
    indices: np.ndarray | None = None,
    logits: bool = True,
    finite: bool = True,
) -> Iterator[Outputs]:
    """Like :func:`embed`, one batch at a time: memory does not grow with the number of images.

    Between two batches the backbone is in the caller's mode, and gradients are enabled as the caller has them.
    """
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}: it must be at least 1")
    done, n = 0, count_images(images, indices)
    for x, index, labels in read_batches(images, batch_size, workers, indices, ordered=cluster_ids is not None):
        found = _run_batch(backbone, x, logits)
        if finite:
            _check_finite(found, images, index, backbone.name)
        yield Outputs(
            **found,
            labels=labels,
            cluster_ids=None if cluster_ids is None else _rows(cluster_ids, index),
            cluster_to_class=cluster_to_class,
        )
        if progress is not None:
            done += len(index)
            progress(done, n)


def _run_batch(backbone: Backbone, x: Tensor, logits: bool) -> dict[str, np.ndarray]:
    """Fields of ``Outputs`` that the backbone gives: embeddings, logits, responses of the shallow layer."""
    device = backbone.mean.device
    found: dict[str, Tensor] = {}

    def record(name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        found[name] = channel_responses(output)

    shallow = {} if backbone.shallow is None else {"shallow": backbone.body.get_submodule(backbone.shallow)}
    with evaluating(backbone), torch.autocast(device.type, enabled=False), listening(shallow, record):
        if backbone.head is None or not logits:
            found["embeddings"] = backbone.embed(x.to(device))
        else:
            found["embeddings"], found["logits"] = backbone(x.to(device))
    return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}


def _check_finite(found: dict[str, np.ndarray], images: Images, index: np.ndarray, network: str) -> None:
    """Refuse NaN and infinity in the outputs of a batch, by the name of the first image that has them."""
    broken = np.unique(np.concatenate([broken_rows(values) for values in found.values()]))
    if not len(broken):
        return
    position = int(index[broken[0]])
    name = f"'{images.files[position]}'" if isinstance(images, ImageSet) else f"image {position} (counted from 0)"
    more = f" and {len(broken) - 1:,} more of its batch" if len(broken) > 1 else ""
    raise DataError(
        f"the network '{network}' gives NaN or infinity for {name}{more}: leave such images out; if many are, its "
        "weights are broken or its training has diverged"
    )


def channel_responses(activations: Tensor) -> Tensor:
    """log of the mean absolute activation of each channel (N, F), from maps (N, F, H, W) or tokens (N, T, F).

    >>> channel_responses(torch.full((1, 2, 4, 4), 3.0)).exp().round()
    tensor([[3., 3.]])
    """
    if activations.ndim == 3:
        return (activations.float().abs().mean(dim=1) + SMALLEST_RESPONSE).log()
    if activations.ndim != 4:
        found = tuple(activations.shape)
        raise UsageError(f"the shallow layer returns {found}, not (N, F, H, W) or (N, T, F): name another layer")
    means = F.adaptive_avg_pool2d(activations.float().abs(), 1).flatten(1)  # in the layout of the convolution
    return (means + SMALLEST_RESPONSE).log()


def fit_whitening(backbone: Backbone, images: Images, *, workers: int = 0) -> None:
    """Set the filters of a network that whitens its input (``airbench``) from training images; others are unchanged.

    Call it before the first step of a training. ``images`` are not augmented and have a length; those evenly spaced
    among them, at most 5000, are read. A network that has seen images keeps its filters.

    >>> from maple.networks.backbone import create_backbone
    >>> backbone = create_backbone("airbench-8", n_classes=10)
    >>> fit_whitening(backbone, np.random.default_rng(0).random((40, 16, 16, 3), np.float32))
    >>> backbone.body.is_whitened
    tensor(True)
    """
    fit = getattr(backbone.body, "fit_whitening", None)
    if fit is None:
        return
    n = count_images(images, None)
    if n == 0:
        raise DataError("there are no training images to whiten with: add some or use resnet9")
    rows = np.linspace(0, n - 1, min(n, WHITENING_IMAGES)).astype(np.int64)
    mean, std = backbone.mean.cpu(), backbone.std.cpu()
    batches = read_batches(images, 512, workers, rows, ordered=False)
    fit(torch.cat([normalise_images(x, mean, std) for x, _, _ in batches]))


def _no_outputs(backbone: Backbone, cluster_to_class: np.ndarray | None, with_logits: bool) -> Outputs:
    """Outputs (0, D) and (0, M) of no images, for ranks without a share of the images."""
    embedding = torch.empty(0, backbone.embedding_size, device=backbone.mean.device)
    with evaluating(backbone):
        read = embedding.new_empty(0, backbone.head_size)
        logits = backbone.head(read).cpu().numpy() if with_logits and backbone.head is not None else None
    none = np.empty(0, dtype=np.int64)
    return Outputs(embedding.cpu().numpy(), logits, none, none, cluster_to_class, _no_responses(backbone))


def _no_responses(backbone: Backbone) -> np.ndarray | None:
    """Responses (0, F) of the shallow layer to no images; F of black images, else of its last convolution."""
    if backbone.shallow is None:
        return None
    if backbone.size is not None:
        black = torch.zeros(2, 3, backbone.size, backbone.size)  # one has no variance for a layer without running ones
        return _run_batch(backbone, black, logits=False)["shallow"][:0]
    layers = backbone.body.get_submodule(backbone.shallow).modules()
    widths = [getattr(layer, "num_features", None) or getattr(layer, "out_channels", 0) for layer in layers]
    return np.empty((0, next((width for width in reversed(widths) if width), 0)), dtype=np.float32)


def count_images(images: Images, indices: np.ndarray | None) -> int:
    """Number of images, 0 if it is not known beforehand."""
    if indices is not None:
        return len(indices)
    if isinstance(images, ImageSet | Tensor | np.ndarray):
        return len(images)
    source = images.dataset if isinstance(images, DataLoader) else images if isinstance(images, Dataset) else None
    return len(source) if isinstance(source, Sized) else 0


def _rows(cluster_ids: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Cluster ids of the images at positions ``index``."""
    cluster_ids = np.asarray(cluster_ids)
    if len(index) and index.max() >= len(cluster_ids):
        raise UsageError(f"cluster_ids has {len(cluster_ids)} entries, fewer than there are images: give one per image")
    return cluster_ids[index].astype(np.int64)


Batch = tuple[Tensor, np.ndarray, np.ndarray | None]  # images (B, 3, H, W) in [0, 1], their positions, their labels


def read_batches(
    images: Images, batch_size: int, workers: int, indices: np.ndarray | None, ordered: bool
) -> Iterator[Batch]:
    """Batches of any source of images; ``ordered`` refuses loaders that shuffle."""
    if isinstance(images, ImageSet):
        for x, index in evaluation_batches(images, batch_size=batch_size, indices=indices, workers=workers):
            position = np.asarray(index)
            yield x, position, images.labels[position]
    elif isinstance(images, Tensor | np.ndarray):
        positions = np.arange(len(images)) if indices is None else np.asarray(indices)
        for start in range(0, len(positions), batch_size):
            position = positions[start : start + batch_size]
            yield as_image_batch(images[position]), position, None
    elif isinstance(images, Dataset):
        chosen = images if indices is None else Subset(images, [int(i) for i in indices])
        for x, position, labels in _read_loader(DataLoader(chosen, batch_size, num_workers=workers), None, ordered):
            yield x, position if indices is None else np.asarray(indices)[position], labels
    elif isinstance(images, Iterable) and not isinstance(images, str | bytes):
        yield from _read_loader(images, indices, ordered)
    else:
        raise UsageError(f"cannot embed {type(images).__name__}: give open_images(...), an array, Dataset or loader")


def _read_loader(loader: Iterable[Any], indices: np.ndarray | None, ordered: bool) -> Iterator[Batch]:
    """Batches of an iterable of x or (x, labels)."""
    if indices is not None:
        raise UsageError("indices cannot be used with a loader: put a torch.utils.data.Subset into the loader")
    if ordered and isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler):
        raise UsageError("the loader shuffles, so cluster_ids cannot follow the images: create it with shuffle=False")
    start = 0
    for batch in loader:
        x, *rest = batch if isinstance(batch, tuple | list) else (batch,)
        x = as_image_batch(x)
        labels = np.asarray(rest[0], dtype=np.int64) if rest else None
        yield x, np.arange(start, start + len(x)), labels
        start += len(x)


def as_image_batch(images: Tensor | np.ndarray) -> Tensor:
    """Images as (N, 3, H, W) float32 in [0, 1]; the colour axis is the one of length 3, second or last.

    >>> as_image_batch(np.full((2, 8, 8, 3), 255, np.uint8)).shape
    torch.Size([2, 3, 8, 8])
    """
    x = torch.as_tensor(images)
    if x.ndim != 4 or (x.shape[1] == 3) == (x.shape[3] == 3):
        raise UsageError(f"images of shape {tuple(x.shape)}: give (N, 3, H, W) or (N, H, W, 3), H and W other than 3")
    if x.shape[3] == 3:
        x = x.permute(0, 3, 1, 2)
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    if not x.is_floating_point():
        raise UsageError(f"images of type {x.dtype}: give uint8 in 0..255 or float in [0, 1]")
    if x.numel() and not (x.min() >= -1e-6 and x.max() <= 1 + 1e-6):
        raise UsageError("float images outside [0, 1]: leave out normalisation, which the backbone does itself")
    return x.float()
