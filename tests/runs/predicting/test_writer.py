"""The prediction file without a predictor: formats, parts, resuming, locking (end to end: ``test_predict.py``)."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cheap import files_in
from maple.errors import RunError, UsageError
from maple.files import skipped_path, to_csv
from maple.runs.predicting import writer
from maple.runs.predicting.parts import Tally
from maple.runs.predicting.writer import ResumableFile, to_json_lines
from maple.types import Skipped

COLUMNS = ["file", "class", "p_value", "is_ood", "prediction_set"]
NAMES = ["a", "b"]
REQUEST = {"the model": "1", "--fdr": None}


def make_rows(start: int, stop: int) -> list[dict[str, Any]]:
    return [
        {"file": f"{i}.png", "class": NAMES[i % 2], "p_value": i / 7, "is_ood": i > 3, "prediction_set": NAMES[: i % 3]}
        for i in range(start, stop)
    ]


def open_file(path: Path, **options: Any) -> ResumableFile:
    return ResumableFile(path, COLUMNS, NAMES, **({"request": REQUEST} | options))


@pytest.fixture(autouse=True)
def _save_every_time(monkeypatch):
    monkeypatch.setattr(writer, "SAVE_SECONDS", 0.0)


@pytest.fixture(params=["csv", "jsonl", "ndjson", "parquet"])
def path(request, tmp_path):
    return tmp_path / f"p.{request.param}"


def read(path: Path) -> str | list[dict[str, Any]]:
    return pq.read_table(path).to_pylist() if path.suffix == ".parquet" else path.read_text()


def expected(path: Path, rows: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if path.suffix == ".parquet":
        return rows
    return to_csv(rows, COLUMNS, header=True) if path.suffix == ".csv" else to_json_lines(rows)


@pytest.mark.parametrize("form", ["csv", "jsonl", "ndjson", "parquet"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), read_rows=st.integers(1, 4))
def test_any_division_into_parts_gives_the_same_file(form, sizes, read_rows):
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "READ_ROWS", read_rows)
        path, start = Path(folder) / f"p.{form}", 0
        with open_file(path) as file:
            for size in sizes:
                file.append(make_rows(start, start + size), [], start + size)
                start += size
            assert not path.exists()
            file.finish()
        assert read(path) == expected(path, make_rows(0, start))
        assert files_in(path.parent) == {path.name}


def test_decisions_over_all_rows_replace_those_in_the_parts(path, monkeypatch):
    monkeypatch.setattr(writer, "READ_ROWS", 2)
    flags = np.array([True, False, True, True, False, False, True])
    with open_file(path) as file:
        for start in (0, 5):
            file.append(make_rows(start, min(start + 5, 7)), [], min(start + 5, 7))
        np.testing.assert_array_equal(file.read_column("p_value"), np.arange(7) / 7)
        file.finish(flags)
    rows = [row | {"is_ood": bool(flag)} for row, flag in zip(make_rows(0, 7), flags)]
    assert read(path) == expected(path, rows)


def test_missing_values(tmp_path):
    rows = [make_rows(0, 1)[0] | {"p_value": float("nan")}]
    for name in ("p.csv", "p.jsonl", "p.parquet"):
        with open_file(tmp_path / name) as file:
            file.append(rows, [], 1)
            file.finish()
    assert (tmp_path / "p.csv").read_text() == "file,class,p_value,is_ood,prediction_set\n0.png,a,nan,False,\n"
    assert json.loads((tmp_path / "p.jsonl").read_text())["p_value"] is None
    assert pq.read_table(tmp_path / "p.parquet")["p_value"].null_count == 1


def interrupt(path: Path, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt), open_file(path, **options) as file:
        file.append(make_rows(0, 3), [Skipped("x.png", "broken")], 4)
        file.append(make_rows(3, 4), [], 5)
        raise KeyboardInterrupt


def test_resuming_starts_after_the_last_part(path):
    interrupt(path)
    assert files_in(path.parent) == {f"{path.name}.partial"}
    with open_file(path) as file:
        assert file.tally == Tally(images=5, rows=4, skipped=1, first_skipped=Skipped("x.png", "broken"))
        file.append(make_rows(4, 7), [Skipped("y.png", "empty")], 9)
        file.finish()
    assert read(path) == expected(path, make_rows(0, 7))
    assert skipped_path(path).read_text() == "file,reason\nx.png,broken\ny.png,empty\n"


def test_rows_that_were_not_saved_are_not_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SAVE_SECONDS", 60.0)
    interrupt(tmp_path / "p.csv")
    assert files_in(tmp_path) == set()


def test_a_part_is_written_before_its_rows_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SAVE_SECONDS", 60.0)
    monkeypatch.setattr(writer, "MAX_GROUP_VALUES", 3 * len(COLUMNS))
    interrupt(tmp_path / "p.csv")
    with open_file(tmp_path / "p.csv") as file:
        assert file.tally.images == 4
        file.discard()


def test_parts_of_another_request_need_overwrite(path):
    interrupt(path)
    other = REQUEST | {"--fdr": 0.1}
    with pytest.raises(UsageError, match=r"--fdr.*--overwrite"), open_file(path, request=other):
        raise AssertionError("opened")
    with open_file(path, request=other, overwrite=True) as file:
        assert file.tally == Tally()
        file.append(make_rows(0, 1), [], 1)
        file.finish()
    assert files_in(path.parent) == {path.name}


def test_without_a_request_nothing_is_kept(path):
    interrupt(path, request=None)
    assert files_in(path.parent) == set()


def test_what_an_older_part_file_does_not_say_is_damage(tmp_path, capsys):
    interrupt(tmp_path / "p.csv")
    part = tmp_path / "p.csv.partial" / "000001.part"
    pq.write_table(pq.read_table(part).replace_schema_metadata({b"maple": b'{"request": {}}'}), part)
    with open_file(tmp_path / "p.csv") as file:
        assert file.tally.images == 4 and part.name in capsys.readouterr().err
        file.discard()


def test_a_second_process_is_refused(path):
    pytest.importorskip("fcntl")
    with open_file(path) as file:
        with pytest.raises(RunError, match=path.name), open_file(path):
            raise AssertionError("opened")
        file.append(make_rows(0, 7), [], 7)
        file.finish()
    assert read(path) == expected(path, make_rows(0, 7))


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/p\.csv"), open_file(tmp_path / "file" / "p.csv"):
        raise AssertionError("opened")


def test_the_parts_are_removed_before_another_process_gets_the_lock(path, monkeypatch):
    with open_file(path) as file:
        release, seen = file._lock.release, []
        monkeypatch.setattr(file._lock, "release", lambda: (seen.append(file.folder.exists()), release()))
        file.append(make_rows(0, 7), [], 7)
        file.finish()
    assert seen == [False]
    assert read(path) == expected(path, make_rows(0, 7))


@pytest.mark.parametrize(("number", "is_full"), [(errno.ENOSPC, True), (errno.ENOENT, False)])
def test_only_a_full_disk_needs_space(tmp_path, number, is_full):
    with pytest.raises(RunError, match=r"p\.csv.*--out") as caught, open_file(tmp_path / "p.csv")._naming_file():
        raise OSError(number, "no")
    assert ("space" in str(caught.value)) == is_full
