"""Predictions of the images of a Ray ``Dataset``: :func:`score`, and :class:`Scorer` for ``map_batches``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from maple.data.decode import Decoding
from maple.data.image_set import ImageSet
from maple.data.stream import Chunk, Decoded
from maple.deploy.ray.model import Model, own_threads
from maple.deploy.ray.spans import decode_chunk
from maple.errors import DataError, UsageError, naming_extras
from maple.options import as_dict
from maple.runs.loading import open_predictor
from maple.runs.predicting.parts import row_schema
from maple.runs.predicting.predict import Extras, predict_chunk
from maple.types import PREDICTION_COLUMNS

if TYPE_CHECKING:
    from ray.data import Dataset

Columns = Mapping[str, np.ndarray]  # a batch of Ray Data in the format "numpy"
SKIPPED = "skipped"  # column: why an image has no prediction
_PIXELS = "maple_pixels"  # column between the two steps
_IMAGE_COLUMNS = ("bytes", "image", "img")
_FILE_COLUMNS = ("file", "path")


def score(
    dataset: Dataset,
    run: str | Path,
    *,
    workers: int = 2,
    cpus_per_worker: float = 1.0,
    gpus_per_worker: float = 0.0,
    batch_size: int = 256,
    all_probabilities: bool = False,
    coverage: float | None = None,
    trust: bool = False,
    **decision: Any,
) -> Dataset:
    """One row per row of ``dataset``, with the columns of ``maple predict``; nothing is computed before it is read.

    ``dataset`` has a column of encoded images, ``bytes`` (as ``ray.data.read_binary_files`` names it) or ``image``,
    which may also hold pixels (as ``ray.data.read_images`` gives) or the records of Hugging Face. Tasks decode them,
    with the limits of ``maple predict``, and ``workers`` actors, with one model each, predict ``batch_size`` at a time.
    Other columns are kept; ``path``, or ``file``, becomes ``file``. A row whose image cannot be used has only a reason
    in the column ``skipped``. ``decision`` are options such as ``false_alarm=0.01``; ``run`` is read here, once::

        images = ray.data.read_binary_files("s3://bucket/slides/", include_paths=True)
        maple.deploy.ray.score(images, "runs/diatoms", workers=8).write_parquet("s3://bucket/predictions/")
    """
    with naming_extras():
        from ray.data import ActorPoolStrategy

    predictor = open_predictor(Path(run), trust).decide(**decision)
    model = Model.read(Path(run), as_dict(predictor.options), trust)
    how = Decoding(predictor.size, predictor.fit)
    decode: Any = decode_columns
    decoded = dataset.map_batches(decode, fn_args=(how,), batch_size=batch_size, batch_format="numpy")
    return decoded.map_batches(
        Scorer,
        fn_constructor_args=(model,),
        fn_constructor_kwargs={"all_probabilities": all_probabilities, "coverage": coverage},
        compute=ActorPoolStrategy(size=workers),
        num_cpus=cpus_per_worker,
        num_gpus=gpus_per_worker,
        batch_size=batch_size,
        batch_format="numpy",
    )


class Scorer:
    """A model that turns batches of images into rows of predictions: the class that ``map_batches`` takes.

    Use it in pipelines of your own, with ``batch_format="numpy"``; it decodes images that are encoded. Columns in and
    out are those of :func:`score`::

        dataset.map_batches(Scorer, fn_constructor_args=("runs/diatoms",), batch_format="numpy", batch_size=256,
                            compute=ray.data.ActorPoolStrategy(size=2))
    """

    def __init__(
        self,
        run: str | Path | Model,
        *,
        all_probabilities: bool = False,
        coverage: float | None = None,
        trust: bool = False,
    ) -> None:
        if not isinstance(run, Model):
            run = Path(run)
        self._predictor = run.open() if isinstance(run, Model) else open_predictor(run, trust, own_threads())
        self._extras = Extras(coverage, all_probabilities)
        sets = ["prediction_set"] if coverage is not None else []
        names = [f"p_{name}" for name in self._predictor.class_names if all_probabilities]
        self._schema = row_schema([*PREDICTION_COLUMNS[1:], *sets, *names])  # the file is a column of the batch

    def __call__(self, batch: Columns) -> pa.Table:
        """The rows of a batch, in its order."""
        if _PIXELS not in batch:
            batch = decode_columns(batch, Decoding(self._predictor.size, self._predictor.fit))
        reasons = [reason or None for reason in batch[SKIPPED]]
        rows = [i for i, reason in enumerate(reasons) if reason is None]
        chunk = Decoded(0, rows, list(map(str, rows)), np.stack(list(batch[_PIXELS]))[rows], [], [])
        predicted, chunk = predict_chunk(self._predictor, chunk, self._extras)
        said: list[dict[str, Any]] = [{}] * len(reasons)
        for row in predicted:
            said[int(row.pop("file"))] = row
        for item in chunk.skipped:
            reasons[int(item.file)] = item.reason
        table = pa.Table.from_pylist(said, self._schema).append_column(SKIPPED, pa.array(reasons, pa.string()))
        for name, values in batch.items():
            if name not in (_PIXELS, *table.column_names):
                table = table.add_column(0, name, _to_arrow(values))
        return table


def decode_columns(batch: Columns, how: Decoding) -> dict[str, Any]:
    """The batch with pixels (N, S, S, 3) in the place of its images, and why an image has none."""
    name = next((name for name in _IMAGE_COLUMNS if name in batch), None)
    if name is None:
        raise UsageError(f"the Dataset has no column {' or '.join(_IMAGE_COLUMNS)}: it has {', '.join(batch)}")
    n = len(batch[name])
    items = [_to_item(value, how) for value in batch[name]]
    decoded = decode_chunk(Chunk(0, [str(i) for i in range(n)], items), how)
    pixels = np.zeros((n, how.size, how.size, 3), np.uint8)
    pixels[decoded.rows] = decoded.pixels
    reasons = np.full(n, "", dtype=object)
    for item in decoded.skipped:
        reasons[int(item.file)] = item.reason
    files = next((key for key in _FILE_COLUMNS if key in batch), None)
    kept = {("file" if key == files else key): value for key, value in batch.items() if key != name}
    return {**kept, _PIXELS: pixels, SKIPPED: reasons}


def _to_item(value: Any, how: Decoding) -> Any:
    """Encoded bytes, pixels of the right size, or why there are none."""
    if isinstance(value, Mapping):  # {"bytes": ..., "path": ...}
        value = value.get("bytes")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value) or DataError("the row holds no image bytes")
    if value is None:
        return DataError("the row holds no image bytes")
    try:
        square = ImageSet.from_arrays(np.asarray(value)[None], size=how.size, fit=how.fit).pixels
    except DataError as error:
        return error
    assert square is not None
    return square[0]


def _to_arrow(values: np.ndarray) -> list[Any] | Any:
    return [pa.array(values.tolist() if values.ndim > 1 or values.dtype == object else values)]
