"""A cheap predictor in the place of a network, and what tests let it do in processes of their own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import time
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from maple.data import stream
from maple.data._decoder import decode_items
from maple.data.decode import IMAGE_SECONDS, Decoding
from maple.data.image_set import ImageSet
from maple.decisions.calibration import Calibration
from maple.prediction.base import BasePredictor
from maple.runs.predicting import predict as predict_files
from maple.runs.predicting import writer
from maple.runs.predicting.predict import predict_images
from maple.runs.requests import PredictRequest
from maple.types import Prediction

FAILED = 99  # exit code


class Cheap(BasePredictor):
    """Bright images are of class "b|right", dark ones "dark"; the score is the distance from the mean brightness."""

    runtime, network, score_name, map_radius = "none", "brightness", "distance", 1.0
    cluster_to_class, map_centroids = np.arange(2), np.zeros((2, 2))

    def __init__(self, size: int = 8, n_calibration: int = 400) -> None:
        scores = np.linspace(0, 60, n_calibration)
        calibration = Calibration(scores, np.zeros(n_calibration, dtype=int), 2, np.linspace(0, 0.7, n_calibration))
        super().__init__(["dark", "b|right"], size=size, calibration=calibration)
        self.n_chunks = 0

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        light = pixels.mean((1, 2, 3), dtype=np.float64)
        logs = np.log(np.stack([256 - light, light + 1], axis=1) / 257)
        class_id, score = logs.argmax(1), np.abs(light - 128)
        return Prediction(
            class_id=class_id,
            probability=np.exp(logs.max(1)),
            typicality=1 - score / 256,
            uncertainty=score / 256,
            score=score,
            p_value=self.decision.p_values(score, class_id),
            is_ood=self.decision.is_ood(score, class_id),
            cluster=class_id,
            md_class_id=1 - class_id,
            softmax_class_id=class_id,
            log_probabilities=logs,
            squared_distance=score**2,
            class_names=self.class_names,
        )

    def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
        self.n_chunks += 1
        return self.predict_pixels(pixels), np.ones(len(pixels), dtype=bool)

    def _predict_rows(self, images: ImageSet, batch_size: int, indices: Any, workers: int) -> Iterator[Prediction]:
        raise AssertionError("maple predict reads no image set")


def use(predictor: BasePredictor, save_seconds: float = 0.0) -> None:
    """Let every model be this predictor, and a part be written after every chunk."""
    sys.modules["maple.prediction.onnx"] = types.SimpleNamespace(  # type: ignore[assignment]
        OnnxPredictor=types.SimpleNamespace(open=lambda path, threads=None: predictor)
    )
    writer.SAVE_SECONDS = save_seconds


def predict(*arguments: Any, **options: Any) -> int:
    return predict_images(PredictRequest(*arguments, **{"workers": 0, **options}))


def write_images(folder: Path, n: int) -> Path:
    """Images that get brighter; every seventh is broken."""
    folder.mkdir(parents=True)
    for i in range(n):
        Image.fromarray(np.full((8, 8, 3), 255 * i // n, np.uint8)).save(folder / f"{i:04}.png")
        if i % 7 == 5:
            (folder / f"{i:04}.png").write_bytes(b"not an image")
    return folder


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def killed_anywhere(folder: str, form: str, fdr: float | None) -> list[int]:
    """Kill a call at each of its moments, let another end it, and compare; for a process that may fork.

    How many chunks were left to the other, by moment.
    """
    parent = Path(folder) / f"{form}-{fdr}"
    images = write_images(parent / "images", 12)
    (parent / "m.onnx").write_bytes(b"a graph")
    use(Cheap())
    work = partial(predict, parent / "m.onnx", [str(images)], fdr=fdr, batch_size=4)
    work(out=str(parent / f"whole.{form}"))
    expected = (parent / f"whole.{form}").read_bytes(), (parent / "whole.skipped.csv").read_bytes()
    left = []
    for moment in range(1, 1000):
        out = parent / "out" / f"p.{form}"
        if fork(partial(work, out=str(out)), moment) is not None:  # it ended before
            return left
        n_chunks = fork(partial(work, out=str(out)))
        assert n_chunks is not None
        left.append(n_chunks)
        assert (out.read_bytes(), (out.parent / "p.skipped.csv").read_bytes()) == expected, moment
        assert files_in(out.parent) == {out.name, "p.skipped.csv"}, (moment, files_in(out.parent))
        shutil.rmtree(out.parent)
    raise AssertionError("it never ended")


def fork(work: Any, moment: int | None = None) -> int | None:
    """Do the work in a fork that is killed at that moment; how many chunks it predicted, None where it was killed."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) == signal.SIGKILL
            return None
        assert os.WEXITSTATUS(status) < FAILED
        return os.WEXITSTATUS(status)
    use(predictor := Cheap())
    stream.decode_kept = decode_items  # an interpreter for each would take longer than all the rest
    count = 0

    def pass_moment() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def pass_before(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            pass_moment()
            return function(*arguments, **options)

        setattr(owner, name, wrapper)

    def write_half(table: Any, file: Any, write_table: Any = writer.pq.write_table) -> None:
        file.write(b"half a part")
        file.flush()
        pass_moment()
        file.seek(0)
        write_table(table, file)

    writer.pq.write_table = write_half
    os.fsync = lambda descriptor: pass_moment()  # a kill does not reach what the system has
    for owner, name in ((Path, "replace"), (Path, "unlink"), (os, "unlink"), (os, "rmdir"), (writer, "to_csv")):
        pass_before(owner, name)
    try:
        work()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(FAILED)
    os._exit(predictor.n_chunks)


def predict_slowly(model: str, images: str, out: str, workers: int, seconds: float = IMAGE_SECONDS) -> None:
    """In at least 50 ms per chunk; an image may take so many ``seconds`` to decode."""

    class Slow(Cheap):
        def predict_usable(self, pixels: np.ndarray) -> tuple[Prediction, np.ndarray]:
            time.sleep(0.05)
            return super().predict_usable(pixels)

    use(Slow())
    predict_files.Decoding = partial(Decoding, seconds=seconds)  # type: ignore[assignment,misc]
    predict(Path(model), [images], out, batch_size=4, workers=workers)


def measure(source: str, out: str) -> None:
    """Print the peak memory of predicting, in MB."""
    use(Cheap(size=128), save_seconds=1.0)
    Path(out).parent.mkdir()
    model = Path(out).parent / "m.onnx"
    model.write_bytes(b"a graph")
    predict(model, [source], out, batch_size=64, fdr=0.1)
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    print(int(peak) / 1024)
