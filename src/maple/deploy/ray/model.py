"""A run or an exported graph as bytes, so that workers need no shared folder to load it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from maple.files import RunFile, check_finished
from maple.options import Values
from maple.prediction.base import BasePredictor
from maple.runs.loading import is_graph, open_predictor


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
            network = [path for path in (source / RunFile.NETWORK).glob("*") if path.is_file()]
            paths, folder = [source / RunFile.WEIGHTS, source / RunFile.DETECTOR, *network], source
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
        return cls(source.name, files, is_graph(source), options, trust)

    def open(self) -> BasePredictor:
        """The predictor, ready to decide."""
        with tempfile.TemporaryDirectory(prefix="maple-model-") as place:
            for name, content in self.files.items():
                path = Path(place) / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            predictor = open_predictor(Path(place) / self.name if self.is_graph else Path(place), self.trust)
        return predictor.decide(**self.options)
