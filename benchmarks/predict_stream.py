"""Measure throughput and memory of ``maple predict``, for N images and for ten times as many.

    python benchmarks/predict_stream.py --images 3000 --workers 0 1 2 --json results/predict_stream.json

Without ``--model`` (a run or an exported graph) the network is a ResNet-9 with random weights: its predictions have no
meaning, their time is realistic. Images are simulated diatoms of 64 pixels as PNG files, 200 of them under N names, or
the same as a Parquet file; the speed of the disk is not measured. Every figure is measured in a separate process.
Memory is the peak resident size (VmHWM) of the predicting process and of the decoding processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from maple.data.image_set import ImageSet
from maple.data.simulate.diatoms import simulated_diatoms
from maple.detectors.maple import MapleDetector
from maple.networks import create_backbone, embed
from maple.prediction.predictor import Predictor
from maple.runs.predicting.predict import predict_images
from maple.runs.requests import PredictRequest

DISTINCT = 200  # images
SIZE = 64  # pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=3000, help="N; measured are N and 10 N")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="processes that decode")
    parser.add_argument("--model", type=Path, help="run folder or exported graph")
    parser.add_argument("--sources", nargs="+", default=["files", "parquet"], choices=["files", "parquet"])
    parser.add_argument("--form", default="parquet", choices=["csv", "jsonl", "parquet"], help="of the predictions")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--one", nargs=3, metavar=("SOURCE", "OUT", "WORKERS"), help="what one process does")
    arguments = parser.parse_args()
    if arguments.one:
        source, out, workers = arguments.one
        predict_one(arguments.model, source, out, int(workers), arguments.batch_size)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = measure_all(arguments, Path(folder))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure_all(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    model = arguments.model or make_run(folder / "run")
    counts = (arguments.images, 10 * arguments.images)
    figures = []
    print(f"{'images':>10}  source   workers  images/s  memory MB  of which decode")
    for source in arguments.sources:
        for n in counts:
            place = write_files(folder / str(n), n) if source == "files" else write_table(folder / f"{n}.parquet", n)
            for workers in arguments.workers:
                one = [str(place), str(folder / f"predictions.{arguments.form}"), str(workers)]
                command = ["--one", *one, "--model", str(model), "--batch-size", str(arguments.batch_size)]
                found = {"images": n, "source": source, "workers": workers, "form": arguments.form, **watch(command)}
                found["images_per_second"] = round(n / found["seconds"], 1)
                figures.append(found)
                print(
                    f"{n:10,}  {source:7}  {workers:7}  {found['images_per_second']:8.0f}  {found['peak_mb']:9.0f}  "
                    f"{found['peak_decoding_mb']:9.0f}",
                    flush=True,
                )
    return figures


def predict_one(model: Path, source: str, out: str, workers: int, batch_size: int) -> None:
    """Predict, and print how long it took: starting Python and loading torch do not count."""
    start = time.perf_counter()
    predict_images(PredictRequest(model, [source], out, workers=workers, batch_size=batch_size))
    print(time.perf_counter() - start)


def watch(command: list[str]) -> dict[str, float]:
    """Run this script; seconds, and the peak memory of its process and of those that it started."""
    process = subprocess.Popen([sys.executable, __file__, *command], stdout=subprocess.PIPE, text=True)
    peaks: dict[int, float] = {}
    while process.poll() is None:
        children = _read(Path(f"/proc/{process.pid}/task/{process.pid}/children")).split()
        for pid in (process.pid, *map(int, children)):
            for peak in re.findall(r"VmHWM:\s+(\d+) kB", _read(Path(f"/proc/{pid}/status"))):
                peaks[pid] = int(peak) / 1024  # the last one counts: a fork has its parent's until it is a program
        time.sleep(0.05)
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    decoding = sum(peaks.values()) - peaks[process.pid]
    return {"seconds": float(said), "peak_mb": round(sum(peaks.values()), 1), "peak_decoding_mb": round(decoding, 1)}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process has ended
        return ""


def make_run(folder: Path) -> Path:
    """A run whose network has learned nothing."""
    pixels, labels, names, _ = simulated_diatoms(400, size=SIZE, seed=0)
    images = ImageSet.from_arrays(pixels, labels, names, name="simulated", size=SIZE)
    backbone = create_backbone("resnet9", n_classes=len(names))
    folder.mkdir()
    predictor = Predictor(backbone, MapleDetector().fit(embed(backbone, images)), names, size=SIZE)
    predictor.calibrate(images).save(folder)
    return folder


def write_files(folder: Path, n: int) -> Path:
    """``n`` files, a thousand in each folder."""
    first = folder.with_name(f"{folder.name}-distinct")
    first.mkdir()
    for i, image in enumerate(diatoms()):
        Image.fromarray(image).save(first / f"{i}.png")
    for i in range(n):
        path = folder / f"{i // 1000:04}" / f"{i:07}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(first / f"{i % DISTINCT}.png")
    return folder


def write_table(path: Path, n: int) -> Path:
    """The same ``n`` images as rows, a thousand in each row group."""
    files = write_files(path.with_suffix(""), DISTINCT) if not path.with_suffix("").is_dir() else path.with_suffix("")
    data = [file.read_bytes() for file in sorted(files.rglob("*.png"))[:DISTINCT]]
    schema = pa.schema([("image", pa.binary())])
    with pq.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for start in range(0, n, 1000):
            rows = [data[i % DISTINCT] for i in range(start, min(start + 1000, n))]
            writer.write_table(pa.table({"image": rows}, schema))
    return path


def diatoms() -> np.ndarray:
    return simulated_diatoms(DISTINCT, size=SIZE, seed=1)[0]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
