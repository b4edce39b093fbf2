"""``maple predict --engine ray``: images are read and decoded in tasks, and predicted by workers that write the parts.

The images are divided into parts of a fixed range each. A task decodes the images of a part, a worker predicts them and
writes the part, whole or not at all, under its number. Whichever process dies, each part is written once or predicted
again; the driver knows the finished parts by their footers and continues with the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from maple.data.stream import Decoded
from maple.deploy.ray.cluster import Resources, connected
from maple.deploy.ray.jobs import Pool, Shared, naming_disk
from maple.deploy.ray.model import Model
from maple.deploy.ray.spans import Span
from maple.deploy.ray.workers import Decoder, Worker
from maple.errors import UsageError
from maple.options import as_dict
from maple.runs.predicting.parts import Footer, part_path, row_schema, write_part
from maple.runs.predicting.predict import Extras, Work, predict_chunk, predict_images
from maple.runs.predicting.writer import MANIFEST, ResumableFile
from maple.runs.requests import PredictRequest
from maple.types import Skipped

PART_BYTES = 2**27  # pixels of a part, at most
PART_IMAGES = 2**14


def predict_on_ray(request: PredictRequest) -> int:
    """Like :func:`~maple.runs.predicting.predict.predict_images`, on a Ray cluster; the same rows and files."""
    if request.path is None:
        raise UsageError("--engine ray writes a file: give one with --out, such as --out predictions.parquet")
    if not request.path.suffix:
        _check_folder(request.path)
    return predict_images(request, fill_on_ray)


def _check_folder(path: Path) -> None:
    """Refuse to replace anything but a folder of predictions."""
    if path.exists() and not (path / MANIFEST).is_file() and (path.is_file() or any(path.iterdir())):
        raise UsageError(f"--out '{path}' exists already, and is no folder of predictions: choose another name")


def fill_on_ray(work: Work, file: ResumableFile) -> None:
    """Predict all images that the file does not hold, and record their parts."""
    resources = Resources.of(work.request)
    parts = plan_parts(file.found, len(work.source), _choose_step(work, resources))
    if parts:  # none is missing where the disk was full at the very end
        with connected(work.request, resources):
            _predict_missing(work, file, parts, resources)
    file.gather()


def _predict_missing(work: Work, file: ResumableFile, parts: list[Part], resources: Resources) -> None:
    done = len(work.source) - sum(len(part) for part in parts)
    work.display.begin("predicting", done, len(work.source))
    for part, footer in _predict_parts(work, file, parts, resources):
        file.record(part.number, footer)
        done += len(part)
        work.display.update(done, len(work.source))


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Images ``first`` to ``stop``, the rows of which are the part with this number."""

    number: int
    first: int
    stop: int
    step: int  # images of a part; the last one may have fewer

    def __len__(self) -> int:
        return self.stop - self.first

    def __str__(self) -> str:
        return f"part {self.number} (images {self.first:,} to {self.stop - 1:,})"


def plan_parts(found: dict[int, Footer], n_images: int, step: int) -> list[Part]:
    """The parts that are missing: ranges of ``step`` images, or of as many as those that are there.

    Parts that one process has written in order have no fixed range; the first range begins behind them.

    >>> [(part.number, part.first, part.stop) for part in plan_parts({1: Footer({}, 8, 4, [], first=4, step=4)}, 10, 5)]
    [(0, 0, 4), (2, 8, 10)]
    """
    number = begin = 0
    while number in found and found[number].step is None:
        begin = found[number].images
        number += 1
    step = next((footer.step for footer in found.values() if footer.step), step)
    missing = []
    for first in range(begin, n_images, step):
        part = Part(number, first, min(first + step, n_images), step)
        if number not in found or (found[number].first, found[number].images) != (part.first, part.stop):
            found.pop(number, None)
            missing.append(part)
        number += 1
    return missing


def _choose_step(work: Work, resources: Resources) -> int:
    """Images per part: whole batches, within ``PART_BYTES``, and several parts for each worker."""
    batch, size = work.request.batch_size, work.predictor.size
    fit = min(PART_IMAGES, PART_BYTES // (3 * size * size), -(-len(work.source) // (4 * resources.workers)))
    return max(fit // batch, 1) * batch


# --- workers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """Where and how rows are written."""

    folder: Path
    columns: tuple[str, ...]
    request: dict[str, Any]
    extras: Extras


class PartWriter(Worker):
    """A worker that predicts parts and writes them."""

    def ready(self, model: Shared[Model]) -> None:
        """Load the model."""
        self._predictor(model)

    def predict(
        self, model: Shared[Model], layout: Shared[Layout], part: Part, chunks: list[Decoded], skipped: list[Skipped]
    ) -> Footer:
        """Predict the images of a part, in the batches of ``chunks``, and write it; ``skipped`` come before them."""
        predictor = self._predictor(model)
        how = layout.get()
        schema = row_schema(how.columns)
        tables, skipped = [schema.empty_table()], list(skipped)
        for chunk in chunks:
            rows, chunk = predict_chunk(predictor, chunk, how.extras)
            tables.append(pa.Table.from_pylist(rows, schema))
            skipped += chunk.skipped
        table = pa.concat_tables(tables)
        footer = Footer(how.request, part.stop, len(table), skipped, part.first, part.step)
        path = part_path(how.folder, part.number)
        with naming_disk(path):
            write_part(path, table, footer)
        return dataclasses.replace(footer, request={})


def _predict_parts(
    work: Work, file: ResumableFile, parts: list[Part], resources: Resources
) -> Iterator[tuple[Part, Footer]]:
    """The parts with their footers, as they are written."""
    request = work.request
    model = Shared.put(Model.read(request.model, as_dict(work.predictor.options), request.trust))
    layout = Shared.put(Layout(file.folder.resolve(), tuple(file.columns), file.request, work.extras))
    decoder = Decoder.beside(resources)

    def submit(actor: Any, part: Part) -> Any:
        span = Span.cut(work.source, part.first, part.stop)
        chunks = decoder.start(span, work.decoding, request.batch_size)
        return actor.predict.remote(model, layout, part, chunks, list(work.source.skipped) if part.number == 0 else [])

    ahead = max(2, 1 + -(-decoder.n // resources.workers))
    pool: Pool[Part] = Pool(resources, PartWriter, resources.gpus, ahead=ahead, model=model)
    yield from pool.run(iter(parts), submit)
