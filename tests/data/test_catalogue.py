"""The catalogue: its facts, conversion of tiny archives in every original format, and the command that uses it."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from scipy.io import savemat

from commands import flat, run
from image_files import encode, noise
from maple.data.catalogue import CATALOGUE, CIFAR10_NAMES, CIFAR100_NAMES, LOCK, Row, find_data_set, get_data_set
from maple.data.download import Checksum
from maple.data.sources import catalogue, open_images
from maple.data.splits import share_out
from maple.errors import DataError, UsageError


def tar(members: dict[str, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


class Shop:
    """Data sets of the catalogue with tiny originals, published in a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.root = folder / "published", folder / "data"
        self.folder.mkdir()
        self._monkeypatch = monkeypatch

    def publish(self, name: str, files: dict[str, bytes], images: dict[str, int], checksums: bool = True) -> None:
        """Replace the originals of a data set, and say how many images each split then has; others are left out."""
        data_set = CATALOGUE[name]
        for file, content in files.items():
            (self.folder / file).write_bytes(content)
        originals = tuple(
            replace(
                original,
                url=original.url and (self.folder / original.name).as_uri(),
                expected=Checksum(md5=hashlib.md5(files[original.name]).hexdigest()) if checksums else Checksum(),
            )
            for original in data_set.originals
        )
        splits = tuple(replace(s, images=images[s.name]) for s in data_set.splits if s.name in images)
        self._monkeypatch.setitem(CATALOGUE, name, replace(data_set, originals=originals, splits=splits))

    def put_by_hand(self, name: str, *files: str) -> None:
        for file in files:
            path = self.root / ".originals" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((self.folder / file).read_bytes())

    def get(self, name: str) -> list[Path]:
        return get_data_set(name, self.root)

    def read(self, source: str) -> tuple[list[np.ndarray], list[int], list[str]]:
        """Pixels, labels and names of a converted split, from the Parquet file itself."""
        table = pq.read_table(self.root / f"{source}.parquet")
        assert [str(column.type) for column in table.columns] == ["binary", "int64", "string"]
        pixels = [np.asarray(Image.open(io.BytesIO(image)).convert("RGB")) for image in table["image"].to_pylist()]
        return pixels, table["label"].to_pylist(), table["label_name"].to_pylist()


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    monkeypatch.delenv("MAPLE_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    return Shop(tmp_path, monkeypatch)


# --- facts ------------------------------------------------------------------------------------------------------------


def test_every_data_set_is_told_in_full() -> None:
    assert list(CATALOGUE) == [
        *("cifar10", "cifar100", "svhn", "tiny_imagenet", "imagenet", "imagenet_o", "cifar10_c", "cifar100_c"),
        *("diatoms", "plankton_ndsb", "digits", "simulated-diatoms"),
    ]
    for name, data_set in CATALOGUE.items():
        assert data_set.name == name and data_set.title and data_set.paper and data_set.licence and data_set.classes > 1
        files = {original.name for original in data_set.originals}
        for original in data_set.originals:
            assert original.url or data_set.page
            assert not original.url or original.url.startswith(("https://", "http://"))
            assert original.url.rpartition("/")[2] in ("", original.name)
            for checksum, length in ((original.expected.md5, 32), (original.expected.sha256, 64)):
                assert checksum is None or (len(checksum) == length and set(checksum) <= set("0123456789abcdef"))
        for split in data_set.splits:
            assert split.rows is not None and set(split.originals) <= files and split.originals
    assert len(set(CIFAR10_NAMES)) == 10 and len(set(CIFAR100_NAMES)) == 100
    assert list(CIFAR100_NAMES) == sorted(CIFAR100_NAMES)
    assert len(CATALOGUE["cifar10_c"].splits) == 1 + 19 * 5


def test_published_checksums_agree_with_torchvision() -> None:
    found = find_spec("torchvision")  # read, not imported: it may not fit the torch that is there
    if found is None or found.origin is None:
        pytest.skip("torchvision is not installed")
    for name in ("svhn", "imagenet"):
        text = (Path(found.origin).parent / "datasets" / f"{name}.py").read_text()
        for original in CATALOGUE[name].originals:
            assert original.expected.md5 is not None
            assert original.name in text and original.expected.md5 in text


def test_names_and_splits_find_their_entry() -> None:
    assert find_data_set("cifar10") is find_data_set("cifar10/train") is CATALOGUE["cifar10"]
    assert find_data_set("cifar10_c/gaussian-noise-3") is CATALOGUE["cifar10_c"]
    assert find_data_set("simulated-diatoms/far?n=9") is CATALOGUE["simulated-diatoms"]
    for other in ("cifar10/tarin", "cifar", "/data/cifar10", "corrupted:cifar10/test", "x/y/z"):
        assert find_data_set(other) is None


@pytest.mark.shared
def test_names_agree_with_the_files_that_are_there(shared_dir: Path) -> None:
    for name, names in (("cifar10", CIFAR10_NAMES), ("cifar100", CIFAR100_NAMES)):
        table = pq.read_table(shared_dir / f"data/{name}/test.parquet", columns=["label", "label_name"])
        assert all(names[label] == found for label, found in zip(*(column.to_pylist() for column in table.columns)))
    counts: Counter[str] = Counter()
    for split in ("train", "test"):
        table = pq.read_table(shared_dir / f"data/plankton_ndsb/{split}.parquet", columns=["label_name"])
        counts += Counter(table["label_name"].to_pylist())
    cut = np.sum([share_out(count, (0.8, 0.2)) for count in counts.values()], axis=0)
    assert cut.tolist() == [split.images for split in CATALOGUE["plankton_ndsb"].splits]


# --- every format -----------------------------------------------------------------------------------------------------


def cifar_records(rng: np.random.Generator, n: int, coarse: bool) -> tuple[bytes, np.ndarray, list[int]]:
    """Records as Toronto writes them, with the images (n, 32, 32, 3) and labels inside."""
    pixels = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    labels = [int(label) for label in rng.integers(0, 100 if coarse else 10, n)]
    records = b""
    for image, label in zip(pixels, labels):
        planes = b"".join(image[:, :, channel].tobytes() for channel in range(3))
        records += (bytes([7]) if coarse else b"") + bytes([label]) + planes
    return records, pixels, labels


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
    with pytest.raises(DataError, match=r"needs ILSVRC2012_img_train.tar.*cannot be fetched without you: get it from"):
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
    families = (*catalogue._STANDARD, *catalogue._EXTRA)
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
            for family in catalogue._STANDARD
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


# --- what can go wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "file", "content", "images", "words"),
    [
        ("cifar10", "cifar-10-binary.tar.gz", tar({"x": b""}, "w:gz"), {"test": 1}, "holds no 'cifar-10-batches-bin/"),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": bytes(3072)}, "w:gz"),
            *({"test": 1}, "is cut short"),
        ),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": b"\x0a" + bytes(3072)}, "w:gz"),
            *({"test": 1}, "label 10, and there are 10 classes"),
        ),
        (
            *("cifar10", "cifar-10-binary.tar.gz"),
            tar({"cifar-10-batches-bin/test_batch.bin": bytes(3073)}, "w:gz"),
            *({"test": 2}, "has 1 images, should be 2"),
        ),
        ("imagenet_o", "imagenet-o.tar", tar({"../n01/a.JPEG": b"x"}), {"test": 1}, "leads out of the archive"),
        ("imagenet_o", "imagenet-o.tar", b"no archive", {"test": 1}, "cannot read the archive"),
        (
            *("cifar10_c", "CIFAR-10-C.tar"),
            tar({"CIFAR-10-C/labels.npy": npy(np.array([{}], object)), "CIFAR-10-C/fog.npy": b""}),
            *({"fog-1": 1}, "cannot make cifar10_c/fog-1.*pickle"),
        ),
        (
            *("cifar10_c", "CIFAR-10-C.tar"),
            tar(
                {
                    "CIFAR-10-C/labels.npy": npy(np.zeros(5, np.uint8)),
                    "CIFAR-10-C/fog.npy": npy(np.array([{}] * 5, object)),
                }
            ),
            *({"fog-1": 1}, "holds object of shape"),
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
    assert not (shop.root / name).exists()  # not even an empty folder, which would pass for a data set


def test_matlab_files_that_are_not_what_they_should_be(shop: Shop) -> None:
    def matlab(**arrays: np.ndarray) -> bytes:
        buffer = io.BytesIO()
        savemat(buffer, arrays)
        return buffer.getvalue()

    good = matlab(X=np.zeros((32, 32, 3, 1), np.uint8), y=np.ones((1, 1), np.uint8))
    for content, words in (
        (b"not MATLAB at all" * 20, "cannot read '.*test_32x32.mat' as a MATLAB file"),
        (good[:200], "cannot read '.*test_32x32.mat' as a MATLAB file"),
        (matlab(X=np.zeros((32, 32, 3, 1), np.uint8)), "holds no array 'y'"),
        (matlab(X=np.zeros((32, 3), np.uint8), y=np.ones((1, 1))), "it is not SVHN's format 2"),
    ):
        shop.publish("svhn", {"test_32x32.mat": content, "train_32x32.mat": b""}, {"test": 1})
        (shop.root / ".originals/svhn/test_32x32.mat").unlink(missing_ok=True)
        (shop.root / LOCK).unlink(missing_ok=True)
        with pytest.raises(DataError, match=words):
            shop.get("svhn")


def test_what_a_killed_process_left_is_no_data_set(shop: Shop, rng: np.random.Generator) -> None:
    rest = shop.root / "imagenet_o" / ".test.parquet.part"
    rest.mkdir(parents=True)
    (rest / "test.parquet").write_bytes(b"half a file")
    assert catalogue.locate("imagenet_o", shop.root) is None
    content = tar({"imagenet-o/n01/a.JPEG": encode(noise(rng), "JPEG")})
    shop.publish("imagenet_o", {"imagenet-o.tar": content}, {"test": 1})
    shop.get("imagenet_o")
    assert [path.name for path in (shop.root / "imagenet_o").iterdir()] == ["test.parquet"]
    assert catalogue.locate("imagenet_o", shop.root) == shop.root / "imagenet_o"


def test_what_is_there_is_left_alone(shop: Shop, rng: np.random.Generator) -> None:
    records = cifar_records(rng, 2, coarse=True)[0]
    files = {"cifar-100-binary/train.bin": records, "cifar-100-binary/test.bin": records}
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 2, "test": 2})
    (shop.root / "cifar100").mkdir(parents=True)
    (shop.root / "cifar100/test.parquet").write_bytes(b"mine")
    assert shop.get("cifar100") == [shop.root / "cifar100/train.parquet"]
    assert (shop.root / "cifar100/test.parquet").read_bytes() == b"mine"
    assert shop.get("cifar100") == []


