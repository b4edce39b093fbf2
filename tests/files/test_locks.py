"""Locks of run folders."""

from __future__ import annotations

import json
import os

import pytest

from maple.errors import RunError
from maple.files import RunFile, check_unlocked, lock_folder, take_lock


def test_the_holder_is_named_while_it_holds(tmp_path):
    with lock_folder(tmp_path, "maple train"):
        assert json.loads((tmp_path / RunFile.HOLDER).read_text())["pid"] == os.getpid()
    assert not (tmp_path / RunFile.HOLDER).exists()


def test_a_lock_removes_what_a_killed_update_left(tmp_path):
    run, left = tmp_path / "run", tmp_path / ".run.a1b2c3d4.draft"
    run.mkdir()
    (left / "new").mkdir(parents=True)
    with lock_folder(run, "maple update"):
        assert not left.exists()


def test_a_lock_that_is_a_link_changes_no_file(tmp_path):
    victim, run = tmp_path / "victim.txt", tmp_path / "run"
    victim.write_text("precious")
    run.mkdir()
    (run / RunFile.LOCK).symlink_to(victim)
    with pytest.raises(RunError, match="run"), lock_folder(run, "maple update"):
        pass
    assert victim.read_text() == "precious"


def test_a_folder_that_is_being_written_is_refused(tmp_path):
    (tmp_path / RunFile.HOLDER).write_text("{")  # half a note is no reason to fail
    lock = take_lock(tmp_path / RunFile.LOCK)
    with pytest.raises(RunError, match="another process"):
        check_unlocked(tmp_path)
    lock.release()
    check_unlocked(tmp_path)
    check_unlocked(tmp_path / "not there")
