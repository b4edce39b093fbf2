"""Readers of originals, each on a tiny file of its format, and on files that are not what they should be."""

from __future__ import annotations

import io
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.io import savemat

from image_files import encode, noise
from maple.data.catalogue.get import LOCK
from maple.data.catalogue.table import CATALOGUE, EXTRA_FAMILIES, STANDARD_FAMILIES
from maple.data.sources import open_images
from maple.errors import DataError
from maple.evaluation.paper.profiles import PROTOCOLS
from published import Shop, cifar_records, npy, tar, zipped

CIFAR10_NAMES, CIFAR100_NAMES = (CATALOGUE[name].class_names for name in ("cifar10", "cifar100"))


def test_cifar10(shop: Shop, rng: np.random.Generator) -> None:
    batches = [cifar_records(rng, 3, coarse=False) for _ in range(6)]
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    members = {f"cifar-10-batches-bin/{name}.bin": records for name, (records, _, _) in zip(names, batches)}
    members = dict(reversed(members.items())) | {"cifar-10-batches-bin/readme.html": b"<html>"}
    shop.publish("cifar10", {"cifar-10-binary.tar.gz": tar(members, "w:gz")}, {"train": 15, "test": 3})
    assert shop.get("cifar10") == [shop.root / "cifar10" / f"{split}.parquet" for split in ("train", "test")]
    pixels, labels, label_names = shop.read("cifar10/train")
    np.testing.assert_array_equal(pixels, np.concatenate([batch[1] for batch in batches[:5]]))
    assert labels == [label for batch in batches[:5] for label in batch[2]]
    assert label_names == [CIFAR10_NAMES[label] for label in labels]
    np.testing.assert_array_equal(shop.read("cifar10/test")[0], batches[5][1])
    opened = open_images("cifar10/test", data_root=shop.root)
    np.testing.assert_array_equal(opened.pixels, batches[5][1])
    assert sorted(path.name for path in (shop.root / "cifar10").iterdir()) == ["test.parquet", "train.parquet"]


def test_cifar100_takes_fine_labels(shop: Shop, rng: np.random.Generator) -> None:
    train, test = cifar_records(rng, 4, coarse=True), cifar_records(rng, 2, coarse=True)
    files = {"cifar-100-binary/train.bin": train[0], "cifar-100-binary/test.bin": test[0]}
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 4, "test": 2})
    shop.get("cifar100")
    pixels, labels, label_names = shop.read("cifar100/train")
    np.testing.assert_array_equal(pixels, train[1])
    assert labels == train[2] and label_names == [CIFAR100_NAMES[label] for label in labels]


def test_svhn(shop: Shop, rng: np.random.Generator) -> None:
    files, images = {}, {}
    for split, n in (("train", 4), ("test", 3)):
        images[split] = rng.integers(0, 256, (32, 32, 3, n), dtype=np.uint8)
        buffer = io.BytesIO()
        savemat(buffer, {"X": images[split], "y": np.array([[10], [1], [9], [10]][:n], np.uint8)}, do_compression=True)
        files[f"{split}_32x32.mat"] = buffer.getvalue()
    shop.publish("svhn", files, {"train": 4, "test": 3})
    shop.get("svhn")
    pixels, labels, label_names = shop.read("svhn/train")
    np.testing.assert_array_equal(pixels, np.moveaxis(images["train"], 3, 0))
    assert labels == [0, 1, 9, 0] and label_names == ["0", "1", "9", "0"]
    assert len(shop.read("svhn/test")[0]) == 3


def test_tiny_imagenet(shop: Shop, rng: np.random.Generator) -> None:
    jpegs = [encode(noise(rng, (64, 64)), "JPEG") for _ in range(5)]
    top = "tiny-imagenet-200"
    archive = zipped(
        {
            f"{top}/wnids.txt": b"n02\nn01\n",
            f"{top}/words.txt": b"n01\tgoldfish, Carassius auratus\nn02\tEgyptian cat\nn03\tother\n",
            f"{top}/train/n01/images/n01_0.JPEG": jpegs[0],
            f"{top}/train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t9\t9\n",
            f"{top}/train/n02/images/n02_0.JPEG": jpegs[1],
            f"{top}/val/val_annotations.txt": b"val_1.JPEG\tn02\t0\t0\t9\t9\nval_0.JPEG\tn01\t0\t0\t9\t9\n",
            f"{top}/val/images/val_0.JPEG": jpegs[2],
            f"{top}/val/images/val_1.JPEG": jpegs[3],
            f"{top}/test/images/test_0.JPEG": jpegs[4],
        }
    )
    shop.publish("tiny_imagenet", {f"{top}.zip": archive}, {"train": 2, "val": 2})
    shop.get("tiny_imagenet")
    table = pq.read_table(shop.root / "tiny_imagenet/train.parquet").to_pydict()
    assert table["image"] == jpegs[:2]  # the original bytes
    assert table["label"] == [1, 0]
    assert table["label_name"] == ["n01 goldfish, Carassius auratus", "n02 Egyptian cat"]
    table = pq.read_table(shop.root / "tiny_imagenet/val.parquet").to_pydict()
    assert table["image"] == [jpegs[3], jpegs[2]] and table["label"] == [0, 1]