def test_a_failed_conversion_leaves_no_file_and_a_later_one_goes_on(shop: Shop, rng: np.random.Generator) -> None:
    records = cifar_records(rng, 3, coarse=True)[0]
    files = {"cifar-100-binary/train.bin": records, "cifar-100-binary/test.bin": records[:4000]}
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 3, "test": 3})
    with pytest.raises(DataError, match="is cut short"):
        shop.get("cifar100")
    assert [path.name for path in (shop.root / "cifar100").iterdir()] == ["train.parquet"]
    files["cifar-100-binary/test.bin"] = records
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 3, "test": 3})
    with pytest.raises(DataError, match="is not the file it should be"):
        shop.get("cifar100")
    (shop.root / ".originals/cifar100/cifar-100-binary.tar.gz").unlink()
    assert [path.name for path in shop.get("cifar100")] == ["test.parquet"]


def test_the_first_checksum_is_kept_where_none_is_published(shop: Shop, rng: np.random.Generator) -> None:
    first = tar({"imagenet-o/n01/a.JPEG": encode(noise(rng), "JPEG")})
    shop.publish("imagenet_o", {"imagenet-o.tar": first}, {"test": 1}, checksums=False)
    shop.get("imagenet_o")
    recorded = json.loads((shop.root / LOCK).read_text())["originals"]["imagenet_o/imagenet-o.tar"]
    assert recorded["sha256"] == hashlib.sha256(first).hexdigest() and recorded["bytes"] == len(first)
    (shop.root / "imagenet_o/test.parquet").unlink()
    (shop.root / ".originals/imagenet_o/imagenet-o.tar").unlink()
    second = tar({"imagenet-o/n01/a.JPEG": encode(noise(rng), "JPEG")})
    shop.publish("imagenet_o", {"imagenet-o.tar": second}, {"test": 1}, checksums=False)
    with pytest.raises(DataError, match=r"if its authors replaced it, remove 'imagenet_o/imagenet-o\.tar' from"):
        shop.get("imagenet_o")
    (shop.root / LOCK).write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        shop.get("imagenet_o")
    (shop.root / LOCK).unlink()
    assert len(shop.get("imagenet_o")) == 1


