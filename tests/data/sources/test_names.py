"""Names of data sets under the data root."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from image_files import write_folder
from maple.data.sources import open_images
from maple.data.sources.names import find_source, list_data_sets
from maple.data.splits import load_splits
from maple.errors import UsageError


def test_names_under_the_data_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_images("pets/train", data_root=root).name == "pets/train"
    assert open_images("pets", data_root=root).name == "pets/test"
    assert open_images("pets", data_root=root, split="train").name == "pets/train"
    assert open_images("birds", data_root=root).name == "birds/val"
    assert open_images("birds", data_root=root, split="validation").name == "birds/val"
    assert open_images("fish", data_root=root).class_names == ("cod", "eel")
    assert open_images(root / "pets" / "test.parquet").name == "pets/test"
    assert open_images(root / "pets").name == "pets/test"
    monkeypatch.setenv("MAPLE_DATA", str(root))
    assert len(open_images("pets")) == 12
    assert list_data_sets() == (
        *("digits", "simulated-diatoms", "simulated-diatoms/near", "simulated-diatoms/far"),
        *("birds", "birds/val", "fish", "pets", "pets/test", "pets/train"),
    )


def test_unknown_names_get_a_suggestion(root: Path) -> None:
    with pytest.raises(UsageError, match=r"'pet'.*'pets'.*root"):
        open_images("pet", data_root=root)
    with pytest.raises(UsageError, match="'pets/train'"):
        open_images("pets/trian", data_root=root)
    with pytest.raises(UsageError, match=r"'trian'.*'train'"):
        open_images("pets", data_root=root, split="trian")
    with pytest.raises(UsageError, match=r"'digits'.*MAPLE_DATA"):
        open_images("digit")
    with pytest.raises(UsageError, match="'simulated-diatoms'"):
        load_splits("simulated-diatom", data_root=root)
    with pytest.raises(UsageError, match="3"):
        open_images(3)  # type: ignore[arg-type]


def test_a_misspelt_folder_suggests_the_one_next_to_it(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "slides" / "train", {"a": 1, "b": 1}, rng)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"'slide'.*did you mean 'slides'"):
        open_images("slide")
    with pytest.raises(UsageError, match=r"did you mean 'slides/train'"):
        open_images("slide/train", labelled=False)
    with pytest.raises(UsageError, match=r"did you mean 'slides/train'"):
        open_images(["slides/trian", "slides"], labelled=False)
    with pytest.raises(UsageError, match="known: digits"):
        open_images("elsewhere")


def test_a_folder_may_begin_like_a_built_in_set(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "digits" / "mine", {"a": 1, "b": 1}, rng)
    monkeypatch.chdir(tmp_path)
    assert open_images("digits/mine").class_names == ("a", "b")
    assert len(open_images("digits")) == 1797
    with pytest.raises(UsageError, match="'simulated-diatoms'"):
        open_images("simulated-diatom?n=5")


def test_a_missing_data_root_is_no_place(monkeypatch):
    monkeypatch.delenv("MAPLE_DATA", raising=False)
    with pytest.raises(UsageError, match=r"'nosuch'.*in the current folder; there is no data root.*MAPLE_DATA"):
        find_source("nosuch", None)
