"""Trainings next to other processes: shared, left to their owner, taken over, resumed after a kill."""

from __future__ import annotations

import signal
import time

import numpy as np
from filelock import FileLock

from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import SUITES
from maple.runs.benchmark.jobs import list_jobs
from maple.runs.benchmark.suites import run_suites
from maple.runs.benchmark.trainings import ensure_trained, locked, train_all
from maple.runs.requests import BenchmarkRequest
from processes import fork_maple

MD = ("benchmark", "md", "--profile", "tiny")


def test_a_killed_benchmark_goes_on(everything, tmp_path):
    """SIGKILL as soon as the first network is saved; the next call ends with the table of an uninterrupted one."""
    _, found = everything
    expected = next(each for each in found.values() if each.suite.name == "md")
    process = fork_maple(*MD, "--out", tmp_path)
    deadline = time.monotonic() + 300
    while not any(tmp_path.rglob("resume.safetensors")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    ((_, again),) = run_suites(BenchmarkRequest(("md",), "tiny", out=tmp_path))
    for before, after in zip(expected.rows, again.rows, strict=True):
        for column in before.figures:
            np.testing.assert_allclose(after.figures[column], before.figures[column], rtol=1e-6, err_msg=column)


def test_a_checkpoint_that_could_not_be_removed_goes_with_the_next_command(tmp_path):
    (job, *_) = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path)
    job.folder.mkdir(parents=True)
    for name in ("results.json", "resume.safetensors"):
        (job.folder / name).touch()
    assert ensure_trained(job) == job.folder
    assert [path.name for path in job.folder.iterdir()] == ["results.json"]


def test_processes_share_the_work(tmp_path):
    """Two benchmarks at once: every network is trained by one of them, and both end with the table."""
    both = [fork_maple(*MD, "--out", tmp_path) for _ in range(2)]
    ends = [process.communicate(timeout=500) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    trained = [line for _, said in ends for line in said.splitlines() if line.startswith(("training:", "continuing:"))]
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path)
    assert sorted(trained) == sorted(f"training: {job.title}" for job in jobs)


def test_what_another_process_trains_is_left_to_it(tmp_path, monkeypatch):
    """And taken over should that process end without having finished it."""
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path)
    trained = []

    def train(job):
        trained.append(job)
        job.folder.mkdir()
        (job.folder / "results.json").touch()
        other.release()

    monkeypatch.setattr("maple.runs.benchmark.trainings._train", train)
    for folder in ("trainings", "locks"):
        (tmp_path / folder).mkdir()
    other = FileLock(jobs[0].lock)
    other.acquire()
    train_all(jobs)
    assert trained == [*jobs[1:], jobs[0]]


def test_processes_of_one_training_see_the_same_networks(tmp_path, monkeypatch):
    """With several devices, all networks are locked before the first is trained, until the last is."""
    jobs = list_jobs([SUITES["md"]], PROFILES["tiny"], [0], tmp_path, changes={"devices": 2})
    trained = []

    def train(job):
        assert all(is_taken(other) for other in jobs)
        trained.append(job)

    def is_taken(job):
        with locked(job, wait=False) as mine:
            return not mine

    monkeypatch.setattr("maple.runs.benchmark.trainings._train", train)
    train_all(jobs)
    assert trained == jobs
    assert not any(is_taken(job) for job in jobs)
