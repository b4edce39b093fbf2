"""Sums on the disk: the same root whatever comes first, whatever dies, and with little memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from maple.deploy.ray.tree import Node, Store, Tree, open_plan
from maple.errors import UsageError
from maple.stats.arrays import with_prefix
from maple.stats.moments import Moments

N, DIM = 60, 5


@pytest.fixture(scope="module")
def embeddings() -> np.ndarray:
    """Far from zero, and sorted by class: what uncentred sums cannot stand."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(N, DIM)) + 1e5 + 40 * np.repeat(np.arange(3), N // 3)[:, None]).astype(np.float32)


CLUSTERS = np.repeat(np.arange(3), N // 3)


def sums(embeddings: np.ndarray, rows: slice) -> dict[str, np.ndarray]:
    moments = Moments(3, DIM).update(embeddings[rows], CLUSTERS[rows])
    named = {f"moments.0.5.{name}": array for name, array in moments.to_arrays().items()}
    return {**named, "1.scatter": np.full((2, 2), float(rows.start)), "cluster_to_class": np.arange(3)}


def grow(store: Store, tree: Tree, embeddings: np.ndarray, order: list[int], n_merges: int | None = None) -> None:
    """Write blocks and merge as soon as possible, until ``n_merges`` are done."""
    ready = [*tree.resume(store)]
    for block in [block for block in order if block in tree.missing()]:
        store.write_block(block, sums(embeddings, slice(4 * block, 4 * block + 4)))
        ready += filter(None, [tree.add(Node(block, block + 1))])
    while ready and n_merges != 0:
        store.merge(node := ready.pop(0))
        ready += filter(None, [tree.add(node)])
        n_merges = None if n_merges is None else n_merges - 1


def root_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("n_blocks", [1, 2, 15])
def test_the_root_is_the_sum_of_all_in_any_order(n_blocks, embeddings, tmp_path):
    records = ("moments.0.5", "1")
    roots = []
    for name, order in (("up", [*range(n_blocks)]), ("down", [*range(n_blocks)][::-1])):
        store, tree = Store(tmp_path / name, records), Tree(n_blocks)
        store.folder.mkdir()
        grow(store, tree, embeddings, order)
        assert tree.root in tree.done and not tree.missing()
        roots.append(root_of(store.folder))
    assert roots[0] == roots[1] and len(roots[0]) == len(records)  # nothing else is left
    found = store.read(tree.root)
    merged = Moments.from_arrays(with_prefix(found, "moments.0.5."))
    whole = Moments(3, DIM).update(embeddings[: 4 * n_blocks], CLUSTERS[: 4 * n_blocks])
    assert merged.counts.tolist() == whole.counts.tolist()
    assert merged.total_covariance == pytest.approx(whole.total_covariance, rel=1e-10, abs=1e-10)
    assert merged.within_covariance == pytest.approx(whole.within_covariance, rel=1e-10, abs=1e-10)
    present = whole.counts > 0
    assert merged.means[present] == pytest.approx(whole.means[present], rel=1e-10)
    assert found["1.scatter"][0, 0] == sum(4 * block for block in range(n_blocks))


@pytest.mark.parametrize("n_merges", [0, 1, 5])
def test_what_is_there_is_kept_and_not_added_again(n_merges, embeddings, tmp_path):
    whole, broken = Store(tmp_path / "whole", ("moments.0.5", "1")), Store(tmp_path / "broken", ("moments.0.5", "1"))
    for store in (whole, broken):
        store.folder.mkdir()
    grow(whole, Tree(9), embeddings, [*range(9)])
    grow(broken, Tree(9), embeddings, [0, 1, 2, 3, 6, 7], n_merges)  # killed here
    broken.write_block(2, sums(embeddings, slice(8, 12)))  # by a worker that was thought dead
    (broken.folder / "writing-0123").write_text("unfinished")
    again = Tree(9)
    grow(broken, again, embeddings, [*range(9)])
    assert root_of(broken.folder) == root_of(whole.folder)


def test_a_merge_that_is_done_twice_is_done_once(embeddings, tmp_path):
    store = Store(tmp_path, ("moments.0.5", "1"))
    for block in (0, 1):
        store.write_block(block, sums(embeddings, slice(4 * block, 4 * block + 4)))
    store.merge(Node(0, 2))
    before = root_of(tmp_path)
    store.merge(Node(0, 2))
    assert root_of(tmp_path) == before


def test_a_merge_holds_two_matrices(tmp_path):
    dim = 600
    x = np.random.default_rng(0).normal(size=(40, dim))
    store = Store(tmp_path, ("moments.1",))
    for block in (0, 1):
        moments = Moments(1, dim).update(x[20 * block : 20 * block + 20], np.zeros(20, int))
        store.write_block(block, {f"moments.1.{name}": array for name, array in moments.to_arrays().items()})
    tracemalloc.start()
    store.merge(Node(0, 2))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.2 * 8 * dim**2


def test_sums_of_another_fit_are_refused_or_discarded(tmp_path):
    folder, request = tmp_path / "sums", {"the images": "a", "the network": "b"}
    assert open_plan(folder, request, 128, overwrite=False) == 128
    assert open_plan(folder, request, 512, overwrite=False) == 128  # that of the sums which are there
    with pytest.raises(UsageError, match=r"differs in the images.*--overwrite"):
        open_plan(folder, {**request, "the images": "c"}, 128, overwrite=False)
    (folder / "moments.1.0-1.npz").write_text("sums")
    assert open_plan(folder, {**request, "the images": "c"}, 512, overwrite=True) == 512
    assert {path.name for path in folder.iterdir()} == {"plan.json"}
