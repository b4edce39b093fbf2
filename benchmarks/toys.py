"""Draw the uncertainty of each method on two moons and two rings, one panel per method.

    python benchmarks/toys.py --out docs/images --json results/toys.json

A point of the plane is an image of one pixel, with x and y, in 256 levels, as its red and green. All methods train on
the same points, in the one training loop, with the same residual network of linear layers and the same schedule; each
has the default options of its recipe except those named in ``PANELS``. Each panel shows an uncertainty in [0, 1] over
the plane, and its AUROC for far points (uniform over the picture, none nearer than ``FAR`` to a training point) against
test points. The JSON file has these AUROC, and the means over far and over test points. The script prints the table of
docs/toys.md at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from scipy.spatial import KDTree
from sklearn.datasets import make_moons
from torch import Tensor, nn

from maple.baselines.ensemble import EnsembleRecipe
from maple.baselines.ensemble_training import train_ensemble
from maple.data.image_set import ImageSet
from maple.decisions.conformal import conformal_p_values
from maple.decisions.pool import class_probabilities
from maple.detectors.base import Detector
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.files import save_json
from maple.networks import Backbone, embed
from maple.options import build_options
from maple.reporting.plots import LIGHT
from maple.stats.metrics import accuracy, auroc
from maple.training.loop import Run, train_backbone
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe
from maple.types import Outputs

REACH = 3.5  # pictures show [-REACH, REACH] in both directions
LEVELS = 256  # of a coordinate
GRID = 128  # points of a picture in each direction
FAR = 0.5  # distance from the training points at least
N_FAR = 2000
SIZES = {"train": 1000, "validation": 500, "calibration": 500, "test": 500}
WIDTH, DEPTH = 64, 4  # of the network
TRAINING: dict[str, Any] = {"epochs": 20, "batch_size": 32, "learning_rate": 0.03, "augment": "none", "workers": 0}


# --- points ----------------------------------------------------------------------------------------------------------


def two_moons(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 2) on two half circles that interlock, around the origin, and their labels (n,)."""
    points, labels = make_moons(n, noise=0.1, random_state=seed)
    return 1.5 * (points - (0.5, 0.25)), labels


