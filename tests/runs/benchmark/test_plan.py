"""The plan of a benchmark: time of a training step, state and images of each training."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import Training
from maple.evaluation.paper.suites import find_suite
from maple.runs.benchmark.jobs import Job, list_jobs
from maple.runs.benchmark.plan import describe_plan, time_step
from maple.runs.benchmark.suites import plan_suites
from maple.runs.requests import BenchmarkRequest
from maple.training.recipe import list_recipes


@pytest.mark.parametrize("recipe", list_recipes())
def test_the_time_of_every_recipe_can_be_estimated(recipe):
    config = Job(Training.of("cifar10", recipe=recipe), PROFILES["cpu"], 0, Path("nowhere")).config
    assert 0 < time_step(config) < 60


def test_the_hours_are_said_before_the_start(tmp_path):
    jobs = list_jobs([find_suite("md")], PROFILES["tiny"], (0, 1), tmp_path)
    assert describe_plan(jobs).startswith("4 trainings, 0 of them finished; the others take less than 0.1 hours")
    longer = list_jobs([find_suite("md")], PROFILES["tiny"], (0, 1), tmp_path, changes={"epochs": 40_000})
    said = re.search(r"about ([0-9.]+) hours of training", describe_plan(longer))
    assert float(said[1]) > 1


def test_plan(everything, tmp_path):
    out, _ = everything
    rows = plan_suites(BenchmarkRequest(("md",), "tiny", out=out))
    assert [row["state"] for row in rows[:-1]] == ["finished", "finished"] and rows[-1]["hours"] == 0
    rows = plan_suites(BenchmarkRequest(("md",), "tiny", out=tmp_path))
    assert [row["state"] for row in rows[:-1]] == ["new", "new"] and rows[0]["images"] == 168
    rows = plan_suites(BenchmarkRequest(("imagenet",), "cpu", out=tmp_path, data_root=tmp_path))
    assert rows[0]["state"] == "no imagenet/train" and rows[0]["images"] == round(0.8 * 1_281_167)
