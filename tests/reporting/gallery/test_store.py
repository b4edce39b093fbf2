"""The files of a gallery: every record survives the disk, and names of sources cannot do harm."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from maple.errors import RunError
from maple.reporting.gallery.store import (
    ClusterExemplars,
    ComponentEnd,
    ComponentExemplars,
    Example,
    Examples,
    Projection,
    read_gallery,
    remove_components,
    remove_examples,
    save_clusters,
    save_components,
    save_examples,
    save_projection,
)

IMAGES = np.random.default_rng(0).integers(0, 256, size=(4, 8, 8, 3), dtype=np.uint8)


def check_equal(found: object, expected: object) -> None:
    """Equality of records of arrays, numbers and other records."""
    assert type(found) is type(expected)
    for field in fields(expected):  # type: ignore[arg-type]
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(theirs, ComponentEnd):
            check_equal(mine, theirs)
        else:
            np.testing.assert_array_equal(mine, theirs)


def make_examples(kind: str, source: str) -> Examples:
    image = Example("a.png", None, "cod", 0.5, np.nan, 3.0, True, IMAGES[0])
    return Examples(kind, source, (image,))


def test_clusters_survive_the_disk(tmp_path: Path) -> None:
    none = np.zeros((0, 8, 8, 3), np.uint8)
    clusters = [
        ClusterExemplars(0, "cod", 3, 0.75, ("a.png", "b.png", "c.png"), IMAGES[:3]),
        ClusterExemplars(1, "eel", 0, 0.0, (), none),
        ClusterExemplars(2, "cod", 1, 0.25, ("d.png",), IMAGES[3:]),
    ]
    save_clusters(tmp_path, clusters)
    for found, expected in zip(read_gallery(tmp_path).clusters, clusters, strict=True):
        check_equal(found, expected)


def test_components_survive_the_disk_until_removed(tmp_path: Path) -> None:
    low = ComponentEnd((-2.0, -1.0), ("cod", "eel"), ("a.png", "b.png"), IMAGES[:2])
    high = ComponentEnd((3.0,), ("eel",), ("c.png",), IMAGES[2:3])
    save_components(tmp_path, [ComponentExemplars(1.5, low, high)])
    (found,) = read_gallery(tmp_path).components
    check_equal(found, ComponentExemplars(1.5, low, high))
    remove_components(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_projections_survive_the_disk(tmp_path: Path) -> None:
    points, ids = np.ones((4, 2), np.float32), np.arange(4)
    projection = Projection("after", points, ids, ids, ("cod",), (0.5, 0.25), 9)
    save_projection(tmp_path, projection)
    check_equal(read_gallery(tmp_path).projections["after"], projection)


def test_examples_survive_the_disk_until_removed(tmp_path: Path) -> None:
    save_examples(tmp_path, make_examples("caught", "far"))
    (found,) = read_gallery(tmp_path).examples
    assert (found.kind, found.source) == ("caught", "far")
    check_equal(found.images[0], make_examples("caught", "far").images[0])
    remove_examples(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_source_names_cannot_leave_the_folder_or_collide(tmp_path: Path) -> None:
    sources = ["../../x", "x", "X", "<script>", "naïve/ü", ""]
    for source in sources:
        save_examples(tmp_path / "gallery", make_examples("caught", source))
    assert sorted(e.source for e in read_gallery(tmp_path / "gallery").examples) == sorted(sources)
    assert [path.name for path in tmp_path.iterdir()] == ["gallery"]


def test_a_missing_folder_is_an_empty_gallery(tmp_path: Path) -> None:
    gallery = read_gallery(tmp_path / "none")
    assert (gallery.clusters, gallery.components, dict(gallery.projections), gallery.examples) == ((), (), {}, ())


def test_a_newer_gallery_is_refused(tmp_path: Path) -> None:
    (tmp_path / "clusters.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match=r"clusters\.json"):
        read_gallery(tmp_path)
