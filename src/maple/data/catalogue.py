"""One table of data sets: what each is, where its authors keep it, and how it becomes the project's files.

Each set has *originals*, the files as their authors publish them, and *splits*, each made from some originals by a
function that yields one :class:`Row` per image. :func:`get_data_set` fetches what can be fetched, verifies it and
writes the splits that are missing, one image at a time:

    <root>/.originals/<name>/<file>      the originals; may be removed once converted
    <root>/<name>/<split>.parquet        columns image (encoded bytes), label (int64), label_name (string)
    <root>/originals.lock.json           size and checksums of every original at its first download

Pixels that come as arrays are stored as lossless WebP, and images that come encoded keep their bytes. No original is
unpickled: CIFAR is taken in its binary version, and arrays are read as plain numbers or not at all.

ImageNet alone becomes folders, ``<root>/imagenet/train/<class>/``: 140 GB of encoded images do not fit into memory,
where a Parquet column is held, while image folders are read one file at a time.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from maple.data.decode import check_file_size
from maple.data.download import BROKEN, Archive, Checksum, download, verify
from maple.data.image_set import Progress
from maple.data.sources import IMAGE_SUFFIXES, find_data_root, find_source, is_built_in, split_files
from maple.data.splits import share_out
from maple.errors import DataError, RunError, UsageError
from maple.files import load_json, save_json
from maple.progress import counting, say, warn

LOCK = "originals.lock.json"
ORIGINALS = ".originals"
_ROW_GROUP_BYTES = 32 * 2**20
_MAX_ARRAY_BYTES = 2 * 2**30  # of a MATLAB file, which is read whole
_MAX_TEXT_BYTES = 64 * 2**20


class Row(NamedTuple):
    """One image on its way into a split."""

    image: bytes  # encoded
    label: int
    label_name: str
    file: str = ""  # what it is called in an image folder


Rows = Callable[[Mapping[str, Path]], Iterator[Row]]  # from the paths of the originals, by name


@dataclass(frozen=True)
class Original:
    """A file as its authors publish it. Without ``url`` it has to be fetched by hand; no checksum here is a guess."""

    name: str
    url: str = ""
    expected: Checksum = Checksum()


@dataclass(frozen=True)
class Split:
    """A part of a data set: how many images, and how to make them from which originals."""

    name: str
    images: int
    rows: Rows | None = None
    originals: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """What is known of a data set."""

    name: str
    title: str
    paper: str
    licence: str
    classes: int
    page: str = ""
    originals: tuple[Original, ...] = ()
    splits: tuple[Split, ...] = ()
    as_folder: bool = False  # image folders instead of Parquet
    note: str = ""  # what else one has to know to get it, or to use it


# --- originals into rows ----------------------------------------------------------------------------------------------


def encode_pixels(pixels: np.ndarray) -> bytes:
    """An image (H, W, 3) uint8 as lossless WebP."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "WEBP", lossless=True, method=0)
    return file.getvalue()


def cifar_rows(
    originals: Mapping[str, Path], archive: str, members: Sequence[str], label_bytes: int, names: Sequence[str]
) -> Iterator[Row]:
    """The binary version: records of label bytes (the last is the class), then 32 x 32 red, green and blue values."""
    with Archive(originals[archive]) as files:
        for member in members:
            with files.open(member) as file:
                while record := file.read(label_bytes + 3072):
                    if len(record) < label_bytes + 3072:
                        raise DataError(f"'{member}' in '{originals[archive]}' is cut short: fetch the archive again")
                    pixels = np.frombuffer(record, np.uint8, offset=label_bytes).reshape(3, 32, 32)
                    label = record[label_bytes - 1]
                    yield Row(encode_pixels(pixels.transpose(1, 2, 0)), label, _class_name(names, label, member))


def _class_name(names: Sequence[str], label: int, where: str) -> str:
    if not 0 <= label < len(names):
        raise DataError(f"'{where}' holds label {label}, and there are {len(names)} classes: fetch the file again")
    return names[label]