def test_conversion_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as they come: a row group is full long before the last row was made."""
    monkeypatch.setattr(catalogue, "_ROW_GROUP_BYTES", 1000)
    seen: list[int] = []
    writes: list[int] = []
    table = catalogue._table
    monkeypatch.setattr(catalogue, "_table", lambda group: writes.append(len(seen)) or table(group))

    def rows():
        for i in range(50):
            seen.append(i)
            yield Row(bytes(100), i, str(i))

    path = catalogue.write_parquet(tmp_path / "set" / "train", rows())
    assert writes == [10, 20, 30, 40, 50] and pq.ParquetFile(path).num_row_groups == 5
    assert pq.read_table(path)["label"].to_pylist() == list(range(50))


def test_folders_take_plain_names_only(tmp_path: Path) -> None:
    for label_name, file in (("..", "a.png"), ("a/../../b", "a.png"), ("a", "../a.png"), ("a", ""), (".a", "a.png")):
        with pytest.raises(DataError, match="cannot be the name of a file or folder"):
            catalogue.write_folder(tmp_path / "set" / "train", iter([Row(b"x", 0, label_name, file)]))
    assert not list(tmp_path.iterdir())


def test_requests_that_cannot_be_met(shop: Shop) -> None:
    for name, words in (
        ("cifar11", "is not in the catalogue"),
        ("digits", "is built in"),
        ("diatoms", "cannot be fetched: put images of your own under the data root"),
    ):
        with pytest.raises(UsageError, match=words):
            shop.get(name)
    with pytest.raises(UsageError, match="set MAPLE_DATA or give --data-root"):
        get_data_set("cifar10")
    with pytest.raises(
        DataError, match=r"train.zip'?, which cannot be fetched without you: get it from https://www.kag"
    ):
        shop.get("plankton_ndsb")


# --- the command ------------------------------------------------------------------------------------------------------


def test_data_lists_the_whole_catalogue(root: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("data", "--data-root", root, "--json") == 0
    rows = {row["source"]: row for row in json.loads(capsys.readouterr().out)}
    assert set(CATALOGUE) | {"pets", "birds", "fish"} <= rows.keys()
    assert rows["pets"] == {
        "source": "pets",
        "splits": "test, train",
        "where": str((root / "pets").resolve()),
        "found": True,
    }
    assert rows["digits"]["found"] and rows["simulated-diatoms/near"]["where"] == "built in"
    assert not rows["imagenet"]["found"] and rows["imagenet"]["where"] == "not found, see maple data imagenet"
    assert run("data", "--data-root", root) == 0
    out = flat(capsys.readouterr().out)
    assert "plankton_ndsb" in out and f"data root: {root}" in out


def test_data_tells_how_to_get_what_is_missing(root: Path, capsys: pytest.CaptureFixture) -> None:
    for source in ("svhn", "svhn/train"):
        assert run("data", source, "--data-root", root) == 0
        out = flat(capsys.readouterr().out)
        for words in (
            "found no",
            "Netzer et al.",
            "non-commercial",
            "train 73,257, test 26,032; 10 classes",
            str(root / "svhn"),
            "maple data svhn --get fetches",
            "http://ufldl.stanford.edu/housenumbers/test_32x32.mat (64 MB, md5 eb5a983be6a315427106f1b164d9cef3)",
            f"{root}/.originals/svhn/test_32x32.mat",
        ):
            assert words in out
    assert run("data", "diatoms", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["found"] is False and facts["licence"] == "not public" and "<taxon>" in facts["how to get"][0]
    assert any("no data root" in place for place in facts["looked in"])
    assert run("data", "svhn/tset", "--data-root", root) == 2
    assert run("data", "nothing", "--data-root", root) == 2


def test_data_get_fetches_converts_and_describes(
    shop: Shop, rng: np.random.Generator, capsys: pytest.CaptureFixture
) -> None:
    records = cifar_records(rng, 3, coarse=True)[0]
    files = {"cifar-100-binary/train.bin": records, "cifar-100-binary/test.bin": records}
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 3, "test": 3})
    assert run("data", "cifar100", "--get", "--data-root", shop.root, "--json") == 0
    out, errors = capsys.readouterr()
    facts = json.loads(out)
    assert facts["found"] and facts["images"] == 3 and facts["source"] == "cifar100/test"
    assert f"cifar100/train: 3 images, {shop.root}/cifar100/train.parquet" in flat(errors)
    assert run("data", "cifar100", "--data-root", shop.root) == 0
    assert "images 3" in flat(capsys.readouterr().out)
    assert run("data", "--get") == 2
    assert "--get needs the name of a data set" in flat(capsys.readouterr().err)
    assert run("data", "digits", "--get", "--data-root", shop.root) == 2
    assert run("data", "plankton_ndsb", "--get", "--data-root", shop.root) == 1


def test_data_describes_corrupted_images(capsys: pytest.CaptureFixture) -> None:
    assert run("data", "corrupted:digits?family=fog&severity=3", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["images"] == 1797 and facts["source"] == "corrupted:digits?family=fog&severity=3&seed=0"


def test_a_missing_data_set_says_how_to_get_it(root: Path) -> None:
    with pytest.raises(UsageError, match=r"'cifar100/train': 'maple data cifar100' says how to get it \(looked"):
        open_images("cifar100/train", data_root=root)
