"""Rows of ``maple data`` and ``maple methods``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from maple.detectors.base import Detector
from maple.detectors.registry import DETECTORS
from maple.errors import UsageError
from maple.options import option
from maple.runs.listings import describe_source, find_methods, list_methods, list_sources
from maple.training.recipe import RECIPES
from maple.types import About


def save_split(path, labels=(0, 1)):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, images=np.arange(len(labels) * 64 * 3, dtype=np.uint8).reshape(-1, 8, 8, 3), labels=np.array(labels))


def test_every_data_set_has_one_row(tmp_path):
    rows = {row["source"]: row for row in list_sources(tmp_path)}
    assert rows["digits"]["where"] == "built in" and rows["digits"]["found"]
    assert not rows["cifar10"]["found"] and "maple data cifar10" in rows["cifar10"]["where"]
    assert len(rows) == len(list_sources(tmp_path))


def test_folders_of_the_data_root_are_listed_with_their_splits(tmp_path):
    for split in ("train", "test"):
        (tmp_path / "slides").mkdir(exist_ok=True)
        (tmp_path / "slides" / f"{split}.parquet").touch()
    row = next(row for row in list_sources(tmp_path) if row["source"] == "slides")
    assert row["found"] and set(row["splits"].split(", ")) == {"train", "test"}
    assert row["where"] == str(tmp_path / "slides")


def test_a_source_is_counted(tmp_path):
    save_split(tmp_path / "few.npz", labels=(0, 0, 0, 1))
    facts = describe_source(str(tmp_path / "few.npz"))
    assert (facts["images"], facts["classes"], facts["per class"], facts["size"]) == (4, 2, "1 to 3", 8)
    assert facts["found"] and facts["skipped"] == 0


def test_a_missing_data_set_is_described_and_not_opened(tmp_path):
    facts = describe_source("cifar10", tmp_path)
    assert facts["found"] is False and "images" not in facts and len(facts) > 2


def test_every_method_is_listed_once_by_kind():
    rows = [(row["kind"], row["name"]) for row in list_methods()]
    expected = [("recipe", name) for name in RECIPES.names()] + [("detector", name) for name in DETECTORS.names()]
    assert rows == expected


def test_a_name_may_be_a_recipe_and_a_detector():
    assert [found.kind for found in find_methods("maple")] == ["recipe", "detector"]
    with pytest.raises(UsageError, match="'sngp'"):
        find_methods("sgnp")


def test_options_show_default_and_help(monkeypatch):
    @dataclass
    class Toy(Detector):
        """A toy."""

        k: int = option(3, "neighbours")
        hidden: int = option(4, "not a flag", flag=False)

    monkeypatch.setattr(DETECTORS, "_methods", {**DETECTORS._methods})
    DETECTORS.register("toy", About("A toy", paper=""))(Toy)
    (found,) = find_methods("toy")
    ((name, (annotation, field)),) = found.options().items()
    assert (name, annotation, field.default, field.metadata["help"]) == ("k", int, 3, "neighbours")
    assert found.to_dict()["title"] == "A toy"
