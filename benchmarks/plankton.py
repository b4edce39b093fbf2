"""Case study: sort plankton images with unknown taxa.

    python benchmarks/plankton.py --shared ../shared --json results/plankton.json --pictures docs/images

The network is that of the last row of ``maple benchmark microorganisms`` (found in ``--runs``, or trained). The
*stream* to be sorted is the test file with all taxa, 95 known and 26 unknown, at their natural frequencies. Output:

- how many images of each unknown taxon are flagged at false-alarm rates of 1, 5 and 10 %, and the predicted taxa of
  the others;
- how many images of each known taxon are flagged by mistake, and how many are classified correctly;
- the taxa that were split, and their clusters;
- the share of the stream that can be classified automatically, and its error rate. A wrong taxon is an error, and so is
  any taxon for an image of an unknown one. Images are taken in the order of their probability; in the second and third
  variant flagged images go to the expert first.

Pictures: detected taxa, the error curve, and the exemplars of the clusters of split taxa.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from PIL import Image, ImageDraw

from maple.data.splits import Splits
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.suites import find_suite
from maple.files import RunFile
from maple.networks import embed, use_fast_allocator
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.reporting.gallery import ClusterExemplars, read_gallery
from maple.reporting.plots import (
    BLUE,
    GREEN,
    MUTED,
    ORANGE,
    Line,
    as_plot,
    plot_coverage,
    standalone_svg,
)
from maple.runs.benchmark.jobs import Job, list_jobs
from maple.runs.benchmark.trainings import ensure_trained
from maple.runs.folder import RunFolder
from maple.runs.setup.splits import reopen_splits
from maple.stats import metrics
from maple.text import percent, shorten
from maple.types import Prediction

RATES = (0.01, 0.05, 0.1)
ERRORS = (0.05, 0.1, 0.15, 0.2)
SHOWN_RATE = 0.05
MAX_CLASSES, PER_CLUSTER, THUMBNAIL = 8, 8, 48


def find_job(runs: Path, data_root: Path) -> Job:
    """MAPLE's network on plankton."""
    jobs = list_jobs([find_suite("microorganisms")], PROFILES["resnet9"], [0], runs, data_root)
    return next(job for job in jobs if job.config.model.recipe == "maple")


def load_run(folder: Path, data_root: Path) -> tuple[Predictor, Splits]:
    predictor = load_predictor(folder)
    return predictor, reopen_splits(RunFolder(folder), predictor.size, data_root)


# --- figures ---------------------------------------------------------------------------------------------------------


def judge_unknown(said: Prediction, labels: np.ndarray, names: tuple[str, ...]) -> dict[str, Any]:
    """Each unknown taxon: its images, the share detected at each rate, and what the others are called at 5 %."""
    rows = {}
    for label in np.unique(labels):
        own = labels == label
        missed = own & (said.p_value > SHOWN_RATE)
        called = Counter(said.class_names[i] for i in said.class_id[missed]).most_common(3)
        rows[names[label]] = {
            "images": int(own.sum()),
            "caught": {str(rate): float((said.p_value[own] <= rate).mean()) for rate in RATES},
            "called": dict(called),
        }
    return rows


def judge_known(said: Prediction, labels: np.ndarray) -> dict[str, Any]:
    """Each known taxon: its images, the share flagged at 5 %, and the share named rightly."""
    rows = {}
    for label in np.unique(labels):
        own = labels == label
        rows[said.class_names[label]] = {
            "images": int(own.sum()),
            "flagged": float((said.p_value[own] <= SHOWN_RATE).mean()),
            "right": float((said.class_id[own] == label).mean()),
        }
    return rows


