"""``maple data``: what there is, and how to get what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import flat, run
from maple.data.catalogue.table import CATALOGUE
from maple.data.sources import open_images
from maple.errors import UsageError


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
