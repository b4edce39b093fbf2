"""A small predictor of any speed, and a service in a process of its own, for the tests of ``maple serve``."""

from __future__ import annotations

import base64
import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from image_files import encode
from maple.decisions.calibration import Calibration
from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.server import listen_at, run_app
from maple.prediction.base import BasePredictor
from maple.types import PREDICTION_COLUMNS, Prediction
from processes import Forked

CENTROIDS = np.array([[200.0, 40, 40], [40, 200, 40], [40, 40, 200], [120, 120, 200]])  # (M, 3): mean colours
CLUSTER_TO_CLASS = np.array([0, 1, 2, 2])
NAMES = ("red", "green", "blue")
THUMBNAILS = {0: np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)}


class Colours(BasePredictor):
    """The class of an image is the nearest colour; a batch takes as long as it is told to.

    ``batches`` are the sizes of those that were predicted; while ``gate`` is closed, none is.
    """

    runtime = "numpy"
    network = "colours"
    score_name = "distance"
    cluster_to_class = CLUSTER_TO_CLASS
    map_centroids = CENTROIDS[:, :2]
    map_radius = 1.0

    def __init__(self, *, seconds: float = 0.0, seconds_per_image: float = 0.0, calibrated: bool = True) -> None:
        scores = np.linspace(0, 100, 200)
        calibration = Calibration(scores, np.arange(200) % 3, 3) if calibrated else None
        super().__init__(NAMES, size=8, calibration=calibration)
        self.seconds, self.seconds_per_image = seconds, seconds_per_image
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        assert pixels.dtype == np.uint8 and pixels.shape[1:] == (8, 8, 3)
        self.gate.wait(30)
        self.batches.append(len(pixels))
        time.sleep(self.seconds + self.seconds_per_image * len(pixels))
        colours = pixels.mean((1, 2), dtype=np.float64)  # (N, 3)
        distances = ((colours[:, None] - CENTROIDS) ** 2).sum(2) / 100  # (N, M)
        cluster, score = distances.argmin(1), distances.min(1)
        logs = np.stack([-distances[:, c == CLUSTER_TO_CLASS].min(1) / 50 for c in range(3)], axis=1)
        logs -= np.log(np.exp(logs).sum(1, keepdims=True))
        class_id = logs.argmax(1)
        typicality = np.exp(-score / 100)
        return Prediction(
            class_id=class_id,
            probability=np.exp(logs.max(1)),
            typicality=typicality,
            uncertainty=1 - typicality,
            score=score,
            p_value=self.decision.p_values(score, class_id),
            is_ood=self.decision.is_ood(score, class_id),
            cluster=cluster,
            md_class_id=CLUSTER_TO_CLASS[cluster],
            softmax_class_id=class_id,
            log_probabilities=logs,
            squared_distance=score,
            class_names=self.class_names,
            position=colours[:, :2],
        )

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        return self.predict_pixels(pixels), np.ones(len(pixels), dtype=bool)

    def _predict_rows(self, images: Any, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]:
        raise NotImplementedError


def serve(predictor: Colours | None = None, **options: Any) -> TestClient:
    """A client of a service with these options."""
    return TestClient(create_app(predictor or Colours(), ServeOptions(**options)))


def metrics(client: TestClient) -> dict[str, float]:
    """All samples without labels, and the sum over all labels of the others."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def check_against(predictor: Any, pixels: np.ndarray, said: list[dict[str, Any]], files: list[str]) -> None:
    """What a predictor says of these pixels is what came over HTTP."""
    expected = predictor.predict_pixels(pixels)
    for i, (row, answer) in enumerate(zip(expected.rows(files), said, strict=True)):
        assert list(answer)[: len(PREDICTION_COLUMNS)] == list(PREDICTION_COLUMNS)
        for column in PREDICTION_COLUMNS:
            same = pytest.approx(row[column], rel=1e-4, abs=1e-9) if isinstance(row[column], float) else row[column]
            assert answer[column] == same, column
        ordered = sorted(zip(-expected.probabilities[i], range(100), predictor.class_names))[:5]
        assert [likely["class"] for likely in answer["probabilities"]] == [name for _, _, name in ordered]
        assert [likely["probability"] for likely in answer["probabilities"]] == pytest.approx(
            [-negative for negative, _, _ in ordered], rel=1e-3, abs=1e-9
        )
        assert answer["runner_up"] == answer["probabilities"][1]
        assert answer["position"] == pytest.approx(expected.position[i].tolist(), rel=1e-3, abs=1e-5)


def png(colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> bytes:
    return encode(Image.new("RGB", size, colour))


def colours(n: int, seed: int = 0) -> list[tuple[int, int, int]]:
    return [tuple(row) for row in np.random.default_rng(seed).integers(0, 256, (n, 3)).tolist()]


def as_json(*images: bytes) -> dict[str, Any]:
    return {
        "images": [{"name": f"{i}.png", "data": base64.b64encode(image).decode()} for i, image in enumerate(images)]
    }


def as_form(*images: bytes, boundary: str = "limit") -> tuple[bytes, str]:
    """A form of these images by hand, and its content type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="files"; filename="{i}.png"\r\n\r\n'.encode() + image
        for i, image in enumerate(images)
    ]
    return b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()]), f"multipart/form-data; boundary={boundary}"


def http_bytes(path: str, body: bytes = b"", kind: str = "", method: str = "POST", **headers: str) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"Content-Type: {kind}"] if kind else []
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def talk(port: int, request: bytes, timeout: float = 20) -> bytes:
    """What a server on this machine answers to these bytes, until it closes the connection or says nothing more."""
    answer = b""
    with contextlib.suppress(ConnectionError), socket.create_connection(("127.0.0.1", port), timeout) as connection:
        with contextlib.suppress(ConnectionError):  # it may answer before it has read everything
            connection.sendall(request)
        with contextlib.suppress(TimeoutError):
            while chunk := connection.recv(2**16):
                answer += chunk
    return answer


@contextlib.contextmanager
def server(*arguments: object) -> Iterator[tuple[Forked, int]]:
    """A service in a process of its own, and its port; ``arguments`` as for the main function below."""
    process = Forked("import serving; serving.main()", *arguments)
    try:
        said = ""
        while not (found := re.search(r"page: http://127\.0\.0\.1:(\d+)/", said)):
            line = process.stderr.readline()
            assert line, f"the service did not start: {said}"
            said += line
        yield process, int(found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()


def main() -> None:
    """Serve a predictor that takes so many seconds per batch."""
    key = sys.argv[2] if len(sys.argv) > 2 else None
    options = ServeOptions(port=0, max_batch=4, max_bytes=2**20, api_key=key, access_log=key is not None)
    seconds, listener = float(sys.argv[1]), listen_at(options.host, options.port)
    again = Colours(seconds=seconds), THUMBNAILS
    run_app(create_app(Colours(seconds=seconds), options), options, listener, lambda: again)
