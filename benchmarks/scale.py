"""Measure the constants of the cost model in docs/scale.md, check it on sub-samples, and write its tables.

    python benchmarks/scale.py measure --json results/scale.json           # some minutes on an idle machine
    python benchmarks/scale.py measure --small --json /tmp/scale.json      # to see that it works
    python benchmarks/scale.py table --json results/scale.json [--page docs/scale.md]

Constants are processor times of one core per image, on generated photographs, so that a busy machine changes them
little: reading and decoding, network, decision, moments, writing, training step; and of lists of files and messages.
The check runs ``maple predict --engine ray`` with one and two workers and ``maple train`` with one and two processes on
sub-samples of growing size. The smallest sample gives the time to start; that of the larger ones is predicted from the
constants. Where measured over predicted time is near 1, cost grows as the model says. What is in the file already, of
the same machine and size, is not measured again: the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from threadpoolctl import threadpool_limits
from torch.utils.flop_counter import FlopCounterMode

import scale_model as model
from maple.data.decode import decode_bytes
from maple.data.sources import open_images
from maple.data.sources.open import open_source
from maple.decisions.probability import Probability
from maple.deploy.ray.cluster import Resources, connected
from maple.detectors.maple import MapleDetector
from maple.networks import Backbone, create_backbone
from maple.prediction.predictor import Predictor
from maple.runs._engine import EngineFlags
from maple.stats.moments import Moments
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.recipe import create_recipe
from maple.training.step import TrainingStep
from maple.types import Outputs

Setting = tuple[str, int, tuple[int, int], int, int]  # network, side of images, of files, classes, clusters
SETTINGS: dict[str, Setting] = {
    "small": ("resnet20", 32, (32, 32), 10, 12),
    "large": ("resnet50", 224, (500, 375), 1000, 1223),
}
SMALL: dict[str, Setting] = {
    "small": ("resnet20", 32, (32, 32), 10, 12),
    "large": ("resnet18", 64, (250, 190), 50, 60),
}
CHECK: Setting = ("resnet20", 64, (320, 240), 2, 2)
NETWORK = ("--backbone", CHECK[0], "--size", CHECK[1], "--precision", "32-true", "--accelerator", "cpu")  # of the check
N_FEW = 512


# --- images and timing ------------------------------------------------------------------------------------------------


def write_photographs(folder: Path, n: int, size: tuple[int, int], classes: int = 2) -> list[Path]:
    """JPEG files of smooth random fields with fine noise, whose size is about that of photographs."""
    rng, paths = np.random.default_rng(0), []
    for i in range(n):
        place = folder / f"class-{i % classes}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 256, (8, 8, 3)).astype(np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), np.int16)
        noisy = np.clip(smooth + rng.normal(0, 12, smooth.shape) + 20 * (i % classes), 0, 255)
        paths.append(place / f"{i:06d}.jpg")
        Image.fromarray(noisy.astype(np.uint8)).save(paths[-1], quality=85)
    return paths


def core_seconds(work: Callable[[], Any], seconds: float) -> float:
    """Processor time of ``work``, the smallest of several calls in about ``seconds``, after one to warm up."""
    work()
    best, deadline = float("inf"), time.process_time() + seconds
    while True:
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
        if time.process_time() > deadline:
            return best


# --- constants --------------------------------------------------------------------------------------------------------


def measure_constants(name: str, setting: Setting, folder: Path, seconds: float) -> model.Constants:
    network, size, file_size, classes, clusters = setting
    torch.manual_seed(0)
    backbone = create_backbone(network, classes)
    paths = write_photographs(folder / name, 24, file_size)
    outputs = simulated_outputs(backbone.embedding_size, classes, clusters)
    predictor, components = fit_simulated(backbone, outputs, size)
    few = outputs[np.arange(N_FEW)]
    moments = Moments(clusters, backbone.embedding_size, norm_exponent=1.0)
    network_seconds, flops = time_network(backbone, size, seconds)
    write_seconds, row_bytes = time_writing(predictor, few, folder, seconds)
    return model.Constants(
        name=name,
        network=network,
        size=size,
        file_bytes=float(np.mean([path.stat().st_size for path in paths])),
        parameters=sum(parameter.numel() for parameter in backbone.parameters()),
        dim=backbone.embedding_size,
        components=components,
        clusters=clusters,
        classes=classes,
        flops=flops,
        read_seconds=time_reading(paths, size, seconds),
        network_seconds=network_seconds,
        score_seconds=core_seconds(lambda: predictor.predict_outputs(few), seconds) / N_FEW,
        moments_seconds=core_seconds(lambda: moments.update(few.embeddings, few.cluster_ids), seconds) / N_FEW,
        write_seconds=write_seconds,
        row_bytes=row_bytes,
        step_seconds=time_step(backbone, size, classes, seconds),
    )


def time_reading(paths: list[Path], size: int, seconds: float) -> float:
    """Seconds of reading and decoding an image, in this process: the commands do it in processes of their own."""
    return core_seconds(lambda: [decode_bytes(path.read_bytes(), size, "pad") for path in paths], seconds) / len(paths)


def simulated_outputs(dim: int, classes: int, clusters: int) -> Outputs:
    """Gaussian clusters with a decaying spectrum, as embeddings of trained networks have, and logits for them."""
    rng = np.random.default_rng(0)
    n = max(4 * clusters, 2 * N_FEW)
    scales = (1 / (1 + np.arange(dim)) ** 0.5).astype(np.float32)
    centres = 3 * rng.standard_normal((clusters, dim), dtype=np.float32) * scales
    cluster_ids, cluster_to_class = np.arange(n) % clusters, np.sort(np.arange(clusters) % classes)
    embeddings = centres[cluster_ids] + rng.standard_normal((n, dim), dtype=np.float32) * scales + 1
    logits = (embeddings - 1) @ centres.T - (centres**2).sum(1) / 2
    return Outputs(embeddings, logits, cluster_to_class[cluster_ids], cluster_ids, cluster_to_class)


def fit_simulated(backbone: Backbone, outputs: Outputs, size: int) -> tuple[Predictor, int]:
    """A predictor for these outputs, and the number of its components."""
    assert outputs.labels is not None
    detector = MapleDetector(norm_exponent=1.0).fit(outputs)
    probability = Probability().fit(detector.describe(outputs), outputs.labels)
    predictor = Predictor(backbone, detector, None, size=size, probability=probability)
    return predictor, detector.gaussians_.n_components


def time_network(backbone: Backbone, size: int, seconds: float) -> tuple[float, float]:
    """Seconds and FLOPs per image of a forward pass."""
    images = torch.rand(8, 3, size, size)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        backbone.eval()(images[:1])
    with torch.inference_mode():
        return core_seconds(lambda: backbone(images), seconds) / len(images), float(counter.get_total_flops())


def time_step(backbone: Backbone, size: int, classes: int, seconds: float) -> float:
    """Seconds per image of a training step of MAPLE's recipe."""
    options = TrainOptions(accelerator="cpu", precision="32-true", allocator=False, learning_rate=1e-4)
    step = TrainingStep(make_fabric(options), create_recipe("maple"), backbone.train(), options)
    images, targets = torch.rand(8, 3, size, size), torch.arange(8) // 2 % classes
    return core_seconds(lambda: step(images, targets, epoch=1, share=0.0), seconds) / len(images)


