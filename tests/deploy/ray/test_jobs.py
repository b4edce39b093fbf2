"""Tasks on a pool of workers: each result once, whatever becomes of a worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from ray.exceptions import OutOfDiskError

from commands import flat
from maple.deploy.ray.cluster import Resources
from maple.deploy.ray.jobs import MAX_ATTEMPTS, Pool
from maple.errors import DataError, RunError


class Doubling:
    """Dies, or fails, at some numbers as often as a file in the folder says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ready(self) -> None:
        pass

    def double(self, number: int) -> int:
        with (self.folder / f"{number}").open("a") as tried:
            tried.write("x")
        n_tried = len((self.folder / f"{number}").read_text())
        if number == 5 and n_tried < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 17:
            raise DataError("no such image")
        if number == 19:
            raise RunError("disk full")
        if number == 23:
            raise OutOfDiskError
        return 2 * number


def run(folder: Path, numbers: list[int]) -> dict[int, int]:
    pool: Pool[int] = Pool(Resources(2, cpus=0), Doubling, folder)
    found = list(pool.run(iter(numbers), lambda actor, number: actor.double.remote(number)))
    assert len(found) == len(dict(found))
    return dict(found)


def test_tasks_of_a_worker_that_dies_are_done_by_others_once(nodes, tmp_path, capsys):
    assert run(tmp_path, [*range(12)]) == {number: 2 * number for number in range(12)}
    assert (tmp_path / "5").read_text() == "xxx"
    assert "a Ray worker has died" in flat(capsys.readouterr().err)


def test_a_task_that_kills_every_worker_is_not_tried_for_ever(nodes, tmp_path):
    with pytest.raises(RunError, match=r"^13 failed .* times on Ray"):
        run(tmp_path, [13])
    assert len((tmp_path / "13").read_text()) == MAX_ATTEMPTS


def test_errors_about_images_are_raised_at_once_and_others_after_some_attempts(nodes, tmp_path):
    with pytest.raises(DataError, match="no such image"):
        run(tmp_path, [17])
    with pytest.raises(RunError, match="disk full"):
        run(tmp_path, [19])
    with pytest.raises(RunError, match=r"OutOfDiskError.*free some space.*/tmp/ray"):
        run(tmp_path, [23])
    assert (tmp_path / "17").read_text() == "x" and len((tmp_path / "19").read_text()) == MAX_ATTEMPTS
