"""Sums over blocks of images, merged two by two: files in one folder, which survive any process.

Block i is the leaf i to i + 1; a node joins two neighbouring ranges, always the same ones, so that the root does not
depend on which worker was quick or died. A node consists of one file per record, written whole or not at all, and
replaces its halves, so that each file counts once, whichever process resumes.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np

from maple.deploy.ray.jobs import naming_disk
from maple.errors import RunError, UsageError
from maple.files import load_json, save_json
from maple.runs.predicting.parts import replacing
from maple.stats.moments import Moments
from maple.text import shorten_list

Arrays = dict[str, np.ndarray]
_SUFFIX = ".npz"  # read and written array by array, without a copy
_PLAN = "plan.json"


@dataclass(frozen=True, order=True)
class Node:
    """The blocks ``first`` to ``stop``."""

    first: int
    stop: int

    def __str__(self) -> str:
        return f"{self.first}-{self.stop}"

    @property
    def is_block(self) -> bool:
        return self.stop - self.first == 1

    @property
    def halves(self) -> tuple[Node, Node]:
        """The two nodes that are merged to this one; the left one is a whole power of two.

        >>> [str(half) for half in Node(0, 5).halves]
        ['0-4', '4-5']
        """
        middle = self.first + (1 << (self.stop - self.first - 1).bit_length() - 1)
        return Node(self.first, middle), Node(middle, self.stop)


def parents(root: Node) -> dict[Node, Node]:
    """The node that each node below ``root`` is merged into.

    >>> {str(node): str(parent) for node, parent in parents(Node(0, 3)).items()}
    {'0-2': '0-3', '2-3': '0-3', '0-1': '0-2', '1-2': '0-2'}
    """
    if root.is_block:
        return {}
    left, right = root.halves
    return {left: root, right: root, **parents(left), **parents(right)}


@dataclass(frozen=True)
class Store:
    """The files of the nodes; ``records`` names what each node consists of."""

    folder: Path
    records: tuple[str, ...]

    def path(self, node: Node, record: str) -> Path:
        return self.folder / f"{record}.{node}{_SUFFIX}"

    def paths(self, *nodes: Node) -> list[Path]:
        return [self.path(node, record) for node in nodes for record in self.records]

    def has(self, node: Node) -> bool:
        return all(path.is_file() for path in self.paths(node))

    def write_block(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the sums of a block; arrays whose names have no record are common to all blocks, and left out."""
        node = Node(number, number + 1)
        for record, own in by_record(arrays).items():
            _write(self.path(node, record), own)

    def merge(self, node: Node) -> None:
        """Merge the halves of a node, one record after the other, and remove them; twice is as good as once.

        At most two D x D matrices are in memory: the left half, to which the right one is added in place, and that one.
        """
        for record in self.records:
            target = self.path(node, record)
            left, right = (self.path(half, record) for half in node.halves)
            if not target.is_file():
                _write(target, _merged(left, right))
        for path in self.paths(*node.halves):
            path.unlink(missing_ok=True)

    def read(self, node: Node) -> Arrays:
        """The sums of a node by full names."""
        return {
            f"{record}.{name}": array
            for record in self.records
            for name, array in _read(self.path(node, record)).items()
        }


def by_record(arrays: Mapping[str, np.ndarray]) -> dict[str, Arrays]:
    """Arrays by the part of their name before the last dot; those without a dot are left out.

    >>> list(by_record({"moments.0.5.sums": np.zeros(1), "classes": np.zeros(1)}))
    ['moments.0.5']
    """
    found: dict[str, Arrays] = {}
    for name, array in arrays.items():
        record, dot, own = name.rpartition(".")
        if dot:
            found.setdefault(record, {})[own] = array
    return found


def _merged(left: Path, right: Path) -> Arrays:
    """The sum of two records: of moments by Chan's rule, of other arrays one by one."""
    total = _read(left)
    if "second" in total:
        return Moments.from_arrays(total).absorb(Moments.from_arrays(_read(right))).to_arrays()
    for name, array in _read(right).items():
        total[name] += array
    return total


def _write(path: Path, arrays: Arrays) -> None:
    """Write arrays, complete and on the disk, or not at all."""
    with naming_disk(path), replacing(path, path.with_name(f"writing-{uuid4().hex}")) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _read(path: Path) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise RunError(f"cannot read '{path}' ({error}): add --overwrite to start again") from None


@dataclass
class Tree:
    """What is done and what can be merged, as the driver knows it."""

    n_blocks: int
    done: set[Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.root = Node(0, self.n_blocks)
        self._parents = parents(self.root)

    def add(self, node: Node) -> Node | None:
        """Note a finished node; the node into which it can be merged now, if there is one."""
        self.done.add(node)
        parent = self._parents.get(node)
        return parent if parent is not None and self.done.issuperset(parent.halves) else None

    def missing(self) -> list[int]:
        """The blocks that no finished node holds."""
        held = {block for node in self.done for block in range(node.first, node.stop)}
        return [block for block in range(self.n_blocks) if block not in held]

    def resume(self, store: Store) -> Iterator[Node]:
        """Take the finished nodes that are on the disk, the largest ones, and remove all other files.

        Yields the nodes that can be merged.
        """
        kept: list[Node] = []
        for node in sorted({self.root, *self._parents}, key=lambda node: (node.first, -node.stop)):
            if (not kept or node.first >= kept[-1].stop) and store.has(node):
                kept.append(node)
        known = {*store.paths(*kept), store.folder / _PLAN}
        for path in [path for path in store.folder.iterdir() if path not in known]:
            path.unlink()
        ready = [self.add(node) for node in kept]
        yield from (node for node in ready if node is not None)


def open_plan(folder: Path, request: Mapping[str, str], step: int, overwrite: bool) -> int:
    """Images per block, of the sums that are in the folder already, else ``step``.

    Sums of another request are refused, unless ``overwrite`` discards them.
    """
    path = folder / _PLAN
    if path.is_file():
        plan = load_json(path)
        other = [name for name, value in request.items() if plan["request"].get(name) != value]
        if not other:
            return int(plan["step"])
        if not overwrite:
            raise UsageError(
                f"'{folder}' holds sums of a fit that differs in {shorten_list(other)}: repeat that command to resume "
                "it, or add --overwrite to start again"
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_json(path, {"request": dict(request), "step": step})
    return step


def count_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Bytes of arrays."""
    return sum(array.nbytes for array in arrays)
