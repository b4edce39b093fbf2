"""The data sets that the project knows: what each is, where its authors keep it, and how its splits are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from maple.data.catalogue.records import Checksum, DataSet, Original, Split
from maple.data.catalogue.rows import (
    cifar_c_rows,
    cifar_rows,
    class_folder_rows,
    imagenet_train_rows,
    imagenet_val_rows,
    plankton_rows,
    svhn_rows,
    tiny_imagenet_rows,
)

BUILT_IN = ("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far")
CORRUPTED = "corrupted:"  # prefix of a source that is another one, corrupted

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


def is_corrupted(source: Any) -> bool:
    """Whether a source is another one, corrupted."""
    return isinstance(source, str) and source.startswith(CORRUPTED)


def is_built_in(source: Any) -> bool:
    """Whether images are made, not read from a file: a built-in set, or a corrupted one.

    ``digits`` is always the built-in set; a folder of that name is ``./digits``.
    """
    if is_corrupted(source):
        return True
    name = source.partition("?")[0] if isinstance(source, str) else ""
    return name in BUILT_IN or (name.partition("/")[0] in BUILT_IN and not Path(source).exists())


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
