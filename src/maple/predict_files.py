"""``maple predict``: images in, one row per image out, whatever their number."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from maple.backbone import embed_batches
from maple.calibrate import min_calibration_images
from maple.checkpoint import write_atomic
from maple.data import open_images
from maple.errors import RunError, UsageError
from maple.images import ImageSet
from maple.networks import use_fast_allocator
from maple.predictor import Predictor, load_predictor
from maple.progress import counting, warn
from maple.types import PREDICTION_COLUMNS, Skipped

JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (".csv", *JSON_SUFFIXES)


def predict_images(
    folder: Path,
    sources: list[str],
    out: str,
    false_alarm: float | None = None,
    all_probabilities: bool = False,
    batch_size: int = 256,
    data_root: Path | None = None,
    workers: int = 0,
) -> int:
    """Write one row per image to ``out``; the number of rows. Files that are not images are listed beside it."""
    if out != "-" and Path(out).suffix not in SUFFIXES:
        raise UsageError(f"--out '{out}': end the name in {' or '.join(SUFFIXES)}, or use - to print")
    predictor = ready_predictor(folder, false_alarm)
    images = open_like(predictor, sources if len(sources) > 1 else sources[0], data_root)
    columns = [*PREDICTION_COLUMNS, *(f"p_{name}" for name in predictor.class_names if all_probabilities)]
    with _open_output(out) as file, counting("predicting") as progress:
        write_row = _row_writer(file, columns, as_lines=out.endswith(JSON_SUFFIXES))
        done = 0
        for outputs in embed_batches(
            predictor.backbone,
            images,
            batch_size=batch_size,
            cluster_to_class=predictor.cluster_to_class,
            progress=progress,
            workers=workers,
        ):
            files = list(images.files[done : done + len(outputs)])
            done += len(outputs)
            for row in predictor.predict_outputs(outputs).rows(files, all_probabilities):
                write_row(row)
    _report_skipped(images.skipped, out)
    return len(images)


# --- what predicting and evaluating share ----------------------------------------------------------------------------


def ready_predictor(folder: Path, false_alarm: float | None = None) -> Predictor:
    """The predictor of a run, at its own false-alarm rate or at another."""
    predictor = load_predictor(folder)
    if false_alarm is not None:
        predictor.false_alarm = false_alarm
    warn_if_nothing_is_flagged(predictor)
    use_fast_allocator()
    return predictor


def open_like(predictor: Predictor, source: Any, data_root: Path | None, labelled: bool = False) -> ImageSet:
    """Images as the predictor wants them."""
    with counting("decoding") as progress:
        return open_images(
            source, size=predictor.size, fit=predictor.fit, data_root=data_root, labelled=labelled, progress=progress
        )


def warn_if_nothing_is_flagged(predictor: Predictor) -> None:
    """With few calibration images no score is unusual enough for a small false-alarm rate."""
    n, needed = len(predictor.calibration_scores), min_calibration_images(predictor.false_alarm)
    if n >= needed:
        return
    least = math.ceil(1000 / (n + 1)) / 1000
    other_rate = f", or use --false-alarm {least} or more" if n else ""
    warn(
        f"no image will be flagged as out-of-distribution: --false-alarm {predictor.false_alarm:g} takes at least "
        f"{needed} calibration images, and the run has {n}; train with more of them (--calibration, or the third share "
        f"of --splits){other_rate}"
    )


def describe_skipped(skipped: tuple[Skipped, ...], of: str = "") -> str:
    """How many files could not be used, and the first of them."""
    files = "1 file" if len(skipped) == 1 else f"{len(skipped)} files"
    return f"{files}{of} could not be used, first '{skipped[0].file}' ({skipped[0].reason})"


# --- output ----------------------------------------------------------------------------------------------------------


@contextmanager
def _open_output(out: str) -> Iterator[TextIO]:
    """Standard output, or a file that appears under its name only when it is complete."""
    if out == "-":
        yield sys.stdout
        return
    path = Path(out)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        raise RunError(
            f"cannot write '{path}': {error.strerror or error}; free some space or choose another --out"
        ) from None
    finally:
        partial.unlink(missing_ok=True)


def _row_writer(file: TextIO, columns: list[str], as_lines: bool) -> Callable[[dict[str, Any]], object]:
    if as_lines:
        return lambda row: file.write(json.dumps(_without_nan(row), ensure_ascii=False) + "\n")
    writer = csv.DictWriter(file, columns, lineterminator="\n")
    writer.writeheader()
    return writer.writerow


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if value != value else value for key, value in row.items()}


def _report_skipped(skipped: tuple[Skipped, ...], out: str) -> None:
    if not skipped:
        return
    where = ""
    if out != "-":
        path = Path(out).with_suffix(".skipped.csv")
        text = io.StringIO()
        rows = [["file", "reason"], *([item.file, item.reason] for item in skipped)]
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomic(path, text.getvalue())
        where = f"; all are listed in '{path}'"
    warn(describe_skipped(skipped) + where)
