"""The columns of suites: title, direction and digits of each figure, and its place in :class:`Results`.

A column is named by the kind of figure and what it is about: ``ece``, ``auroc/svhn``, ``share@0.8``. A prefix names
other images than the clean test images, ``corrupted/ece``, ``training/gaussian_error``, or a group of unknown images
whose mean is taken: ``near/auroc``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from maple.errors import UsageError
from maple.evaluation.results import Results

Images = Literal["test", "corrupted", "training"]  # on which a figure is measured
_OTHER_IMAGES: dict[str, tuple[Images, str]] = {  # by prefix: the images, and the end of the title
    "corrupted": ("corrupted", ", corrupted"),
    "training": ("training", ", training images"),
}


@dataclass(frozen=True)
class Column:
    """One figure: its title, the better direction, and its decimals."""

    title: str
    better: Literal["higher", "lower", ""] = ""
    digits: int = 3


_TITLES: dict[str, Column] = {  # by kind of figure
    "accuracy": Column("accuracy", "higher", 4),
    "softmax_accuracy": Column("softmax accuracy", "higher", 4),
    "ece": Column("ECE", "lower"),
    "nll": Column("NLL", "lower"),
    "auroc": Column("AUROC", "higher"),
    "aupr": Column("AUPR", "higher"),
    "fpr95_ood_positive": Column("FPR95 at 95 % of unknown flagged", "lower"),
    "fpr95_ind_positive": Column("FPR95 at 95 % of known accepted", "lower"),
    "mean_auroc": Column("mean AUROC", "higher"),
    "fused_auroc": Column("fused score on this network, mean AUROC", "higher"),
    "clusters": Column("clusters", digits=0),
    "components": Column("components", digits=0),
    "gaussian_error": Column("Gaussian test", "lower"),
    "gaussian_error_per_component": Column("per component", "lower"),
    "latency_ms": Column("ms per image", "lower", 2),
    "share": Column("share kept", "higher"),
    "parameters": Column("parameters", "lower", 0),
    "minutes": Column("training, minutes", "lower", 1),
}


GROUPS = ("near", "far")  # of unknown images
_DETECTION = {"auroc": "auroc", "aupr": "aupr_out"}  # fields of Detection with another name
_OTHER_METHOD = {"softmax_accuracy": "softmax", "fused_auroc": "maple"}  # read instead of the method of the row


def split_images(column: str) -> tuple[Images, str]:
    """The images that a column is about, and its name without their prefix.

    >>> split_images("corrupted/ece"), split_images("auroc/svhn")
    (('corrupted', 'ece'), ('test', 'auroc/svhn'))
    """
    prefix, _, rest = column.partition("/")
    return (_OTHER_IMAGES[prefix][0], rest) if prefix in _OTHER_IMAGES else ("test", column)


def figure_kind(column: str) -> tuple[str, str]:
    """The kind of figure that a column has, and of what: an OOD set, a level of confidence, or nothing.

    >>> figure_kind("auroc/svhn"), figure_kind("share@0.8"), figure_kind("corrupted/ece")
    (('auroc', 'svhn'), ('share', '0.8'), ('ece', ''))
    """
    kind, *detail = re.split("[/@]", split_images(column)[1], maxsplit=1)
    return kind, "".join(detail)


def _column(name: str) -> Column:
    """The column of a figure by its name."""
    kind, detail = figure_kind(name)
    if kind in GROUPS:
        return replace(_TITLES[detail], title=f"{kind}-OOD {_TITLES[detail].title}")
    column = _TITLES[kind]
    suffix = f" above {detail}" if "@" in name else f" {detail}" if detail else ""
    _, where = _OTHER_IMAGES.get(name.partition("/")[0], ("test", ""))
    return replace(column, title=column.title + suffix + where)


def describe_columns(names: Iterable[str]) -> dict[str, Column]:
    """Columns by name.

    >>> [column.title for column in describe_columns(["auroc/svhn", "near/auroc"]).values()]
    ['AUROC svhn', 'near-OOD AUROC']
    """
    return {name: _column(name) for name in names}


def floor_columns(names: Iterable[str]) -> dict[str, str]:
    """For each ECE, the column of what perfect probabilities would have by chance.

    >>> floor_columns(["accuracy", "ece", "corrupted/ece"])
    {'ece': 'ece_floor', 'corrupted/ece': 'corrupted/ece_floor'}
    """
    return {name: f"{name}_floor" for name in names if figure_kind(name)[0] == "ece"}


def read_figure(results: Results, method: str, column: str, facts: Mapping[str, float] | None = None) -> float:
    """One figure of a method; NaN where it has none. ``facts`` are figures of the training by column."""
    kind, detail = figure_kind(column)
    if facts and column in facts:
        return facts[column]
    if column == "clusters":
        return float(results.n_clusters)
    read = results.methods.get(_OTHER_METHOD.get(kind, method))
    if read is None:
        raise UsageError(f"the results have no method '{method}': evaluate the run with --detector {method}")
    if kind == "latency_ms":  # of the network alone, or up to the decision where Gaussians are read
        measures_distances = method.startswith("maple") or not math.isnan(read.n_components)
        return float(results.latency_ms if measures_distances else results.network_latency_ms)
    if kind in ("mean_auroc", "fused_auroc"):
        found = [each.auroc for each in read.detection.values()]
        return sum(found) / len(found) if found else math.nan
    if kind in GROUPS:
        return results.group_mean(read, kind, _DETECTION.get(detail, detail))
    if kind in ("auroc", "aupr", "fpr95_ood_positive", "fpr95_ind_positive"):
        return getattr(read.detection[detail], _DETECTION.get(kind, kind))
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
