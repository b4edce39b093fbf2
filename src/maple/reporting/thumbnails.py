"""The sections of a report that show images: exemplars of clusters and examples of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maple.reporting.gallery.store import ClusterExemplars, Example, Examples
from maple.reporting.page import CRISP

MAX_THUMBNAILS = 1_500  # of clusters, in all
UNSPLIT_THUMBNAILS = 6  # of a class that is one cluster

_KNOWN = ("uncertain", "mistakes")  # kinds of examples, in the order of the report; of test images
_UNKNOWN = ("missed", "caught")  # of OOD sets
_TITLES = {  # title and note by kind
    "uncertain": ("Most uncertain known images", "{source}; unusual views, poor images or wrong labels"),
    "mistakes": ("Most confident mistakes", "{source}; check the labels"),
    "missed": ("Unknown images with the lowest scores: {source}", "most similar to known images"),
    "caught": ("Unknown images with the highest scores: {source}", "least similar to known images"),
}


@dataclass(frozen=True)
class ClassGallery:
    """The clusters of one class, largest first."""

    name: str
    count: int
    clusters: Sequence[ClusterExemplars]


@dataclass(frozen=True)
class ClusterSection:
    split: list[ClassGallery]
    whole: list[ClassGallery]
    shown: int  # thumbnails of each cluster of a split class
    shown_whole: int
    crisp: bool


def cluster_section(clusters: Sequence[ClusterExemplars]) -> ClusterSection | None:
    """Exemplars by class, split classes first; None if the run holds none."""
    per_class: dict[str, list[ClusterExemplars]] = {}
    for cluster in clusters:
        if cluster.count:
            per_class.setdefault(cluster.class_name, []).append(cluster)
    if not per_class:
        return None
    classes = [
        ClassGallery(name, sum(each.count for each in own), sorted(own, key=lambda each: -each.count))
        for name, own in per_class.items()
    ]
    shown = max(2, MAX_THUMBNAILS // len(clusters))
    return ClusterSection(
        split=[each for each in classes if len(each.clusters) > 1],
        whole=[each for each in classes if len(each.clusters) == 1],
        shown=shown,
        shown_whole=min(shown, UNSPLIT_THUMBNAILS),
        crisp=any(0 < cluster.thumbnails.shape[1] <= CRISP for cluster in clusters),
    )


@dataclass(frozen=True)
class ExampleSection:
    title: str
    note: str
    known: bool  # labels can be compared with predicted classes
    images: Sequence[Example]


def example_sections(groups: Sequence[Examples]) -> list[ExampleSection]:
    """Known images first; then each OOD set, missed images before detected ones."""

    def place(group: Examples) -> tuple[bool, str, int]:
        is_unknown = group.kind in _UNKNOWN
        return is_unknown, group.source if is_unknown else "", [*_KNOWN, *_UNKNOWN].index(group.kind)

    sections = []
    for group in sorted((group for group in groups if group.kind in _TITLES), key=place):
        title, note = (text.format(source=group.source) for text in _TITLES[group.kind])
        sections.append(ExampleSection(title, note, group.kind in _KNOWN, group.images))
    return sections
