"""The experiments of the paper as suites: one table or figure each.

A suite is a table: its rows name a training and the method that reads its network, its columns name figures. Nothing
runs here: :mod:`maple.runs.benchmark.trainings` trains and evaluates, :mod:`maple.runs.benchmark.tables` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from maple.errors import UsageError, suggest
from maple.evaluation.paper import figures as paper
from maple.evaluation.paper import rows as rows_of
from maple.evaluation.paper.figures import Table
from maple.evaluation.paper.profiles import Profile
from maple.evaluation.paper.rows import Row, Training

_BEYOND = "Beyond the paper"


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
    figure: str = ""  # kind of drawing: latent, clusters, calibration, qq

    @property
    def subtitle(self) -> str:
        return f"{self.place}{'' if self.place == _BEYOND else ' of the paper'}: {self.shows}"

    def trainings(self, profile: Profile) -> list[Training]:
        """The networks of the table, each once, in order."""
        return list(dict.fromkeys(row.training for row in self.rows(profile)))

    def detectors(self, profile: Profile) -> list[str]:
        """The detectors that rows read, beyond those of every evaluation."""
        usual = (*rows_of.STANDARD_DETECTORS, rows_of.READ_OURS, rows_of.READ_NORMALISED)
        asked = [row.method for row in self.rows(profile) if row.method not in (*usual, row.recipe)]
        return list(dict.fromkeys(asked))


_CIFAR_OOD = ("auroc/svhn", "auroc/cifar100", "auroc/tiny_imagenet")
_CLUSTER_COLUMNS = ("clusters", "accuracy", "ece", *_CIFAR_OOD)
_ALL = tuple(rows_of.COMPARATORS)

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
            rows_of.compare_recipes("cifar10", _ALL),
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
            rows_of.compare_recipes("cifar100", tuple(name for name in _ALL if name != "VMDLS")),
            paper.CIFAR100,
        ),
        Suite(
            "imagenet",
            "ImageNet against ImageNet-O",
            "Table 3",
            "the same at scale",
            "imagenet",
            ("accuracy", "ece", "nll", "auroc/imagenet_o", "aupr/imagenet_o", "latency_ms"),
            rows_of.compare_recipes("imagenet", ("Deterministic", "MC Dropout", "Deep Ensemble")),
            paper.IMAGENET,
        ),
        Suite(
            "md",
            "Methods that measure Mahalanobis distances",
            "Table 4",
            "MAPLE next to Lee et al., marginal and relative distances, near-OOD",
            "cifar10",
            ("auroc/cifar100", "auroc/tiny_imagenet", "auroc/svhn"),
            rows_of.md_rows,
            paper.MD,
        ),
        Suite(
            "detectors",
            "Every detector on one network",
            _BEYOND,
            "all registered detectors, plug-ins included, on a network trained with cross-entropy",
            "cifar10",
            _CIFAR_OOD,
            rows_of.detector_rows,
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
            rows_of.ablation_rows,
            paper.ABLATION,
        ),
        Suite(
            "fnr",
            "When is a class hard? The ratio of false negatives t",
            "Table 6",
            "clusters, accuracy and detection for t from 0 to 0.5",
            "cifar10",
            _CLUSTER_COLUMNS,
            rows_of.maple_rows({f"t = {t:g}": {"hard_class_error": t} for t in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)}),
            paper.FNR,
        ),
        Suite(
            "microorganisms",
            "The use case: plankton with unknown taxa",
            "Table 7",
            "95 taxa known, 26 unknown, strongly imbalanced; the paper's diatoms are not public",
            "microorganisms",
            ("accuracy", "ece", "nll", "auroc/unknown", "aupr/unknown", "parameters", "minutes", "latency_ms"),
            rows_of.compare_recipes("microorganisms", ("MC Dropout", "Deep Ensemble", "SNGP")),
            paper.MICROORGANISMS,
        ),
        Suite(
            "confidence",
            "Accuracy of confident predictions",
            "Table 8",
            "accuracy where the confidence is above 0.5, 0.8 and 0.9, and how many images that leaves",
            "cifar10",
            tuple(f"{kind}@{level}" for level in ("0.5", "0.8", "0.9") for kind in ("accuracy", "share")),
            rows_of.compare_recipes("cifar10", _ALL),
            paper.CONFIDENCE,
        ),
        Suite(
            "gaussian",
            "Are embeddings Gaussian?",
            "Table 9",
            "mean absolute error between squared distances and the chi-square distribution",
            "cifar10",
            ("gaussian_error", "components", "gaussian_error_per_component", "clusters"),
            rows_of.gaussian_rows,
            paper.GAUSSIAN,
        ),
        Suite(
            "backbones",
            "Other networks",
            "Table 10",
            "MAPLE on three networks; small relatives of them on a CPU",
            "cifar10",
            ("accuracy", "ece", *_CIFAR_OOD, "parameters"),
            rows_of.backbone_rows,
            paper.BACKBONES,
        ),
        Suite(
            "clustering",
            "How to cluster",
            "Table 11",
            "K-Means on every class, G-Means and X-Means as in the paper, T-Means as by default",
            "cifar10",
            _CLUSTER_COLUMNS,
            rows_of.maple_rows(
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
            rows_of.maple_rows(
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
            rows_of.maple_rows({f"p = {p}": {"relabel_every": p} for p in (5, 10, 15, 20)}),
            paper.FREQUENCY,
        ),
        Suite(
            "metric-loss",
            "Triplet or contrastive loss",
            "Section 4.5",
            "the paper: triplet slightly better, without figures",
            "cifar10",
            ("accuracy", "ece", "gaussian_error", *_CIFAR_OOD),
            rows_of.metric_loss_rows,
        ),
        Suite(
            "latent",
            "The latent space",
            "Figure 1",
            "embeddings of known and unknown images in the plane that separates clusters best",
            "cifar10",
            (),
            rows_of.figure_rows,
            figure="latent",
        ),
        Suite(
            "clusters",
            "A class before and after its clusters are found, and after training",
            "Figure 3",
            "embeddings of the class with the most clusters at each snapshot",
            "cifar10",
            (),
            lambda profile: rows_of.figure_rows(profile)[1:2],
            figure="clusters",
        ),
        Suite(
            "calibration",
            "Calibration plots",
            "Figure 4",
            "accuracy against confidence for all methods",
            "cifar10",
            ("ece",),
            rows_of.compare_recipes("cifar10", _ALL),
            figure="calibration",
        ),
        Suite(
            "qq",
            "Squared distances against chi-square",
            "Appendix",
            "quantiles of the squared distances, with and without MAPLE's training",
            "cifar10",
            ("gaussian_error",),
            rows_of.gaussian_rows,
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