def time_writing(predictor: Predictor, outputs: Outputs, folder: Path, seconds: float) -> tuple[float, float]:
    """Seconds and bytes of a row of predictions."""
    names = [f"archive/2026/{i:09d}.jpg" for i in range(len(outputs))]
    prediction, path = predictor.predict_outputs(outputs), folder / "rows.parquet"

    def write() -> None:
        pq.write_table(pa.Table.from_pylist(list(prediction.rows(names))), path)

    per_row = core_seconds(write, seconds) / len(names)
    return per_row, path.stat().st_size / len(names)


def measure_lists(folder: Path, n: int, seconds: float) -> dict[str, float]:
    """Bytes and seconds per file of a list, and of opening labelled images; seconds per task of Ray."""
    many, labelled = folder / "many", folder / "labelled"
    many.mkdir()
    for i in range(n):
        (many / f"{i:09d}.jpg").touch()
    tracemalloc.start()
    source = open_source([many], size=32)
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    paths = write_photographs(labelled, 200, (500, 375))
    opened = open_images(labelled, size=64)
    keeping = core_seconds(lambda: open_images(labelled, size=64), seconds) / len(paths)  # without the decoders
    kept = sum(array.nbytes for array in (opened.labels, opened.keys)) / len(paths)
    return {
        "list_bytes": size / len(source),
        "list_seconds": core_seconds(lambda: open_source([many], size=32), seconds) / n,
        "image_bytes": kept + 2 * 8,  # and the order of an epoch, and the clusters
        "open_seconds": keeping + time_reading(paths, 64, seconds),
        "task_seconds": time_tasks(),
    }


