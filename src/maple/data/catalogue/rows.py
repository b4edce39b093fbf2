"""Readers of originals: each yields one :class:`Row` per image, in a fixed order.

Pixels that come as arrays are encoded as lossless WebP, and images that come encoded keep their bytes. No original is
unpickled: CIFAR is read in its binary version, and arrays are read as plain numbers or not at all. An original that is
not in its published format is a ``ValueError``; conversion adds the names of the files and what to do.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from maple.data.catalogue.archive import Archive
from maple.data.decode import IMAGE_SUFFIXES
from maple.data.shares import share_out

_MAX_ARRAY_BYTES = 2 * 2**30  # of a MATLAB file, which is read whole
_MAX_TEXT_BYTES = 64 * 2**20
_IMAGENET_BYTES = 160 * 10**9
_LISTED_BYTES = 40 * 10**9  # of an archive of unknown images


class Row(NamedTuple):
    """One image of a split."""

    image: bytes  # encoded
    label: int
    label_name: str
    file: str = ""  # name in an image folder


def encode_pixels(pixels: np.ndarray) -> bytes:
    """Encode an image (H, W, 3) uint8 as lossless WebP."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True, method=0)
    return file.getvalue()


def cifar_rows(
    originals: Mapping[str, Path], archive: str, members: Sequence[str], label_bytes: int, names: Sequence[str]
) -> Iterator[Row]:
    """CIFAR, binary version: records of label bytes, of which the last is the class, then 3 x 32 x 32 values."""
    with Archive(originals[archive]) as files:
        for member in members:
            with files.open(member) as file:
                while record := file.read(label_bytes + 3072):
                    if len(record) < label_bytes + 3072:
                        raise ValueError(f"'{member}' is truncated")
                    pixels = np.frombuffer(record, np.uint8, offset=label_bytes).reshape(3, 32, 32)
                    label = record[label_bytes - 1]
                    yield Row(encode_pixels(pixels.transpose(1, 2, 0)), label, _class_name(names, label, member))


def _class_name(names: Sequence[str], label: int, where: str) -> str:
    if not 0 <= label < len(names):
        raise ValueError(f"'{where}' holds label {label}, outside 0..{len(names) - 1}")
    return names[label]


def svhn_rows(originals: Mapping[str, Path], file: str) -> Iterator[Row]:
    """SVHN: MATLAB arrays X (32, 32, 3, N) and y (N, 1), in which digit 0 has label 10."""
    arrays = _load_matlab(originals[file], ("X", "y"))
    x, y = arrays["X"], arrays["y"].ravel()
    if x.ndim != 4 or x.shape[2] != 3 or x.dtype != np.uint8 or x.shape[3] != len(y):
        raise ValueError(f"arrays of shapes {x.shape} and {y.shape} are not SVHN's format 2")
    for i, label in enumerate(y.astype(np.int64) % 10):
        yield Row(encode_pixels(np.ascontiguousarray(x[..., i])), int(label), str(label))


