"""Every entry of the catalogue is complete and agrees with what is published."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from maple.data.catalogue.rows import READERS
from maple.data.catalogue.table import CATALOGUE, find_data_set
from maple.data.shares import share_out

CIFAR10_NAMES, CIFAR100_NAMES = (CATALOGUE[name].class_names for name in ("cifar10", "cifar100"))


def test_every_data_set_is_told_in_full() -> None:
    assert list(CATALOGUE) == [
        *("cifar10", "cifar100", "svhn", "tiny_imagenet", "imagenet", "imagenet_o", "cifar10_c", "cifar100_c"),
        *("diatoms", "plankton_ndsb", "digits", "simulated-diatoms", "openood"),
    ]
    for name, data_set in CATALOGUE.items():
        assert data_set.name == name and data_set.title and data_set.paper and data_set.licence
        assert data_set.classes > 1 or name == "openood"  # which is several data sets
        files = {original.name for original in data_set.originals}
        for original in data_set.originals:
            assert original.url or data_set.page
            assert not original.url or original.url.startswith(("https://", "http://"))
            assert original.url.rpartition("/")[2] in ("", original.name)
            for checksum, length in ((original.expected.md5, 32), (original.expected.sha256, 64)):
                assert checksum is None or (len(checksum) == length and set(checksum) <= set("0123456789abcdef"))
        for split in data_set.splits:
            assert split.reader in READERS and set(split.originals) <= files and split.originals
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
