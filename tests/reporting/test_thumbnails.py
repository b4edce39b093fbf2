"""Sections of images: split classes first, known images before unknown ones, few thumbnails of many clusters."""

from __future__ import annotations

import numpy as np
import pytest

from maple.reporting.gallery.store import ClusterExemplars, Examples
from maple.reporting.sections import MAX_THUMBNAILS, cluster_section, example_sections


def make_cluster(cluster: int, name: str, count: int) -> ClusterExemplars:
    return ClusterExemplars(cluster, name, count, 0.5, ("a.png",), np.zeros((1, 32, 32, 3), np.uint8))


def test_split_classes_and_whole_ones() -> None:
    clusters = [
        make_cluster(0, "cod", 3),
        make_cluster(1, "eel", 4),
        make_cluster(2, "cod", 5),
        make_cluster(3, "x", 0),
    ]
    section = cluster_section(clusters)
    assert section is not None and not section.crisp
    (cod,), (eel,) = section.split, section.whole
    assert (cod.name, cod.count) == ("cod", 8) and [each.cluster for each in cod.clusters] == [2, 0]
    assert eel.name == "eel" and len(eel.clusters) == 1


def test_no_images_no_section() -> None:
    assert cluster_section([]) is None and cluster_section([make_cluster(0, "cod", 0)]) is None


@pytest.mark.parametrize(("n", "shown"), [(10, 150), (MAX_THUMBNAILS, 2)])
def test_many_clusters_show_few_thumbnails_each(n: int, shown: int) -> None:
    section = cluster_section([make_cluster(i, "cod", 1) for i in range(n)])
    assert section is not None and section.shown == shown


def test_order_of_examples() -> None:
    kinds = [
        ("caught", "near"),
        ("mistakes", "t"),
        ("missed", "far"),
        ("uncertain", "t"),
        ("missed", "near"),
        ("?", ""),
    ]
    sections = example_sections([Examples(kind, source, ()) for kind, source in kinds])
    assert [section.known for section in sections] == [True, True, False, False, False]
    assert [section.title.rpartition(" ")[2] for section in sections[2:]] == ["far", "near", "near"]
    assert "lowest" in sections[3].title and "highest" in sections[4].title
