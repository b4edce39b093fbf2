"""The records of a gallery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class ClusterExemplars:
    """The images of one cluster that lie nearest to its mean, nearest first."""

    cluster: int
    class_name: str
    count: int  # training images in the cluster
    share: float  # of the images of its class
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentEnd:
    """The training images at one end of a component, outermost first."""

    coordinates: tuple[float, ...]
    class_names: tuple[str, ...]
    files: tuple[str, ...]
    thumbnails: np.ndarray  # (n, S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class ComponentExemplars:
    """Both ends of one component of the squared distance."""

    spread: float  # standard deviation of the centroids along it; identifies the component
    low: ComponentEnd
    high: ComponentEnd


@dataclass(frozen=True, eq=False)
class Projection:
    """Embeddings of a sample of images on their two main axes."""

    name: str
    points: np.ndarray  # (n, 2) float32
    class_ids: np.ndarray  # (n,) int64; -1 if unknown
    cluster_ids: np.ndarray  # (n,) int64; the class ids if there are no clusters
    class_names: tuple[str, ...]
    explained: tuple[float, float]  # share of the variance along each axis
    n_images: int  # before sampling


@dataclass(frozen=True, eq=False)
class Example:
    """One image and its prediction."""

    file: str
    label: str | None  # None if the image has no label
    class_name: str
    probability: float
    uncertainty: float
    score: float
    is_ood: bool
    thumbnail: np.ndarray  # (S, S, 3) uint8


@dataclass(frozen=True, eq=False)
class Examples:
    """Images of one source selected by one criterion, most extreme first."""

    kind: str
    source: str
    images: tuple[Example, ...]


@dataclass(frozen=True, eq=False)
class Gallery:
    """The content of a ``gallery/`` folder; parts that are not there are empty."""

    clusters: tuple[ClusterExemplars, ...] = ()
    components: tuple[ComponentExemplars, ...] = ()
    projections: Mapping[str, Projection] = field(default_factory=dict)
    examples: tuple[Examples, ...] = ()
