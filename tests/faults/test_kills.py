"""Commands killed at any moment: what they leave is whole, and the same command brings it to the same end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.scenes import SCENES, Scene, World, check_whole, contents
from faults.server import KILLED, Ended
from torture import Torture

CHEAP = ("train", "predict", "update")  # the others are for make torture
SERIES = 6  # kills of one command before it may come to its end


def survive(scene: Scene, world: World, killed: Ended) -> None:
    """Check what a killed command left, run it again and compare the end with that of an uninterrupted one."""
    reference = world.reference(scene.command)
    assert killed.code in (KILLED, 0), killed.err
    check_whole(world.trial)
    check_usable(scene, world)
    come_to_the_end(scene, world)
    check_whole(world.trial)
    assert_same(contents(world.trial), reference.after)


def come_to_the_end(scene: Scene, world: World) -> None:
    """Repeat the command; one that was stopped in its last step, and says so, lacks only its report."""
    ended = scene.repeat(world)
    if ended.code:
        assert is_refused(scene, ended), ended.err
        assert world.forge.run(["report", "run"], world.trial).code == 0


def is_refused(scene: Scene, ended: Ended) -> bool:
    """Whether the command says that nothing is left to do."""
    return ended.is_clean and bool(scene.refused) and scene.refused in ended.err


def check_usable(scene: Scene, world: World) -> None:
    """A run that was there, or is being made, predicts, or an error names it and says what to do."""
    run = world.trial / ("fitted" if scene.command == "fit" else "run")
    if scene.command in ("benchmark", "predict", "export"):
        return
    if scene.command in ("update", "evaluate"):  # the run is the former or the new one, never missing
        assert run.is_dir()
    ended = world.forge.run(["predict", run.name, "../images", "--workers", "0"], world.trial)
    assert ended.is_clean, ended.err
    if ended.code:
        assert scene.command not in ("update", "evaluate") and run.name in ended.err, ended.err
    else:
        assert ended.out.count("\n") == 36  # the header and 35 images that are no broken ones


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, value in wanted.items():
        assert found[name] == value, f"{name}: {list(differences(found[name], value))[:5]}"


def differences(found: Any, wanted: Any, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Where two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted({*found, *wanted}):
            yield from differences(found.get(name), wanted.get(name), f"{place}.{name}")
    elif isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        for i, pair in enumerate(zip(found, wanted)):
            yield from differences(*pair, f"{place}[{i}]")
    elif found != wanted:
        yield place, found, wanted


@pytest.mark.parametrize("command", CHEAP)
def test_killed_at_a_file_operation(command: str, world: World) -> None:
    scene, reference = SCENES[command], world.reference(command)
    killed = scene.start(world, at=1 + reference.operations // 2)
    assert killed.code == KILLED
    survive(scene, world, killed)


@pytest.mark.torture
def test_killed_again_and_again_until_it_ends(world: World) -> None:
    """Every call gets five file operations further than the one before."""
    scene, reference = SCENES["train"], world.reference("train")
    killed = scene.start(world, at=reference.operations // 3)
    for at in (reference.operations // 2, reference.operations // 3, 5):
        assert killed.code == KILLED
        killed = scene.repeat(world, at=at)
    survive(scene, world, killed)


# --- make torture -----------------------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.parametrize("command", SCENES)
def test_kills(command: str, world: World, torture: Torture) -> None:
    """At random moments and file operations, and again while the same command repairs what the kills before it left.

    Every 16th series begins with the real command in a process of its own.
    """
    scene, n = SCENES[command], 0
    while torture.goes_on():
        n += 1
        kills = kill_repeatedly(scene, world, torture.rng, really=n % 16 == 8)
        survive(scene, world, Ended(KILLED, "", "", 0.0))
        torture.count("kills", scene.command.split()[0], sum(kills.values()))
        for how, count in kills.items():
            torture.count("kills by", how, count)


def kill_repeatedly(scene: Scene, world: World, rng: np.random.Generator, really: bool = False) -> Counter[str]:
    """Kill a command, check what it left, kill its repetition and so on; how many were killed by what."""
    kills: Counter[str] = Counter()
    for i in range(SERIES):
        if i:
            check_whole(world.trial)
            check_usable(scene, world)
        start = scene.repeat if i else scene.start
        if really and not i:
            ended, how = start_really(scene, world, rng), "command line"
        elif rng.random() < 0.75:
            ended, how = start(world, at=int(rng.integers(1, last_operation(scene, world, i) + 1))), "file operation"
        else:
            ended, how = start(world, kill_after=rng.uniform(0, world.reference(scene.command).seconds)), "moment"
        if ended.code != KILLED:
            assert ended.code == 0 or is_refused(scene, ended), ended.err
            break
        kills[how] += 1
    return kills


def last_operation(scene: Scene, world: World, repetition: int) -> int:
    """A command that resumes has fewer operations left each time."""
    return max(world.reference(scene.command).operations // (1 + repetition), 2)


def start_really(scene: Scene, world: World, rng: np.random.Generator) -> Ended:
    """``python -m maple`` in a process of its own, killed at a random moment of its work."""
    folder, start = scene.prepare(world), time.monotonic()
    before = _files(folder)
    command = [sys.executable, "-m", "maple", *scene.argv]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and _files(folder) == before:
            time.sleep(0.02)  # imports, which take seconds and write nothing
        time.sleep(rng.uniform(0, world.reference(scene.command).seconds))
        process.kill()
        return Ended(process.wait(), "", "", time.monotonic() - start)


def _files(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*"))
