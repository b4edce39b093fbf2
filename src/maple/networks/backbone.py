"""Backbones: image to embedding to logits, made by name or found inside a network that someone else trained.

A ``Backbone`` takes images in [0, 1] and normalises them itself, so that no caller can forget to. ``embed`` turns
images of any source into ``Outputs``: in order, without augmentation, in evaluation mode and in float32, and leaves
the backbone as it was.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

from maple.data.batches import evaluation_batches
from maple.data.image_set import ImageSet, Progress
from maple.errors import UsageError, suggest
from maple.networks.architectures import NETWORKS, create_network
from maple.text import shorten_list
from maple.types import LinearHead, Outputs

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
SMALLEST_RESPONSE = 1e-3  # of a channel: below this a channel is silent, and the logarithm stays finite
EXAMPLE_SIZES = (32, 64, 224)  # tried in turn where nobody says how large a module's images are

Images = ImageSet | Tensor | np.ndarray | Iterable[Any]
Key = TypeVar("Key")


class Backbone(nn.Module):
    """A network from images in [0, 1] to embeddings, and the head from embeddings to logits.

    ``body`` sees normalised images (x - mean) / std and returns (N, D'); ``embedding_layer`` makes (N, D) of it (the
    identity, unless an embedding size was asked for); ``head`` makes logits (N, M). The embedding is exactly what the
    head sees, so that the classification loss shapes the space in which distances are measured.

    >>> backbone = create_backbone("resnet9", n_classes=10)
    >>> embedding, logits = backbone(torch.rand(4, 3, 32, 32))
    >>> embedding.shape, logits.shape
    (torch.Size([4, 128]), torch.Size([4, 10]))
    """

    mean: Tensor  # (3,)
    std: Tensor  # (3,)

    def __init__(
        self,
        body: nn.Module,
        head: nn.Module | None,
        *,
        embedding_size: int,
        embedding_layer: nn.Module | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        name: str = "",
        size: int | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        shallow: str | None = None,
    ) -> None:
        super().__init__()
        self.body = body
        self.shallow = shallow  # name of a layer of the body whose channels are to be listened to
        self.embedding_layer = nn.Identity() if embedding_layer is None else embedding_layer
        self.head = head
        self.embedding_size = embedding_size
        self.name = name
        self.size = size  # side of the images it was made for, where known
        self.memory_format = memory_format
        self.made_by: dict[str, Any] | None = None  # recipe, its options and outputs, where the head is not linear
        self.origin: dict[str, Any] | None = (
            None  # where layers of others come from: plain JSON, see maple.networks.hub
        )
        self.register_buffer("mean", _per_channel(mean, "mean"))
        self.register_buffer("std", _per_channel(std, "std"))
        if not bool((self.std > 0).all()):
            raise UsageError(f"std is {tuple(std)}: each channel's deviation must be positive")

    def embed(self, x: Tensor) -> Tensor:
        """Embeddings (N, D) float32 of images (N, 3, H, W) in [0, 1]."""
        smallest = getattr(self.body, "min_size", 1)
        if x.ndim != 4 or x.shape[1] != 3 or min(x.shape[2:]) < smallest:
            raise UsageError(
                f"images of shape {tuple(x.shape)}: the backbone takes (N, 3, H, W), at least {smallest} pixels a side"
            )
        x = normalise(x, self.mean, self.std).contiguous(memory_format=self.memory_format)
        return self.embedding_layer(self.body(x)).float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings (N, D) and logits (N, M), both float32, of images (N, 3, H, W) in [0, 1]."""
        if self.head is None:
            raise UsageError("the backbone has no head, hence no logits: call its method embed, or give it a head")
        embedding = self.embed(x)
        return embedding, self.head(embedding).float()