def _load_matlab(source: Path | BinaryIO, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """Load arrays of a MATLAB file after checking their declared sizes."""
    from scipy.io import loadmat, whosmat
    from scipy.io.matlab import MatReadError

    try:
        declared = sum(int(np.prod(shape, dtype=object)) for _, shape, _ in whosmat(source))
        if declared > _MAX_ARRAY_BYTES:
            raise ValueError(f"it declares {declared:,} values, too many")
        found = loadmat(source, variable_names=names, **options)
        return {name: found[name] for name in names}
    except (MatReadError, TypeError, KeyError) as error:
        raise ValueError(f"not the expected MATLAB file: {error}") from None


def tiny_imagenet_rows(originals: Mapping[str, Path], split: str) -> Iterator[Row]:
    """Tiny ImageNet: ``train/<id>/images``, or ``val/images`` with val_annotations.txt; labels follow wnids.txt."""
    top = "tiny-imagenet-200"
    with Archive(originals[f"{top}.zip"]) as files:
        ids = _read_text(files, f"{top}/wnids.txt").split()
        words = dict(line.split("\t", 1) for line in _read_text(files, f"{top}/words.txt").splitlines() if "\t" in line)
        label = {wnid: i for i, wnid in enumerate(ids)}
        if split == "val":
            lines = _read_text(files, f"{top}/val/val_annotations.txt").splitlines()
            pairs = [tuple(line.split("\t")[:2]) for line in lines if line]
            members = [(f"{top}/val/images/{file}", wnid) for file, wnid in pairs]
        else:
            images = _images(files, f"{top}/{split}/")
            members = [(name, PurePosixPath(name).parts[2]) for name in images]
        for name, wnid in members:
            if wnid not in label:
                raise ValueError(f"'{name}' belongs to the unknown class '{wnid}'")
            yield Row(files.read(name), label[wnid], f"{wnid} {words.get(wnid, '')}".strip())


def class_folder_rows(originals: Mapping[str, Path], archive: str) -> Iterator[Row]:
    """Encoded images in one folder per class; classes in the order of their names."""
    with Archive(originals[archive]) as files:
        names = _images(files)
        label = {folder: i for i, folder in enumerate(sorted(set(map(_folder, names))))}
        for name in names:
            yield Row(files.read(name), label[_folder(name)], _folder(name))


def image_list_rows(
    originals: Mapping[str, Path], archive: str, lists: str, member: str, names: Sequence[str] = ()
) -> Iterator[Row]:
    """Images of an archive that a list names, one per line: ``<data set>/<path in the archive> <label>``.

    Labels are those of the list and index ``names``; without names, images belong to the class of their folder.
    """
    with Archive(originals[lists]) as texts:
        lines = [line.rsplit(" ", 1) for line in _read_text(texts, member).splitlines() if line.strip()]
    with Archive(originals[archive], max_bytes=_LISTED_BYTES) as files:
        there = {name.removeprefix(f"{archive.removesuffix('.zip')}/"): name for name in files.names}
        folders: dict[str, int] = {}
        for place, said in lines:
            inside = place.partition("/")[2]
            if inside not in there:
                raise ValueError(f"'{place}' of '{member}' is not in '{archive}'")
            label = int(said) if names else folders.setdefault(_folder(place), len(folders))
            yield Row(files.read(there[inside]), label, _class_name(names, label, member) if names else _folder(place))


def plankton_rows(originals: Mapping[str, Path], part: int) -> Iterator[Row]:
    """PlanktonSet: class folders, cut 80:20 within each class in the order of a hash of the images; ``part`` 0 or 1."""
    with Archive(originals["train.zip"]) as files:
        names = sorted(_images(files), key=_folder)
        for label, (class_name, members) in enumerate(groupby(names, _folder)):
            group = sorted(members, key=lambda name: (hashlib.sha256(files.read(name)).digest(), name))
            first = int(share_out(len(group), (0.8, 0.2))[0])
            for name in group[:first] if part == 0 else group[first:]:
                yield Row(files.read(name), label, class_name)


def cifar_c_rows(
    originals: Mapping[str, Path], archive: str, pairs: Sequence[tuple[str, int]], names: Sequence[str]
) -> Iterator[Row]:
    """CIFAR-C: arrays (5 n, 32, 32, 3), one per family, with n images at each of five severities.

    One (family, severity) in ``pairs`` gives all its n images; of several, one is drawn for each image, with seed 0.
    """
    top = archive.removesuffix(".tar")
    with Archive(originals[archive]) as files:
        labels = np.load(io.BytesIO(files.read(f"{top}/labels.npy")), allow_pickle=False).astype(np.int64)
        n = len(labels) // 5
        rows = {family: ArrayRows(files, f"{top}/{family}.npy") for family in dict.fromkeys(f for f, _ in pairs)}
        for i, draw in enumerate(np.random.default_rng(0).integers(len(pairs), size=n)):
            family, severity = pairs[draw]
            pixels = np.frombuffer(rows[family][(severity - 1) * n + i], np.uint8).reshape(32, 32, 3)
            yield Row(encode_pixels(pixels), int(labels[i]), _class_name(names, int(labels[i]), archive))


class ArrayRows:
    """Rows of a uint8 ``.npy`` file inside an archive, read on demand; nothing is unpickled."""

    def __init__(self, files: Archive, name: str) -> None:
        self._file = files.open(name)
        version = np.lib.format.read_magic(self._file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        self._shape, by_column, dtype = read(self._file)
        self._start = self._file.tell()
        self._bytes = int(np.prod(self._shape[1:], dtype=np.int64))
        if dtype != np.uint8 or by_column or self._start + self._shape[0] * self._bytes != files.size(name):
            raise ValueError(f"'{name}' holds {dtype} of shape {self._shape}, not the expected array")

    def __getitem__(self, i: int) -> bytes:
        self._file.seek(self._start + i * self._bytes)
        return self._file.read(self._bytes)


def imagenet_train_rows(originals: Mapping[str, Path]) -> Iterator[Row]:
    """ImageNet, training images: a tar archive of one tar archive per class."""
    path = originals["ILSVRC2012_img_train.tar"]
    with Archive(path, max_bytes=_IMAGENET_BYTES) as classes:
        names = sorted(name for name in classes.names if name.endswith(".tar"))
        for label, name in enumerate(names):
            wnid = PurePosixPath(name).stem
            with classes.open(name) as file, Archive(file, name) as images:
                for image in _images(images):
                    yield Row(images.read(image), label, wnid, PurePosixPath(image).name)


def imagenet_val_rows(originals: Mapping[str, Path]) -> Iterator[Row]:
    """ImageNet, validation images by name; the development kit lists their classes in that order."""
    top = "ILSVRC2012_devkit_t12/data"
    with Archive(originals["ILSVRC2012_devkit_t12.tar.gz"]) as kit:
        truth = [int(line) for line in _read_text(kit, f"{top}/ILSVRC2012_validation_ground_truth.txt").split()]
        meta = io.BytesIO(kit.read(f"{top}/meta.mat"))
    synsets = _load_matlab(meta, ("synsets",), squeeze_me=True)["synsets"]
    wnid = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
    label = {name: i for i, name in enumerate(sorted(wnid.values()))}
    with Archive(originals["ILSVRC2012_img_val.tar"], max_bytes=_IMAGENET_BYTES) as files:
        names = sorted(_images(files))
        if len(names) != len(truth) or not set(truth) <= wnid.keys():
            raise ValueError(f"the development kit lists {len(truth)} images, not {len(names)}")
        for name, number in zip(names, truth):
            yield Row(files.read(name), label[wnid[number]], wnid[number], PurePosixPath(name).name)


def _images(files: Archive, under: str = "") -> list[str]:
    """Names of images in an archive below a folder, without hidden ones, in the order of the archive."""
    return [
        name
        for name in files.names
        if name.startswith(under)
        and name.lower().endswith(IMAGE_SUFFIXES)
        and not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
    ]


def _folder(name: str) -> str:
    return PurePosixPath(name).parent.name


def _read_text(files: Archive, name: str) -> str:
    if files.size(name) > _MAX_TEXT_BYTES:
        raise ValueError(f"'{name}' has {files.size(name):,} bytes, too many")
    return files.read(name).decode("utf-8", errors="replace")


_READERS = (
    *(cifar_rows, cifar_c_rows, class_folder_rows, image_list_rows, imagenet_train_rows, imagenet_val_rows),
    *(plankton_rows, svhn_rows, tiny_imagenet_rows),
)
READERS: Mapping[str, Callable[..., Iterator[Row]]] = {  # by their names in data_sets.toml
    reader.__name__.removesuffix("_rows"): reader for reader in _READERS
}
