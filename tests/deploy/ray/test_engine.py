"""Fit, evaluate and monitor on Ray: what one process finds, to rounding."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from clusters_of_ray import write_classes
from disks import change, disk
from maple.data.sources import open_images
from maple.deploy.ray import totals
from maple.deploy.ray.engine import RayEngine
from maple.deploy.ray.tree import Store
from maple.errors import DataError, RunError
from maple.files import RunFile, load_arrays
from maple.runs.evaluate import evaluate_run
from maple.runs.fit import fit_run
from maple.runs.predicting.monitor import monitor_images
from maple.runs.requests import EvaluateRequest, FitRequest, MonitorRequest

N = 600  # training images: five batches, each a block


@dataclass(frozen=True)
class Place:
    """Images, and where runs go."""

    folder: Path

    def request(self, out: str, **more) -> FitRequest:
        images = {name: str(self.folder / name) for name in ("train", "calibrate", "test")}
        return FitRequest(
            model="python:clusters_of_ray:make_network",
            source=images["train"],
            calibrate=images["calibrate"],
            test=images["test"],
            out=self.folder / out,
            trust=True,
            report=False,
            flags={"detector.covariance": "full"},  # which reads the training images twice
            **{"ood": {"others": str(self.folder / "others")}, **more},
        )


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("engine")
    for seed, (name, n) in enumerate([("train", N), ("calibrate", 240), ("test", 80), ("others", 40)]):
        write_classes(folder / name, n, seed)
    return Place(folder)


@pytest.fixture(scope="module")
def local(place) -> Path:
    """A run that one process has fitted."""
    fit_run(request := place.request("local"))
    return request.folder


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(totals, "plan_step", lambda *_: 128)


def fit_on_ray(request: FitRequest) -> None:
    request = replace(request, engine="ray")
    with RayEngine(request, request.folder / RunFile.MOMENTS, request.overwrite) as engine:
        fit_run(request, engine)


def assert_same_run(found: Path, known: Path) -> None:
    arrays, metadata = load_arrays(found / RunFile.DETECTOR)
    expected, expected_metadata = load_arrays(known / RunFile.DETECTOR)
    assert arrays.keys() == expected.keys()
    for name in ("counts", "sums", "second"):
        assert any(key.endswith(name) for key in arrays)
    for name, array in expected.items():
        if not name.startswith("moments."):  # sums around another shift: what follows from them is compared
            np.testing.assert_allclose(arrays[name], array, rtol=1e-10, atol=1e-10, err_msg=name)
    for exponent in ("0", "0.5", "1"):
        if f"moments.{exponent}.counts" in expected:
            one, other = (moments_of(each, exponent) for each in (arrays, expected))
            scale = np.abs(other.total_covariance).max()
            np.testing.assert_allclose(one.total_covariance / scale, other.total_covariance / scale, atol=1e-10)
            np.testing.assert_allclose(one.means, other.means, rtol=1e-10, atol=1e-10)
    assert metadata["class_names"] == expected_metadata["class_names"]
    assert metadata["decision"]["threshold"] == pytest.approx(expected_metadata["decision"]["threshold"], rel=1e-10)
    one, other = (json.loads((run / RunFile.RESULTS).read_text())["methods"]["maple"] for run in (found, known))
    for name in ("accuracy", "ece", "nll"):
        assert one["classification"][name] == pytest.approx(other["classification"][name], rel=1e-6)
    assert one["detection"]["others"]["auroc"] == other["detection"]["others"]["auroc"]


def moments_of(arrays: dict[str, np.ndarray], exponent: str):
    from maple.stats.arrays import with_prefix
    from maple.stats.moments import Moments

    return Moments.from_arrays(with_prefix(arrays, f"moments.{exponent}."))


def test_a_fit_that_was_killed_goes_on_from_its_sums(nodes, place, local, small_blocks, monkeypatch, capsys):
    """And equals that of one process, in both passes over the training images."""

    class Killed(BaseException):
        pass

    request = place.request("ray")

    def stop(merging, node) -> None:
        finish(merging, node)
        if len(merging.tree.done) >= 2:
            raise Killed

    finish = totals._Merging.finish
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(totals._Merging, "finish", stop)
        fit_on_ray(replace(request, workers=1))
    assert [*(request.folder / RunFile.MOMENTS).rglob("*.npz")] and not (request.folder / RunFile.CONFIG).exists()
    fit_on_ray(request)
    assert "resuming after" in capsys.readouterr().err
    assert_same_run(request.folder, local)
    assert not (request.folder / RunFile.MOMENTS).exists()


def test_an_evaluation_is_that_of_one_process(nodes, place, local):
    copies = [Path(shutil.copytree(local, place.folder / name)) for name in ("evaluated", "evaluated-on-ray")]
    ask = partial(
        EvaluateRequest,
        ind=str(place.folder / "test"),
        ood={"others": str(place.folder / "others")},
        detectors=("rmd", "knn"),
        report=False,
        trust=True,
    )
    known = evaluate_run(ask(run=copies[0]))
    with RayEngine(request := ask(run=copies[1], engine="ray")) as engine:
        found = evaluate_run(request, engine)
    for name, method in known.methods.items():
        if method.classification is not None:  # not every score gives a class
            assert found.methods[name].classification.accuracy == method.classification.accuracy
        for kind, detection in method.detection.items():
            assert found.methods[name].detection[kind].auroc == pytest.approx(detection.auroc, rel=1e-6)


def test_monitoring_is_that_of_one_process(nodes, graph, run, place):
    for model in (graph, run):
        request = MonitorRequest(model, [str(place.folder / "test")], batch_size=16, engine="ray", workers=1)
        known = monitor_images(request)
        with RayEngine(request) as engine:
            found = monitor_images(request, engine)
        assert found.to_dict() == known.to_dict()


def test_images_that_vanish_stop_a_fit(nodes, place, small_blocks, monkeypatch):
    """After they were listed and decoded once: the block that misses them is not counted without them."""
    train = Path(shutil.copytree(place.folder / "train", place.folder / "vanishing"))

    def vanish(*arguments) -> int:
        shutil.rmtree(train)
        return 128

    monkeypatch.setattr(totals, "plan_step", vanish)
    monkeypatch.setattr("maple.runs.setup.splits.open_images", partial(open_images, memory_limit=0))
    with pytest.raises(DataError, match=r"vanishing.*"):
        fit_on_ray(replace(place.request("vanished"), source=str(train), workers=1))
    assert not (place.folder / "vanished" / RunFile.CONFIG).exists()


def test_sums_that_cannot_be_written_name_file_and_machine(tmp_path):
    store = Store(tmp_path, ("moments.1",))
    (tmp_path / "moments.1.0-1.npz").mkdir()  # nothing can be written there
    with pytest.raises(RunError, match=r"moments\.1\.0-1\.npz.* on .*rerun the same command"):
        store.write_block(0, {"moments.1.sums": np.zeros(3)})


def test_a_disk_that_fills_up_ends_a_fit_and_the_same_one_goes_on(nodes, place, local, small_blocks, tmp_path, capsys):
    """A real one, with room for the sums of some blocks."""
    with disk(tmp_path / "runs", kibibytes=12) as folder:
        request = replace(place.request("full"), out=folder / "full")
        full = (
            rf"cannot write '{folder}/.*No space left on device on {socket.gethostname()}; free some space, then rerun"
        )
        with pytest.raises(RunError, match=full):
            fit_on_ray(request)
        found = [path.name for path in (request.folder / RunFile.MOMENTS).rglob("*") if path.is_file()]
        assert "plan.json" in found and not [name for name in found if name.startswith("writing")]
        assert not (request.folder / RunFile.CONFIG).exists()
        change(folder, "size=64m")
        fit_on_ray(request)
        assert_same_run(request.folder, local)
        assert not (request.folder / RunFile.MOMENTS).exists()