def time_tasks(n: int = 300) -> float:
    """Seconds of the driver for a part: a task and a call of an actor that do nothing."""
    import ray

    with connected(EngineFlags(), Resources(1, 1, 0)):
        task = ray.remote(lambda: 0).options(num_cpus=0)
        actor = ray.remote(type("Idle", (), {"take": lambda self, value: value})).options(num_cpus=0).remote()
        ray.get(actor.take.remote(task.remote()))
        started = time.perf_counter()
        ray.get([actor.take.remote(task.remote()) for _ in range(n)])
        return (time.perf_counter() - started) / n


# --- the check --------------------------------------------------------------------------------------------------------


def simulate(folder: Path, counts: list[int], seconds: dict[str, dict[str, float]]) -> Iterator[None]:
    """Add the seconds of sub-samples by task, workers and images; one at a time, those that are missing."""
    photographs = write_photographs(folder / "photographs", 64, CHECK[2])
    command("train", folder / "photographs", "--out", folder / "run", "--epochs", 1, *NETWORK)
    for workers in (1, 2):
        for task, run in (("score", time_scoring), ("train, one epoch", time_training)):
            found = seconds.setdefault(f"{task}|{workers}", {})
            for n in counts:
                if str(n) not in found:
                    found[str(n)] = run(folder, photographs, n, workers)
                    yield


def check_rows(c: model.Constants, measured: dict[str, dict[str, float]], cores: int) -> list[dict[str, Any]]:
    """Predicted and measured seconds of the sub-samples."""
    rows = []
    for key, found in measured.items():
        task, workers = key.split("|")
        if task == "score":  # each worker has a decoder beside it
            per_image = model.scoring(c, 1.0).core_seconds / min(cores, 2 * int(workers))
        else:  # images are decoded before the first epoch
            per_image = c.step_seconds / min(cores, int(workers))
        rows += compare(task, int(workers), per_image, {int(n): seconds for n, seconds in found.items()})
    return rows


def compare(task: str, workers: int, per_image: float, measured: dict[int, float]) -> list[dict[str, Any]]:
    """The smallest sub-sample gives the start, to which the others add ``per_image``."""
    first, *others = sorted(measured)
    start = measured[first] - first * per_image
    return [
        {
            "task": task,
            "workers": workers,
            "images": n,
            "start": start,
            "per_image": per_image,
            "predicted": start + n * per_image,
            "measured": measured[n],
        }
        for n in others
    ]


def sub_sample(folder: Path, photographs: list[Path], n: int) -> Path:
    """A folder of ``n`` links to photographs, in their classes; every link is a file of its own."""
    place = folder / f"sample-{n}"
    if not place.exists():
        for i in range(n):
            source = photographs[i % len(photographs)]
            (place / source.parent.name).mkdir(parents=True, exist_ok=True)
            (place / source.parent.name / f"{i:06d}.jpg").hardlink_to(source)
    return place


