"""The run folder: what it reads and writes, and that one process writes it at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maple.errors import RunError, UsageError
from maple.files import RunFile, lock_folder, write_atomic
from maple.files.formats import FORMAT_VERSION
from maple.runs.folder import RunFolder, RunOrigin, RunSettings
from maple.types import RunClasses, Skipped

HOLD = """
import sys, time
from pathlib import Path
from maple.runs.folder import RunFolder
with RunFolder(Path(sys.argv[1])).lock("maple train slides"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def hold(folder: RunFolder) -> subprocess.Popen:
    """Another process that holds the lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder.path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "held"
    return process


def test_settings_survive(folder):
    origin = RunOrigin(source="digits", classes=("b", "a"), command="maple train digits")
    folder.write_config(RunSettings(origin, {"train": {"epochs": 3}}))
    assert folder.holds_run()
    assert folder.read_config() == RunSettings(origin, {"train": {"epochs": 3}})


def test_classes_survive(folder):
    before = RunClasses(
        classes=("a", "b"),
        skipped=(Skipped("x.png", "damaged"),),
        left_out=("c",),
        digests={"train": "12"},
        cluster_to_class=np.array([0, 1, 1]),
        cluster_sizes=np.array([5, 6, 7]),
        snapshot_epochs={"after": 3},
        updates=({"digest": "34"},),
    )
    folder.write_classes(before)
    assert folder.read_classes().to_json().keys() == before.to_json().keys()
    after = folder.read_classes()
    np.testing.assert_array_equal(after.cluster_sizes, before.cluster_sizes)
    assert (after.classes, after.skipped, after.updates) == (before.classes, before.skipped, before.updates)


def test_what_is_not_known_before_training_is_not_written(folder):
    folder.write_classes(RunClasses(classes=("a",)))
    assert "cluster_sizes" not in folder.read_classes().to_json()


def test_a_file_in_the_place_of_the_folder(folder):
    folder.path.write_text("")
    with pytest.raises(UsageError, match="--out"):
        folder.holds_run()


def test_a_config_file_that_is_no_runs(folder):
    folder.path.mkdir()
    (folder / RunFile.CONFIG).write_text("[tool]\nname = 1\n")
    with pytest.raises(RunError, match=RunFile.CONFIG):
        folder.holds_run()


def test_a_newer_format_is_refused(folder):
    folder.path.mkdir()
    (folder / RunFile.CONFIG).write_text(f"[origin]\nformat = {FORMAT_VERSION + 1}\n")
    with pytest.raises(RunError, match=str(FORMAT_VERSION + 1)):
        folder.read_config()


def test_clear_removes_the_run_and_nothing_else(folder):
    for name in (RunFile.CONFIG, RunFile.WEIGHTS, "notes.txt", f"{RunFile.GALLERY}/a.png", f"{RunFile.MEMBERS}/0/x"):
        write_atomic(folder / name, "x")
    assert folder.owns(folder / RunFile.GALLERY / "a.png")
    assert not folder.owns(folder / "notes.txt")
    folder.clear()
    assert [path.name for path in folder.path.iterdir()] == ["notes.txt"]


def test_checkpoints(folder):
    assert not folder.has_checkpoint()
    for path in (folder / RunFile.CHECKPOINT, folder / RunFile.MEMBERS / "1" / RunFile.CHECKPOINT):
        write_atomic(path, "x")
        assert folder.has_checkpoint()
        folder.remove_training_state()
        assert not folder.has_checkpoint()


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_the_second_process_is_told_who_holds_the_run(folder):
    process = hold(folder)
    try:
        for attempt in (lambda: folder.lock("maple evaluate").__enter__(), folder.check_unlocked):
            with pytest.raises(RunError) as told:
                attempt()
            for named in (str(folder.path), "maple train slides", str(process.pid), os.uname().nodename):
                assert named in str(told.value)
    finally:
        process.kill()
        process.wait()


def test_a_killed_process_holds_nothing(folder):
    process = hold(folder)
    process.kill()
    process.wait()
    assert (folder / RunFile.HOLDER).exists()  # nobody removed it
    with folder.lock("maple evaluate"):
        assert str(os.getpid()) in (folder / RunFile.HOLDER).read_text()


def test_the_lock_ends_with_its_command(folder):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), folder.lock("maple train"):
            raise ZeroDivisionError
    folder.check_unlocked()
    assert not (folder / RunFile.HOLDER).exists()


def test_looking_does_not_make_a_folder(folder):
    folder.check_unlocked()
    assert not folder.path.exists()


def test_two_processes_one_wins(folder):
    """However close they are, the lock is granted once."""
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", HOLD.replace("60", "1"), str(folder.path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    )
    start = time.monotonic()
    said = [process.communicate()[0].strip() for process in (first, second)]
    if time.monotonic() - start < 1.9:  # they met: otherwise the machine was too slow for it
        assert sorted(said) == ["", "held"]


def test_the_note_of_a_later_holder_stays(tmp_path):
    """A command that replaced the folder leaves the note of the one that has locked the new folder meanwhile."""
    folder = tmp_path / "run"
    folder.mkdir()
    with lock_folder(folder, "maple update"):
        other = {"pid": 1, "host": "elsewhere", "command": "maple predict", "since": "now"}
        (folder / RunFile.HOLDER).write_text(json.dumps(other))
    assert json.loads((folder / RunFile.HOLDER).read_text()) == other


@pytest.mark.parametrize(("key", "value"), [("classes", "5"), ("classes", '["a", 5]'), ("source", "3")])
def test_a_damaged_origin_is_named(folder, key, value):
    folder.path.mkdir()
    (folder / RunFile.CONFIG).write_text(f"[origin]\nformat = {FORMAT_VERSION}\n{key} = {value}\n")
    with pytest.raises(RunError, match=f"{RunFile.CONFIG}.*{key}"):
        folder.read_config()


def test_the_detector_is_removed_first_and_the_configuration_last(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a killed ``--overwrite`` leaves is an unfinished run: never a detector without its weights."""
    names = set(RunFile) - {RunFile.LOCK, RunFile.HOLDER}
    folders = {RunFile.GALLERY, RunFile.MEMBERS, RunFile.NETWORK, RunFile.MOMENTS}
    folder.path.mkdir()
    for name in names:
        (folder / name / "part").mkdir(parents=True) if name in folders else (folder / name).touch()
    (folder / "notes.txt").touch()
    removed: list[str] = []
    unlink, rmtree = Path.unlink, shutil.rmtree

    def note_file(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name)
        unlink(path, missing_ok)

    def note_folder(path: Path, ignore_errors: bool = False) -> None:
        removed.append(path.name)
        rmtree(path, ignore_errors)

    monkeypatch.setattr(Path, "unlink", note_file)
    monkeypatch.setattr(shutil, "rmtree", note_folder)
    folder.clear()
    assert (removed[0], removed[-1]) == (RunFile.DETECTOR, RunFile.CONFIG)
    assert set(removed) == names and [path.name for path in folder.path.iterdir()] == ["notes.txt"]
