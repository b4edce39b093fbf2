"""Reading a run folder: typed parts, each of which may be missing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from maple.errors import ConfigError, RunError
from maple.files import RunFile
from maple.reporting.record import read_run
from maple.types import Skipped
from run_folders import DIGITS


def test_parts_of_a_run(run: Path) -> None:
    record = read_run(run)
    assert record.class_names == DIGITS and record.name == "digits" and record.seed == 0
    assert record.classes is not None and record.classes.cluster_sizes.sum() == 899
    assert record.classes.skipped[0] == Skipped("broken.png", "truncated")
    assert record.classes.left_out == ("rare & tiny",)
    assert record.history is not None and record.history.n_epochs == 12
    assert record.history.minutes == pytest.approx(0.7) and record.history.validation_accuracy == pytest.approx(0.95)
    assert [(event.epoch, event.clusters) for event in record.history.events] == [(4, 12), (8, 15)]
    assert record.history.events[0].classes == ("zero", "one")
    assert record.results is not None and record.provenance["seed"] == 0
    assert set(record.gallery.projections) == {"before", "after"}


def test_missing_numbers_of_a_history_are_nan(copied: Path) -> None:
    (copied / RunFile.HISTORY).write_text("epoch,relabelled,clusters\n1,,\n2,a;b,3\n")
    history = read_run(copied).history
    assert history is not None and math.isnan(history.columns["clusters"][0])
    assert history.events[0].classes == ("a", "b") and math.isnan(history.events[0].shift)
    (copied / RunFile.HISTORY).write_text("epoch,relabelled,clusters\n")
    assert read_run(copied).history is None


def test_classes_come_from_the_results_where_nothing_else_names_them(copied: Path) -> None:
    (copied / RunFile.CLASSES).unlink()
    assert read_run(copied).class_names == DIGITS
    (copied / RunFile.RESULTS).unlink()
    assert read_run(copied).class_names == ()


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nowhere"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"config\.toml"):
        read_run(tmp_path)


def test_damaged_results_are_named(copied: Path) -> None:
    (copied / RunFile.RESULTS).write_text("{")
    with pytest.raises(RunError, match=r"results\.json"):
        read_run(copied)


@pytest.mark.parametrize(
    ("content", "named"),
    [(b"epoch,relabelled\n4,a\n", "'clusters'"), (b"epoch,relabelled,clusters\n4,a,x\n", ""), (b"epoch\n\xff\n", "")],
)
def test_a_damaged_history_is_named(copied: Path, content: bytes, named: str) -> None:
    (copied / RunFile.HISTORY).write_bytes(content)
    with pytest.raises(RunError, match=rf"history\.csv.*{named}"):
        read_run(copied)


def test_a_section_that_is_none_is_named(copied: Path) -> None:
    (copied / RunFile.CONFIG).write_text("origin = 3\n")
    with pytest.raises(RunError, match=r"config\.toml.*origin"):
        read_run(copied)
    (copied / RunFile.CONFIG).write_bytes(b"a = '\xff'\n")
    with pytest.raises(ConfigError, match=r"config\.toml"):
        read_run(copied)
