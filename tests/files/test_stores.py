"""Files are written whole or not at all."""

from __future__ import annotations

import csv
import errno
import json
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from maple.errors import DataError, RunError, UsageError
from maple.files import (
    load_arrays,
    load_json,
    naming_damage,
    nearest_path,
    no_run,
    save_arrays,
    save_json,
    write_atomic,
)
from maple.files.formats import FORMAT_VERSION, OLDEST_FORMAT


def test_round_trip(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(3, np.int64), "c": np.zeros((0, 2), np.float32)}
    save_arrays(tmp_path / "x.safetensors", arrays, {"names": ["ä", "b"]})
    loaded, metadata = load_arrays(tmp_path / "x.safetensors")
    assert metadata == {"format": FORMAT_VERSION, "names": ["ä", "b"]}
    for name, array in arrays.items():
        np.testing.assert_array_equal(loaded[name], array)
        assert loaded[name].dtype == array.dtype


def test_shapes_survive(tmp_path):
    """Also of a number, which is no vector of one."""
    arrays = {"count": np.array(3), "vector": np.ones(1), "columns": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    save_arrays(tmp_path / "a.safetensors", arrays, {})
    loaded, _ = load_arrays(tmp_path / "a.safetensors")
    assert {name: array.shape for name, array in loaded.items()} == {"count": (), "vector": (1,), "columns": (2, 3)}
    np.testing.assert_array_equal(loaded["columns"], arrays["columns"])


def test_full_disk_keeps_the_previous_version(tmp_path, monkeypatch):
    path = tmp_path / "weights.safetensors"
    save_arrays(path, {"a": np.ones(3)}, {})

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match=path.name):
        save_arrays(path, {"a": np.zeros(3)}, {})
    np.testing.assert_array_equal(load_arrays(path)[0]["a"], np.ones(3))
    assert [p.name for p in tmp_path.iterdir()] == ["weights.safetensors"]


def test_interruption_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    write_atomic(tmp_path / "x.json", "old")
    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "x.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert (tmp_path / "x.json").read_text() == "old"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_really_full_device(monkeypatch, tmp_path):
    """Write through a device that is always full."""
    target = tmp_path / "x.json"
    real = tempfile.NamedTemporaryFile

    def on_full_device(**kwargs):
        file = real(**kwargs)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, file.fileno())
        os.close(full)
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", on_full_device)
    with pytest.raises(RunError, match=target.name):
        write_atomic(target, b"x" * 10_000)
    assert list(tmp_path.iterdir()) == []


def test_newer_format_is_refused_with_the_remedy(tmp_path):
    path = tmp_path / "classes.json"
    path.write_text(json.dumps({"format": FORMAT_VERSION + 1}))
    with pytest.raises(RunError, match=path.name):
        load_json(path)


@pytest.mark.parametrize("content", [b"", b"not a file", b"\xff" * 100])
def test_damaged_files(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(RunError, match=path.name):
        load_arrays(path)
    path.write_bytes(content)
    with pytest.raises(RunError):
        load_json(path)


def test_a_misspelt_run_suggests_the_one_next_to_it(tmp_path):
    (tmp_path / "slides").mkdir()
    assert f"did you mean '{tmp_path / 'slides'}'" in str(no_run(tmp_path / "slide", "config.toml"))
    assert "maple train" in str(no_run(tmp_path / "slides", "config.toml"))
    assert nearest_path(tmp_path / "zebra") is None and nearest_path(tmp_path / "slides") is None


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(RunError, match=r"weights\.safetensors"):
        load_arrays(tmp_path / "weights.safetensors")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(RunError, match=r"x\.json"):
        load_json(tmp_path / "x.json")


def test_json_has_no_nan(tmp_path):
    save_json(tmp_path / "x.json", {"a": float("nan"), "b": [np.float32(1.5), np.inf], "c": np.arange(2)})
    value = load_json(tmp_path / "x.json")
    assert value["a"] is None
    assert value["b"] == [1.5, None]
    assert value["c"] == [0, 1]


def test_every_earlier_format_is_read_and_none_that_never_was(tmp_path):
    path = tmp_path / "a.safetensors"
    for version in range(OLDEST_FORMAT, FORMAT_VERSION + 1):
        save_arrays(path, {"a": np.zeros(1)}, {"format": version})
        assert load_arrays(path)[0]["a"].tolist() == [0]
    for version in (OLDEST_FORMAT - 1, FORMAT_VERSION + 1):
        save_arrays(path, {"a": np.zeros(1)}, {"format": version})
        with pytest.raises(RunError, match=path.name):
            load_arrays(path)


def test_every_changed_byte_of_arrays_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_arrays(path, {"a": np.arange(3.0), "b": np.ones(2, np.uint8)}, {"names": ["x"], "level": 0.25})
    whole, (arrays, metadata) = path.read_bytes(), load_arrays(path)
    for at in (*range(0, len(whole), 7), *range(len(whole) - 26, len(whole))):  # some of the header, all values
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            found, said = load_arrays(path)
        except RunError as error:
            assert path.name in str(error)
        else:  # of spaces, and of what only a digest says
            assert {**said, **metadata} == said and all(np.array_equal(found[name], arrays[name]) for name in arrays)


def test_the_same_content_is_the_same_file(tmp_path: Path) -> None:
    for name in "abcdefgh":
        save_arrays(tmp_path / name, {"x": np.arange(3.0), "y": np.zeros(2)}, {"b": 1, "a": float("nan")})
    assert len({(tmp_path / name).read_bytes() for name in "abcdefgh"}) == 1


@pytest.mark.parametrize(
    "error", [UsageError("size is -3"), csv.Error("line contains NUL"), DataError("no"), OSError(5)]
)
def test_whatever_content_raises_names_the_file(tmp_path, error):
    with pytest.raises(RunError, match=str(tmp_path / "a.json")), naming_damage(tmp_path / "a.json"):
        raise error


def test_errors_with_a_remedy_of_their_own_stay(tmp_path):
    with pytest.raises(UsageError, match="--plugin"), naming_damage(tmp_path / "a.json", let=UsageError):
        raise UsageError("give --plugin")
    with pytest.raises(RunError, match="other"), naming_damage(tmp_path / "a.json"):
        raise RunError("'other' is damaged")