def time_scoring(folder: Path, photographs: list[Path], n: int, workers: int) -> float:
    """Seconds of ``maple predict --engine ray`` for ``n`` images."""
    out = folder / f"scored-{workers}-{n}.parquet"
    sample = sub_sample(folder, photographs, n)
    started = time.perf_counter()
    command("predict", folder / "run", sample, "--out", out, "--engine", "ray", "--workers", workers)
    taken = time.perf_counter() - started
    assert pq.read_metadata(out).num_rows == n
    return taken


def time_training(folder: Path, photographs: list[Path], n: int, devices: int) -> float:
    """Seconds of an epoch of ``maple train`` on ``n`` images."""
    out = folder / f"trained-{devices}-{n}"
    sample = sub_sample(folder, photographs, n)
    command("train", sample, "--out", out, "--epochs", 2, "--devices", devices, *NETWORK)
    with (out / "history.csv").open() as file:
        return float(list(csv.DictReader(file))[-1]["seconds"])  # the first epoch warms up


def command(*arguments: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-m", "maple", *map(str, arguments)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stderr}")


# --- the command ------------------------------------------------------------------------------------------------------


def measure(small: bool, path: Path) -> None:
    """Measure what is not yet in the file, which is written after each step."""
    seconds, counts = (0.2, [64, 192]) if small else (2.0, [300, 600, 1200])
    about = {"cores": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__, "small": small}
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if results.get("about") != about:  # of another machine, or a trial run
        results = {"about": about, "constants": {}}

    def save() -> None:
        path.write_text(json.dumps(results, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="maple-scale-") as name:
        folder = Path(name)
        for key, setting in {**(SMALL if small else SETTINGS), "check": CHECK}.items():
            if key not in results["constants"]:
                results["constants"][key] = asdict(measure_constants(key, setting, folder, seconds))
                save()
        if "lists" not in results:
            results["lists"] = measure_lists(folder, 2000 if small else 50_000, seconds)
            save()
        for _ in simulate(folder, counts, results.setdefault("seconds", {})):
            save()


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/scale.md, by name."""
    constants = {name: model.Constants.from_json(values) for name, values in results["constants"].items()}
    small, large, check = (constants[name] for name in ("small", "large", "check"))
    rows = check_rows(check, results.get("seconds", {}), results["about"]["cores"])
    return {
        "about": describe(results["about"]),
        "constants": model.constants_table([small, large, check]),
        "costs": model.costs_table([small, large]),
        "simulation": model.simulation_table(rows),
        "limits": model.limits_table(model.limits(large, results["lists"])),
    }


def describe(about: dict[str, Any]) -> str:
    """Where the figures come from, in a sentence."""
    machine = f"Measured on {about['cores']} cores ({about['machine']}), torch {about['torch']}"
    trial = ", in a trial run beside other work, with small networks and few images: orders of magnitude only"
    return f"{machine}{trial if about['small'] else ''}."


def fill(page: str, found: dict[str, str]) -> str:
    """The page with its tables, which stand between comments ``<!-- name -->`` and ``<!-- end -->``."""
    for name, table in found.items():
        before, rest = page.split(f"<!-- {name} -->\n", 1)
        page = f"{before}<!-- {name} -->\n{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("measure", "table"))
    parser.add_argument("--small", action="store_true", help="small networks and few images, to see that it works")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--page", type=Path, help="page into which the tables are written")
    arguments = parser.parse_args()
    if arguments.action == "measure":
        torch.set_num_threads(1)
        with threadpool_limits(1):
            measure(arguments.small, arguments.json)
    found = tables(json.loads(arguments.json.read_text()))
    print("\n\n".join(found.values()))
    if arguments.page is not None:
        arguments.page.write_text(fill(arguments.page.read_text(encoding="utf-8"), found), encoding="utf-8")


if __name__ == "__main__":
    main()
