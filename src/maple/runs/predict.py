"""``maple predict``: images in, one row per image out, whatever their number.

Images are decoded, predicted and written chunk by chunk, in constant memory (:mod:`maple.data.stream`); what is
written goes
on where a kill left it (:mod:`maple.runs.writer`). Torch is loaded for the predictor of a run, not for an exported
graph.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from maple import __version__
from maple.data.sources import open_source
from maple.data.stream import Decoded, Source, decode_stream
from maple.decisions.conformal import benjamini_hochberg, can_flag, min_calibration_images
from maple.decisions.sets import min_labelled_images
from maple.errors import DataError, UsageError
from maple.options import as_dict, flag_name
from maple.prediction.base import BasePredictor
from maple.progress import counting, warn
from maple.runs.loading import MORE_CALIBRATION, describe_skipped, ready_model
from maple.runs.writer import PARQUET_SUFFIX, SUFFIXES, ResumableFile, Row, Tally, skipped_path, to_csv
from maple.text import percent
from maple.types import PREDICTION_COLUMNS, Skipped

_NO_SCORE = "its embedding or score is NaN or infinite"


def predict_images(
    model: Path,
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
    overwrite: bool = False,
    trust: bool = False,
) -> int:
    """Write one row per image to ``out``; the number of rows. Files that are not images are listed beside it.

    ``model`` is a run folder or an exported graph. ``decision`` holds options of the decision that differ from the
    run's; with ``fdr``, all images together decide which of them are flagged; with ``coverage``, every row has a
    prediction set. A call that was interrupted is gone on with by the same call; ``overwrite`` starts anew.
    """
    path = None if out == "-" else Path(out)
    if path is not None and path.suffix not in SUFFIXES:
        raise UsageError(
            f"--out '{out}': end the name in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, or use - to print"
        )
    check = partial(_check_request, fdr=fdr, coverage=coverage, all_probabilities=all_probabilities)
    predictor = ready_model(model, decision, fdr=fdr, check=check, trust=trust)
    source = open_source(sources, size=predictor.size, fit=predictor.fit, data_root=data_root)
    if path is not None:
        _check_place(path, source, sources)
    work = _Work(predictor, source, batch_size, workers, coverage, all_probabilities)
    if path is not None:
        request = _describe_request(work, model, fdr)
        state = _write(work, ResumableFile(path, work.columns, predictor.class_names, request, overwrite), fdr)
    else:
        state = _print(work) if fdr is None else _print_at_last(work, fdr)
    _report_skipped(state, path)
    return state.rows


@dataclass(frozen=True, eq=False)
class _Work:
    """What is to be predicted, and how."""

    predictor: BasePredictor
    source: Source
    batch_size: int
    workers: int
    coverage: float | None
    all_probabilities: bool

    @property
    def columns(self) -> list[str]:
        sets = ["prediction_set"] if self.coverage is not None else []
        return [
            *PREDICTION_COLUMNS,
            *sets,
            *(f"p_{name}" for name in self.predictor.class_names if self.all_probabilities),
        ]

    def chunks(self, start: int = 0) -> Generator[tuple[list[Row], Decoded]]:
        """The rows of each chunk of images, from image ``start`` on."""
        size, fit = self.predictor.size, self.predictor.fit
        decoded = decode_stream(
            self.source, size=size, fit=fit, chunk_size=self.batch_size, start=start, workers=self.workers
        )
        with counting("predicting") as progress, closing(decoded):
            for chunk in decoded:
                yield self._predict(chunk)
                if progress is not None:
                    progress(chunk.stop, len(self.source))

    def _predict(self, chunk: Decoded) -> tuple[list[Row], Decoded]:
        """The rows of a chunk; images without a finite embedding and score join those that were skipped."""
        if not chunk.files:
            return [], chunk
        said, usable = self.predictor.predict_usable(chunk.pixels)
        unusable = [Skipped(file, _NO_SCORE) for file in compress(chunk.files, ~usable)]
        sets = None if self.coverage is None else self.predictor.prediction_sets(said, self.coverage)
        rows = said.rows(list(compress(chunk.files, usable)), self.all_probabilities, sets)
        return list(rows), chunk._replace(skipped=[*chunk.skipped, *unusable])


def _write(work: _Work, file: ResumableFile, fdr: float | None) -> Tally:
    """Predict into a file, from the image on that it has come to."""
    with file:
        if not file.tally.images and work.source.skipped:
            file.append([], work.source.skipped, images=0)
        with closing(work.chunks(file.tally.images)) as chunks:
            for rows, chunk in chunks:
                file.append(rows, chunk.skipped, chunk.stop)
        if not file.tally.rows:
            file.discard()
        _check_losses(work.source, file.tally)
        is_ood = None
        if fdr is not None:
            is_ood = flag_together(file.read_column("p_value"), fdr, len(work.predictor.calibration))
        file.finish(is_ood, _describe_file(work, fdr, file.tally.rows))
        return file.tally


def _print(work: _Work) -> Tally:
    """Predict to standard output."""
    state = Tally().add(0, work.source.skipped)
    with closing(work.chunks()) as chunks:
        for rows, chunk in chunks:
            sys.stdout.write(to_csv(rows, work.columns, header=bool(rows) and not state.rows))
            state = state.add(len(rows), chunk.skipped)
    _check_losses(work.source, state)
    return state


def _print_at_last(work: _Work, fdr: float) -> Tally:
    """As :func:`_print`, where decisions are known only when all images are."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.csv"
        state = _write(work, ResumableFile(path, work.columns, work.predictor.class_names), fdr)
        with path.open(encoding="utf-8", newline="") as file:
            shutil.copyfileobj(file, sys.stdout)
    return state