def publish_imagenet(shop: Shop, rng: np.random.Generator) -> dict[str, bytes]:
    """Two classes and an inner node of WordNet; class numbers run against the order of the names."""
    jpegs = {f"{i}": encode(noise(rng), "JPEG") for i in range(6)}
    train = {
        "n02.tar": tar({"n02_7.JPEG": jpegs["0"], "n02_8.JPEG": jpegs["1"]}),
        "n01.tar": tar({"n01_5.JPEG": jpegs["2"]}),
    }
    val = {f"ILSVRC2012_val_0000000{i}.JPEG": jpegs[f"{i + 2}"] for i in (3, 1, 2)}
    kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
    synsets = np.array(
        [(1, "n02", "cat", "a cat", 0), (2, "n01", "fish", "a fish", 0), (3, "n00", "animal", "any", 2)], dtype=kinds
    )
    buffer = io.BytesIO()
    savemat(buffer, {"synsets": synsets[:, None]})
    top = "ILSVRC2012_devkit_t12/data"
    kit = {f"{top}/ILSVRC2012_validation_ground_truth.txt": b"2\n1\n1\n", f"{top}/meta.mat": buffer.getvalue()}
    files = {
        "ILSVRC2012_img_train.tar": tar(train),
        "ILSVRC2012_img_val.tar": tar(val),
        "ILSVRC2012_devkit_t12.tar.gz": tar(kit, "w:gz"),
    }
    shop.publish("imagenet", files, {"train": 3, "val": 3})
    return jpegs


