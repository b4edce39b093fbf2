"""Compare ``--engine ray`` with one process on CIFAR-10: fit and predict, files, classes, decisions and numbers.

    OMP_NUM_THREADS=1 python benchmarks/ray_equality.py --shared ../shared --json results/ray_equality.json

The public ResNet-20 is fitted on ``--images`` training images, written as PNG files, and predicts them; 2,000 test
images calibrate. Each step runs once in one process and once with two Ray workers of one thread each, by the command
line; with ``--folder``, steps that are done are not repeated. Predictions are compared with the same batches (256
images) and with others (100). The JSON file also says how many blocks the moments were taken in, and their share of the
bytes read. No time is measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from maple.data.sources import open_source
from maple.deploy.ray.totals import SHARE, count_read, plan_step
from maple.deploy.ray.tree import count_bytes
from maple.files import RunFile, load_arrays
from maple.networks import IMAGENET_MEAN, IMAGENET_STD
from maple.networks.embedding import BATCH_SIZE
from maple.stats.arrays import with_prefix
from maple.stats.moments import Moments

CALIBRATION = 2_000
WORKERS = 2
ON_RAY = ("--engine", "ray", "--workers", WORKERS)
OTHER_BATCH = 100
EXPONENTS = 3  # of the norm, that a fit chooses from; a run keeps the moments of two


def write_images(shared: Path, n: int, folder: Path) -> None:
    """Training images as PNG files, one folder per class, and test images as a table."""
    if (folder / "calibrate.parquet").exists():
        return
    table = pq.read_table(shared / "data" / "cifar10" / "train.parquet").slice(0, n)
    for i, row in enumerate(table.to_pylist()):
        path = folder / "train" / f"{row['label']}" / f"{i:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = next(row[name] for name in ("image", "img") if name in row)
        path.write_bytes(image["bytes"] if isinstance(image, dict) else image)
    test = pq.read_table(shared / "data" / "cifar10" / "test.parquet").slice(0, CALIBRATION)
    columns = {"image": test["image" if "image" in test.column_names else "img"], "label": test["label"]}
    pq.write_table(pa.table(columns), folder / "calibrate.parquet")


def maple(done: Path, *arguments: Any) -> None:
    """Run a command, unless what it writes last is there."""
    if not done.exists():
        print("maple", *arguments[:2], "...", flush=True)
        subprocess.run([sys.executable, "-m", "maple", *map(str, arguments)], check=True)


def fit(shared: Path, folder: Path, name: str, *more: Any) -> Path:
    """A run of the public network."""
    mean, std = (",".join(map(str, values)) for values in (IMAGENET_MEAN, IMAGENET_STD))
    maple(
        folder / name / RunFile.REPORT,
        "fit", "resnet20", "--weights", shared / "weights" / "resnet20-12fca82f.th", "--data", folder / "train",
        "--calibrate", folder / "calibrate.parquet", "--mean", mean, "--std", std, "--out", folder / name, *more,
    )  # fmt: skip
    return folder / name


def compare_fits(one: Path, other: Path) -> dict[str, Any]:
    """The largest differences of what two runs have learnt, relative to the largest value of each array."""
    known, found = (load_arrays(run / RunFile.DETECTOR)[0] for run in (one, other))
    moments = {}
    for name in sorted({name.rpartition(".")[0] for name in known if name.endswith(".second")}):
        first, second = (Moments.from_arrays(with_prefix(arrays, f"{name}.")) for arrays in (known, found))
        moments[name] = {
            "same counts": bool((first.counts == second.counts).all()),
            "means": difference(first.means, second.means),
            "total covariance": difference(first.total_covariance, second.total_covariance),
            "within covariance": difference(first.within_covariance, second.within_covariance),
        }
    others = {
        name: difference(known[name], found[name]) for name in known if not name.startswith(("moments", "shallow"))
    }
    return {"moments": moments, "other arrays, largest": max(others.values())}


def difference(known: np.ndarray, found: np.ndarray) -> float:
    scale = np.abs(known[np.isfinite(known)]).max(initial=1e-300)
    both = np.isfinite(known) & np.isfinite(found)
    assert (np.isnan(known) == np.isnan(found)).all()
    return float(np.abs(known[both].astype(float) - found[both].astype(float)).max(initial=0.0) / scale)


def plan_of_blocks(folder: Path, run: Path) -> dict[str, Any]:
    """How the images are divided into blocks, and what their moments amount to."""
    images = open_source([str(folder / "train")], size=32)
    arrays = load_arrays(run / RunFile.DETECTOR)[0]
    one = count_bytes(with_prefix(arrays, "moments.0.").values())
    sums = EXPONENTS * one + count_bytes(with_prefix(arrays, "shallow.").values())
    read = count_read(images)
    step = plan_step(len(images), read, sums, BATCH_SIZE, WORKERS)
    blocks = -(-len(images) // step)
    return {
        "images per block": step,
        "blocks": blocks,
        "bytes read": read,
        "bytes of sums per block": sums,
        "share": round(blocks * sums / read, 4),
        "largest share": SHARE,
    }


def compare_rows(one: Path, other: Path) -> dict[str, Any]:
    """Where two prediction files differ."""
    known, found = pq.read_table(one), pq.read_table(other)
    assert known.column_names == found.column_names and len(known) == len(found)
    found_by: dict[str, Any] = {"rows": len(known), "values that differ": {}, "largest difference": {}}
    for name in known.column_names:
        a, b = known[name], found[name]
        if pa.types.is_floating(a.type):
            x, y = a.to_numpy(), b.to_numpy()
            found_by["values that differ"][name] = int((x != y).sum())
            found_by["largest difference"][name] = difference(x, y)
        else:
            n = sum(x != y for x, y in zip(a.to_pylist(), b.to_pylist(), strict=True))
            found_by["values that differ"][name] = n
    return found_by


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--folder", type=Path, help="keep images, runs and predictions here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = arguments.folder or Path(place)
        write_images(arguments.shared, arguments.images, folder)
        local, on_ray = fit(arguments.shared, folder, "local"), fit(arguments.shared, folder, "on-ray", *ON_RAY)
        rows = {name: folder / f"{name}.parquet" for name in ("local", "same", "other")}
        for name, more in (("local", ()), ("same", ON_RAY), ("other", (*ON_RAY, "--batch-size", OTHER_BATCH))):
            maple(rows[name], "predict", local, folder / "train", "--out", rows[name], *more)
        found = {
            "images": arguments.images,
            "workers": WORKERS,
            "ray": ray.__version__,
            "blocks": plan_of_blocks(folder, local),
            "fit": compare_fits(local, on_ray),
            "predict, same batches": compare_rows(rows["local"], rows["same"]),
            f"predict, batches of {OTHER_BATCH}": compare_rows(rows["local"], rows["other"]),
        }
    text = json.dumps(found, indent=1)
    print(text)
    arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
