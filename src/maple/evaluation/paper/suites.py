"""The experiments of the paper as suites: which networks are trained, how each is read, and what the paper found.

A suite is a table: its rows name a training and the method that reads its network, its columns name figures. A
*profile* says how networks are trained (``paper``: as in the paper; ``cpu``: what two cores can do; ``tiny``: what a
test can do), so that a suite is the same experiment in all of them. Nothing runs here:
:mod:`maple.runs.benchmark.trainings` trains
and evaluates, :mod:`maple.runs.benchmark.tables` writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from maple.errors import UsageError, suggest
from maple.evaluation.paper import figures as paper
from maple.evaluation.paper.figures import Table
from maple.evaluation.results import Results
from maple.options import read_names

# --- data ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """What is known, what is unknown: the images of a suite."""

    source: str
    ood: dict[str, str]  # sources by name
    test: str | None = None  # where the source has no test images of its own
    corrupted: str | None = None  # a second test set: the first, corrupted
    flags: dict[str, Any] = field(default_factory=dict)
    preset: str = "paper"  # how the paper trained on such images


UNKNOWN_PLANKTON = Path(__file__).with_name("taxa") / "plankton_unknown.txt"
CORRUPTED_COLUMN = "corrupted/"  # in front of figures of corrupted images
CORRUPTED = "corrupted:{}?family=all&severity=all"

PROTOCOLS = {
    "cifar10": Protocol("cifar10", {"svhn": "svhn", "cifar100": "cifar100/test", "tiny_imagenet": "tiny_imagenet"}),
    "cifar100": Protocol(
        "cifar100",
        {"cifar10": "cifar10/test", "tiny_imagenet": "tiny_imagenet"},
        corrupted=CORRUPTED.format("cifar100/test"),
    ),
    "imagenet": Protocol(
        "imagenet/train",
        {"imagenet_o": "imagenet_o"},
        test="imagenet/val",
        flags={"size": 224, "fit": "crop"},
        preset="paper-imagenet",
    ),
    "microorganisms": Protocol(
        "plankton_ndsb",
        {"unknown": "left-out"},
        flags={
            "leave_out": read_names(f"@{UNKNOWN_PLANKTON}"),
            "size": 32,
            "augment": "flip-both",
            "splits": [0.875, 0.0625, 0.0625, 0.0],  # 70 to 10, of the training file; the test file is the other 20
        },
        preset="paper-diatoms",
    ),
}
FULL_PLANKTON = replace(PROTOCOLS["microorganisms"], flags={**PROTOCOLS["microorganisms"].flags, "size": 96})
_TINY = "simulated-diatoms?n=240&size=32"
_TINY_OOD = "simulated-diatoms/{}?n=40&size=32&seed={}"
TINY_PROTOCOLS = {
    name: Protocol(
        _TINY,
        {other: _TINY_OOD.format("near" if i else "far", i) for i, other in enumerate(protocol.ood)},
        corrupted=protocol.corrupted and CORRUPTED.format("simulated-diatoms?n=60&size=32&seed=7"),
    )
    for name, protocol in PROTOCOLS.items()
}


# --- profiles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """How networks are trained."""

    name: str
    about: str
    seeds: tuple[int, ...]
    flags: dict[str, Any]
    protocols: dict[str, Protocol]
    as_paper: bool = False  # trained by the presets of the protocols, not by our defaults
    relabel_every: Callable[[int], int] = lambda epochs: epochs  # what the paper's p becomes in shorter trainings
    members: int = 10  # of an ensemble
    clusters: dict[str, Any] = field(default_factory=dict)  # flags that cluster as the paper does


# The paper clusters each hard class anew, on raw embeddings, and starts a new head; 'keep' needs parents to keep.
PAPER_CLUSTERS = {"cluster_method": "xmeans", "cluster_space": "raw"}

PROFILES = {
    "paper": Profile(
        "paper",
        "networks, epochs and optimisers of the paper, ten seeds: for machines with accelerators",
        tuple(range(10)),
        {},
        {**PROTOCOLS, "microorganisms": FULL_PLANKTON},
        as_paper=True,
    ),
    "cpu": Profile(
        "cpu",
        "ResNet-9, 16 epochs, one seed: two to four hours per suite on two cores",
        (0,),
        {"backbone": "resnet9", "epochs": 16},
        PROTOCOLS,
        relabel_every=lambda epochs: max(1, round(0.4 * epochs)),
        members=5,
        clusters=PAPER_CLUSTERS,
    ),
    "tiny": Profile(
        "tiny",
        "ResNet-9, 2 epochs on simulated diatoms, to see that everything runs",
        (0,),
        {"backbone": "resnet9", "epochs": 2, "batch_size": 32, "learning_rate": 0.02, "min_cluster_size": 5},
        TINY_PROTOCOLS,
        relabel_every=lambda epochs: 1 if epochs < 15 else 2,
        members=2,
        clusters=PAPER_CLUSTERS,
    ),
}


def find_profile(name: str) -> Profile:
    """A profile by name."""
    if name not in PROFILES:
        raise UsageError(f"unknown profile '{name}': {suggest(name, PROFILES)}")
    return PROFILES[name]


# --- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """One network: a protocol, and what differs from the profile."""

    protocol: str
    flags: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def of(cls, protocol: str, **flags: Any) -> Training:
        return cls(protocol, tuple(sorted(flags.items())))


@dataclass(frozen=True)
class Row:
    """One line of a table: a network, and the method that reads it (a key of ``Results.methods``)."""

    title: str
    training: Training
    method: str
    paper: str = ""  # the row of the paper's table to compare with


@dataclass(frozen=True)
class Column:
    """One figure: how it is called, which way is better, how it is written."""

    title: str
    better: Literal["higher", "lower", ""] = ""
    digits: int = 3


@dataclass(frozen=True)
class Suite:
    """One table or figure of the paper."""

    name: str
    title: str
    place: str  # in the paper
    shows: str
    protocol: str
    columns: tuple[str, ...]
    rows: Callable[[Profile], list[Row]]
    paper: Table = field(default_factory=dict)
    detectors: tuple[str, ...] = ()  # beyond those that every evaluation has
    figure: str = ""  # drawn by this function of maple.runs.benchmark.tables

    def trainings(self, profile: Profile) -> list[Training]:
        """The networks of the table, each once, in order."""
        return list(dict.fromkeys(row.training for row in self.rows(profile)))


_TITLES: dict[str, Column] = {  # by kind of figure
    "accuracy": Column("accuracy", "higher", 4),
    "softmax_accuracy": Column("softmax accuracy", "higher", 4),
    "ece": Column("ECE", "lower"),
    "nll": Column("NLL", "lower"),
    "auroc": Column("AUROC", "higher"),
    "aupr": Column("AUPR", "higher"),
    "clusters": Column("clusters", digits=0),
    "components": Column("components", digits=0),
    "gaussian_error": Column("Gaussian test", "lower"),
    "gaussian_error_per_component": Column("per component", "lower"),
    "latency_ms": Column("ms per image", "lower", 2),
    "share": Column("share kept", "higher"),
    "parameters": Column("parameters", "lower", 0),
    "minutes": Column("training, minutes", "lower", 1),
}


def figure_kind(column: str) -> tuple[str, str]:
    """The kind of figure that a column has, and of what: an OOD set, a level of confidence, or nothing.

    >>> figure_kind("auroc/svhn"), figure_kind("share@0.8"), figure_kind("corrupted/ece")
    (('auroc', 'svhn'), ('share', '0.8'), ('ece', ''))
    """
    kind, *detail = re.split("[/@]", column.removeprefix(CORRUPTED_COLUMN), maxsplit=1)
    return kind, "".join(detail)


def _column(name: str) -> Column:
    """The column of a figure by its name."""
    kind, detail = figure_kind(name)
    column = _TITLES[kind]
    suffix = f" above {detail}" if "@" in name else f" {detail}" if detail else ""
    corrupted = ", corrupted" if name.startswith(CORRUPTED_COLUMN) else ""
    return replace(column, title=column.title + suffix + corrupted)


def columns_of(suite: Suite) -> dict[str, Column]:
    """The columns of a suite by name.

    >>> columns_of(find_suite("fnr"))["auroc/svhn"].title
    'AUROC svhn'
    """
    return {name: _column(name) for name in suite.columns}


def read_figure(results: Results, method: str, column: str, facts: Mapping[str, float] | None = None) -> float:
    """One figure of a method; NaN where it has none. ``facts`` holds what is known of the training."""
    kind, detail = figure_kind(column)
    if facts and column in facts:
        return facts[column]
    whole = {"clusters": results.n_clusters, "latency_ms": results.latency_ms}
    if column in whole:
        return float(whole[column])
    read = results.methods.get("softmax" if kind == "softmax_accuracy" else method)
    if read is None:
        raise UsageError(f"the results have no method '{method}': evaluate the run with --detector {method}")
    if kind in ("auroc", "aupr"):
        found = read.detection[detail]
        return found.auroc if kind == "auroc" else found.aupr_out
    if kind in ("components", "gaussian_error"):
        return read.n_components if kind == "components" else read.gaussian_error
    if kind == "gaussian_error_per_component":  # chi-square has a mean of one per component
        return read.gaussian_error / read.n_components
    judged = read.classification
    if judged is None:
        return math.nan
    if detail:
        return (judged.accuracy_above if kind == "accuracy" else judged.share_above)[detail]
    return getattr(judged, kind.removeprefix("softmax_"))


# --- the suites ------------------------------------------------------------------------------------------------------

# Read by every evaluation in one pass over the training images; others are asked for by a suite.
STANDARD_DETECTORS = ("softmax", "energy", "md", "pca-md", "pca-ed", "rmd", "marginal-md")
READ_AS_PAPER = "pca-md"  # raw embeddings, PCA, tied covariance, chi-square tail: the paper's P_MD and u
READ_NORMALISED = "maple-paper"  # the same of the run's own Gaussians, whose embeddings are normalised by default
READ_OURS = "maple"

_COMPARATORS = {  # row of the paper: recipe and method
    "Deterministic": ("cross-entropy", "softmax"),
    "MC Dropout": ("mc-dropout", "mc-dropout"),
    "Deep Ensemble": ("ensemble", "ensemble"),
    "DUQ": ("duq", "duq"),
    "SNGP": ("sngp", "sngp"),
    "DUE": ("due", "due"),
    "VMDLS": ("vmdls", "vmdls"),
}


def _recipe(profile: Profile, protocol: str, recipe: str, **flags: Any) -> Training:
    if recipe == "ensemble":
        flags["members"] = 3 if protocol == "imagenet" else profile.members
    return Training.of(protocol, recipe=recipe, **flags)


def _both_readings(profile: Profile, title: str, training: Training, paper: str = "") -> list[Row]:
    """Distances as in the paper, and of normalised embeddings; where training is the paper's own, the first alone."""
    rows = [Row(title, training, READ_AS_PAPER, paper)]
    return rows if profile.as_paper else [*rows, Row(f"{title}, normalised", training, READ_NORMALISED)]