def test_imagenet_becomes_class_folders(shop: Shop, rng: np.random.Generator) -> None:
    jpegs = publish_imagenet(shop, rng)
    with pytest.raises(DataError, match=r"ILSVRC2012_img_train.tar"):
        shop.get("imagenet")
    shop.put_by_hand("imagenet", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz")
    assert shop.get("imagenet") == [shop.root / "imagenet/val"]  # what can be made is made
    found = {path.relative_to(shop.root / "imagenet").as_posix() for path in (shop.root / "imagenet").rglob("*.JPEG")}
    assert found == {
        "val/n01/ILSVRC2012_val_00000001.JPEG",
        "val/n02/ILSVRC2012_val_00000002.JPEG",
        "val/n02/ILSVRC2012_val_00000003.JPEG",
    }
    assert (shop.root / "imagenet/val/n01/ILSVRC2012_val_00000001.JPEG").read_bytes() == jpegs["3"]
    shop.put_by_hand("imagenet", "ILSVRC2012_img_train.tar")
    assert shop.get("imagenet") == [shop.root / "imagenet/train"]
    images = open_images("imagenet/train", data_root=shop.root)
    assert images.class_names == ("n01", "n02") and images.labels.tolist() == [0, 1, 1]
    assert open_images("imagenet", data_root=shop.root).name == "imagenet/val"
    assert not list((shop.root / "imagenet").glob(".*"))


def test_imagenet_o(shop: Shop, rng: np.random.Generator) -> None:
    jpegs = [encode(noise(rng), "JPEG") for _ in range(3)]
    members = {
        "imagenet-o/README.txt": b"read me",
        "imagenet-o/n09/b.JPEG": jpegs[0],
        "imagenet-o/n03/a.JPEG": jpegs[1],
        "imagenet-o/n03/.hidden.JPEG": b"x",
        "__MACOSX/n03/a.JPEG": b"x",
        "imagenet-o/n03/c.jpeg": jpegs[2],
    }
    shop.publish("imagenet_o", {"imagenet-o.tar": tar(members)}, {"test": 3})
    shop.get("imagenet_o")
    table = pq.read_table(shop.root / "imagenet_o/test.parquet").to_pydict()
    assert table == {"image": jpegs, "label": [1, 0, 0], "label_name": ["n09", "n03", "n03"]}


def cifar_c(rng: np.random.Generator, n: int = 4) -> tuple[dict[str, bytes], dict[str, np.ndarray], np.ndarray]:
    families = (*STANDARD_FAMILIES, *EXTRA_FAMILIES)
    arrays = {family: rng.integers(0, 256, (5 * n, 32, 32, 3), dtype=np.uint8) for family in families}
    labels = np.tile(rng.integers(0, 10, n).astype(np.uint8), 5)
    members = {f"CIFAR-10-C/{family}.npy": npy(array) for family, array in arrays.items()}
    return members | {"CIFAR-10-C/labels.npy": npy(labels)}, arrays, labels[:n]


def test_cifar10_c(shop: Shop, rng: np.random.Generator) -> None:
    members, arrays, labels = cifar_c(rng)
    shop.publish("cifar10_c", {"CIFAR-10-C.tar": tar(members)}, {"test": 4, "gaussian-noise-1": 4, "spatter-5": 4})
    shop.get("cifar10_c")
    np.testing.assert_array_equal(shop.read("cifar10_c/gaussian-noise-1")[0], arrays["gaussian_noise"][:4])
    pixels, found, names = shop.read("cifar10_c/spatter-5")
    np.testing.assert_array_equal(pixels, arrays["spatter"][16:])
    assert found == labels.tolist() and names == [CIFAR10_NAMES[label] for label in labels]
    drawn = set()
    for i, image in enumerate(shop.read("cifar10_c/test")[0]):  # each image somewhere among its own corruptions
        drawn |= {
            (family, severity)
            for family in STANDARD_FAMILIES
            for severity in range(5)
            if (arrays[family][4 * severity + i] == image).all()
        }
    assert len(drawn) == 4
    assert open_images("cifar10_c", data_root=shop.root).name == "cifar10_c/test"


def test_plankton_is_cut_within_each_class(shop: Shop, rng: np.random.Generator) -> None:
    counts = {"copepods": 10, "larvae": 5, "rare": 2}
    members = {
        f"train/{name}/{i}.jpg": encode(noise(rng), "JPEG") for name, count in counts.items() for i in range(count)
    }
    shop.publish("plankton_ndsb", {"train.zip": zipped(members)}, {"train": 13, "test": 4}, checksums=False)
    shop.put_by_hand("plankton_ndsb", "train.zip")
    shop.get("plankton_ndsb")
    tables = [pq.read_table(shop.root / f"plankton_ndsb/{split}.parquet").to_pydict() for split in ("train", "test")]
    assert Counter(tables[0]["label_name"]) == {"copepods": 8, "larvae": 4, "rare": 1}
    assert Counter(tables[1]["label_name"]) == {"copepods": 2, "larvae": 1, "rare": 1}
    assert sorted(tables[0]["image"] + tables[1]["image"]) == sorted(members.values())
    assert dict(zip(tables[0]["label"], tables[0]["label_name"])) == {0: "copepods", 1: "larvae", 2: "rare"}
    shuffled = dict(sorted(members.items(), key=lambda item: item[1]))  # another order, the same cut
    shop.root = shop.root / "again"
    shop.publish("plankton_ndsb", {"train.zip": zipped(shuffled)}, {"train": 13, "test": 4}, checksums=False)
    shop.put_by_hand("plankton_ndsb", "train.zip")
    shop.get("plankton_ndsb")
    assert set(pq.read_table(shop.root / "plankton_ndsb/test.parquet")["image"].to_pylist()) == set(tables[1]["image"])


@pytest.mark.parametrize(
    ("name", "file", "content", "images", "words"),
    [
        ("cifar10", "cifar-10-binary.tar.gz", tar({"x": b""}, "w:gz"), {"test": 1}, "cifar-10-batches-bin/"),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": bytes(3072)}, "w:gz"),
            *({"test": 1}, "test_batch.bin"),
        ),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": b"\x0a" + bytes(3072)}, "w:gz"),
            *({"test": 1}, "label 10"),
        ),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": bytes(3073)}, "w:gz"),
            *({"test": 2}, "cifar10/test.* 1 .* 2"),
        ),
        ("imagenet_o", "imagenet-o.tar", tar({"../n01/a.JPEG": b"x"}), {"test": 1}, "../n01/a.JPEG"),
        ("imagenet_o", "imagenet-o.tar", b"no archive", {"test": 1}, "imagenet-o.tar"),
        (
            *("cifar10_c", "CIFAR-10-C.tar"),
            tar({"CIFAR-10-C/labels.npy": npy(np.array([{}], object)), "CIFAR-10-C/fog.npy": b""}),
            *({"fog-1": 1}, "cifar10_c/fog-1"),
        ),
        (
            *("cifar10_c", "CIFAR-10-C.tar"),
            tar(
                {
                    "CIFAR-10-C/labels.npy": npy(np.zeros(5, np.uint8)),
                    "CIFAR-10-C/fog.npy": npy(np.array([{}] * 5, object)),
                }
            ),
            *({"fog-1": 1}, "fog.npy"),
        ),
    ],
    ids=["nothing-inside", "cut-short", "label", "count", "path", "no-archive", "pickled-labels", "pickled-images"],
)
def test_originals_that_are_not_what_they_should_be(
    shop: Shop, name: str, file: str, content: bytes, images: dict[str, int], words: str
) -> None:
    shop.publish(name, {file: content}, images)
    with pytest.raises(DataError, match=words):
        shop.get(name)
    assert not (shop.root / name).exists()  # not even an empty folder, which would count as a data set