def svhn_rows(originals: Mapping[str, Path], file: str) -> Iterator[Row]:
    """MATLAB arrays X (32, 32, 3, N) and y (N, 1), in which digit 0 has label 10."""
    arrays = _load_matlab(originals[file], str(originals[file]), ("X", "y"))
    x, y = arrays["X"], arrays["y"].ravel()
    if x.ndim != 4 or x.shape[2] != 3 or x.dtype != np.uint8 or x.shape[3] != len(y):
        raise DataError(
            f"'{originals[file]}' holds arrays of shapes {x.shape} and {y.shape}: it is not SVHN's format 2"
        )
    for i, label in enumerate(y.astype(np.int64) % 10):
        yield Row(encode_pixels(np.ascontiguousarray(x[..., i])), int(label), str(label))


def _load_matlab(source: Path | BinaryIO, label: str, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """Arrays of a MATLAB file, once their declared sizes are accepted."""
    from scipy.io import loadmat, whosmat
    from scipy.io.matlab import MatReadError

    try:
        declared = sum(int(np.prod(shape, dtype=object)) for _, shape, _ in whosmat(source))
        if declared > _MAX_ARRAY_BYTES:
            raise DataError(f"'{label}' declares {declared:,} values: it is not the file that was expected")
        found = loadmat(source, variable_names=names, **options)
    except (MatReadError, TypeError, KeyError, *BROKEN) as error:
        raise DataError(f"cannot read '{label}' as a MATLAB file: {error}; fetch it again") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"'{label}' holds no array '{missing[0]}': it is not the file that was expected")
    return found


def tiny_imagenet_rows(originals: Mapping[str, Path], split: str) -> Iterator[Row]:
    """``train/<id>/images/*.JPEG``, or ``val/images/*.JPEG`` with ``val_annotations.txt``; labels follow wnids.txt."""
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
                raise DataError(f"'{name}' belongs to the unknown class '{wnid}': fetch the archive again")
            yield Row(files.read(name), label[wnid], f"{wnid} {words.get(wnid, '')}".strip())


def class_folder_rows(originals: Mapping[str, Path], archive: str) -> Iterator[Row]:
    """Encoded images in one folder per class; classes in the order of their names."""
    with Archive(originals[archive]) as files:
        names = _images(files)
        label = _label_folders(names)
        for name in names:
            class_name = PurePosixPath(name).parent.name
            yield Row(files.read(name), label[class_name], class_name)


def plankton_rows(originals: Mapping[str, Path], part: int) -> Iterator[Row]:
    """Class folders, cut 80:20 within each class in the order of a hash of the images: ``part`` 0 or 1."""
    with Archive(originals["train.zip"]) as files:
        names = _images(files)
        label = _label_folders(names)
        members: dict[str, list[str]] = {class_name: [] for class_name in label}
        for name in names:
            members[PurePosixPath(name).parent.name].append(name)
        for class_name, group in members.items():
            group.sort(key=lambda name: (hashlib.sha256(files.read(name)).digest(), name))
            first = int(share_out(len(group), (0.8, 0.2))[0])
            for name in group[:first] if part == 0 else group[first:]:
                yield Row(files.read(name), label[class_name], class_name)


