"""``maple predict``: images in, one row per image out, whatever their number."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from maple.calibrate import benjamini_hochberg, can_flag, min_calibration_images
from maple.checkpoint import write_atomic
from maple.config import DecisionOptions, build_options, flag_name
from maple.data import open_images
from maple.errors import RunError, UsageError
from maple.images import ImageSet
from maple.networks import use_fast_allocator
from maple.predictor import Predictor, load_predictor
from maple.progress import counting, warn
from maple.types import PREDICTION_COLUMNS, Prediction, Skipped

JSON_SUFFIXES = (".jsonl", ".ndjson")
MORE_CALIBRATION = (  # where there are none, or too few
    "calibrate with maple update RUN --calibrate IMAGES, or train with more of them (--calibration, or the third share "
    "of --splits)"
)
SET_SEPARATOR = " | "  # between the classes of a prediction set, in CSV
SUFFIXES = (".csv", *JSON_SUFFIXES)


def predict_images(
    folder: Path,
    sources: list[str],
    out: str,
    decision: dict[str, Any] | None = None,
    *,
    fdr: float | None = None,
    coverage: float | None = None,
    all_probabilities: bool = False,
    batch_size: int = 256,
    data_root: Path | None = None,
    workers: int = 0,
) -> int:
    """Write one row per image to ``out``; the number of rows. Files that are not images are listed beside it.

    ``decision`` holds options of the decision that differ from the run's; with ``fdr``, all images together decide
    which of them are flagged; with ``coverage``, every row has a prediction set.
    """
    if out != "-" and Path(out).suffix not in SUFFIXES:
        raise UsageError(f"--out '{out}': end the name in {' or '.join(SUFFIXES)}, or use - to print")
    predictor = ready_predictor(folder, decision, fdr=fdr)
    _check_request(predictor, fdr, coverage, all_probabilities)
    images = open_like(predictor, sources if len(sources) > 1 else sources[0], data_root)
    columns = [*PREDICTION_COLUMNS, *(["prediction_set"] if coverage is not None else [])]
    columns += [f"p_{name}" for name in predictor.class_names if all_probabilities]
    with _open_output(out) as file, counting("predicting") as progress:
        write_row = _row_writer(file, columns, as_lines=out.endswith(JSON_SUFFIXES))
        said = predictor.predict_batches(images, batch_size=batch_size, progress=progress, workers=workers)
        rows = _predict_rows(predictor, said, images.files, coverage, all_probabilities)
        for row in rows if fdr is None else flag_together(rows, fdr, len(predictor.calibration)):
            write_row(row)
    _report_skipped(images.skipped, out)
    return len(images)


def _check_request(predictor: Predictor, fdr: float | None, coverage: float | None, all_probabilities: bool) -> None:
    """What cannot be answered is better known before the images are read."""
    for flag, rate in (("--fdr", fdr), ("--coverage", coverage)):
        if rate is not None and not 0 < rate < 1:
            raise UsageError(f"{flag} {rate:g}: give a share between 0 and 1")
    if fdr is not None and not len(predictor.calibration):
        raise UsageError(f"--fdr needs calibration images, and the run has none: {MORE_CALIBRATION}")
    if coverage is not None and not len(predictor.calibration.set_scores):
        raise UsageError(f"--coverage needs labelled calibration images, and the run has none: {MORE_CALIBRATION}")
    taken = [name for name in predictor.class_names if all_probabilities and f"p_{name}" in PREDICTION_COLUMNS]
    if taken:
        raise UsageError(f"the class '{taken[0]}' would need the column p_{taken[0]}, which is taken: rename the class")


def _predict_rows(
    predictor: Predictor,
    predictions: Iterable[Prediction],
    files: Sequence[str],
    coverage: float | None,
    all_probabilities: bool,
) -> Iterator[dict[str, Any]]:
    done = 0
    for prediction in predictions:
        sets = predictor.prediction_sets(prediction, coverage) if coverage is not None else None
        yield from prediction.rows(list(files[done : done + len(prediction)]), all_probabilities, sets)
        done += len(prediction)


def flag_together(rows: Iterable[dict[str, Any]], fdr: float, n_calibration: int) -> Iterator[dict[str, Any]]:
    """The same rows with ``is_ood`` by Benjamini-Hochberg over all their p-values; meanwhile they wait on disk."""
    p_values = []
    with tempfile.TemporaryFile("w+", encoding="utf-8") as waiting:
        for row in rows:
            p_values.append(row["p_value"])
            waiting.write(json.dumps(row) + "\n")
        waiting.seek(0)
        flagged = benjamini_hochberg(p_values, fdr)
        if not flagged.any() and not can_flag(n_calibration, len(p_values), fdr):
            least = math.ceil(len(p_values) / (fdr * (n_calibration + 1)))
            warn(
                f"with {n_calibration} calibration images and --fdr {fdr:g}, images among {len(p_values)} are flagged "
                f"only when at least {least} are as unusual as can be: predict smaller batches, or train with more "
                "calibration images"
            )
        for line, is_ood in zip(waiting, flagged):
            yield json.loads(line) | {"is_ood": bool(is_ood)}


# --- what predicting and evaluating share ----------------------------------------------------------------------------


def ready_predictor(folder: Path, decision: dict[str, Any] | None = None, fdr: float | None = None) -> Predictor:
    """The predictor of a run, deciding as the run does or with other options of the decision."""
    decision = decision or {}
    build_options(DecisionOptions, decision, where=None)  # so that a wrong flag is called a flag
    predictor = load_predictor(folder)
    if fdr is None:
        predictor.decide(**decision)
        warn_if_nothing_is_flagged(predictor)
        if predictor.options.per_class and not predictor.decision.n_own_thresholds:
            warn(
                "--per-class changes nothing: no class has enough calibration images for a threshold of its own; "
                + MORE_CALIBRATION
            )
    elif decision:
        flags = " and ".join(flag_name(key) for key in decision)
        raise UsageError(f"--fdr decides over all images together: leave out {flags}, or leave out --fdr")
    else:
        predictor.decide(per_class=False, confidence=None)  # p-values of one shared calibration set
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
    options, n = predictor.options, len(predictor.calibration)
    needed = min_calibration_images(options.false_alarm, options.confidence)
    if n >= needed:
        return
    confidence = "" if options.confidence is None else f" with --confidence {options.confidence:g}"
    least = math.ceil(1000 / (n + 1)) / 1000
    other_rate = f", or use --false-alarm {least} or more" if n and options.confidence is None else ""
    warn(
        f"no image will be flagged as out-of-distribution: --false-alarm {options.false_alarm:g}{confidence} takes at "
        f"least {needed} calibration images, and the run has {n}; {MORE_CALIBRATION}{other_rate}"
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
    return lambda row: writer.writerow(
        {key: SET_SEPARATOR.join(value) if isinstance(value, list) else value for key, value in row.items()}
    )


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