def test_matlab_files_that_are_not_what_they_should_be(shop: Shop) -> None:
    def matlab(**arrays: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        savemat(buffer, arrays)
        return buffer.getvalue()

    good = matlab(X=np.zeros((32, 32, 3, 1), np.uint8), y=np.ones((1, 1), np.uint8))
    for content, words in (
        (b"not MATLAB at all" * 20, "test_32x32.mat"),
        (good[:200], "test_32x32.mat"),
        (matlab(X=np.zeros((32, 32, 3, 1), np.uint8)), "'y'"),
        (matlab(X=np.zeros((32, 3), np.uint8), y=np.ones((1, 1))), "SVHN"),
    ):
        shop.publish("svhn", {"test_32x32.mat": content, "train_32x32.mat": b""}, {"test": 1})
        (shop.root / ".originals/svhn/test_32x32.mat").unlink(missing_ok=True)
        (shop.root / LOCK).unlink(missing_ok=True)
        with pytest.raises(DataError, match=words):
            shop.get("svhn")


# --- image lists of OpenOOD


def listed(lines: dict[str, list[str]]) -> bytes:
    return zipped(
        {f"benchmark_imglist/cifar10/test_{name}.txt": "\n".join(each).encode() for name, each in lines.items()}
    )


def test_openood_takes_the_images_that_its_lists_name(shop: Shop, rng: np.random.Generator) -> None:
    """Archives hold the paths of the lists without the name of the data set, or below a folder of that name."""
    pictures = [encode(noise(rng)) for _ in range(4)]
    lists = listed(
        {
            "cifar10": ["cifar10/test/a.png 3", "cifar10/test/b.png 9"],
            "texture": ["texture/dotted/2.png -1", "texture/banded/1.png -1"],
            "tin": ["tin/val/x.png -1"],
        }
    )
    shop.publish(
        "openood",
        {
            "benchmark_imglist.zip": lists,
            "cifar10.zip": zipped({"test/a.png": pictures[0], "test/b.png": pictures[1], "test/c.png": pictures[2]}),
            "texture.zip": zipped({"texture/banded/1.png": pictures[2], "texture/dotted/2.png": pictures[3]}),
            "tin.zip": zipped({"val/y.png": pictures[0]}),
        },
        dict.fromkeys(("cifar10-test", "cifar10-texture"), 0) | {"cifar10-tin": 0},
        checksums=False,
    )
    shop.put_by_hand("openood", "benchmark_imglist.zip", "cifar10.zip", "texture.zip")
    assert [path.name for path in shop.get("openood")] == ["cifar10-test.parquet", "cifar10-texture.parquet"]
    pixels, labels, names = shop.read("openood/cifar10-test")
    assert labels == [3, 9] and names == ["cat", "truck"] and len(pixels) == 2
    _, labels, names = shop.read("openood/cifar10-texture")
    assert labels == [0, 1] and names == ["dotted", "banded"]  # in the order of the list
    shop.put_by_hand("openood", "tin.zip")
    with pytest.raises(DataError, match=r"tin/val/x\.png"):
        shop.get("openood")
    assert not (shop.root / "openood" / "cifar10-tin.parquet").exists()


def test_openood_has_the_sets_of_its_suites() -> None:
    splits = {f"openood/{split.name}" for split in CATALOGUE["openood"].splits}
    protocols = [each for name, each in PROTOCOLS.items() if name.startswith("openood")]
    used = {source for each in protocols for source in (*each.ood.values(), each.test)}
    assert len(protocols) == 3 and used - splits == {"imagenet/val"} and splits - used == set()
    for each in protocols:
        assert (*each.near, *each.far) == tuple(each.ood)