def cifar_c_rows(
    originals: Mapping[str, Path], archive: str, pairs: Sequence[tuple[str, int]], names: Sequence[str]
) -> Iterator[Row]:
    """Arrays (5 n, 32, 32, 3), one per family, with n images at each of five severities.

    With one (family, severity) in ``pairs`` all n images of it; with several one of them for each image, drawn with
    seed 0.
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
    """The rows of a uint8 ``.npy`` file inside an archive, each read when it is asked for; nothing is unpickled."""

    def __init__(self, files: Archive, name: str) -> None:
        self._file = files.open(name)
        try:
            version = np.lib.format.read_magic(self._file)
            headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            self._shape, by_column, dtype = headers[version](self._file)
        except (KeyError, *BROKEN) as error:
            raise DataError(f"cannot read '{name}' as an array: {error}; fetch the archive again") from None
        self._start = self._file.tell()
        self._bytes = int(np.prod(self._shape[1:], dtype=np.int64))
        if dtype != np.uint8 or by_column or self._start + self._shape[0] * self._bytes != files.size(name):
            raise DataError(f"'{name}' holds {dtype} of shape {self._shape}: it is not the array that was expected")

    def __getitem__(self, i: int) -> bytes:
        self._file.seek(self._start + i * self._bytes)
        return self._file.read(self._bytes)


def imagenet_train_rows(originals: Mapping[str, Path]) -> Iterator[Row]:
    """A tar archive of one tar archive per class."""
    path = originals["ILSVRC2012_img_train.tar"]
    with Archive(path, max_bytes=_IMAGENET_BYTES) as classes:
        names = sorted(name for name in classes.names if name.endswith(".tar"))
        for label, name in enumerate(names):
            wnid = PurePosixPath(name).stem
            with classes.open(name) as file, Archive(file, name) as images:
                for image in _images(images):
                    yield Row(images.read(image), label, wnid, PurePosixPath(image).name)


def imagenet_val_rows(originals: Mapping[str, Path]) -> Iterator[Row]:
    """Images in the order of their names; the development kit has their classes in the same order."""
    top = "ILSVRC2012_devkit_t12/data"
    with Archive(originals["ILSVRC2012_devkit_t12.tar.gz"]) as kit:
        truth = [int(line) for line in _read_text(kit, f"{top}/ILSVRC2012_validation_ground_truth.txt").split()]
        meta = io.BytesIO(kit.read(f"{top}/meta.mat"))
    synsets = _load_matlab(meta, "meta.mat", ("synsets",), squeeze_me=True)["synsets"]
    wnid = {int(s["ILSVRC2012_ID"]): str(s["WNID"]) for s in synsets if int(s["num_children"]) == 0}
    label = {name: i for i, name in enumerate(sorted(wnid.values()))}
    with Archive(originals["ILSVRC2012_img_val.tar"], max_bytes=_IMAGENET_BYTES) as files:
        names = sorted(_images(files))
        if len(names) != len(truth) or not set(truth) <= wnid.keys():
            raise DataError(f"the development kit has classes for {len(truth)} images, not for {len(names)}")
        for name, number in zip(names, truth):
            yield Row(files.read(name), label[wnid[number]], wnid[number], PurePosixPath(name).name)


def _images(files: Archive, under: str = "") -> list[str]:
    """Images in an archive below a folder, without hidden ones, in the order of the archive."""
    return [
        name
        for name in files.names
        if name.startswith(under)
        and name.lower().endswith(IMAGE_SUFFIXES)
        and not any(part.startswith((".", "__MACOSX")) for part in PurePosixPath(name).parts)
    ]


def _label_folders(names: Sequence[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(sorted({PurePosixPath(name).parent.name for name in names}))}


def _read_text(files: Archive, name: str) -> str:
    if files.size(name) > _MAX_TEXT_BYTES:
        raise DataError(f"'{name}' has {files.size(name):,} bytes: it is not the file that was expected")
    return files.read(name).decode("utf-8", errors="replace")


# --- the table --------------------------------------------------------------------------------------------------------

_IMAGENET_BYTES = 160 * 10**9

CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# fmt: off
CIFAR100_NAMES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)
# fmt: on
_STANDARD = (  # the 15 families that published means are taken over
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    *("snow", "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression"),
)
_EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")


def _cifar(
    name: str, title: str, archive: str, expected: Checksum, files: Mapping[str, Sequence[str]], **format: Any
) -> DataSet:
    return DataSet(
        name=name,
        title=title,
        paper="Krizhevsky, 'Learning Multiple Layers of Features from Tiny Images', 2009",
        licence="no formal licence; free for research with citation",
        classes=len(format["names"]),
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        originals=(Original(archive, f"https://www.cs.toronto.edu/~kriz/{archive}", expected),),
        splits=tuple(
            Split(
                split,
                {"train": 50_000, "test": 10_000}[split],
                partial(cifar_rows, archive=archive, members=members, **format),
                (archive,),
            )
            for split, members in files.items()
        ),
    )


def _cifar_c(name: str, clean: str, names: Sequence[str], record: int, archive: str, expected: Checksum) -> DataSet:
    pairs = {"test": [(family, severity) for family in _STANDARD for severity in range(1, 6)]}
    for family in (*_STANDARD, *_EXTRA):
        pairs |= {f"{family.replace('_', '-')}-{severity}": [(family, severity)] for severity in range(1, 6)}
    return DataSet(
        name=name,
        title=f"{clean.upper()[:5]}-{clean[5:]}-C: the test images of {clean}, corrupted in 19 ways at 5 severities",
        paper="Hendrycks & Dietterich, 'Benchmarking Neural Network Robustness to Common Corruptions and "
        "Perturbations', ICLR 2019, https://arxiv.org/abs/1903.12261",
        licence="Creative Commons Attribution 4.0",
        classes=len(names),
        page=f"https://zenodo.org/records/{record}",
        originals=(Original(archive, f"https://zenodo.org/records/{record}/files/{archive}", expected),),
        splits=tuple(
            Split(split, 10_000, partial(cifar_c_rows, archive=archive, pairs=drawn, names=names), (archive,))
            for split, drawn in pairs.items()
        ),
        note=f"test holds one of the 15 standard families at one severity for each image (seed 0), fog-3 the images "
        f"with fog at severity 3; 'corrupted:{clean}/test' makes such images without a download",
    )


_SETS = (
    _cifar(
        "cifar10",
        "CIFAR-10: photographs of 10 kinds of animals and vehicles, 32 x 32 pixels",
        "cifar-10-binary.tar.gz",
        Checksum(
            170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
        {
            "train": [f"cifar-10-batches-bin/data_batch_{i}.bin" for i in range(1, 6)],
            "test": ["cifar-10-batches-bin/test_batch.bin"],
        },
        label_bytes=1,
        names=CIFAR10_NAMES,
    ),
    _cifar(
        "cifar100",
        "CIFAR-100: photographs of 100 kinds of things, 32 x 32 pixels, fine labels",
        "cifar-100-binary.tar.gz",
        Checksum(
            168_513_733,
            "03b5dce01913d631647c71ecec9e9cb8",
            "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        ),
        {"train": ["cifar-100-binary/train.bin"], "test": ["cifar-100-binary/test.bin"]},
        label_bytes=2,
        names=CIFAR100_NAMES,
    ),
    DataSet(
        name="svhn",
        title="SVHN: digits of house numbers, 32 x 32 pixels (format 2)",
        paper="Netzer et al., 'Reading Digits in Natural Images with Unsupervised Feature Learning', 2011",
        licence="non-commercial use only",
        classes=10,
        page="http://ufldl.stanford.edu/housenumbers/",
        originals=(
            Original(
                "train_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/train_32x32.mat",
                Checksum(
                    182_040_794,
                    "e26dedcc434d2e4c54c9b2d4a06d8373",
                    "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
                ),
            ),
            Original(
                "test_32x32.mat",
                "http://ufldl.stanford.edu/housenumbers/test_32x32.mat",
                Checksum(
                    64_275_384,
                    "eb5a983be6a315427106f1b164d9cef3",
                    "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
                ),
            ),
        ),
        splits=tuple(
            Split(split, images, partial(svhn_rows, file=f"{split}_32x32.mat"), (f"{split}_32x32.mat",))
            for split, images in {"train": 73_257, "test": 26_032}.items()
        ),
    ),
    DataSet(
        name="tiny_imagenet",
        title="Tiny ImageNet: 200 classes of ImageNet, 64 x 64 pixels",
        paper="Le & Yang, 'Tiny ImageNet Visual Recognition Challenge', Stanford CS 231N, 2015",
        licence="ImageNet's terms: non-commercial research and education; images belong to their owners",
        classes=200,
        page="http://cs231n.stanford.edu/",
        originals=(
            Original(
                "tiny-imagenet-200.zip",
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                Checksum(248_100_043, "90528d7ca1a48142e341f4ef8d21d0de"),
            ),
        ),
        splits=tuple(
            Split(split, images, partial(tiny_imagenet_rows, split=split), ("tiny-imagenet-200.zip",))
            for split, images in {"train": 100_000, "val": 10_000}.items()
        ),
        note="its 10,000 test images have no labels and are left out",
    ),
    DataSet(
        name="imagenet",
        title="ImageNet (ILSVRC 2012): photographs of 1,000 kinds of things",
        paper="Russakovsky et al., 'ImageNet Large Scale Visual Recognition Challenge', IJCV 2015, "
        "https://arxiv.org/abs/1409.0575",
        licence="ImageNet's terms, which one has to accept: non-commercial research and education",
        classes=1000,
        page="https://image-net.org/challenges/LSVRC/2012/2012-downloads.php",
        originals=(
            Original("ILSVRC2012_img_train.tar", "", Checksum(147_897_477_120, "1d675b47d978889d74fa0da5fadfb00e")),
            Original("ILSVRC2012_img_val.tar", "", Checksum(6_744_924_160, "29b22e2961454d5413ddabcf34fc5622")),
            Original("ILSVRC2012_devkit_t12.tar.gz", "", Checksum(None, "fa75699e90414af021442c21a62c3abf")),
        ),
        splits=(
            Split("train", 1_281_167, imagenet_train_rows, ("ILSVRC2012_img_train.tar",)),
            Split("val", 50_000, imagenet_val_rows, ("ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")),
        ),
        as_folder=True,
        note="an existing copy with the folders train/<class> and val/<class> can be linked into the data root instead",
    ),
    DataSet(
        name="imagenet_o",
        title="ImageNet-O: images of 200 classes that ImageNet's 1,000 do not have, picked to deceive",
        paper="Hendrycks et al., 'Natural Adversarial Examples', CVPR 2021, https://arxiv.org/abs/1907.07174",
        licence="MIT for the collection; images belong to their owners",
        classes=200,
        page="https://github.com/hendrycks/natural-adv-examples",
        originals=(
            Original(
                "imagenet-o.tar",
                "https://people.eecs.berkeley.edu/~hendrycks/imagenet-o.tar",
                Checksum(None, "86bd7a50c1c4074fb18fc5f219d6d50b"),
            ),
        ),
        splits=(Split("test", 2_000, partial(class_folder_rows, archive="imagenet-o.tar"), ("imagenet-o.tar",)),),
    ),
    _cifar_c(
        "cifar10_c",
        "cifar10",
        CIFAR10_NAMES,
        2_535_967,
        "CIFAR-10-C.tar",
        Checksum(
            2_918_471_680,
            "56bf5dcef84df0e2308c6dcbcbbd8499",
            "c72763e101c723b7c507b96205f7e938912a5d587376173b825850cf3cb876a7",
        ),
    ),
    _cifar_c(
        "cifar100_c",
        "cifar100",
        CIFAR100_NAMES,
        3_555_552,
        "CIFAR-100-C.tar",
        Checksum(
            2_918_473_216,
            "11f0ed0f1191edbf9fa23466ae6021d3",
            "30ee6543a1bfd049fa33834b7c1ada301e7064b7fbe8fc38340eb8b62ced4b33",
        ),
    ),
    DataSet(
        name="diatoms",
        title="diatoms: the microscope images of the paper, 166 taxa, 256 x 256 pixels",
        paper="Venkataramanan et al., 'Usefulness of synthetic datasets for diatom automatic detection using a "
        "deep-learning approach', Engineering Applications of Artificial Intelligence, 2023",
        licence="not public",
        classes=166,
        note="put images of your own under the data root, one folder per taxon: diatoms/train/<taxon>/*.png, with "
        "test/ or validation/ beside train/ if you have such; or diatoms/<taxon>/*.png alone, to be cut into splits",
    ),
    DataSet(
        name="plankton_ndsb",
        title="PlanktonSet 1.0 (National Data Science Bowl): shadow images of plankton, 121 classes",
        paper="Cowen, Sponaugle, Robinson & Luo, 'PlanktonSet 1.0', NOAA NCEI accession 0127422, 2015",
        licence="archive of the US NOAA, cite the accession; the rules of the competition for Kaggle's copy",
        classes=121,
        page="https://www.kaggle.com/c/datasciencebowl/data",
        originals=(Original("train.zip"),),
        splits=(
            Split("train", 24_265, partial(plankton_rows, part=0), ("train.zip",)),
            Split("test", 6_071, partial(plankton_rows, part=1), ("train.zip",)),
        ),
        note="train.zip holds one folder per class; the cut into train and test, 80:20 within each class, is ours",
    ),
    DataSet(
        name="digits",
        title="handwritten digits, 8 x 8 pixels",
        paper="Alpaydin & Kaynak, 'Optical Recognition of Handwritten Digits', UCI, 1998 (the part in scikit-learn)",
        licence="Creative Commons Attribution 4.0",
        classes=10,
    ),
    DataSet(
        name="simulated-diatoms",
        title="simulated diatoms, drawn by formula; /near are other taxa, /far other things on the slide",
        paper="part of this package",
        licence="MIT",
        classes=8,
        note="simulated-diatoms?n=5000&seed=3&size=64&taxa=12 asks for other numbers",
    ),
)

CATALOGUE: Mapping[str, DataSet] = {data_set.name: data_set for data_set in _SETS}


def find_data_set(source: str) -> DataSet | None:
    """The entry for a name, a name with one of its splits, or ``None``.

    >>> find_data_set("cifar10/test").classes, find_data_set("cifar10/tst"), find_data_set("my/folder")
    (10, None, None)
    """
    name, _, split = str(source).partition("?")[0].partition("/")
    data_set = CATALOGUE.get(name)
    if data_set is None or is_built_in(source):
        return data_set
    return data_set if split in ("", *(part.name for part in data_set.splits)) else None


# --- getting ----------------------------------------------------------------------------------------------------------


def get_data_set(source: str, data_root: str | Path | None = None) -> list[Path]:
    """Fetch the originals of a data set, and write the splits that are missing under the data root; their paths.

    What is there is left alone. Where some originals have to be fetched by hand, the splits that can be made are made.
    """
    data_set = find_data_set(source)
    if data_set is None:
        raise UsageError(f"'{source}' is not in the catalogue: 'maple data' lists what can be got")
    if not data_set.originals:
        reason = (
            "is built in, nothing has to be got"
            if is_built_in(data_set.name)
            else f"cannot be fetched: {data_set.note}"
        )
        raise UsageError(f"'{data_set.name}' {reason}")
    root = find_data_root(data_root)
    if root is None:
        raise UsageError("there is no folder for data sets: set MAPLE_DATA or give --data-root")
    there = split_files(root / data_set.name) if (root / data_set.name).is_dir() else {}
    missing = [split for split in data_set.splits if split.name not in there]
    ready = [split for split in missing if not _to_fetch_by_hand(data_set, split, root)]
    if missing and not ready:
        raise DataError(_ask_for(data_set, missing, root))
    if len(ready) < len(missing):
        warn(_ask_for(data_set, [split for split in missing if split not in ready], root))
    originals = {
        name: _fetch(data_set, _original(data_set, name), root)
        for name in dict.fromkeys(name for split in ready for name in split.originals)
    }
    return [_convert(data_set, split, originals, root) for split in ready]


def _original(data_set: DataSet, name: str) -> Original:
    return next(original for original in data_set.originals if original.name == name)


def original_path(data_set: DataSet, original: Original, root: Path) -> Path:
    """Where an original is looked for, and put."""
    return root / ORIGINALS / data_set.name / original.name


def _to_fetch_by_hand(data_set: DataSet, split: Split, root: Path) -> list[Original]:
    """Originals that a split needs, that nobody but the user can fetch, and that are not there."""
    needed = [_original(data_set, name) for name in split.originals]
    return [o for o in needed if not o.url and not original_path(data_set, o, root).is_file()]


def _ask_for(data_set: DataSet, splits: Sequence[Split], root: Path) -> str:
    absent = list(dict.fromkeys(o for split in splits for o in _to_fetch_by_hand(data_set, split, root)))
    names, paths = ", ".join(o.name for o in absent), ", ".join(f"'{original_path(data_set, o, root)}'" for o in absent)
    which = ", ".join(split.name for split in splits)
    return (
        f"{data_set.name}/{which} needs {names}, which cannot be fetched without you: get it from {data_set.page}, put "
        f"it at {paths}, then run the same command"
    )


def _fetch(data_set: DataSet, original: Original, root: Path) -> Path:
    """An original that is there and as it should be; its checksums are on record from now on."""
    path, lock, key = original_path(data_set, original, root), root / LOCK, f"{data_set.name}/{original.name}"
    recorded = _read_lock(lock).get(key)
    expected = original.expected if original.expected.known or recorded is None else recorded
    try:
        found = _download(original, path, expected) if original.url else verify(path, expected)
    except DataError as error:
        if expected is recorded:
            raise DataError(f"{error}; if its authors replaced it, remove '{key}' from '{lock}'") from None
        raise
    if recorded is None:
        files = {**_read_lock(lock), key: found}
        save_json(lock, {"originals": {name: asdict(checksum) for name, checksum in sorted(files.items())}})
    return path


def _download(original: Original, path: Path, expected: Checksum) -> Checksum:
    with counting(f"fetching {original.name} (MB)") as bar:
        progress = None if bar is None else (lambda done, total: bar(done // 10**6, total // 10**6))
        return download(original.url, path, expected, progress=progress)


def _read_lock(path: Path) -> dict[str, Checksum]:
    if not path.exists():
        return {}
    try:
        return {name: Checksum(**entry) for name, entry in load_json(path)["originals"].items()}
    except (RunError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"'{path}' is damaged ({error}): remove it, then run the same command") from None


def _convert(data_set: DataSet, split: Split, originals: Mapping[str, Path], root: Path) -> Path:
    assert split.rows is not None
    where = f"{data_set.name}/{split.name}"
    with counting(f"converting {where}") as progress:
        try:
            rows = _counted(split.rows(originals), split.images, where, progress)
            write = write_folder if data_set.as_folder else write_parquet
            path = write(root / data_set.name / split.name, rows)
        except BROKEN as error:
            used = ", ".join(f"'{originals[name]}'" for name in split.originals)
            raise DataError(
                f"cannot make {where} from {used}: {error}; check the disk, or fetch the files again"
            ) from None
    say(f"{where}: {split.images:,} images, {path}")
    return path


def _counted(rows: Iterator[Row], images: int, where: str, progress: Progress | None) -> Iterator[Row]:
    """The same rows, of which there must be as many as were published."""
    n = 0
    for row in rows:
        check_file_size(len(row.image))
        yield row
        n += 1
        if progress is not None and (n % 100 == 0 or n == images):
            progress(n, images)
    if n != images:
        raise DataError(
            f"{where} has {n:,} images, should be {images:,}: the originals are not those that were expected"
        )


# --- writing ----------------------------------------------------------------------------------------------------------

_SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int64()), ("label_name", pa.string())])


def write_parquet(path: Path, rows: Iterator[Row]) -> Path:
    """Rows into ``<path>.parquet``, which appears when it is complete; no more than a row group is in memory."""
    target = path.with_name(path.name + ".parquet")
    with _temporary(target) as part, pq.ParquetWriter(part, _SCHEMA, compression="zstd") as writer:
        group: list[Row] = []
        size = 0
        for row in rows:
            group.append(row)
            size += len(row.image)
            if size >= _ROW_GROUP_BYTES:
                writer.write_table(_table(group))
                group, size = [], 0
        if group:
            writer.write_table(_table(group))
    return target


def _table(group: Sequence[Row]) -> pa.Table:
    image, label, label_name, _ = zip(*group)
    return pa.table([image, label, label_name], schema=_SCHEMA)


def write_folder(path: Path, rows: Iterator[Row]) -> Path:
    """Rows into ``<path>/<class>/<file>``; the folder appears when it is complete."""
    with _temporary(path) as part:
        for row in rows:
            for name in (row.label_name, row.file):
                if not name or name.startswith(".") or "/" in name or "\\" in name:
                    raise DataError(f"'{name}' cannot be the name of a file or folder: fetch the originals again")
            folder = part / row.label_name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / row.file).write_bytes(row.image)
    return path


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A path beside ``target`` that becomes it in the end, or vanishes."""
    workplace = target.with_name(f".{target.name}.part")
    shutil.rmtree(workplace, ignore_errors=True)  # left by a process that was killed
    workplace.mkdir(parents=True)
    part = workplace / target.name
    try:
        yield part
        if part.is_file():
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:  # also on Ctrl-C
        shutil.rmtree(workplace, ignore_errors=True)
        if not any(target.parent.iterdir()):
            target.parent.rmdir()  # an empty folder would pass for a data set