def two_rings(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (n, 2) on circles of radius 1 and 2 around the origin, and their labels (n,)."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    angles = rng.uniform(0, 2 * np.pi, n)
    circles = np.where(labels == 0, 1.0, 2.0)[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return circles + rng.normal(scale=0.1, size=(n, 2)), labels


TOYS: dict[str, Callable[[int, int], tuple[np.ndarray, np.ndarray]]] = {"two-moons": two_moons, "rings": two_rings}


def to_images(points: np.ndarray, labels: np.ndarray | None = None) -> ImageSet:
    """Points (N, 2) of the picture as images (N, 1, 1, 3) of one pixel."""
    levels = np.clip((points + REACH) / (2 * REACH) * (LEVELS - 1), 0, LEVELS - 1).round().astype(np.uint8)
    pixels = np.concatenate([levels, np.zeros_like(levels[:, :1])], axis=1)[:, None, None, :]
    return ImageSet.from_arrays(pixels, labels, None if labels is None else ("first", "second"), size=1)


def to_points(images: ImageSet) -> np.ndarray:
    """The inverse of :func:`to_images`, but for rounding."""
    assert images.pixels is not None
    return images.pixels[:, 0, 0, :2] / (LEVELS - 1) * (2 * REACH) - REACH


def far_points(training_points: np.ndarray, seed: int) -> np.ndarray:
    """Points (N, 2) spread evenly over the picture, but for the neighbourhood of training points."""
    points = np.random.default_rng(seed).uniform(-REACH, REACH, (10 * N_FAR, 2))
    nearest, _ = KDTree(training_points).query(points)
    return points[nearest > FAR][:N_FAR]


def grid_points() -> np.ndarray:
    """The middles of the pixels of a picture (GRID * GRID, 2), from the bottom row up."""
    axis = ((np.arange(GRID) + 0.5) / GRID * 2 - 1) * REACH
    return np.stack(np.meshgrid(axis, axis), axis=-1).reshape(-1, 2)


def draw_sets(toy: str, seed: int = 0) -> dict[str, ImageSet]:
    """The points to learn from and to be tested on, far ones, and those of the picture."""
    drawn = {name: to_images(*TOYS[toy](n, 4 * seed + part)) for part, (name, n) in enumerate(SIZES.items())}
    return {**drawn, "far": to_images(far_points(to_points(drawn["train"]), seed)), "grid": to_images(grid_points())}


# --- training --------------------------------------------------------------------------------------------------------


class ResidualBody(nn.Module):
    """From one pixel (N, 3, 1, 1) to embeddings (N, WIDTH): a linear layer, then x + dropout(relu(W x + b))."""

    min_size = 1

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.0)) for _ in range(DEPTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for layer in self.layers:
            x = x + layer(x)
        return x


def make_backbone(seed: int) -> Backbone:
    """A new network, which sees the coordinates in the unit of the pictures."""
    torch.manual_seed(seed)
    unit = 1 / (2 * REACH)
    return Backbone(
        ResidualBody(), None, embedding_size=WIDTH, mean=(0.5, 0.5, 0.0), std=(unit, unit, 1.0), name="toy", size=1
    )


def train(recipe_name: str, options: dict[str, Any], sets: dict[str, ImageSet], seed: int, **changes: Any) -> Run:
    recipe = create_recipe(recipe_name, **options)
    settings = build_options(TrainOptions, {**TRAINING, "seed": seed, **changes}, "training options")
    if isinstance(recipe, EnsembleRecipe):
        return train_ensemble(
            make_backbone, recipe, sets["train"], sets["validation"], options=settings, show_progress=False
        )
    return train_backbone(
        make_backbone(seed), recipe, sets["train"], sets["validation"], options=settings, show_progress=False
    )


def embed_sets(run: Run, sets: dict[str, ImageSet]) -> dict[str, Outputs]:
    outputs = {
        name: embed(run.backbone, images, batch_size=4096, cluster_to_class=run.cluster_to_class)
        for name, images in sets.items()
        if name != "train"
    }
    clusters = {"cluster_ids": run.relabelling.cluster_ids, "cluster_to_class": run.cluster_to_class}
    return {"train": embed(run.backbone, sets["train"], **clusters), **outputs}


# --- uncertainties in [0, 1] -----------------------------------------------------------------------------------------

Uncertainty = Callable[[Detector, Outputs, Outputs], np.ndarray]  # from detector, outputs, calibration outputs to (N,)


def as_entropy(detector: Detector, outputs: Outputs, calibration: Outputs) -> np.ndarray:
    """An entropy, of two classes, over its largest value."""
    return detector.score(outputs) / np.log(2)


def as_kernel(detector: Detector, outputs: Outputs, calibration: Outputs) -> np.ndarray:
    """1 - exp(-score): of a score -log K, what is missing to a kernel of 1."""
    return -np.expm1(-detector.score(outputs))


def as_tail(detector: Detector, outputs: Outputs, calibration: Outputs) -> np.ndarray:
    """1 - p of the conformal p-value: the share of calibration points with a lower score."""
    return 1 - conformal_p_values(detector.score(outputs), detector.score(calibration))


def as_typicality(detector: Detector, outputs: Outputs, calibration: Outputs) -> np.ndarray:
    """MAPLE's 1 - typicality."""
    assert isinstance(detector, MapleDetector)
    return detector.describe(outputs).uncertainty


@dataclass(frozen=True)
class Panel:
    """What is trained, and what is shown of it."""

    name: str
    title: str
    drawn: str
    recipe: str
    detector: str
    uncertainty: Uncertainty
    recipe_options: dict[str, Any] = field(default_factory=dict)
    detector_options: dict[str, Any] = field(default_factory=dict)


# The kernel of SNGP as in its authors' tutorial on two moons. The other options of SNGP and DUQ are those of their
# authors' first code, with which the drawings were made.
SNGP = {"space": "raw", "kernel_scale": 2.0, "amplitude": 20.0, "mean_field": 25.0}
DUQ = {"gradient_penalty": 0.5, "centroid_size": 128}
PAPER = {"norm_exponent": 0.0, "score_by": "distance"}  # Mahalanobis distances as in the paper

PANELS = [
    Panel("deterministic", "Deterministic", "entropy", "cross-entropy", "entropy", as_entropy),
    Panel("energy", "Deterministic, energy", "1 − p", "cross-entropy", "energy", as_tail),
    Panel("mc-dropout", "MC-Dropout", "entropy", "mc-dropout", "entropy", as_entropy),
    Panel("ensemble", "Ensemble of 5", "entropy", "ensemble", "entropy", as_entropy),
    Panel("duq", "DUQ", "1 − largest K", "duq", "max-logit", as_kernel, DUQ),
    Panel("sngp", "SNGP", "entropy", "sngp", "entropy", as_entropy, SNGP),
    Panel("due", "DUE", "entropy", "due", "entropy", as_entropy),
    Panel("vmdls-like", "VMDLS-like", "1 − p", "vmdls-like", "max-logit", as_tail),
    Panel("knn", "Deterministic, kNN", "1 − p", "cross-entropy", "knn", as_tail),
    Panel("md", "Deterministic, MD", "1 − p", "cross-entropy", "md", as_tail),
    Panel("maple-fused", "MAPLE, fused score", "1 − p", "maple", "maple", as_tail),
    Panel("maple", "MAPLE", "1 − typicality", "maple", "maple", as_typicality, detector_options=PAPER),
]


@dataclass(frozen=True, eq=False)
class Drawing:
    """A panel of one toy: its figures, and the uncertainty over the plane."""

    panel: Panel
    row: dict[str, Any]
    grid: np.ndarray  # (GRID, GRID), the bottom row first


def measure(toy: str, panel: Panel, outputs: dict[str, Outputs]) -> Drawing:
    """Fit the panel's detector, and ask it about test points, far points and the plane."""
    detector = create_detector(panel.detector, **panel.detector_options)
    detector.fit(outputs["train"], outputs["validation"])
    found = {
        name: panel.uncertainty(detector, outputs[name], outputs["calibration"]) for name in ("test", "far", "grid")
    }
    test = outputs["test"]
    assert test.logits is not None and test.cluster_to_class is not None
    row = {
        "toy": toy,
        "panel": panel.name,
        "recipe": {"name": panel.recipe, **panel.recipe_options},
        "detector": {"name": panel.detector, **panel.detector_options},
        "drawn": panel.drawn,
        "accuracy": accuracy(class_probabilities(test.logits, test.cluster_to_class).argmax(1), test.labels),
        "auroc": auroc(found["test"], found["far"]),
        "mean_far": float(found["far"].mean()),
        "mean_test": float(found["test"].mean()),
    }
    return Drawing(panel, row, found["grid"].reshape(GRID, GRID))


def study(toy: str, panels: list[Panel], sets: dict[str, ImageSet], seed: int = 0, **changes: Any) -> list[Drawing]:
    """All panels of a toy; those of the same recipe share its network."""
    outputs: dict[str, dict[str, Outputs]] = {}
    drawings = []
    for panel in panels:
        key = repr((panel.recipe, panel.recipe_options))
        if key not in outputs:
            outputs[key] = embed_sets(train(panel.recipe, panel.recipe_options, sets, seed, **changes), sets)
        drawings.append(measure(toy, panel, outputs[key]))
        print("{toy:10} {panel:14} accuracy {accuracy:.3f}  AUROC {auroc:.3f}".format(**drawings[-1].row), flush=True)
    return drawings


def format_table(rows: list[dict[str, Any]]) -> str:
    """The figures of docs/toys.md in Markdown: one line per panel, three columns per toy."""
    keys = {"auroc": "AUROC", "mean_far": "far", "mean_test": "test"}
    toys = dict.fromkeys(row["toy"] for row in rows)
    heading = ["panel", "drawn", *(f"{toy}: {name}" for toy in toys for name in keys.values())]
    lines = [heading, ["---"] * len(heading)]
    for panel in PANELS:
        figures = [f"{row[key]:.2f}" for row in rows if row["panel"] == panel.name for key in keys]
        if figures:
            lines.append([panel.title, panel.drawn, *figures])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- pictures --------------------------------------------------------------------------------------------------------

COLUMNS = 4
COLOURS = LinearSegmentedColormap.from_list("uncertainty", [LIGHT["card"], LIGHT["c6"]])
CLASS_COLOURS = (LIGHT["c0"], LIGHT["c4"])
N_SHOWN = 200  # training points
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "maple",
    "path.simplify": False,
    "font.family": "sans-serif",
    "font.size": 8.5,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.edgecolor": LIGHT["rest"],
    "text.color": LIGHT["ink"],
    "axes.labelcolor": LIGHT["ink"],
    "axes.titlecolor": LIGHT["ink"],
    "ytick.color": LIGHT["muted"],
}


