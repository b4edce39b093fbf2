"""Workers, nodes and commands that are killed at random moments: no row is lost or doubled, no block counted twice."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from clusters_of_ray import BATCH, contents, kill, parts, request, when, write_classes
from maple.deploy.ray import totals
from maple.deploy.ray.engine import RayEngine
from maple.deploy.ray.predict import predict_on_ray
from maple.files import RunFile, load_arrays
from maple.runs.fit import fit_run
from maple.runs.requests import FitRequest
from maple.stats.arrays import with_prefix
from maple.stats.moments import Moments

pytestmark = [pytest.mark.torture, pytest.mark.timeout(3600)]
N_TRAIN = 1500  # twelve blocks


def strike(nodes, name: str, rng: np.random.Generator) -> None:
    """Kill one worker of this name, if there is one."""
    if workers := nodes.workers(name):
        kill(workers[rng.integers(len(workers))])


def test_predictions(nodes, graph, images, expected, tmp_path, torture):
    while torture.goes_on():
        out = tmp_path / f"{time.monotonic_ns()}" / "p.csv"
        out.parent.mkdir()
        after, is_node = int(torture.rng.integers(0, 9)), bool(torture.rng.random() < 0.4)
        act = nodes.kill_second if is_node else lambda: strike(nodes, "PartWriter", torture.rng)
        try:
            with when(lambda at=after, out=out: len(parts(out)) >= at, act):
                predict_on_ray(request(graph, images, out))
        finally:
            if is_node:
                nodes.second = nodes.add()
        assert contents(out) == expected
        torture.count("kills", "ray node" if is_node else "ray worker")


def test_commands(nodes, graph, images, expected, tmp_path, torture):
    """The command itself is killed, and given again."""
    while torture.goes_on():
        out = tmp_path / f"{time.monotonic_ns()}" / "p.csv"
        out.parent.mkdir()
        flags = ["--batch-size", BATCH, "--workers", 2, "--engine", "ray", "--ray-address", nodes.cluster.address]
        command = [sys.executable, "-m", "maple", "predict", graph, images, "--out", out, *flags]
        after = int(torture.rng.integers(0, 10))
        with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and len(parts(out)) < after:
                time.sleep(0.01)
            process.kill()
        predict_on_ray(request(graph, images, out))
        assert contents(out) == expected
        torture.count("kills", "ray command")


def test_fits(nodes, tmp_path_factory, monkeypatch, torture):
    folder = tmp_path_factory.mktemp("fits")
    for seed, (name, n) in enumerate([("train", N_TRAIN), ("calibrate", 240)]):
        write_classes(folder / name, n, seed)
    monkeypatch.setattr(totals, "plan_step", lambda *_: 128)

    def fit(out: str, engine: str) -> FitRequest:
        return FitRequest(
            model="python:clusters_of_ray:make_network", source=str(folder / "train"),
            calibrate=str(folder / "calibrate"), out=folder / out, trust=True, report=False, engine=engine,
        )  # fmt: skip

    fit_run(known := fit("local", "local"))
    while torture.goes_on():
        asked = fit(f"{time.monotonic_ns()}", "ray")
        after, is_node = int(torture.rng.integers(0, 5)), bool(torture.rng.random() < 0.4)
        act = nodes.kill_second if is_node else lambda: strike(nodes, "NetworkWorker", torture.rng)
        moments = asked.folder / RunFile.MOMENTS
        try:
            with (
                when(lambda at=after, place=moments: len([*place.rglob("*.npz")]) >= at, act),
                RayEngine(asked, moments) as engine,
            ):
                fit_run(asked, engine)
        finally:
            if is_node:
                nodes.second = nodes.add()
        assert_same_moments(asked.folder, known.folder)
        torture.count("kills", "ray node, fit" if is_node else "ray worker, fit")


def assert_same_moments(found: Path, known: Path) -> None:
    arrays, expected = (load_arrays(run / RunFile.DETECTOR)[0] for run in (found, known))
    names = {name.removesuffix("second") for name in expected if name.endswith(".second")}
    assert names
    for name in names:
        one, other = (Moments.from_arrays(with_prefix(each, name)) for each in (arrays, expected))
        assert one.counts.tolist() == other.counts.tolist()
        scale = np.abs(other.total_covariance).max()
        np.testing.assert_allclose(one.total_covariance / scale, other.total_covariance / scale, atol=1e-10)