# --- describing -------------------------------------------------------------------------------------------------------


def locate(source: str, data_root: str | Path | None = None) -> Path | None:
    """The file or folder that a source means, if it is there and not empty."""
    try:
        path = None if is_built_in(source) else find_source(source, data_root)
    except UsageError:
        return None
    if path is not None and path.is_dir() and all(entry.name.startswith(".") for entry in path.iterdir()):
        return None
    return path


def describe_data_set(data_set: DataSet, data_root: str | Path | None = None) -> dict[str, Any]:
    """What a data set is, where it was looked for, and how to get it."""
    root = find_data_root(data_root)
    return {
        "title": data_set.title,
        "paper": data_set.paper,
        "licence": data_set.licence,
        "original": _original_size(data_set),
        "looked in": _looked_in(data_set, root),
        "how to get": _how_to_get(data_set, root),
    }


def _original_size(data_set: DataSet) -> str:
    """Images and classes of the original: ``train 50,000, test 10,000; 10 classes``."""
    shown = [f"{split.name} {split.images:,}" for split in data_set.splits[:3]]
    more = [f"{len(data_set.splits) - 3} more"] if len(data_set.splits) > 3 else []
    return "; ".join(filter(None, [", ".join(shown + more), f"{data_set.classes:,} classes"]))


