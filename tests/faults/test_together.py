"""Two commands on one run: the second one ends at once with an error that names the first, and changes nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from commands import run
from faults.scenes import SCENES, World, contents
from faults.server import Ended
from faults.test_kills import assert_same
from maple.files import RunFile


def until(holds: Path) -> None:
    deadline = time.monotonic() + 60
    while not holds.exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert holds.exists()


LONG = [pytest.param(name, marks=pytest.mark.torture) for name in ("train --overwrite", "evaluate")]


@pytest.mark.parametrize("command", ["update", *LONG])
def test_two_commands_on_one_run(
    command: str, world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    scene, reference = SCENES[command], world.reference(command)
    folder, ended = scene.prepare(world), list[Ended]()
    thread = threading.Thread(target=lambda: ended.append(world.forge.run(scene.argv, folder)))
    thread.start()
    until(folder / "run" / RunFile.HOLDER)
    monkeypatch.chdir(folder)
    codes = [run("update", "run", "--data", "../new"), run("evaluate", "run"), run(*SCENES["train --overwrite"].argv)]
    still = thread.is_alive()
    thread.join()
    assert ended[0].code == 0, ended[0].err
    if still:  # else the machine was too slow for the second command to meet the first
        assert codes == [1, 1, 1]
        assert capsys.readouterr().err.count("being written by") == 3
        assert_same(contents(folder), reference.after)
