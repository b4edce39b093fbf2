"""Images of a torch ``Dataset`` or ``DataLoader``, read through the data set as 8-bit RGB squares.

An item is an image, or (image, label, ...). The image is a picture of Pillow, an array (H, W), (H, W, C) or (C, H, W)
of uint8, or of floats in [0, 1]: 1, 3 or 4 channels. Floats are rounded to 8 bits, which leaves those of ``ToTensor``
exactly as they are. The transform of the data set runs; one that is random or that normalises is refused. Of a
``DataLoader`` the data set is read, in its own order.

torch is not imported here: whoever gives one of its objects has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from maple.data._decoder import Item, content_key
from maple.data.decode import Fit, Size, auto_size, fit_square, to_rgb
from maple.data.image_set import index_labels
from maple.data.stream import Source
from maple.errors import DataError, UsageError
from maple.types import Skipped

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset

    TorchData = Dataset[Any] | DataLoader[Any]

_PROBES = 8  # images that are read twice, to find a transform that is random
_MEASURED = 512  # images, evenly spread, that tell the size
_MAX_CLASSES = 100_000
_ROUNDING = 1e-6
_COLOURS = (1, 3, 4)  # channels: grey, RGB, RGBA


def is_torch_data(source: Any) -> bool:
    """Whether ``source`` is a ``Dataset`` or ``DataLoader``.

    >>> is_torch_data("cifar10")
    False
    """
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(source, (torch_data.Dataset, torch_data.DataLoader))


def holds_pictures(source: Any) -> bool:
    """Whether torch data consists of Pillow's pictures, which torch cannot put into batches."""
    dataset = getattr(source, "dataset", source)
    if not is_torch_data(source) or not hasattr(dataset, "__getitem__") or not len(dataset):
        return False
    first = dataset[0]
    return isinstance(first[0] if isinstance(first, tuple | list) else first, Image.Image)


class Listed(NamedTuple):
    """Labels that a data set lists beside its images."""

    values: np.ndarray  # (N,) integers or names
    class_names: Sequence[str] | None


@dataclass(eq=False)
class TorchImages(Source):
    """Images of a map-style data set. Where it does not list its labels, they are known after all images were read."""

    dataset: Any
    name: str
    size: int
    fit: Fit
    known: tuple[str, ...]  # names of the classes 0, 1, .. where the data set has none
    values: list[Any] | None  # labels as read, one per image; None if they are listed or not wanted
    labels: np.ndarray | None = None
    class_names: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    @property
    def is_decoded(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.dataset)

    def digest(self) -> str:
        items = (item if isinstance(item, np.ndarray) else str(item).encode() for _, item in self.items(0))
        return content_key("".join(map(content_key, items)).encode())

    def item(self, i: int) -> Item:
        try:
            item = self.dataset[i]
        except Exception as error:  # of the data set or its transform
            return DataError(f"the data set fails at it: {type(error).__name__}: {' '.join(str(error).split())}")
        image, label = split_item(item)
        if self.values is not None:
            self.values[i] = class_label(label)
        return square_image(image, self.size, self.fit, self.dataset, self.name)

    def items(self, start: int) -> Iterator[tuple[str, Item]]:
        for i in range(start, len(self)):
            yield f"{self.name}#{i}", self.item(i)
        if self.values is not None:
            unread = next((label for label in self.values if label is not None), -1)  # of images that cannot be used
            values = np.array([unread if label is None else label for label in self.values])
            self.labels, self.class_names = name_labels(Listed(values, None), self.known, self.name)


def list_torch_data(source: Any, size: Size, fit: Fit, labelled: bool, known: Sequence[str] = ()) -> TorchImages:
    """The images of a ``Dataset`` or ``DataLoader``.

    Class names and labels are those that the data set lists (``classes``, and ``targets`` or ``labels``), through
    ``Subset`` and ``ConcatDataset``; else labels are read with the images. Integer labels without names number the
    classes ``known``; those beyond them are named by their number.
    """
    dataset = _map_style(source)
    name = _name(dataset)
    if not (n := len(dataset)):
        raise DataError(f"no images in '{name}': its length is 0, give at least one image")
    _check_repeatable(dataset, name)
    side = _measure(dataset, name) if size == "auto" else size
    listed = _listed_labels(dataset) if labelled else None
    if listed is not None and not _agrees(listed, dataset):
        listed = None
    if labelled and listed is None and split_item(dataset[0])[1] is None:
        raise DataError(f"the items of '{name}' have no label: let __getitem__ return (image, label)")
    values = [None] * n if labelled and listed is None else None
    images = TorchImages(dataset, name, side, fit, tuple(known), values)
    if listed is not None:
        images.labels, images.class_names = name_labels(listed, known, name)
    return images


# --- data sets and loaders --------------------------------------------------------------------------------------------