def _looked_in(data_set: DataSet, root: Path | None) -> list[str]:
    if is_built_in(data_set.name):
        return ["built in"]
    under = (
        "no data root: set MAPLE_DATA or give --data-root" if root is None else str((root / data_set.name).absolute())
    )
    return [str(Path(data_set.name).absolute()), under]


def _how_to_get(data_set: DataSet, root: Path | None) -> list[str]:
    """Lines for the person who wants it."""
    note = [data_set.note] if data_set.note else []
    if not data_set.originals:
        return note or ["nothing has to be got"]
    command = f"maple data {data_set.name} --get" + ("" if root is not None else " --data-root FOLDER")
    first = (
        f"{command} fetches and converts"
        if all(original.url for original in data_set.originals)
        else f"by hand from {data_set.page} to the places below; then {command} converts"
    )
    files = [
        f"{original.url or original.name} ({_facts(original)}) to "
        f"{original_path(data_set, original, root or Path('FOLDER'))}"
        for original in data_set.originals
    ]
    return [first, *files, *note]


def _facts(original: Original) -> str:
    size, md5 = original.expected.bytes, original.expected.md5
    shown = [] if size is None else [f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"]
    return ", ".join([*shown, f"md5 {md5}" if md5 else f"no published checksum: the first one is kept in {LOCK}"])
