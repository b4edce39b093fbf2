"""The processes of ``--devices N`` end together, each error is said once, and the exit code is 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commands import python
from maple.training.processes import children
from processes import run_processes

# The command itself, but one process is killed.
KILLED = """
import os, signal

import maple.training.loop
from maple.cli.app import main


def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("LOCAL_RANK", "0") == os.environ["KILLED"]:
    maple.training.loop.training_batches = killed
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "code"), [(1, 1), (0, -9)])
def test_a_killed_process_ends_the_other_with_one_sentence(tmp_path, rank, code):
    (tmp_path / "killed.py").write_text(KILLED)
    arguments = ("train", "digits", "--out", tmp_path / "run", "--devices", 2, "--epochs", 1, "--accelerator", "cpu")
    result = python(tmp_path / "killed.py", *arguments, "--backbone", "resnet9", KILLED=str(rank))
    assert result.returncode == code
    assert result.stderr.count("error:") == result.stderr.count("another process of this training") == 1, result.stderr
    assert "Traceback" not in result.stderr


def watch(told: Path, codes: list[int]) -> None:
    """Watch processes that end with these codes, in a process that waits for ever."""
    with told.open("w") as file:
        os.dup2(file.fileno(), 2)
    children.GRACE_SECONDS = 0.1
    programs = [[sys.executable, "-c", f"raise SystemExit({code})"] for code in codes]
    children._watch([subprocess.Popen(program) for program in programs])


def test_a_process_that_waits_for_one_that_has_failed_is_ended(tmp_path):
    ((code, _),) = run_processes(watch, tmp_path / "told", [0, 7], n=1)
    assert code == 1
    assert "code 7" in (tmp_path / "told").read_text()
    ((code, answer),) = run_processes(watch, tmp_path / "silence", [0, 0], n=1)
    assert (code, answer) == (0, (None,))
    assert (tmp_path / "silence").read_text() == ""


CHILD = """
import time
from maple.training.processes import children

children.GRACE_SECONDS = 0.1
children.start_children(2)
print("started", flush=True)
time.sleep(100)
"""


def test_a_child_ends_after_the_first_process(tmp_path):
    """Also where it waits in a call that nothing else ends, as for a connection."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = os.environ | {"LOCAL_RANK": "1", "MAPLE_CHILD": "1"}
    with subprocess.Popen([sys.executable, "-c", CHILD], env=variables, **pipes) as child:
        assert child.stdout.readline() == "started\n"
        _, told = child.communicate(timeout=60)  # closes the pipe first
    assert child.returncode == 1 and told.count("another process of this training") == 1


def test_children_are_started_once(monkeypatch):
    started = []
    for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what is set is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(children, "_watch", lambda _: None)
    monkeypatch.setattr(children.subprocess, "Popen", lambda command, env, stdin: started.append((command, env)))
    children.start_children(1)
    assert not started
    children.start_children(3)
    children.start_children(3)
    assert [env["LOCAL_RANK"] for _, env in started] == ["1", "2"] and os.environ["LOCAL_RANK"] == "0"
    assert {env["WORLD_SIZE"] for _, env in started} == {"3"}
    assert len({env["MASTER_PORT"] for _, env in started}) == 1
    assert all(command[0] == sys.executable for command, _ in started)