def _comparison(protocol: str, names: tuple[str, ...]) -> Callable[[Profile], list[Row]]:
    """The comparators by name, then MAPLE's network read as the paper reads it, and as we do."""

    def rows(profile: Profile) -> list[Row]:
        found = [
            Row(name, _recipe(profile, protocol, recipe), method, name)
            for name, (recipe, method) in _COMPARATORS.items()
            if name in names
        ]
        ours = _recipe(profile, protocol, "maple")
        return [*found, *_both_readings(profile, "MAPLE, P_MD", ours, "MAPLE"), Row("MAPLE", ours, READ_OURS)]

    return rows


def _md_rows(profile: Profile) -> list[Row]:
    plain, ours = _recipe(profile, "cifar10", "cross-entropy"), _recipe(profile, "cifar10", "maple")
    return [
        Row("Lee et al.", plain, "lee-md", "Lee et al."),
        Row("Marginal MD", plain, "marginal-md", "Marginal MD"),
        Row("RMD", plain, "rmd", "RMD"),
        Row("MD", plain, "md"),
        *_both_readings(profile, "MAPLE's distance", ours, "MAPLE"),
        Row("MAPLE", ours, READ_OURS),
    ]


def _clustered(profile: Profile, recipe: str = "maple", **flags: Any) -> Training:
    """A network trained with the paper's clustering, whose p counts epochs of a training of 200."""
    options = {"relabel_every": 10, "hard_class_error": 0.3, "max_clusters": 5, **profile.clusters, **flags}
    options["relabel_every"] = profile.relabel_every(options["relabel_every"])
    return _recipe(profile, "cifar10", recipe, **options)


