"""The values that travel between the parts: plain frozen records of arrays.

Letters for shapes, everywhere: N images, D embedding, K projection, C classes, M clusters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from maple import notebook

MAX_CELL = 2**31 - 1  # characters, in CSV: a prediction set may list thousands of classes
SET_SEPARATOR = " | "  # between the classes of a prediction set, in CSV


@dataclass(frozen=True, eq=False)
class Outputs:
    """Outputs of a backbone for N images; the input of every detector.

    ``logits`` has one column per *cluster* (pseudo-class); ``cluster_to_class`` maps columns to classes.
    Before any class is split, clusters are classes.

    >>> outputs = Outputs(np.zeros((5, 8)), labels=np.arange(5))
    >>> outputs[:2]
    Outputs(embeddings=(2, 8), labels=(2,))
    >>> Outputs.concatenate([outputs, outputs[:2]])
    Outputs(embeddings=(7, 8), labels=(7,))
    """

    embeddings: np.ndarray  # (N, D) float32
    logits: np.ndarray | None = None  # (N, M) float32
    labels: np.ndarray | None = None  # (N,) int64 class ids; -1 where unknown
    cluster_ids: np.ndarray | None = None  # (N,) int64; training images only
    cluster_to_class: np.ndarray | None = None  # (M,) int64
    shallow: np.ndarray | None = None  # (N, F) float32: how strongly each channel of a shallow layer responds, in logs

    def __len__(self) -> int:
        return len(self.embeddings)

    def __repr__(self) -> str:
        shapes = {name: tuple(np.shape(value)) for name, value in vars(self).items() if value is not None}
        return f"Outputs({', '.join(f'{name}={shape}' for name, shape in shapes.items())})"

    def __getitem__(self, index: Any) -> Outputs:
        """The rows at ``index`` (slice, mask or integer array)."""
        return replace(self, **{name: rows[index] for name, rows in self._rows().items()})

    @staticmethod
    def concatenate(parts: list[Outputs]) -> Outputs:
        """One ``Outputs`` from consecutive batches."""
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0]._rows()}
        return replace(parts[0], **joined)

    def _rows(self) -> dict[str, np.ndarray]:
        """The arrays with one row per image."""
        return {k: value for k, value in vars(self).items() if value is not None and k != "cluster_to_class"}


class LinearHead(NamedTuple):
    """A linear head as plain arrays: logits are ``embeddings @ weight.T + bias``."""

    weight: np.ndarray  # (M, D) float32
    bias: np.ndarray  # (M,) float32


@dataclass(frozen=True)
class About:
    """Description of a recipe or detector, for ``maple methods``."""

    title: str
    paper: str  # authors and year
    url: str = ""
    passes: str = "1"  # forward (and backward) passes per image
    needs: str = ""  # what it reads
    adds: str = ""  # what it adds to the network or keeps beside it

    @staticmethod
    def of(kind: type) -> About:
        """The description of a class: its ``about``, or the first line of its docstring."""
        return getattr(kind, "about", None) or About(next(iter((kind.__doc__ or kind.__name__).split("\n"))), paper="")


@dataclass(frozen=True, eq=False)
class Relabelling:
    """Which cluster each training image belongs to, and which class each cluster belongs to.

    ``parents`` and ``shares`` say how the clusters came out of those before the last event: cluster j took the
    share ``shares[j]`` of the images of the former cluster ``parents[j]``.

    >>> Relabelling.initial(np.array([0, 1, 1]), n_classes=2)
    Relabelling(n_images=3, n_clusters=2, n_classes=2)
    """

    cluster_ids: np.ndarray  # (N,) int64
    cluster_to_class: np.ndarray  # (M,) int64
    parents: np.ndarray  # (M,) int64
    shares: np.ndarray  # (M,) float64, in (0, 1]

    @property
    def n_clusters(self) -> int:
        return len(self.cluster_to_class)

    def __repr__(self) -> str:
        n_classes = len(np.unique(self.cluster_to_class))
        return f"Relabelling(n_images={len(self.cluster_ids)}, n_clusters={self.n_clusters}, n_classes={n_classes})"

    @staticmethod
    def initial(labels: np.ndarray, n_classes: int) -> Relabelling:
        """One cluster per class."""
        identity = np.arange(n_classes, dtype=np.int64)
        return Relabelling(labels.astype(np.int64), identity, identity, np.ones(n_classes))


@dataclass(frozen=True, eq=False)
class Prediction:
    """Predictions for N images; ids index ``class_names`` and clusters.

    The fields up to ``softmax_class_id`` are the columns of the prediction files, in this order, with names for ids:
    first class, probability and decision, which people act on, then the evidence, last the quantities of the paper.
    """

    class_id: np.ndarray  # (N,) int64: argmax of ``probabilities``
    probability: np.ndarray  # (N,) probability of that class
    is_ood: np.ndarray  # (N,) bool; False without calibration
    p_value: np.ndarray  # (N,) conformal; NaN without calibration
    score: np.ndarray  # (N,) higher is more out-of-distribution
    typicality: np.ndarray  # (N,) chi-square tail of the nearest cluster: the paper's P_MD
    uncertainty: np.ndarray  # (N,) 1 - typicality: the paper's u
    cluster: np.ndarray  # (N,) int64: the nearest cluster
    md_class_id: np.ndarray  # (N,) int64: the class of the nearest cluster
    softmax_class_id: np.ndarray  # (N,) int64
    log_probabilities: np.ndarray  # (N, C)
    squared_distance: np.ndarray  # (N,) to the nearest cluster
    class_names: tuple[str, ...] = ()
    position: np.ndarray | None = None  # (N, 2) on the map of the clusters, where it was asked for

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Class probabilities (N, C); rows sum to 1."""
        return np.exp(self.log_probabilities)

    @property
    def is_calibrated(self) -> bool:
        """Whether images were decided about: there are p-values."""
        return not np.isnan(self.p_value).any()

    def __len__(self) -> int:
        return len(self.class_id)

    def __repr__(self) -> str:
        decided = f"n_ood={int(self.is_ood.sum())}" if self.is_calibrated else "not calibrated"
        return f"Prediction(n_images={len(self)}, n_classes={self.log_probabilities.shape[1]}, {decided})"

    def _repr_html_(self) -> str:
        numbers = {"images": len(self), "classes": self.log_probabilities.shape[1]}
        if not len(self):
            return notebook.card("Prediction", notebook.summary(**numbers))
        if self.is_calibrated:
            about = notebook.summary(**numbers, out_of_distribution=int(self.is_ood.sum()))
        else:
            about = f"{notebook.summary(**numbers)} · not calibrated: nothing is flagged"
        shown = min(len(self), notebook.MAX_ROWS)
        headings = ["image", "class", "probability", "decision", "p-value", "score"]
        known = notebook.muted("known" if self.is_calibrated else "–")
        rows = [
            [
                i,
                row["class"],
                notebook.bar(row["probability"]),
                notebook.flag("unknown") if row["is_ood"] else known,
                row["p_value"],
                row["score"],
            ]
            for i, row in enumerate(self.rows([""] * shown))
        ]
        return notebook.card("Prediction", about, notebook.table(headings, rows, more=len(self) - shown))

    def rows(
        self, files: list[str], all_probabilities: bool = False, sets: np.ndarray | None = None
    ) -> Iterator[dict[str, Any]]:
        """One dictionary per image, in the columns of the prediction files; with ``sets`` (N, C), its prediction set.

        The classes of a set are listed from the most to the least probable.
        """
        names = self.class_names or tuple(str(i) for i in range(self.probabilities.shape[1]))
        values = {column: getattr(self, name).tolist() for column, name in _COLUMNS.items()}
        for column, name in _COLUMNS.items():
            if name.endswith("class_id"):
                values[column] = [names[c] for c in values[column]]
        for i, file in enumerate(files):
            row: dict[str, Any] = {"file": file, **{column: listed[i] for column, listed in values.items()}}
            if sets is not None:
                likely = np.argsort(-self.probabilities[i], kind="stable")
                row["prediction_set"] = [names[c] for c in likely if sets[i, c]]
            if all_probabilities:
                row |= {f"p_{name}": float(self.probabilities[i, c]) for c, name in enumerate(names)}
            yield row


