"""The MLflow flavour: ``maple.mlflow.log_model``, ``save_model`` and ``load_model``.

A model of MLflow holds the files of a run, or an exported graph, and names this module as its loader: nothing is
pickled, and no code is stored. MLflow calls it as ``pyfunc``: a table with the column ``image``, the bytes of image
files, becomes a table with the columns of the prediction files; the parameter ``false_alarm`` is the level of
``is_ood``.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maple import __version__
from maple.data.decoders import decode_image
from maple.decisions.conformal import check_rate
from maple.errors import UsageError, naming_extras
from maple.files import (
    RunFile,
    check_finished,
    check_links,
    load_arrays,
    read_metadata,
    save_arrays,
    without_paths,
)
from maple.options import as_dict
from maple.prediction.base import BasePredictor
from maple.prediction.onnx import OnnxPredictor
from maple.runs.loading import is_graph, open_predictor
from maple.types import PREDICTION_COLUMNS

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.models.model import ModelInfo

COLUMN = "image"
LEVEL = "false_alarm"
GRAPH = "model.onnx"
BATCH = 64  # images per forward pass
TYPES = {bool: "boolean", int: "long", float: "double", str: "string"}  # of MLflow


def log_model(model: str | Path | BasePredictor, name: str = "model", **options: Any) -> ModelInfo:
    """Log a run folder, an exported graph, ``hf://ORG/NAME`` or a predictor to the active run of MLflow.

    ``options`` are those of ``mlflow.pyfunc.log_model``, such as ``registered_model_name``.
    """
    with _stored(model) as stored:
        return _pyfunc().log_model(name=name, **_flavour(stored), **options)


def save_model(model: str | Path | BasePredictor, path: str | Path, **options: Any) -> None:
    """The same into a folder; ``options`` are those of ``mlflow.pyfunc.save_model``."""
    with _stored(model) as stored:
        _pyfunc().save_model(path=str(path), **_flavour(stored), **options)


def load_model(uri: str, *, trust: bool = False) -> BasePredictor:
    """The predictor of a logged model, such as ``models:/diatoms/3``; ``trust`` allows a network that runs code."""
    with naming_extras():
        from mlflow.artifacts import download_artifacts
        from mlflow.models import Model

    folder = Path(download_artifacts(artifact_uri=uri))
    flavour = Model.load(str(folder)).flavors.get("python_function", {})
    if flavour.get("loader_module") != __name__:
        raise UsageError(f"'{uri}' is no model of maple: log one with maple.mlflow.log_model")
    return _open(folder / flavour["data"], trust)


class PyFunc:
    """What MLflow calls: a table of images becomes a table of predictions."""

    def __init__(self, predictor: BasePredictor) -> None:
        self.predictor = predictor

    def predict(self, data: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """One row per image; ``params`` may hold the false-alarm level."""
        import pandas as pd

        level = (params or {}).get(LEVEL, self.predictor.false_alarm)
        check_rate(level, LEVEL, 0.05)
        decision = self.predictor.calibration.decide(**as_dict(self.predictor.options) | {LEVEL: level})
        size, fit = self.predictor.size, self.predictor.fit
        files, rows = [bytes(each) for each in data[COLUMN]], []
        for start in range(0, len(files), BATCH):
            pixels = np.stack([decode_image(file, size, fit) for file in files[start : start + BATCH]])
            said = self.predictor.predict_pixels(pixels)
            flagged = decision.is_ood(said.score, said.class_id)
            found = zip(said.rows([""] * len(said)), flagged, strict=True)
            rows += [row | {"is_ood": bool(is_ood)} for row, is_ood in found]
        return pd.DataFrame(rows, columns=list(PREDICTION_COLUMNS)).drop(columns="file")


def _load_pyfunc(path: str, model_config: Any = None) -> PyFunc:
    """Called by MLflow with the path of what was stored; a network that runs code is refused."""
    return PyFunc(_open(Path(path)))


def _open(stored: Path, trust: bool = False) -> BasePredictor:
    graph = stored / GRAPH
    return open_predictor(graph if graph.is_file() else stored, trust)


# --- what is stored ---------------------------------------------------------------------------------------------------


@contextmanager
def _stored(model: str | Path | BasePredictor) -> Iterator[Path]:
    """A folder with the files that a prediction needs, while they are copied."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        folder.mkdir()
        if isinstance(model, OnnxPredictor):
            model = model.source
        if isinstance(model, BasePredictor):
            from maple.prediction.predictor import Predictor
            from maple.prediction.store import save_predictor

            if not isinstance(model, Predictor):
                raise UsageError(f"a {type(model).__name__} cannot be stored: give a run folder or an exported graph")
            save_predictor(folder, model)
        elif str(model).startswith("hf:"):
            from maple.runs.hub import fetch_run

            _copy_run(fetch_run(str(model)), folder)
        elif is_graph(Path(model)):
            open_predictor(Path(model))  # an error says what is wrong with the file
            shutil.copyfile(model, folder / GRAPH)
        else:
            _copy_run(Path(model), folder)
        with warnings.catch_warnings():  # the signature is given, and is what an example is for
            warnings.filterwarnings("ignore", ".*[Ii]nput example")
            yield folder


def _copy_run(run: Path, folder: Path) -> None:
    check_finished(run)
    check_links(run)
    for name in (RunFile.WEIGHTS, RunFile.DETECTOR, RunFile.MANIFEST):
        if name != RunFile.MANIFEST or (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    described = read_metadata(weights := folder / RunFile.WEIGHTS)
    if (public := without_paths(described)) != described:  # of a run that an earlier version wrote
        save_arrays(weights, load_arrays(weights)[0], public)
        (folder / RunFile.MANIFEST).unlink(missing_ok=True)  # has their former digest
    if (run / RunFile.NETWORK).is_dir():
        shutil.copytree(run / RunFile.NETWORK, folder / RunFile.NETWORK)


def _flavour(stored: Path) -> dict[str, Any]:
    """Loader, data, signature and requirements for MLflow."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

    predictor = _open(stored)
    size = predictor.size
    row = next(predictor.predict_pixels(np.zeros((1, size, size, 3), np.uint8)).rows([""]))
    outputs = [ColSpec(TYPES[type(row[name])], name) for name in PREDICTION_COLUMNS if name != "file"]
    signature = ModelSignature(
        Schema([ColSpec("binary", COLUMN)]),
        Schema(outputs),
        ParamSchema([ParamSpec(LEVEL, "double", float(predictor.false_alarm))]),
    )
    return {
        "loader_module": __name__,
        "data_path": str(stored),
        "signature": signature,
        "pip_requirements": [f"maple-uncertainty[{predictor.runtime}]=={__version__}"],
        "metadata": {"classes": list(predictor.class_names), "network": predictor.network},
    }


def _pyfunc() -> Any:
    with naming_extras():
        import mlflow.pyfunc
        import pandas  # noqa: F401  (MLflow needs it for tables, and its small distribution leaves it out)

    return mlflow.pyfunc