def _ablation_rows(profile: Profile) -> list[Row]:
    plain = _recipe(profile, "cifar10", "cross-entropy")

    def both(title: str, training: Training, paper: str | None = None) -> list[Row]:
        return _both_readings(profile, title, training, paper or title)

    return [
        Row("DNN+MD", plain, "md", "DNN+MD"),
        *both("DNN+PCA+MD", plain),
        Row("DNN+PCA+ED", plain, "pca-ed", "DNN+PCA+ED"),
        *both("DNN+Triplet+PCA+MD", _recipe(profile, "cifar10", "triplet")),
        *both("DNN+Clustering+PCA+MD", _clustered(profile, "clustering")),
        *both("MAPLE, X-Means, P_MD", _clustered(profile), "MAPLE"),
        Row("MAPLE, X-Means", _clustered(profile), READ_OURS),
        Row("MAPLE", _recipe(profile, "cifar10", "maple"), READ_OURS),
    ]


def _grid(settings: Mapping[str, Mapping[str, Any]]) -> Callable[[Profile], list[Row]]:
    """Rows by title: MAPLE with the paper's clustering and these flags, read by its own Gaussians."""
    return lambda profile: [
        Row(title, _clustered(profile, **flags), READ_NORMALISED, title) for title, flags in settings.items()
    ]


