"""What killed processes leave beside a target is removed by the next one; what others are writing is not."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from maple.errors import RunError
from maple.files import check_finished, draft_folder, drafts, no_run, write_atomic
from maple.files.drafts import draft_beside, draft_file, exchange, find_replaced

KILLED = """
import os, signal, sys
from pathlib import Path
from maple.files import draft_folder, write_atomic

target = Path(sys.argv[1])
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "file":
    os.fsync = kill
    write_atomic(target, "new")
with draft_folder(target) as draft:
    draft.mkdir()
    (draft / "a").write_text("new")
    kill()
"""


def kill_writing(target: Path, kind: str) -> None:
    code = subprocess.run([sys.executable, "-c", KILLED, target, kind]).returncode
    assert code == -signal.SIGKILL


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_of_a_killed_process(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    target.write_text("old")
    kill_writing(target, "file")
    assert target.read_text() == "old" and len(names(tmp_path)) == 2
    write_atomic(target, "newer")
    assert target.read_text() == "newer" and names(tmp_path) == ["x.json"]


def test_a_folder_of_a_killed_process(tmp_path: Path) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "a").write_text("old")
    kill_writing(target, "folder")
    assert (target / "a").read_text() == "old" and len(names(tmp_path)) == 2
    with draft_folder(target) as draft:
        draft.mkdir()
    assert names(target) == [] and names(tmp_path) == ["run"]


def test_what_is_being_written_stays(tmp_path: Path) -> None:
    target = tmp_path / "x.json"
    with draft_file(target) as (file, path), draft_beside(target) as folder:
        write_atomic(target, "other")
        assert path.exists() and folder.exists()
        file.write(b"late")
        file.flush()
        path.replace(target)
    assert target.read_text() == "late" and names(tmp_path) == ["x.json"]


def test_folders_change_places_in_one_step(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot")
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["b"], ["a"])
    assert not exchange(tmp_path / "a", tmp_path / "missing")


def test_without_that_step_the_former_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "config.toml").touch()
    monkeypatch.setattr(drafts, "exchange", lambda *_: False)
    with draft_folder(target) as draft:
        draft.mkdir()
    assert names(target) == []
    left = tmp_path / ".run.abcdefgh.draft"
    left.mkdir()
    target.rename(left / "old")  # killed here, before the new version is in its place
    assert find_replaced(target) == left / "old"
    for error in (lambda: check_finished(target), lambda: no_run(target, "config.toml")):
        with pytest.raises(RunError, match=r"\.run\.abcdefgh\.draft"):
            error()
    drafts.remove_stale(target)
    (left / "old").rename(target)
    drafts.remove_stale(target)
    assert names(tmp_path) == ["run"]


def test_a_failing_swap_brings_the_former_version_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "run"
    target.mkdir()
    (target / "a").write_text("old")
    monkeypatch.setattr(drafts, "exchange", lambda *_: False)
    with pytest.raises(FileNotFoundError), draft_folder(target):
        pass  # nothing was written
    assert (target / "a").read_text() == "old" and names(tmp_path) == ["run"]
