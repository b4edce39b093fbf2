"""Data sets are described, fetched once, verified, converted complete or not at all, and left alone afterwards."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from commands import flat, run
from image_files import encode, noise
from maple.data.catalogue import get
from maple.data.catalogue.get import LOCK, get_data_set, locate
from maple.data.catalogue.rows import Row
from maple.data.catalogue.table import CATALOGUE
from maple.data.sources import open_images
from maple.errors import DataError, UsageError
from published import Shop, cifar_records, tar


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
    with pytest.raises(DataError, match=r"test.bin"):
        shop.get("cifar100")
    assert [path.name for path in (shop.root / "cifar100").iterdir()] == ["train.parquet"]
    files["cifar-100-binary/test.bin"] = records
    shop.publish("cifar100", {"cifar-100-binary.tar.gz": tar(files, "w:gz")}, {"train": 3, "test": 3})
    with pytest.raises(DataError, match=r"cifar-100-binary.tar.gz"):
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
    with pytest.raises(DataError, match=r"imagenet_o/imagenet-o\.tar'.*lock"):
        shop.get("imagenet_o")
    (shop.root / LOCK).write_text("{")
    with pytest.raises(DataError, match="lock"):
        shop.get("imagenet_o")
    (shop.root / LOCK).unlink()
    assert len(shop.get("imagenet_o")) == 1


def test_requests_that_cannot_be_met(shop: Shop) -> None:
    for name in ("cifar11", "digits", "diatoms"):
        with pytest.raises(UsageError, match=name):
            shop.get(name)
    with pytest.raises(UsageError, match="--data-root"):
        get_data_set("cifar10")
    with pytest.raises(DataError, match=r"train\.zip.*https://www.kag"):
        shop.get("plankton_ndsb")


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


# --- written ----------------------------------------------------------------------------------------------------------


def test_what_a_killed_process_left_is_no_data_set(shop: Shop, rng: np.random.Generator) -> None:
    rest = shop.root / "imagenet_o" / ".test.parquet.part"
    rest.mkdir(parents=True)
    (rest / "test.parquet").write_bytes(b"half a file")
    assert locate("imagenet_o", shop.root) is None
    content = tar({"imagenet-o/n01/a.JPEG": encode(noise(rng), "JPEG")})
    shop.publish("imagenet_o", {"imagenet-o.tar": content}, {"test": 1})
    shop.get("imagenet_o")
    assert [path.name for path in (shop.root / "imagenet_o").iterdir()] == ["test.parquet"]
    assert locate("imagenet_o", shop.root) == shop.root / "imagenet_o"


def test_conversion_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as they come: a row group is full long before the last row was made."""
    monkeypatch.setattr(get, "_ROW_GROUP_BYTES", 1000)
    seen: list[int] = []
    writes: list[int] = []
    make_table = get._table
    monkeypatch.setattr(get, "_table", lambda group: writes.append(len(seen)) or make_table(group))

    def rows():
        for i in range(50):
            seen.append(i)
            yield Row(bytes(100), i, str(i))

    path = get.write_parquet(tmp_path / "set" / "train", rows())
    assert writes == [10, 20, 30, 40, 50] and pq.ParquetFile(path).num_row_groups == 5
    assert pq.read_table(path)["label"].to_pylist() == list(range(50))


def test_folders_take_plain_names_only(tmp_path: Path) -> None:
    for bad in ("..", "a/../../b", "../a.png", "", ".a", "a\\b"):
        for row in (Row(b"x", 0, bad, "a.png"), Row(b"x", 0, "a", bad)):
            with pytest.raises(DataError, match=re.escape(f"'{bad}'")):
                get.write_folder(tmp_path / "set" / "train", iter([row]))
    assert not list(tmp_path.iterdir())


# --- described --------------------------------------------------------------------------------------------------------


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


def test_data_describes_corrupted_images(capsys: pytest.CaptureFixture) -> None:
    assert run("data", "corrupted:digits?family=fog&severity=3", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["images"] == 1797 and facts["source"] == "corrupted:digits?family=fog&severity=3&seed=0"


def test_a_missing_data_set_says_how_to_get_it(root: Path) -> None:
    with pytest.raises(UsageError, match=r"'cifar100/train'.*maple data cifar100"):
        open_images("cifar100/train", data_root=root)
