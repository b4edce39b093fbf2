"""The n-th file operation of a command fails, for every n until it succeeds; so do disk, permissions and memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from disks import change, disk
from faults.scenes import SCENES, Scene, World, check_whole, contents
from faults.server import Ended
from faults.test_kills import SERIES, assert_same, come_to_the_end, is_refused
from maple.files import RunFile
from torture import Torture

ERRORS = ("ENOSPC", "EIO", "EACCES", "EDQUOT")
CHEAP = ("predict", "update")  # the others are for make torture
DISKS = (64, 256, 1024, 4096, 16_384, 65_536)  # KiB
MEMORY = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # MiB on top of what the process has when it starts


def fail(scene: Scene, world: World, ended: Ended) -> None:
    """Check a command that may have failed: the error is clean, and once there is no fault it comes to its end."""
    check_failed(scene, world, ended)
    if ended.code:
        come_to_the_end(scene, world)
        assert_same(contents(world.trial), world.reference(scene.command).after)


def check_failed(scene: Scene, world: World, ended: Ended) -> None:
    """The error is clean, what is left is whole, and a run is the former or the new one."""
    reference = world.reference(scene.command)
    assert ended.is_clean and (ended.code != 2 or is_refused(scene, ended)), (ended.code, ended.err)
    check_whole(world.trial)
    if ended.code == 0:
        assert_same(without_drafts(contents(world.trial)), reference.after)
    elif scene.command == "update":
        found = without_drafts(contents(world.trial))
        is_former = found.keys() == reference.before.keys()
        assert_same(found, reference.before if is_former else without_report(reference.after))


def without_drafts(found: dict[str, object]) -> dict[str, object]:
    """Without what could not be removed, and will be by the next command."""
    return {
        name: value
        for name, value in found.items()
        if not any((part.startswith(".") and part != ".lock") or part.endswith(".partial") for part in Path(name).parts)
    }


def without_report(found: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in found.items() if Path(name).name != RunFile.REPORT}


@pytest.mark.parametrize("command", CHEAP)
def test_an_operation_fails(command: str, world: World) -> None:
    scene, reference = SCENES[command], world.reference(command)
    fail(scene, world, scene.start(world, at=1 + reference.operations // 3, error="ENOSPC", lasts=True))


def test_no_memory(world: World) -> None:
    """At least one amount is too little, and the largest is enough."""
    scene = SCENES["predict"]
    codes = []
    for mebibytes in (1, 1024):
        ended = scene.start(world, memory=2**20 * mebibytes)
        codes.append(ended.code)
        fail(scene, world, ended)
    assert codes == [1, 0]


@pytest.mark.parametrize("command", ["predict", "export"])
def test_a_file_may_not_grow(command: str, world: World) -> None:
    scene = SCENES[command]
    ended = scene.start(world, file_size=2000)
    assert ended.code == 1
    fail(scene, world, ended)


# --- real disks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["update", "predict"])
def test_a_full_disk(command: str, world: World) -> None:
    """A file takes all the room, and gives it back."""
    scene, reference = SCENES[command], world.reference(command)
    with disk(world.trial):
        folder = scene.prepare(world)
        filler = folder / ".filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        ended = world.forge.run(scene.argv, folder)
        filler.unlink()
        assert ended.code == 1 and ended.is_clean, ended.err
        assert "space" in ended.err
        check_whole(folder)
        assert_same(without_drafts(contents(folder / "run")), _inside(reference.before, "run"))
        assert scene.repeat(world).code == 0
        assert_same(contents(folder), reference.after)


def _inside(found: dict[str, object], folder: str) -> dict[str, object]:
    return {name.partition("/")[2]: value for name, value in found.items() if name.startswith(f"{folder}/")}


@pytest.mark.parametrize("command", ["train", "update", "predict", "export"])
def test_a_disk_that_cannot_be_written(command: str, world: World) -> None:
    scene = SCENES[command]
    reference = world.reference(command)
    with disk(world.trial) as trial:
        folder = scene.prepare(world)
        change(trial, "ro")
        ended = world.forge.run(scene.argv, folder)
        change(trial, "rw")
        assert ended.code == 1 and ended.is_clean, ended.err
        assert "Read-only" in ended.err
        assert_same(contents(folder), reference.before)


def test_a_run_on_a_disk_that_cannot_be_written_is_still_useful(world: World) -> None:
    """It predicts, and is updated into another folder."""
    with disk(world.trial) as trial:
        SCENES["update"].prepare(world)
        change(trial, "ro")
        said = world.forge.run(["predict", "run", "../images", "--workers", "0"], trial)
        updated = world.folder / "updated"
        ended = world.forge.run(["update", "run", "--data", "../new", "--workers", "0", "--out", updated], trial)
        assert (said.code, ended.code) == (0, 0), said.err + ended.err
        assert (updated / "detector.safetensors").exists()


# --- make torture -----------------------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.parametrize("command", SCENES)
def test_every_operation_fails(command: str, world: World, torture: Torture) -> None:
    """From a random operation on, one after the other and round again; once, or as long as the command runs."""
    scene, reference = SCENES[command], world.reference(command)
    at = int(torture.rng.integers(reference.operations))
    while torture.goes_on():
        n_failed = 0
        for call in (scene.start, *[scene.repeat] * (SERIES - 1)):
            at = at % reference.operations + 1
            error, lasts = str(torture.rng.choice(ERRORS)), bool(torture.rng.integers(2))
            ended = call(world, at=at, error=error, lasts=lasts)
            check_failed(scene, world, ended)
            n_failed += ended.operations >= at
            if ended.code in (0, 2):
                break
        come_to_the_end(scene, world)
        assert_same(contents(world.trial), reference.after)
        torture.count("failed operations", scene.command.split()[0], n_failed)


@pytest.mark.torture
@pytest.mark.parametrize("command", SCENES)
def test_memory_grows_until_it_is_enough(command: str, world: World, torture: Torture) -> None:
    scene = SCENES[command]
    while torture.goes_on():
        for mebibytes in MEMORY:
            ended = scene.start(world, memory=int(2**20 * mebibytes * torture.rng.uniform(1, 2)))
            fail(scene, world, ended)
            torture.count("failed allocations", scene.command.split()[0], ended.code != 0)
            if ended.code == 0 or not torture.goes_on():
                break


@pytest.mark.torture
@pytest.mark.parametrize("command", SCENES)
def test_disk_grows_until_it_is_enough(command: str, world: World, torture: Torture) -> None:
    scene = SCENES[command]
    world.reference(command)  # before, since it needs the same folder
    with disk(world.trial) as trial:
        while torture.goes_on():
            for kibibytes in DISKS:
                change(trial, "size=65536k")
                folder = scene.prepare(world)
                used = sum(path.stat().st_size + 4096 for path in folder.rglob("*")) // 1024
                room = int(kibibytes * torture.rng.uniform(0.5, 1))
                change(trial, f"size={used + room}k")
                ended = world.forge.run(scene.argv, folder)
                change(trial, "size=65536k")
                fail(scene, world, ended)
                torture.count("full disks", scene.command.split()[0], ended.code != 0)
                if ended.code == 0 or not torture.goes_on():
                    break