def _map_style(source: Any) -> Any:
    """The data set of ``source``; refuses loaders of which more than the data set matters."""
    from torch.utils.data import DataLoader, IterableDataset, Subset

    dataset, rows = source, None
    if isinstance(source, DataLoader):
        dataset = source.dataset
        if not isinstance(dataset, IterableDataset):
            rows = _sampled_rows(source)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise UsageError(
            f"'{type(dataset).__name__}' is read as a stream, and images are read by position: give a Dataset with "
            "__len__ and __getitem__, or save the images as a folder or Parquet file"
        )
    return dataset if rows is None else Subset(dataset, rows)


def _sampled_rows(loader: Any) -> list[int] | None:
    """The rows that a loader is restricted to, ``None`` for all of them; refuses what the data set cannot replace."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, default_collate

    if loader.batch_size is not None and loader.collate_fn is not default_collate:
        raise UsageError(
            "the DataLoader has a collate_fn of its own, which is not run: put what it does into __getitem__ of the "
            "Dataset, and give the Dataset"
        )
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) not in (BatchSampler, type(None)):
        sampler = batches
    if isinstance(sampler, SubsetRandomSampler):
        return sorted(map(int, sampler.indices))
    whole = isinstance(sampler, RandomSampler) and not sampler.replacement and len(sampler) == len(loader.dataset)
    if whole or type(sampler) is SequentialSampler:
        return None
    raise UsageError(
        f"the DataLoader draws images with a {type(sampler).__name__}, and each image is read once, in order: give "
        "torch.utils.data.Subset(dataset, rows) instead"
    )


def _base(dataset: Any) -> Any:
    """The data set behind subsets."""
    from torch.utils.data import Subset

    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def _name(dataset: Any) -> str:
    """The folder of a data set of files, else its class: names tell whether images may be mirrored."""
    base = _base(dataset)
    root = getattr(base, "root", None)
    if hasattr(base, "samples") and isinstance(root, str | Path):
        return Path(root).resolve().name
    return type(base).__name__.lower()


def _probe_rows(dataset: Any, count: int) -> list[int]:
    return sorted({int(row) for row in np.linspace(0, len(dataset) - 1, min(count, len(dataset)))})


def _check_repeatable(dataset: Any, name: str) -> None:
    """Refuse data sets that give another image each time: a fit, a split and a threshold need the image itself."""
    for row in _probe_rows(dataset, _PROBES):
        try:
            first, second = (np.asarray(split_item(dataset[row])[0]) for _ in range(2))
        except Exception:  # the image is reported as unusable when all are read
            continue
        if not np.array_equal(first, second):
            raise UsageError(
                f"image {row} of '{name}' differs when it is read twice: give the data set without random "
                "transforms (train_backbone augments images by itself, option augment)"
            )


def _measure(dataset: Any, name: str) -> int:
    """The side for ``size='auto'``."""
    sizes = []
    for row in _probe_rows(dataset, _MEASURED):
        try:
            image = split_item(dataset[row])[0]
        except Exception:
            continue
        sizes.append(as_picture(image, dataset, name).size)
    return auto_size(np.array(sizes)) if sizes else 16


# --- labels -----------------------------------------------------------------------------------------------------------


def _listed_labels(dataset: Any) -> Listed | None:
    """Labels as torchvision's data sets list them, without reading an image; ``None`` where there are none."""
    from torch.utils.data import ConcatDataset, Subset, TensorDataset

    if isinstance(dataset, Subset):
        whole = _listed_labels(dataset.dataset)
        return whole and Listed(whole.values[np.asarray(dataset.indices, dtype=np.int64)], whole.class_names)
    if isinstance(dataset, ConcatDataset):
        parts = [_listed_labels(part) for part in dataset.datasets]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts) or any(part.class_names != found[0].class_names for part in found):
            return None
        return Listed(np.concatenate([part.values for part in found]), found[0].class_names)
    if isinstance(dataset, TensorDataset):
        return Listed(dataset.tensors[1].numpy(force=True), None) if len(dataset.tensors) > 1 else None
    for key in ("targets", "labels"):
        values = np.asarray(getattr(dataset, key, None))
        if values.ndim == 1 and len(values) == len(dataset) and values.dtype.kind in "iu":
            return Listed(values, _listed_names(dataset))
    return None


def _listed_names(dataset: Any) -> Sequence[str] | None:
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None
    return tuple(names)


def _agrees(listed: Listed, dataset: Any) -> bool:
    """Whether items have the labels that are listed: a ``target_transform`` may change them."""
    for row in _probe_rows(dataset, _PROBES):
        try:
            label = split_item(dataset[row])[1]
        except Exception:
            continue
        if class_label(label) != listed.values[row].item():
            return False
    return True