def _backbone_rows(profile: Profile) -> list[Row]:
    names = {"WRN-28-10": "wrn-28-10", "ResNet-18": "resnet18", "EfficientNet-B0": "efficientnet-b0"}
    small = {"WRN-28-10": "wrn-10-2", "ResNet-18": "resnet20", "EfficientNet-B0": "resnet9"}
    chosen = names if profile.name == "paper" else small
    return [
        Row(
            title if profile.name == "paper" else f"{chosen[title]} for {title}",
            _recipe(profile, "cifar10", "maple", backbone=chosen[title]),
            READ_NORMALISED,
            title,
        )
        for title in names
    ]


def _metric_loss_rows(profile: Profile) -> list[Row]:
    return [
        Row(title, _recipe(profile, "cifar10", "maple", metric_loss=name), READ_NORMALISED)
        for title, name in (("Triplet loss", "triplet"), ("Contrastive loss", "contrastive"))
    ]


def _gaussian_rows(profile: Profile) -> list[Row]:
    return [
        *_both_readings(profile, "Deterministic", _recipe(profile, "cifar10", "cross-entropy"), "Deterministic"),
        *_both_readings(profile, "Triplet loss", _recipe(profile, "cifar10", "triplet")),
        *_both_readings(profile, "MAPLE, X-Means", _clustered(profile), "MAPLE"),
        *_both_readings(profile, "MAPLE", _recipe(profile, "cifar10", "maple")),
    ]


def _figure_rows(profile: Profile) -> list[Row]:
    return [
        Row("Deterministic", _recipe(profile, "cifar10", "cross-entropy"), "softmax"),
        Row("MAPLE, X-Means", _clustered(profile), READ_AS_PAPER),
        Row("MAPLE", _recipe(profile, "cifar10", "maple"), READ_OURS),
    ]