def sort_stream(known: Prediction, labels: np.ndarray, unknown: Prediction) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Shares left to the machine and accuracy among them (N,), in three ways of choosing what the expert sees first."""
    right = np.concatenate([known.class_id == labels, np.zeros(len(unknown), bool)])
    probability, p_value = (
        np.concatenate([getattr(known, n), getattr(unknown, n)]) for n in ("probability", "p_value")
    )
    return {
        "by probability": metrics.coverage_curve(probability, right),
        "flagged at 5 % first": metrics.coverage_curve(probability - (p_value <= 0.05), right),
        "flagged at 10 % first": metrics.coverage_curve(probability - (p_value <= 0.1), right),
    }


def list_split_classes(clusters: tuple[ClusterExemplars, ...]) -> dict[str, list[ClusterExemplars]]:
    """The classes with more than one cluster, those with the most images first."""
    found: dict[str, list[ClusterExemplars]] = {}
    for cluster in clusters:
        found.setdefault(cluster.class_name, []).append(cluster)
    split = {name: own for name, own in found.items() if len(own) > 1}
    return dict(sorted(split.items(), key=lambda item: -sum(c.count for c in item[1])))


# --- pictures --------------------------------------------------------------------------------------------------------


@as_plot
def draw_caught(rows: list[tuple[str, int, float]], false_alarm: float) -> tuple[Figure, str]:
    """One bar per unknown taxon (name, images, share detected), in the order given, beside the false-alarm rate."""
    figure = Figure(figsize=(6.4, 0.8 + 0.24 * len(rows)), layout="constrained")
    axes, places = figure.subplots(), np.arange(len(rows))
    axes.barh(places, [share for *_, share in rows], color=BLUE, height=0.62)
    axes.axvline(false_alarm, color=MUTED, linewidth=1)
    axes.set_yticks(places, [f"{shorten(name.replace('_', ' '), 40)} ({images})" for name, images, _ in rows])
    axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 1), xlabel=f"detected at {percent(false_alarm)} false alarms")
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    said = ", ".join(f"{name} {percent(share)}" for name, _, share in rows)
    return figure, f"Share of the images of each unknown taxon that is detected: {said}"


def draw_clusters(split: dict[str, list[ClusterExemplars]]) -> bytes:
    """One row of exemplars per cluster, for the largest split classes; PNG."""
    shown = list(split.items())[:MAX_CLASSES]
    gap, margin = 22, 250
    height = sum(gap + len(own) * (THUMBNAIL + 4) for _, own in shown)
    sheet = Image.new("RGB", (margin + PER_CLUSTER * (THUMBNAIL + 4), height), "white")
    pen = ImageDraw.Draw(sheet)
    y = 0
    for name, own in shown:
        pen.text((4, y + 6), name.replace("_", " "), fill="black", font_size=13)
        y += gap
        for number, cluster in enumerate(sorted(own, key=lambda c: -c.count), start=1):
            pen.text((16, y + 16), f"cluster {number}: {cluster.count} images", fill="#626d77", font_size=12)
            for i, thumbnail in enumerate(cluster.thumbnails[:PER_CLUSTER]):
                resized = Image.fromarray(thumbnail).resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BICUBIC)
                sheet.paste(resized, (margin + i * (THUMBNAIL + 4), y))
            y += THUMBNAIL + 4
    file = io.BytesIO()
    sheet.save(file, "PNG", optimize=True)
    return file.getvalue()


def draw_stream(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    lines = [Line(name, *style) for name, style in zip(curves, ((ORANGE, "--"), (BLUE, "-"), (GREEN, ":")))]
    return standalone_svg(plot_coverage([(line, *curve) for line, curve in zip(lines, curves.values())]))


# ---------------------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/")
    parser.add_argument("--runs", type=Path, default=Path("runs/benchmark"), help="--out of maple benchmark")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--pictures", type=Path, required=True, help="folder for the pictures")
    arguments = parser.parse_args()
    use_fast_allocator()
    data_root = arguments.shared / "data"
    folder = ensure_trained(find_job(arguments.runs, data_root))
    predictor, splits = load_run(folder, data_root)
    assert splits.left_out_images is not None
    read = lambda images: predictor.predict_outputs(embed(predictor.backbone, images))  # noqa: E731
    known, unknown = read(splits.test), read(splits.left_out_images)
    labels = splits.test.labels
    curves = sort_stream(known, labels, unknown)
    by_taxon = judge_unknown(unknown, splits.left_out_images.labels, splits.left_out_images.class_names)
    split = list_split_classes(read_gallery(folder / RunFile.GALLERY).clusters)
    found = {
        "known_images": len(known),
        "unknown_images": len(unknown),
        "accuracy": float((known.class_id == labels).mean()),
        "false_alarm": {str(rate): float((known.p_value <= rate).mean()) for rate in RATES},
        "caught": {str(rate): float((unknown.p_value <= rate).mean()) for rate in RATES},
        "auroc": metrics.auroc(known.score, unknown.score),
        "left_to_the_machine": {
            name: {str(error): metrics.coverage_at(*curve, error) for error in ERRORS} for name, curve in curves.items()
        },
        "unknown_taxa": by_taxon,
        "known_taxa": judge_known(known, labels),
        "split_taxa": {name: sorted((c.count for c in own), reverse=True) for name, own in split.items()},
    }
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    ranked = sorted(by_taxon.items(), key=lambda item: -item[1]["caught"][str(SHOWN_RATE)])
    bars = draw_caught([(name, row["images"], row["caught"][str(SHOWN_RATE)]) for name, row in ranked], SHOWN_RATE)
    arguments.pictures.mkdir(parents=True, exist_ok=True)
    (arguments.pictures / "plankton_caught.svg").write_text(standalone_svg(bars))
    (arguments.pictures / "plankton_stream.svg").write_text(draw_stream(curves))
    if split:
        (arguments.pictures / "plankton_clusters.png").write_bytes(draw_clusters(split))
    print(json.dumps({key: value for key, value in found.items() if not key.endswith("_taxa")}, indent=1))


if __name__ == "__main__":
    main()