def name_labels(listed: Listed, known: Sequence[str], where: str) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels (N,) and class names; integers without names number the classes, those ``known`` first.

    >>> name_labels(Listed(np.array([2, 0]), None), ["cat", "dog"], "pets")
    (array([2, 0]), ('cat', 'dog', '2'))
    """
    values, names = listed
    if values.dtype.kind not in "iu" or names is not None:
        return index_labels(values, names, where)
    top = int(values.max(initial=0))
    if top >= _MAX_CLASSES:
        raise DataError(f"the labels of '{where}' go up to {top}: number the classes from 0")
    names = (*known, *map(str, range(len(known), top + 1)))
    return index_labels(values, names, where)


# --- items ------------------------------------------------------------------------------------------------------------


def split_item(item: Any) -> tuple[Any, Any]:
    """Image and label of an item of a data set; the label is ``None`` where it has none."""
    if isinstance(item, Mapping):
        keys = ", ".join(map(str, item))
        raise UsageError(f"items are dictionaries of {keys}: let __getitem__ return (image, label)")
    image, *rest = item if isinstance(item, tuple | list) else (item,)
    return image, rest[0] if rest else None


def class_label(label: Any) -> int | str:
    """The label of an item as a number or name.

    >>> class_label(np.int64(3)), class_label("cat")
    (3, 'cat')
    """
    label = label.item() if hasattr(label, "item") and np.asarray(label).size == 1 else label
    if not isinstance(label, int | str) or isinstance(label, bool):
        raise UsageError(
            f"the label {label!r} is no class: let __getitem__ return (image, number or name of its class)"
        )
    return label


def square_image(image: Any, size: int, fit: Fit, dataset: Any, name: str) -> np.ndarray:
    """An image of a data set as (S, S, 3) uint8."""
    return np.array(fit_square(as_picture(image, dataset, name), size, fit))


def as_picture(image: Any, dataset: Any, name: str) -> Image.Image:
    """An image of a data set in Pillow's mode RGB.

    >>> as_picture(np.zeros((3, 4, 6), np.float32), None, "dark").size
    (6, 4)
    """
    if isinstance(image, Image.Image):
        return to_rgb(image)
    is_array = isinstance(image, np.ndarray)
    values = image if is_array else image.numpy(force=True) if hasattr(image, "numpy") else None
    if values is None or values.ndim not in (2, 3) or 0 in values.shape:
        found = type(image).__name__ if values is None else f"an array of shape {values.shape}"
        raise UsageError(
            f"an image of '{name}' is {found}: give a picture of Pillow, or an array (H, W, 3) or (3, H, W)"
        )
    channels_last = _to_8_bit(_channels_last(values, is_array, name), dataset, name)
    return to_rgb(Image.fromarray(channels_last[..., 0] if channels_last.shape[-1] == 1 else channels_last))


def _channels_last(values: np.ndarray, prefer_last: bool, name: str) -> np.ndarray:
    """(H, W, C) of (H, W), (H, W, C) or (C, H, W); where both fit, tensors have their channels first."""
    if values.ndim == 2:
        return values[..., None]
    first, last = values.shape[0] in _COLOURS, values.shape[-1] in _COLOURS
    if not first and not last:
        raise UsageError(f"an image of '{name}' has shape {values.shape}: give 1, 3 or 4 channels, first or last")
    return values if last and (prefer_last or not first) else np.moveaxis(values, 0, -1)


def _to_8_bit(values: np.ndarray, dataset: Any, name: str) -> np.ndarray:
    values = np.ascontiguousarray(values)
    if values.dtype == np.uint8:
        return values
    if values.dtype.kind not in "bf":
        raise UsageError(f"the images of '{name}' are of type {values.dtype}: give uint8, or floats in [0, 1]")
    values = values.astype(np.float32)
    low, high = float(values.min()), float(values.max())
    if low < -_ROUNDING or not high <= 1 + _ROUNDING:
        raise UsageError(f"an image of '{name}' has values from {low:.3g} to {high:.3g}: {_remedy(low, high, dataset)}")
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _remedy(low: float, high: float, dataset: Any) -> str:
    """What to do about values outside [0, 1]."""
    if low >= 0 and high <= 255:
        return "divide by 255, or give uint8"
    if np.isnan(low) or np.isnan(high):
        return "replace values that are not numbers"
    used = _find_normalize(_base(dataset))
    numbers = "mean=..., std=..." if used is None else f"mean={used[0]}, std={used[1]}"
    return (
        "the backbone normalises images in [0, 1] itself: leave Normalize out of the transform of the data set, and "
        f"open the network with its numbers, wrap_backbone(module, {numbers})"
    )


def _find_normalize(dataset: Any) -> tuple[list[float], list[float]] | None:
    """Mean and deviation of the ``Normalize`` in the transform of a data set."""
    stack: list[Any] = [getattr(dataset, "transform", None)]
    while stack:
        step = stack.pop()
        if type(step).__name__ == "Normalize" and hasattr(step, "mean") and hasattr(step, "std"):
            return [float(value) for value in step.mean], [float(value) for value in step.std]
        stack += list(getattr(step, "transforms", ()))
    return None