def normalise(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std per channel; x (N, 3, H, W), mean and std (3,)."""
    return (x - mean[:, None, None]) / std[:, None, None]


def _per_channel(values: Sequence[float], what: str) -> Tensor:
    tensor = torch.as_tensor(values, dtype=torch.float32)
    if tensor.shape != (3,):
        raise UsageError(f"{what} is {values!r}: give three numbers, for red, green and blue")
    return tensor


def linear_head(backbone: Backbone) -> LinearHead:
    """The head as arrays, for detectors that compute logits anew.

    >>> linear_head(create_backbone("resnet9", n_classes=10)).weight.shape
    (10, 128)
    """
    head = backbone.head
    if not isinstance(head, nn.Linear):
        kind = "no head" if head is None else f"a head of type {type(head).__name__}"
        raise UsageError(f"the backbone has {kind}: detectors that compute logits anew need a linear one")
    weight = head.weight.detach().float().cpu().numpy()
    bias = np.zeros(len(weight), np.float32) if head.bias is None else head.bias.detach().float().cpu().numpy()
    return LinearHead(weight, bias)


# Making backbones by name


def list_backbones() -> list[str]:
    """Names for ``create_backbone``; besides these, ``wrn-D-W`` for any depth D = 6n + 4 and any width W."""
    return list(NETWORKS)


def create_backbone(
    name: str,
    n_classes: int,
    *,
    embedding_size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Backbone:
    """A new backbone with random weights and a linear head of ``n_classes`` columns.

    ``embedding_size`` puts a linear layer between network and head, whose output is then the embedding (the paper's
    ResNet-50 has 640). ``mean`` and ``std`` default to ImageNet's, which the public weights expect.

    >>> create_backbone("wrn-10-1", n_classes=5, embedding_size=48).embedding_size
    48
    >>> create_backbone("resnet81", n_classes=10)
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown backbone 'resnet81': did you mean 'resnet18'?
    """
    if n_classes < 1 or (embedding_size is not None and embedding_size < 1):
        raise UsageError(f"{n_classes} classes and an embedding of {embedding_size}: both must be at least 1")
    body = create_network(name)
    embedding_layer = None if embedding_size is None else nn.Linear(body.embedding_size, embedding_size)
    embedding_size = embedding_size or body.embedding_size
    backbone = Backbone(
        body,
        nn.Linear(embedding_size, n_classes),
        embedding_size=embedding_size,
        embedding_layer=embedding_layer,
        mean=IMAGENET_MEAN if mean is None else mean,
        std=IMAGENET_STD if std is None else std,
        name=name,
        shallow=body.shallow,
    )
    return use_channels_last(backbone)


# Finding the embedding inside someone else's network


class Pick(nn.Module):
    """One entry of the output of a module that returns a dictionary or a tuple."""

    def __init__(self, module: nn.Module, path: tuple[Any, ...]) -> None:
        super().__init__()
        self.module = module
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        output = self.module(x)
        for key in self.path:
            output = output[key]
        return output


class _Call(NamedTuple):
    """What went into a layer and what came out."""

    input: Tensor
    output: Tensor


def wrap_backbone(
    module: nn.Module,
    *,
    head: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    example: Tensor | np.ndarray | None = None,
    shallow: str | None = None,
) -> Backbone:
    """A trained classifier as a backbone: its embedding is the input of the linear layer that gives its logits.

    The head is the linear layer whose output is the output of the module (or an entry of it, where the module returns a
    tuple or a dictionary), found by running ``example``, a batch of images in [0, 1] (random ones if not given).
    ``head`` names it ("classifier.1") where there are several or where it is no ``nn.Linear``. One call of the backbone
    then gives the embedding, and head(embedding) equals the logits of before, which is checked on the example. The
    module itself stays as it is: the backbone owns a copy.

    ``mean`` and ``std`` are those the module was trained with; if not given, a timm model's own, else (0, 0, 0) and
    (1, 1, 1): the module sees images in [0, 1]. ``shallow`` names a layer about half-way up, with channels
    (N, F, H, W), for the score of that name ("layer2").

    >>> classifier = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    >>> wrap_backbone(classifier).embedding_size
    8
    """
    if isinstance(module, Backbone):
        return module
    check_dtype(module)
    settings = _timm_settings(module)
    mean = settings.get("mean", (0.0, 0.0, 0.0)) if mean is None else mean
    std = settings.get("std", (1.0, 1.0, 1.0)) if std is None else std
    size = settings["input_size"][-1] if "input_size" in settings else None
    if example is not None:
        size = int(np.shape(example)[-2])  # rows, in (N, 3, H, W) columns in (N, H, W, 3): square either way

    module = copy.deepcopy(module)
    if shallow is not None and shallow not in dict(module.named_modules()):
        raise UsageError(f"the module has no layer '{shallow}': {suggest(shallow, dict(module.named_modules()))}")
    layers = _possible_heads(module, head)
    with evaluating(module):
        x, calls, output = run_example(module, layers, example, size, mean, std)
        name, path = _find_head(calls, dict(leaves(output)), head)
        if calls[name].input.ndim != 2:
            raise UsageError(
                f"the head '{name}' sees {tuple(calls[name].input.shape)}, not one vector per image (N, D): "
                "name a layer behind the pooling with head=..., or pool inside the module"
            )
        body, found = split_head(module, name, path)
        embedding = body(x)
        seen = calls[name]
        if not same_values(embedding, seen.input) or not same_values(found(embedding), seen.output):
            raise UsageError(
                f"without its head '{name}' the module does not return what the head saw: "
                "let forward return the output of the head, computed once, and nothing made of it"
            )
    backbone = Backbone(
        body,
        found,
        embedding_size=embedding.shape[1],
        mean=mean,
        std=std,
        name=type(module).__name__,
        size=size,
        shallow=f"module.{shallow}" if shallow and path else shallow,
    )
    backbone.origin = {"head": name, "path": list(path)}
    return backbone.to(embedding.device)


def use_channels_last(backbone: Backbone) -> Backbone:
    """Keep weights and inputs in channels_last memory from now on, in which convolutions are faster on most machines.

    Not for modules of strangers: a ``view`` in their forward may refuse it, perhaps only for images of another size.
    """
    backbone.memory_format = torch.channels_last
    return backbone.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_dtype(module: nn.Module) -> None:
    """Refuse networks that do not compute in float32."""
    if other := {p.dtype for p in module.parameters() if p.is_floating_point()} - {torch.float32}:
        raise UsageError(f"the module computes in {other.pop()}: call module.float() before wrapping it")


def split_head(module: nn.Module, head: str, path: Sequence[Any] = ()) -> tuple[nn.Module, nn.Module]:
    """The module without the layer called ``head``, and that layer; ``path`` leads to the logits in its output.

    >>> body, head = split_head(nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), "1")
    >>> body(torch.rand(2, 3, 2, 2)).shape, head.out_features
    (torch.Size([2, 12]), 5)
    """
    layer = module.get_submodule(head)
    module.set_submodule(head, nn.Identity())
    return (Pick(module, tuple(path)) if path else module), layer


def _timm_settings(module: nn.Module) -> dict[str, Any]:
    """What a timm model says about its input: mean, std, input_size; empty for other modules."""
    settings = getattr(module, "pretrained_cfg", None)
    return dict(settings) if isinstance(settings, Mapping) else {}


def _possible_heads(module: nn.Module, head: str | None) -> dict[str, nn.Module]:
    if head is None:
        return {name: layer for name, layer in module.named_modules() if name and isinstance(layer, nn.Linear)}
    layers = {name: layer for name, layer in module.named_modules() if name}
    if head not in layers:
        linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
        raise UsageError(f"the module has no layer '{head}'; its linear layers: {', '.join(linear) or 'none'}")
    return {head: layers[head]}


def run_example(
    module: nn.Module,
    layers: dict[str, nn.Module],
    example: Tensor | np.ndarray | None,
    size: int | None,
    mean: Sequence[float],
    std: Sequence[float],
) -> tuple[Tensor, dict[str, _Call], Any]:
    """Run the module once; its normalised input, the last call of each layer (in order of calls), and its output."""
    tensors = [*module.parameters(), *module.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")
    if example is not None:
        examples = [as_image_batch(example)]
    else:
        generator = torch.Generator().manual_seed(0)
        sizes = EXAMPLE_SIZES if size is None else (size,)
        examples = [torch.rand(2, 3, s, s, generator=generator) for s in sizes]
    failure: Exception | None = None
    for images in examples:
        x = normalise(images, _per_channel(mean, "mean"), _per_channel(std, "std")).contiguous().to(device)
        try:
            calls, output = _trace(module, layers, x)
        except Exception as error:  # whatever a stranger's forward raises
            failure = error
            continue
        return x, calls, output
    tried = ", ".join(f"{images.shape[-1]}" for images in examples)
    reason = " ".join(str(failure).split())
    raise UsageError(
        f"the module failed on images of {tried} pixels ({type(failure).__name__}: {reason}): "
        "pass example=, a batch (N, 3, H, W) in [0, 1] of the size it takes (maple fit: --size)"
    ) from failure


def _trace(module: nn.Module, layers: dict[str, nn.Module], x: Tensor) -> tuple[dict[str, _Call], Any]:
    calls: dict[str, _Call] = {}

    def record(name: str, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if len(inputs) == 1 and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
            calls.pop(name, None)
            calls[name] = _Call(inputs[0].clone(), output.clone())  # against in-place operations behind it

    with listening(layers, record):
        return calls, module(x)


def leaves(output: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor in nested tuples, lists and dictionaries, with the keys that lead to it."""
    if isinstance(output, Tensor):
        yield path, output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from leaves(value, (*path, key))
    elif isinstance(output, tuple | list):
        for i, value in enumerate(output):
            yield from leaves(value, (*path, i))


