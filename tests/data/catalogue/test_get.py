"""Get data sets: fetched once, verified, converted, left alone afterwards."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from commands import flat, run
from image_files import encode, noise
from maple.data.catalogue.get import LOCK, get_data_set
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
