"""Compare all methods on CIFAR-10 with a ResNet-9, at the same budget, in one table.

    python benchmarks/baselines.py --shared ../shared --json results/baselines.json
    python benchmarks/baselines.py --shared ../shared --json results/baselines.json --only timing
    python benchmarks/baselines.py --json results/baselines.json --only table    # print the tables of docs/baselines.md

The first command uses the networks of ``maple benchmark cifar10`` (found in ``--runs``, resumed or trained) and
evaluates each (``--methods``, ``--seeds``) with its own probabilities and score; on the deterministic network it also
evaluates all post-hoc detectors. ``timing`` measures training steps and the latency of a prediction, relative to the
deterministic network in the same run; the machine must be idle. ``table`` prints the tables of the JSON file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maple.data.batches import Epoch, to_input, training_batches
from maple.data.sources import open_images
from maple.detectors.registry import list_detectors
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import find_suite
from maple.evaluation.results import Method
from maple.networks import create_backbone
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.runs.benchmark.jobs import Job, list_jobs
from maple.runs.benchmark.trainings import ensure_evaluated
from maple.training.head import prepare_backbone
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.recipe import create_recipe, find_recipe
from maple.training.step import TrainingStep

DETERMINISTIC = "cross-entropy"
PROFILE = PROFILES["resnet9"]
SUITE = find_suite("cifar10")
METHODS = [dict(training.flags)["recipe"] for training in SUITE.trainings(PROFILE)]
NOT_POSTHOC = ("maple", "lee-md-ood")  # has rows of its own; sees unknown images
TIMED_STEPS, TIMED_ROUNDS = 10, 5
LATENCY_BATCH, LATENCY_REPEATS = 64, 25


def find_jobs(seed: int, runs: Path, data_root: Path) -> dict[str, Job]:
    """The networks of the suite by recipe."""
    return {job.config.model.recipe: job for job in list_jobs([SUITE], PROFILE, [seed], runs, data_root)}


# --- quality ---------------------------------------------------------------------------------------------------------


def measure_method(job: Job) -> dict[str, Any]:
    """One training with its own row, that of MAPLE on the same network and, if deterministic, of all detectors."""
    name = job.config.model.recipe
    posthoc = [d for d in list_detectors() if d not in NOT_POSTHOC] if name == DETERMINISTIC else []
    results = ensure_evaluated(job, posthoc)
    own = {DETERMINISTIC: "softmax"}.get(name, name)
    backbone = load_predictor(job.folder).backbone
    return {
        "method": name,
        "seed": job.seed,
        "epochs": job.config.train.epochs,
        "parameters": sum(parameter.numel() for parameter in backbone.parameters()),
        "stored": sum(tensor.numel() for tensor in backbone.state_dict().values()),  # with buffers
        "passes": passes(job),
        "options": job.config.sections()[job.config.recipe.section],
        "versions": results.provenance["versions"],
        "own": summarise(results.methods[own]),
        "detectors": {other: summarise(method) for other, method in results.methods.items() if other != own},
    }


def passes(job: Job) -> str:
    """Forward passes per image."""
    name = job.config.model.recipe
    return str(members(job)) if name == "ensemble" else find_recipe(name).about.passes


def members(job: Job) -> int:
    return getattr(job.config.recipe, "members", 1)


def summarise(method: Method) -> dict[str, Any]:
    """The figures of one row of the table."""
    row: dict[str, Any] = {}
    if method.classification is not None:
        row |= {key: getattr(method.classification, key) for key in ("accuracy", "ece", "nll")}
    for key in ("auroc", "aupr_out"):
        row[key] = {name: getattr(found, key) for name, found in method.detection.items()}
    return row


# --- time ------------------------------------------------------------------------------------------------------------


def measure_times(jobs: dict[str, Job]) -> dict[str, dict[str, float]]:
    """Seconds per training step and per prediction, relative to the deterministic network, interleaved in one run."""
    images = open_images("cifar10/test", data_root=jobs[DETERMINISTIC].data_root)
    steps = {name: training_step(name, images) for name in jobs}
    batch = to_input(torch.from_numpy(np.stack([images.read(i) for i in range(LATENCY_BATCH)])))
    predict = {name: prediction(name, load_predictor(job.folder), batch) for name, job in jobs.items()}
    training = interleave(steps, TIMED_ROUNDS)
    torch.set_num_threads(1)  # steadier than two, for so little work
    latency = interleave(predict, LATENCY_REPEATS)
    return {
        name: {
            "training": ratio(training, name) * members(job),
            "training_spread": spread(training[name] / training[DETERMINISTIC]) * members(job),
            "latency": ratio(latency, name),
            "latency_spread": spread(latency[name] / latency[DETERMINISTIC]),
        }
        for name, job in jobs.items()
    }


def prediction(name: str, predictor: Predictor, batch: torch.Tensor) -> Callable[[], Any]:
    """What a method does for a batch: the network and its softmax, for MAPLE everything up to the decision."""
    backbone = predictor.backbone

    def read() -> Any:
        with torch.no_grad():
            return backbone(batch)[1].softmax(dim=1)

    return (lambda: predictor(batch)) if name == "maple" else read


def ratio(seconds: dict[str, np.ndarray], name: str) -> float:
    """Median time relative to that of the deterministic network."""
    return float(np.median(seconds[name]) / np.median(seconds[DETERMINISTIC]))


def spread(ratios: np.ndarray) -> float:
    """Interquartile range."""
    low, high = np.quantile(ratios, (0.25, 0.75))
    return float(high - low)


def interleave(calls: dict[str, Any], rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each call in each round, all of them in turn, so that noise of the machine hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(values) for name, values in seconds.items()}


def training_step(recipe_name: str, images: Any) -> Any:
    """A function that makes ``TIMED_STEPS`` steps of a recipe on a network of its own."""
    torch.manual_seed(0)
    recipe = create_recipe(recipe_name)
    backbone = create_backbone("resnet9", 10).train()
    options = TrainOptions(
        learning_rate=1e-3, nesterov=False, weight_decay=0, schedule="constant", accelerator="cpu", precision="32-true"
    )
    fabric = make_fabric(options)
    prepare_backbone(backbone, recipe, 10, fabric)
    recipe.start(backbone, lambda rows: embed_rows(backbone, images, rows), images.labels, 0)
    step = TrainingStep(fabric, recipe, backbone, options)
    order = Epoch(batch_size=128, sampler="shuffle", seed=0, number=1)
    drawn = training_batches(images, images.labels, order, augment="crop,flip")
    batches = [batch for _, batch in zip(range(TIMED_STEPS), drawn)]

    def run() -> None:
        backbone.train()
        recipe.begin_epoch(backbone, 1, 1)
        for x, targets, _ in batches:
            step(x.clone(), targets, epoch=1, share=0.5)

    return run


def embed_rows(backbone: Any, images: Any, rows: np.ndarray) -> np.ndarray:
    x = to_input(torch.from_numpy(np.stack([images.read(int(row)) for row in rows])))
    with torch.no_grad():
        return backbone.eval().embed(x).numpy()


# --- table -----------------------------------------------------------------------------------------------------------


def format_tables(saved: dict[str, Any]) -> str:
    """Two Markdown tables: trained methods, and detectors on the deterministic network."""
    rows, times = saved["rows"], saved.get("times", {})
    sets = list(rows[0]["own"]["auroc"])
    heading = ["method", "accuracy", "ECE", "NLL", *(f"AUROC {s}" for s in sets), *(f"AUPR {s}" for s in sets)]
    costs = ["passes", "parameters", "numbers stored", "training", "latency"]
    lines = [markdown_row([*heading, *costs]), markdown_row(["---"] * (len(heading) + len(costs)))]
    for name in dict.fromkeys(row["method"] for row in rows):
        these = [row for row in rows if row["method"] == name]
        cells = quality_cells([row["own"] for row in these], sets)
        sizes = [f"{these[0][key] / 1e6:.2f} M" for key in ("parameters", "stored")]
        cost = [f"{times[name][key]:.2f}" if name in times else "–" for key in ("training", "latency")]
        lines.append(markdown_row([name, *cells, these[0]["passes"], *sizes, *cost]))
    lines += ["", markdown_row(["detector", *heading[4:], "mean AUROC"]), markdown_row(["---"] * (len(heading) - 2))]
    base = [row for row in rows if row["method"] == DETERMINISTIC]
    detectors = {name: [row["detectors"][name] for row in base] for name in base[0]["detectors"]} if base else {}
    detectors |= {"softmax": [row["own"] for row in base]} if base else {}
    ranked = sorted(detectors.items(), key=lambda item: -mean_auroc(item[1]))
    for name, found in ranked:
        lines.append(markdown_row([name, *quality_cells(found, sets)[3:], f"{mean_auroc(found):.3f}"]))
    return "\n".join(lines)


def mean_auroc(found: list[dict[str, Any]]) -> float:
    return float(np.mean([list(row["auroc"].values()) for row in found]))


def quality_cells(found: list[dict[str, Any]], sets: list[str]) -> list[str]:
    """Mean over seeds, with the deviation where there are several."""
    values = [[row.get(key) for row in found] for key in ("accuracy", "ece", "nll")]
    values += [[row[key][s] for row in found] for key in ("auroc", "aupr_out") for s in sets]
    return [format_cell(value) for value in values]


def format_cell(values: list[float | None]) -> str:
    if any(value is None for value in values):
        return "–"
    mean = f"{np.mean(values):.3f}"
    return f"{mean} ± {np.std(values):.3f}" if len(values) > 1 else mean


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, help="folder with data/")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--only", choices=("quality", "timing", "table"))
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--json", type=Path, required=True, help="file of the results, read and written")
    arguments = parser.parse_args()
    read = lambda: json.loads(arguments.json.read_text()) if arguments.json.exists() else {"rows": []}  # noqa: E731
    if arguments.only in (None, "quality"):
        for seed in arguments.seeds:
            jobs = find_jobs(seed, arguments.runs, arguments.shared / "data")
            for name in arguments.methods:
                row = measure_method(jobs[name])
                saved = read()
                others = [other for other in saved["rows"] if (other["method"], other["seed"]) != (name, seed)]
                in_order = sorted([*others, row], key=lambda row: (METHODS.index(row["method"]), row["seed"]))
                arguments.json.write_text(json.dumps({**saved, "rows": in_order}, indent=1) + "\n")
    if arguments.only == "timing":
        jobs = find_jobs(arguments.seeds[0], arguments.runs, arguments.shared / "data")
        times = measure_times({name: jobs[name] for name in dict.fromkeys([DETERMINISTIC, *arguments.methods])})
        arguments.json.write_text(json.dumps({**read(), "times": times}, indent=1) + "\n")
    print(format_tables(read()))


if __name__ == "__main__":
    main()