def draw(drawings: list[Drawing], training: ImageSet) -> Figure:
    """All panels in one figure, with one colour bar."""
    n_rows = -(-len(drawings) // COLUMNS)
    figure = Figure(figsize=(9.4, 2.55 * n_rows), layout="constrained")
    axes = figure.subplots(n_rows, COLUMNS, squeeze=False)
    for each in axes.flat:
        each.set_axis_off()
    for each, drawing in zip(axes.flat, drawings):
        image = draw_panel(each, drawing, training)
    bar = figure.colorbar(image, ax=axes, shrink=0.5, aspect=30, pad=0.015, ticks=(0, 0.5, 1))
    bar.set_label("uncertainty")
    bar.outline.set_visible(False)
    return figure


def draw_panel(axes: Axes, drawing: Drawing, training: ImageSet) -> Any:
    axes.set_axis_on()
    extent = (-REACH, REACH, -REACH, REACH)
    image = axes.imshow(drawing.grid, cmap=COLOURS, vmin=0, vmax=1, origin="lower", extent=extent, interpolation="none")
    points = to_points(training)[:N_SHOWN]
    for class_id, colour in enumerate(CLASS_COLOURS):
        draw_points(axes, points[training.labels[:N_SHOWN] == class_id], colour)
    axes.set(xticks=[], yticks=[])
    axes.set_title(drawing.panel.title, loc="left", pad=4)
    for place, text in (("left", drawing.panel.drawn), ("right", f"AUROC {drawing.row['auroc']:.2f}")):
        axes.text(float(place == "right"), -0.03, text, ha=place, va="top", transform=axes.transAxes)
    return image


def draw_points(axes: Axes, points: np.ndarray, colour: str) -> None:
    """Points as one path of zero-length strokes with round ends: a tenth of the bytes of as many markers."""
    outline = Outline(np.repeat(points, 2, axis=0), np.tile([Outline.MOVETO, Outline.LINETO], len(points)))
    axes.add_patch(PathPatch(outline, edgecolor=colour, facecolor="none", linewidth=2.2, capstyle="round"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toys", nargs="+", choices=TOYS, default=list(TOYS))
    parser.add_argument("--panels", nargs="+", choices=[panel.name for panel in PANELS], help="only these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures, one SVG file per toy")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    panels = [panel for panel in PANELS if arguments.panels is None or panel.name in arguments.panels]
    rows = []
    for toy in arguments.toys:
        sets = draw_sets(toy, arguments.seed)
        drawings = study(toy, panels, sets, arguments.seed)
        rows += [drawing.row for drawing in drawings]
        with matplotlib.rc_context(STYLE):
            arguments.out.mkdir(parents=True, exist_ok=True)
            draw(drawings, sets["train"]).savefig(arguments.out / f"{toy}.svg", metadata={"Date": None})
    if arguments.json is not None:
        versions = {"torch": torch.__version__, "numpy": np.__version__}
        save_json(arguments.json, {**versions, "seed": arguments.seed, "training": TRAINING, "rows": rows})
    print(format_table(rows))


if __name__ == "__main__":
    main()