_COLUMNS = {each.name.removesuffix("_id"): each.name for each in fields(Prediction)[:10]}  # up to softmax_class_id
PREDICTION_COLUMNS = ("file", *_COLUMNS)  # of the prediction files


DOUBTFUL_PROBABILITY = 0.8  # of its class, below which a known image is worth a look: one in five or more is wrong


@dataclass(frozen=True)
class Counts:
    """How many of the images predicted are flagged as unknown, and how many of the others are doubtful.

    An image is doubtful if it is not flagged and the probability of its class is below ``DOUBTFUL_PROBABILITY``.

    >>> Counts.of(is_ood=np.array([True, False, False]), probability=np.array([0.3, 0.5, 0.9]))
    Counts(images=3, flagged=1, doubtful=1)
    """

    images: int = 0
    flagged: int = 0
    doubtful: int = 0

    @staticmethod
    def of(is_ood: np.ndarray, probability: np.ndarray) -> Counts:
        """Counts over decisions (N,) and probabilities (N,)."""
        doubtful = ~is_ood & (probability < DOUBTFUL_PROBABILITY)
        return Counts(len(is_ood), int(is_ood.sum()), int(doubtful.sum()))

    def __add__(self, other: Counts) -> Counts:
        return Counts(self.images + other.images, self.flagged + other.flagged, self.doubtful + other.doubtful)


@dataclass(frozen=True)
class Skipped:
    """A file that could not be used, and why."""

    file: str
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class RunClasses:
    """The content of ``classes.json``; clusters are known once the network is trained."""

    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()
    left_out: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)  # of the images of a split, by its name
    cluster_to_class: np.ndarray | None = None  # (M,)
    cluster_sizes: np.ndarray | None = None  # (M,) training images
    snapshot_epochs: dict[str, int] | None = None
    updates: tuple[dict[str, Any], ...] = ()  # one per maple update

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunClasses:
        known: dict[str, Any] = {f.name: value[f.name] for f in fields(cls) if f.name in value}
        known["skipped"] = tuple(Skipped(*item) for item in known.get("skipped", ()))
        for name in ("classes", "left_out", "updates"):
            known[name] = tuple(known.get(name, ()))
        for name in ("cluster_to_class", "cluster_sizes"):
            known[name] = np.array(known[name]) if name in known else None
        return cls(**known)

    def to_json(self) -> dict[str, Any]:
        known = {f.name: getattr(self, f.name) for f in fields(self)}
        known |= {"skipped": [[item.file, item.reason] for item in self.skipped], "updates": self.updates or None}
        return {name: value for name, value in known.items() if value is not None}