_CIFAR_OOD = ("auroc/svhn", "auroc/cifar100", "auroc/tiny_imagenet")
_CLUSTER_COLUMNS = ("clusters", "accuracy", "ece", *_CIFAR_OOD)
_ALL = tuple(_COMPARATORS)

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "cifar10",
            "CIFAR-10 against SVHN, CIFAR-100 and Tiny ImageNet",
            "Table 1",
            "all comparators and MAPLE: classes, calibration, unknown images, cost",
            "cifar10",
            (
                "accuracy",
                "ece",
                "nll",
                *_CIFAR_OOD,
                "aupr/svhn",
                "aupr/cifar100",
                "aupr/tiny_imagenet",
                "parameters",
                "minutes",
                "latency_ms",
            ),
            _comparison("cifar10", _ALL),
            paper.CIFAR10,
        ),
        Suite(
            "cifar100",
            "CIFAR-100 against CIFAR-10 and Tiny ImageNet, clean and corrupted",
            "Table 2",
            "the same with many classes, and how calibration holds on corrupted images",
            "cifar100",
            (
                "accuracy",
                "corrupted/accuracy",
                "ece",
                "corrupted/ece",
                "nll",
                "corrupted/nll",
                "auroc/cifar10",
                "auroc/tiny_imagenet",
                "aupr/cifar10",
                "aupr/tiny_imagenet",
            ),
            _comparison("cifar100", tuple(name for name in _ALL if name != "VMDLS")),
            paper.CIFAR100,
        ),
        Suite(
            "imagenet",
            "ImageNet against ImageNet-O",
            "Table 3",
            "the same at scale",
            "imagenet",
            ("accuracy", "ece", "nll", "auroc/imagenet_o", "aupr/imagenet_o", "latency_ms"),
            _comparison("imagenet", ("Deterministic", "MC Dropout", "Deep Ensemble")),
            paper.IMAGENET,
        ),
        Suite(
            "md",
            "Methods that measure Mahalanobis distances",
            "Table 4",
            "MAPLE next to Lee et al., marginal and relative distances, near-OOD",
            "cifar10",
            ("auroc/cifar100", "auroc/tiny_imagenet", "auroc/svhn"),
            _md_rows,
            paper.MD,
            detectors=("lee-md",),
        ),
        Suite(
            "ablation",
            "What each part of MAPLE adds",
            "Table 5",
            "PCA, distance, triplet loss, clustering, one by one",
            "cifar10",
            (
                "softmax_accuracy",
                "accuracy",
                "ece",
                "auroc/svhn",
                "aupr/svhn",
                "auroc/cifar100",
                "aupr/cifar100",
                "components",
                "clusters",
            ),
            _ablation_rows,
            paper.ABLATION,
        ),
        Suite(
            "fnr",
            "When is a class hard? The ratio of false negatives t",
            "Table 6",
            "clusters, accuracy and detection for t from 0 to 0.5",
            "cifar10",
            _CLUSTER_COLUMNS,
            _grid({f"t = {t:g}": {"hard_class_error": t} for t in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)}),
            paper.FNR,
        ),
        Suite(
            "microorganisms",
            "The use case: plankton with unknown taxa",
            "Table 7",
            "95 taxa known, 26 unknown, strongly imbalanced; the paper's diatoms are not public",
            "microorganisms",
            ("accuracy", "ece", "nll", "auroc/unknown", "aupr/unknown", "parameters", "minutes", "latency_ms"),
            _comparison("microorganisms", ("MC Dropout", "Deep Ensemble", "SNGP")),
            paper.MICROORGANISMS,
        ),
        Suite(
            "confidence",
            "Accuracy of confident predictions",
            "Table 8",
            "accuracy where the confidence is above 0.5, 0.8 and 0.9, and how many images that leaves",
            "cifar10",
            tuple(f"{kind}@{level}" for level in ("0.5", "0.8", "0.9") for kind in ("accuracy", "share")),
            _comparison("cifar10", _ALL),
            paper.CONFIDENCE,
        ),
        Suite(
            "gaussian",
            "Are embeddings Gaussian?",
            "Table 9",
            "mean absolute error between squared distances and the chi-square distribution",
            "cifar10",
            ("gaussian_error", "components", "gaussian_error_per_component", "clusters"),
            _gaussian_rows,
            paper.GAUSSIAN,
        ),
        Suite(
            "backbones",
            "Other networks",
            "Table 10",
            "MAPLE on three networks; small relatives of them on a CPU",
            "cifar10",
            ("accuracy", "ece", *_CIFAR_OOD, "parameters"),
            _backbone_rows,
            paper.BACKBONES,
        ),
        Suite(
            "clustering",
            "How to cluster",
            "Table 11",
            "K-Means on every class, G-Means and X-Means as in the paper, T-Means as by default",
            "cifar10",
            _CLUSTER_COLUMNS,
            _grid(
                {
                    "K-Means": {"cluster_method": "kmeans", "max_clusters": 3, "hard_class_error": 0.0},
                    "G-Means": {"cluster_method": "gmeans"},
                    "X-Means": {},
                    "T-Means": {"cluster_method": "tmeans", "cluster_space": "normalised"},
                }
            ),
            paper.CLUSTERING,
        ),
        Suite(
            "max-clusters",
            "At most how many clusters per class?",
            "Table 12",
            "3, 5, 7 and 10, each with t = 0.1, 0.3 and 0.5",
            "cifar10",
            _CLUSTER_COLUMNS,
            _grid(
                {
                    f"at most {k}, t = {t:g}": {"max_clusters": k, "hard_class_error": t}
                    for k in (3, 5, 7, 10)
                    for t in (0.1, 0.3, 0.5)
                }
            ),
            paper.MAX_CLUSTERS,
        ),
        Suite(
            "frequency",
            "How often to relabel?",
            "Table 13",
            "every 5, 10, 15 and 20 epochs of 200, or as often in a shorter training",
            "cifar10",
            _CLUSTER_COLUMNS,
            _grid({f"p = {p}": {"relabel_every": p} for p in (5, 10, 15, 20)}),
            paper.FREQUENCY,
        ),
        Suite(
            "metric-loss",
            "Triplet or contrastive loss",
            "Section 4.5",
            "the paper: triplet slightly better, without figures",
            "cifar10",
            ("accuracy", "ece", "gaussian_error", *_CIFAR_OOD),
            _metric_loss_rows,
        ),
        Suite(
            "latent",
            "The latent space",
            "Figure 1",
            "embeddings of known and unknown images in the plane that separates clusters best",
            "cifar10",
            (),
            _figure_rows,
            figure="latent",
        ),
        Suite(
            "clusters",
            "A class before and after its clusters are found, and after training",
            "Figure 3",
            "embeddings of the class with the most clusters at each snapshot",
            "cifar10",
            (),
            lambda profile: _figure_rows(profile)[1:2],
            figure="clusters",
        ),
        Suite(
            "calibration",
            "Calibration plots",
            "Figure 4",
            "accuracy against confidence for all methods",
            "cifar10",
            ("ece",),
            _comparison("cifar10", _ALL),
            figure="calibration",
        ),
        Suite(
            "qq",
            "Squared distances against chi-square",
            "Appendix",
            "quantiles of the squared distances, with and without MAPLE's training",
            "cifar10",
            ("gaussian_error",),
            _gaussian_rows,
            figure="qq",
        ),
    )
}


def find_suite(name: str) -> Suite:
    """A suite by name.

    >>> find_suite("fnr").place
    'Table 6'
    """
    if name not in SUITES:
        raise UsageError(f"unknown benchmark '{name}': {suggest(name, SUITES)}")
    return SUITES[name]