def _find_head(
    calls: dict[str, _Call], leaves: dict[tuple[Any, ...], Tensor], head: str | None
) -> tuple[str, tuple[Any, ...]]:
    """The layer whose output is an entry of the module's output, and the way to that entry."""
    found: dict[str, tuple[Any, ...]] = {}
    for name, call in calls.items():
        for path, leaf in leaves.items():
            if name not in found and same_values(leaf, call.output):
                found[name] = path
    if len(found) > 1:
        raise UsageError(f"the module has several heads ({', '.join(found)}): name one, head='{next(iter(found))}'")
    if found:
        return next(iter(found.items()))
    if head is not None:
        raise UsageError(
            f"the output of '{head}' is not the output of the module: name the layer that gives the logits, and let "
            "forward return them unchanged (no softmax)"
        )
    raise UsageError(
        "no linear layer gives the output of the module: let forward return its logits unchanged (no softmax), name "
        "the head with head=..., or, if the module returns embeddings, use Backbone(module, None, embedding_size=D)"
    )


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# From images to outputs


@contextmanager
def listening(
    layers: Mapping[Key, nn.Module], hear: Callable[[Key, nn.Module, tuple[Any, ...], Any], Tensor | None]
) -> Iterator[None]:
    """While it lasts, ``hear`` gets the key, the layer, its inputs and its output whenever a layer has finished.

    What it returns, unless that is None, takes the place of the output.

    >>> layer = nn.Identity()
    >>> with listening({"doubled": layer}, lambda key, layer, inputs, output: 2 * output):
    ...     layer(torch.ones(2))
    tensor([2., 2.])
    >>> layer(torch.ones(2))
    tensor([1., 1.])
    """
    handles = [layer.register_forward_hook(partial(hear, key)) for key, layer in layers.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each layer is in the mode it was in, also after an exception."""
    modes = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training


def embed(
    backbone: Backbone,
    images: Images,
    *,
    batch_size: int = 128,
    cluster_ids: np.ndarray | None = None,
    cluster_to_class: np.ndarray | None = None,
    progress: Progress | None = None,
    workers: int = 0,
    indices: np.ndarray | None = None,
    logits: bool = True,
) -> Outputs:
    """Embeddings, logits and labels of all images, in order: evaluation mode, no gradients, no augmentation, float32.

    ``images`` is an ``ImageSet``; or a tensor or array of shape (N, 3, H, W) or (N, H, W, 3), uint8 in 0..255 or float
    in [0, 1]; or a ``Dataset`` of such images x or (x, label); or a ``DataLoader`` (or any iterable) of batches x or
    (x, labels). ``indices`` picks images and sets their order. ``batch_size`` changes results by rounding at most; much
    larger ones are slower on a CPU, by page faults, unless ``use_fast_allocator`` was called. ``cluster_ids`` (N,) has
    one id per image of ``images``. ``progress`` is called after each batch with the numbers of images done and in all
    (0 where a loader does not say). The backbone's mode and statistics are as before afterwards. ``logits=False``
    leaves out the head, and with it all passes but one of a backbone that samples.

    >>> outputs = embed(create_backbone("resnet9", n_classes=10), np.zeros((3, 32, 32, 3), np.uint8))
    >>> outputs.embeddings.shape, outputs.embeddings.dtype, outputs.logits.shape
    ((3, 128), dtype('float32'), (3, 10))
    """
    batches = embed_batches(
        backbone,
        images,
        batch_size=batch_size,
        cluster_ids=cluster_ids,
        cluster_to_class=cluster_to_class,
        progress=progress,
        workers=workers,
        indices=indices,
        logits=logits,
    )
    parts = list(batches)
    return Outputs.concatenate(parts) if parts else _no_outputs(backbone, cluster_to_class)


def embed_batches(
    backbone: Backbone,
    images: Images,
    *,
    batch_size: int = 128,
    cluster_ids: np.ndarray | None = None,
    cluster_to_class: np.ndarray | None = None,
    progress: Progress | None = None,
    workers: int = 0,
    indices: np.ndarray | None = None,
    logits: bool = True,
) -> Iterator[Outputs]:
    """As ``embed``, one batch at a time: memory does not grow with the number of images.

    Between two batches the backbone is in the caller's mode, and gradients are as the caller has them.
    """
    if batch_size < 1:
        raise UsageError(f"a batch size of {batch_size}: it must be at least 1")
    done, n = 0, count_images(images, indices)
    for x, index, labels in read_batches(images, batch_size, workers, indices, ordered=cluster_ids is not None):
        yield Outputs(
            **_run_batch(backbone, x, logits),
            labels=labels,
            cluster_ids=None if cluster_ids is None else _rows(cluster_ids, index),
            cluster_to_class=cluster_to_class,
        )
        if progress is not None:
            done += len(index)
            progress(done, n)


def _run_batch(backbone: Backbone, x: Tensor, logits: bool) -> dict[str, np.ndarray]:
    """Embeddings, and what else the backbone gives: logits, and the responses of its shallow layer."""
    device = backbone.mean.device
    found: dict[str, Tensor] = {}

    def hear(name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        found[name] = channel_responses(output)

    shallow = {} if backbone.shallow is None else {"shallow": backbone.body.get_submodule(backbone.shallow)}
    with evaluating(backbone), torch.autocast(device.type, enabled=False), listening(shallow, hear):
        if backbone.head is None or not logits:
            found["embeddings"] = backbone.embed(x.to(device))
        else:
            found["embeddings"], found["logits"] = backbone(x.to(device))
    return {name: tensor.float().cpu().numpy() for name, tensor in found.items()}


def channel_responses(activations: Tensor) -> Tensor:
    """log of the mean absolute activation of each channel (N, F), from (N, F, H, W).

    >>> channel_responses(torch.full((1, 2, 4, 4), 3.0)).exp().round()
    tensor([[3., 3.]])
    """
    if activations.ndim != 4:
        raise UsageError(
            f"the shallow layer gives {tuple(activations.shape)}, not channels (N, F, H, W): name another one"
        )
    means = F.adaptive_avg_pool2d(activations.float().abs(), 1).flatten(1)  # a node that convolutions feed as they are
    return (means + SMALLEST_RESPONSE).log()


def _no_outputs(backbone: Backbone, cluster_to_class: np.ndarray | None) -> Outputs:
    """Outputs of no image, as a rank without a share of the images needs them: (0, D) and (0, M)."""
    embedding = torch.empty(0, backbone.embedding_size, device=backbone.mean.device)
    with evaluating(backbone):
        logits = None if backbone.head is None else backbone.head(embedding).cpu().numpy()
    none = np.empty(0, dtype=np.int64)
    return Outputs(embedding.cpu().numpy(), logits, none, none, cluster_to_class, _no_responses(backbone))


def _no_responses(backbone: Backbone) -> np.ndarray | None:
    """Responses of the shallow layer to no image (0, F), by its last convolution or normalisation."""
    if backbone.shallow is None:
        return None
    layers = backbone.body.get_submodule(backbone.shallow).modules()
    widths = [getattr(layer, "num_features", None) or getattr(layer, "out_channels", 0) for layer in layers]
    return np.empty((0, next((width for width in reversed(widths) if width), 0)), dtype=np.float32)


def count_images(images: Images, indices: np.ndarray | None) -> int:
    """How many images there will be; 0 where nobody knows beforehand."""
    if indices is not None:
        return len(indices)
    if isinstance(images, ImageSet | Tensor | np.ndarray):
        return len(images)
    source = images.dataset if isinstance(images, DataLoader) else images if isinstance(images, Dataset) else None
    return len(source) if isinstance(source, Sized) else 0


def _rows(cluster_ids: np.ndarray, index: np.ndarray) -> np.ndarray:
    cluster_ids = np.asarray(cluster_ids)
    if len(index) and index.max() >= len(cluster_ids):
        raise UsageError(f"{len(cluster_ids)} cluster ids for more images: give one per image")
    return cluster_ids[index].astype(np.int64)


Batch = tuple[Tensor, np.ndarray, np.ndarray | None]  # images (B, 3, H, W) in [0, 1], their positions, their labels


def read_batches(
    images: Images, batch_size: int, workers: int, indices: np.ndarray | None, ordered: bool
) -> Iterator[Batch]:
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
        raise UsageError(
            f"cannot embed {type(images).__name__}: give an ImageSet (open_images makes one), a tensor, an array, a "
            "Dataset or a DataLoader"
        )


def _read_loader(loader: Iterable[Any], indices: np.ndarray | None, ordered: bool) -> Iterator[Batch]:
    if indices is not None:
        raise UsageError("indices need images that can be indexed: put a torch.utils.data.Subset into the loader")
    if ordered and isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler):
        raise UsageError("the loader shuffles, so cluster ids cannot follow the images: make it with shuffle=False")
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
        return x.float() / 255
    if not x.is_floating_point():
        raise UsageError(f"images of type {x.dtype}: give uint8 in 0..255 or float in [0, 1]")
    if x.numel() and not (x.min() >= -1e-6 and x.max() <= 1 + 1e-6):
        raise UsageError(
            "float images must lie in [0, 1], before any normalisation: the backbone normalises them itself"
        )
    return x.float()


# Reading weights


def load_weights(backbone: Backbone, path: str | Path) -> Backbone:
    """Put the weights of a file into the backbone and return it; without pickle, so that any file may be tried.

    Reads ``.safetensors``, and whatever ``torch.load(weights_only=True)`` reads: a state dictionary, or a checkpoint
    with one under ``state_dict`` or ``model``; a ``module.`` in front of every name is dropped. The names are those of
    a backbone, or those of the network inside it, in which case the one layer that the body lacks is the head. Nothing
    is changed unless everything fits.
    """
    path = Path(path)
    load_state(backbone, rename_state(read_state(path), backbone, path), path, backbone.name)
    return backbone


def load_state(module: nn.Module, state: Mapping[str, Tensor], path: Path, name: str) -> None:
    """Put tensors read from ``path`` into a network called ``name``; nothing is changed unless everything fits."""
    own = module.state_dict()
    if further := [key for key in state if key not in own]:
        raise UsageError(f"'{path}' also holds {shorten_list(further)}: it holds another network than '{name}'")
    missing = [key for key in own if key not in state and not key.endswith("num_batches_tracked")]
    missing = [key for key in missing if key not in ("mean", "std")]
    if missing:
        raise UsageError(f"'{path}' lacks {shorten_list(missing)}: it holds another network than '{name}'")
    for key, value in state.items():
        a_number = own[key].ndim == 0 and value.numel() == 1  # which some files hold as a vector
        if value.shape != own[key].shape and not a_number:
            raise UsageError(
                f"'{path}' has {key} of shape {tuple(value.shape)}, the backbone {tuple(own[key].shape)}: "
                "create the backbone with the network, number of classes and embedding size of the file"
            )
    module.load_state_dict({**own, **state})


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a weights file by name, without a ``module.`` in front of all of them; see ``load_weights``."""
    if not path.is_file():
        raise UsageError(f"there is no weights file '{path}': check the path")
    try:
        if path.suffix == ".safetensors":
            return _without_wrapper(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UsageError(
            f"'{path}' holds more than tensors and is not opened, because it could run code: "
            "save it again as torch.save(model.state_dict(), ...)"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError, SafetensorError) as error:
        raise UsageError(f"cannot read the weights '{path}' ({error}): is the file complete?") from None
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content or not all(isinstance(v, Tensor) for v in content.values()):
        raise UsageError(f"'{path}' holds no state dictionary: save it as torch.save(model.state_dict(), ...)")
    return _without_wrapper(dict(content))


def _without_wrapper(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the ``module.`` that DataParallel puts in front of every name."""
    wrapped = all(key.startswith("module.") for key in state)
    return {key.removeprefix("module."): value for key, value in state.items()} if wrapped else state


def rename_state(state: dict[str, Tensor], backbone: Backbone, path: Path) -> dict[str, Tensor]:
    """The names of the file turned into those of the backbone."""
    own = backbone.state_dict()
    if all(key in own for key in state):
        return state
    prefix = "body.module." if isinstance(backbone.body, Pick) else "body."
    renamed = {prefix + key: value for key, value in state.items() if prefix + key in own}
    left = {key: value for key, value in state.items() if prefix + key not in own}
    layers = {key.rpartition(".")[0] for key in left}
    if len(layers) == 1:
        renamed |= {f"head.{key.rpartition('.')[2]}": value for key, value in left.items()}
    if len(layers) > 1 or any(key not in own for key in renamed):
        raise UsageError(
            f"'{path}' also holds {shorten_list(list(left))}: it holds another network than '{backbone.name}'"
        )
    return renamed