def _check_request(
    predictor: BasePredictor, fdr: float | None, coverage: float | None, all_probabilities: bool
) -> None:
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
    if coverage is not None and (n := len(predictor.calibration.set_scores)) < min_labelled_images(coverage):
        warn(
            f"every prediction set will hold all classes: --coverage {coverage:g} takes at least "
            f"{min_labelled_images(coverage)} labelled calibration images, and the run has {n}; {MORE_CALIBRATION}"
        )


def _check_place(out: Path, source: Source, sources: Sequence[str]) -> None:
    """Predictions may not take the place of images, nor a table of them lie where it would be taken for images."""
    if source.path is not None and out.resolve() == source.path.resolve():
        raise UsageError(f"--out '{out}' holds the images themselves: choose another --out")
    folders = [Path(name).resolve() for name in sources if Path(name).is_dir()]
    if out.suffix == PARQUET_SUFFIX and out.resolve().parent in folders:
        raise UsageError(
            f"--out '{out}' would make its folder a data set, of which it is the table: choose a folder without images"
        )


def _check_losses(source: Source, state: Tally) -> None:
    """Some images may be broken, but not all."""
    if state.rows or state.first_skipped is None:
        return
    first = f"'{state.first_skipped.file}': {state.first_skipped.reason}"
    if state.skipped == 1:
        raise DataError(f"cannot use {first}; give another image")
    raise DataError(f"none of the {state.skipped} images of '{source.name}' can be used ({first}): replace them")


def flag_together(p_values: np.ndarray, fdr: float, n_calibration: int) -> np.ndarray:
    """Which images (N,) are flagged by Benjamini-Hochberg over all p-values (N,)."""
    flagged = benjamini_hochberg(p_values, fdr)
    n = len(p_values)
    least = 1 + bisect_left(range(1, n + 1), True, key=lambda k: can_flag(n_calibration, n, fdr, k))
    if least > max(n, 1):
        warn(
            f"nothing can be flagged, in batches of any size: --fdr {fdr:g} takes at least "
            f"{min_calibration_images(fdr)} calibration images, and the run has {n_calibration}; {MORE_CALIBRATION}"
        )
    elif least > 1 and not flagged.any():
        warn(
            f"with {n_calibration} calibration images and --fdr {fdr:g}, images among {n} are flagged only when at "
            f"least {least} are as unusual as can be: predict smaller batches, or {MORE_CALIBRATION}"
        )
    return flagged


def _describe_request(work: _Work, model: Path, fdr: float | None) -> dict[str, Any]:
    """What must be the same for a call to go on with what another one has written.

    How many images are predicted at a time is not among it: where that was too many, fewer go on.
    """
    return {
        "the model": _digest_model(model),
        "the images": work.source.digest(),
        "the version of maple": __version__,
        "--fdr": fdr,
        "--coverage": work.coverage,
        "--all-probabilities": work.all_probabilities,
        **{flag_name(name): value for name, value in as_dict(work.predictor.options).items()},
    }


def _digest_model(model: Path) -> str:
    """What is another when a run was trained or calibrated anew, or a graph exported again."""
    found = hashlib.blake2b(digest_size=16)
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("network/*")]
    for path in sorted(files):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def _describe_file(work: _Work, fdr: float | None, n_images: int) -> dict[str, Any]:
    """What a Parquet file says of itself: who predicted, and what decisions and prediction sets promise."""
    predictor, sets = work.predictor, {}
    promise = predictor.decision.sentence()
    if fdr is not None:
        promise = (
            f"of the images flagged, at most {percent(fdr, exact=True)} are in-distribution on average "
            f"(Benjamini-Hochberg over {n_images:,} images)"
        )
    if work.coverage is not None:
        n_labelled = len(predictor.calibration.set_scores)
        covered = f"holds the true class of at least {percent(work.coverage, exact=True)} of in-distribution images"
        sets["prediction_set"] = f"{covered} on average over calibration sets ({n_labelled:,} labelled images)"
    return {
        "version": __version__,
        "network": predictor.network,
        "score": predictor.score_name,
        "decision": promise,
        **sets,
    }


def _report_skipped(state: Tally, path: Path | None) -> None:
    if state.first_skipped is not None:
        where = "" if path is None else f"; all are listed in '{skipped_path(path)}'"
        warn(describe_skipped([state.first_skipped], count=state.skipped) + where)
