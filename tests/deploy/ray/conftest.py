"""One Ray cluster of two nodes, and a run, for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'maple-uncertainty[ray]'")


@pytest.fixture(scope="session")
def nodes(tmp_path_factory):
    from clusters_of_ray import started

    with started(tmp_path_factory.mktemp("site")) as found:
        yield found


@pytest.fixture(scope="session")
def run(predictor, tmp_path_factory) -> Path:
    """A run folder that predicts."""
    folder = tmp_path_factory.mktemp("ray") / "run"
    folder.mkdir()
    predictor.save(folder)
    return folder


@pytest.fixture(scope="session")
def graph(predictor, tmp_path_factory) -> Path:
    """The same model, exported: workers load it in a tenth of the time."""
    from maple.deploy.export import export_onnx

    path = tmp_path_factory.mktemp("ray") / "model.onnx"
    export_onnx(predictor, path)
    return path


@pytest.fixture(scope="session")
def images(tmp_path_factory) -> Path:
    """An archive of images, one of them broken."""
    from clusters_of_ray import N, write_images

    return write_images(tmp_path_factory.mktemp("archive") / "images", N)


@pytest.fixture(scope="session")
def expected(graph, images, tmp_path_factory) -> tuple[bytes, bytes]:
    """What the one-process engine writes for the archive."""
    from clusters_of_ray import contents, request
    from maple.runs.predicting.predict import predict_images

    out = tmp_path_factory.mktemp("local") / "p.csv"
    predict_images(request(graph, images, out))
    return contents(out)


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch):
    """As many threads as a worker has, so that sums are taken in the same order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
