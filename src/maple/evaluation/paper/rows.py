"""The rows of suites: which network is trained, and which method reads it.

Recipes and detectors that the paper does not name, plug-ins included, come from the registries: every comparison has a
row per recipe, the suite ``detectors`` a row per detector.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from maple.detectors.registry import create_detector, list_detectors
from maple.evaluation.paper.profiles import Profile
from maple.options import Values
from maple.training.maple import MapleRecipe
from maple.training.recipe import find_recipe, list_recipes


@dataclass(frozen=True)
class Training:
    """One network: a protocol, and the flags that differ from the profile."""

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

    @property
    def recipe(self) -> str:
        return dict(self.training.flags).get("recipe", "maple")


# Fitted in every evaluation, in one pass over the training images; others only for suites whose rows name them.
STANDARD_DETECTORS = ("softmax", "energy", "md", "pca-md", "pca-ed", "rmd", "marginal-md")
READ_AS_PAPER = "pca-md"  # raw embeddings, PCA, tied covariance, chi-square tail: the paper's P_MD and u
READ_NORMALISED = "maple-paper"  # the same of the run's own Gaussians, whose embeddings are normalised by default
READ_OURS = "maple"

COMPARATORS = {  # row of the paper: recipe and method
    "Deterministic": ("cross-entropy", "softmax"),
    "MC Dropout": ("mc-dropout", "mc-dropout"),
    "Deep Ensemble": ("ensemble", "ensemble"),
    "DUQ": ("duq", "duq"),
    "SNGP": ("sngp", "sngp"),
    "DUE": ("due", "due"),
    "VMDLS": ("vmdls-like", "vmdls-like"),
}
_SIMPLIFIED = {"VMDLS": "VMDLS-like"}  # title of a comparator that is not the paper's method
_PAPER_CLUSTERING = {"relabel_every": 10, "hard_class_error": 0.3, "max_clusters": 5}


def _recipe(profile: Profile, protocol: str, recipe: str, **flags: Any) -> Training:
    if recipe == "ensemble":
        flags["members"] = 3 if protocol == "imagenet" else profile.members
    return Training.of(protocol, recipe=recipe, **flags)


def _both_readings(profile: Profile, title: str, training: Training, paper: str) -> list[Row]:
    """Distances of raw embeddings as in the paper, and of normalised ones, unless training is the paper's own."""
    rows = [Row(title, training, READ_AS_PAPER, paper)]
    return rows if profile.as_paper else [*rows, Row(f"{title}, normalised", training, READ_NORMALISED)]


@dataclass(frozen=True)
class Line:
    """One of the ``rows`` in ``suites.toml``: a network, and the method that reads it."""

    title: str
    recipe: str = "maple"
    flags: Values = field(default_factory=dict)  # of the training
    paper_clusters: bool = False  # with the paper's clustering, whose p counts epochs of a training of 200
    small: str = ""  # the backbone in profiles with small networks
    method: str = ""  # by default the squared distance, of raw embeddings and of normalised ones
    paper: str | None = None  # the row of the paper's table, where it has another title; empty where it has none
    protocol: str = ""  # where it is not that of the suite

    def rows(self, profile: Profile, protocol: str) -> list[Row]:
        """The rows of a table: one, or one per reading of the distances."""
        title, flags = self.title, self.flags
        if self.small and profile.name != "paper":
            title, flags = f"{self.small} for {title}", {**flags, "backbone": self.small}
        if self.paper_clusters:
            flags = {**_PAPER_CLUSTERING, **profile.clusters, **flags}
            flags["relabel_every"] = profile.relabel_every(flags["relabel_every"])
        training = _recipe(profile, self.protocol or protocol, self.recipe, **flags)
        paper = self.title if self.paper is None else self.paper
        if not self.method:
            return _both_readings(profile, title, training, paper)
        return [Row(title, training, self.method, paper)]


def comparator_rows(profile: Profile, protocol: str, names: Collection[str]) -> list[Row]:
    """The paper's comparators by name, other recipes, then MAPLE's network as the paper reads it and as we do."""
    found = [
        Row(_SIMPLIFIED.get(name, name), _recipe(profile, protocol, recipe), method, name)
        for name, (recipe, method) in COMPARATORS.items()
        if name in names
    ]
    found += [Row(name, _recipe(profile, protocol, name), method) for name, method in _other_recipes().items()]
    ours = _recipe(profile, protocol, "maple")
    return [*found, *_both_readings(profile, "MAPLE, P_MD", ours, "MAPLE"), Row("MAPLE", ours, READ_OURS)]


def _other_recipes() -> dict[str, str]:
    """The method that reads each registered recipe that is neither a variant of MAPLE nor named by the paper."""
    named = {recipe for recipe, _ in COMPARATORS.values()}
    kinds = {name: find_recipe(name).kind for name in list_recipes() if name not in named}
    others = {name: kind for name, kind in kinds.items() if kind is not MapleRecipe}
    return {name: READ_OURS if issubclass(kind, MapleRecipe) else name for name, kind in others.items()}


def detector_rows(profile: Profile, protocol: str) -> list[Row]:
    """All registered detectors that see no unknown image, on a network trained with cross-entropy."""
    plain = _recipe(profile, protocol, "cross-entropy")
    names = [name for name in list_detectors() if not getattr(create_detector(name), "learns_from_ood", False)]
    return [Row("MAPLE" if name == READ_OURS else name, plain, name) for name in names]
