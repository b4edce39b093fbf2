"""A run or an exported graph as bytes, so that workers need no shared folder to load it."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import ray

from maple.deploy.ray.jobs import naming_disk
from maple.files import RunFile, check_finished
from maple.options import Values
from maple.prediction.base import BasePredictor
from maple.runs.loading import is_graph, open_predictor
from maple.stats._blas import limit_threads

if TYPE_CHECKING:  # an exported graph is predicted without torch
    from maple.networks import Backbone
    from maple.prediction.predictor import Predictor


@dataclass(frozen=True)
class Model:
    """The files of a model by their path below its folder, and the options of its decision."""

    name: str
    files: dict[str, bytes]
    is_graph: bool
    options: Values  # of the decision
    trust: bool = False

    @classmethod
    def read(cls, source: Path, options: Values, trust: bool = False) -> Model:
        """The files of a run folder or an exported graph that a prediction needs."""
        if is_graph(source):
            beside = source.with_name(f"{source.name}.data")
            paths = [path for path in (source, beside) if path.is_file()]
            folder = source.parent
        else:
            check_finished(source)
            others = [source / RunFile.MANIFEST, *(source / RunFile.NETWORK).glob("*")]
            kept = [path for path in others if path.is_file()]
            paths, folder = [source / RunFile.WEIGHTS, source / RunFile.DETECTOR, *kept], source
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return cls(source.name, files, is_graph(source), options, trust)

    @classmethod
    def of_network(cls, backbone: Backbone) -> Model:
        """The files of a network alone, which this process has been allowed to open."""
        from maple.prediction.store import save_backbone

        with tempfile.TemporaryDirectory(prefix="maple-model-") as place:
            save_backbone(Path(place) / RunFile.WEIGHTS, backbone)
            paths = [path for path in Path(place).rglob("*") if path.is_file()]
            files = {str(path.relative_to(place)): path.read_bytes() for path in paths}
        return cls(backbone.name, files, is_graph=False, options={}, trust=True)

    def digest(self) -> str:
        """A digest of the files."""
        found = hashlib.blake2b(digest_size=16)
        for name, content in sorted(self.files.items()):
            found.update(b"%s\0%d\0" % (name.encode(), len(content)) + content)
        return found.hexdigest()

    def open(self, gpus: float = 0.0) -> BasePredictor:
        """The predictor, ready to decide, on the GPU of a worker that has one."""
        with self._unpacked() as folder:
            source = folder / self.name if self.is_graph else folder
            predictor = open_predictor(source, self.trust, own_threads())
        if predictor.runtime == "torch":
            _place(cast("Predictor", predictor).backbone, gpus)
        return predictor.decide(**self.options)

    def open_network(self, gpus: float = 0.0) -> Backbone:
        """The network alone, on the GPU of a worker that has one."""
        from maple.networks import use_threads
        from maple.prediction.store import load_backbone

        use_threads(own_threads())
        with self._unpacked() as folder:
            return _place(load_backbone(folder / RunFile.WEIGHTS, trust=self.trust), gpus)

    @contextmanager
    def _unpacked(self) -> Iterator[Path]:
        """A folder with the files."""
        with tempfile.TemporaryDirectory(prefix="maple-model-") as place:
            for name, content in self.files.items():
                path = Path(place) / name
                with naming_disk(path):
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(content)
            yield Path(place)


def own_threads() -> int | None:
    """The computing threads of this worker, one for each of its processors; None where this is no worker of Ray.

    BLAS is limited to them. Ray only sets ``OMP_NUM_THREADS``, and not where the user has: with a thread of every
    worker on every processor, workers wait for each other in loops, and two of them on two processors take twice the
    processor time.
    """
    if not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is None:
        return None
    n = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
    limit_threads(n)
    return n


def _place(backbone: Backbone, gpus: float) -> Backbone:
    from maple.networks import use_fast_allocator

    use_fast_allocator()
    return backbone.to("cuda") if gpus else backbone
