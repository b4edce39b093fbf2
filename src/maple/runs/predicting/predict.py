"""``maple predict``: one row per image, for any number of images.

Images are decoded, predicted and written chunk by chunk in constant memory (:mod:`maple.data.stream`), and an
interrupted request is resumed (:mod:`maple.runs.predicting.writer`). Torch is imported for the predictor of a run, not
for an exported graph. Another engine, such as :mod:`maple.deploy.ray`, replaces only the step that fills the file.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maple import __version__
from maple.data.decode import Decoding
from maple.data.sources import open_source
from maple.data.stream import BESIDE, Decoded, Source, check_present, decode_stream
from maple.decisions.conformal import benjamini_hochberg, can_flag, min_calibration_images
from maple.decisions.sets import min_labelled_images
from maple.errors import DataError, UsageError
from maple.files import Row, expand_home, skipped_path, to_csv
from maple.options import as_dict, flag_name
from maple.prediction.base import BasePredictor
from maple.progress import CountDisplay, say, warn
from maple.runs.loading import MORE_CALIBRATION, describe_skipped, ready_model, too_few_images
from maple.runs.predicting.flagged import check_files, check_flagged, place_flagged
from maple.runs.predicting.parts import Tally
from maple.runs.predicting.writer import PARQUET_SUFFIX, SUFFIXES, ResumableFile
from maple.runs.requests import PredictRequest
from maple.text import percent
from maple.types import DOUBTFUL_PROBABILITY, PREDICTION_COLUMNS, Counts, Skipped

_NO_SCORE = "its embedding or score is NaN or infinite"


def predict_images(request: PredictRequest, fill: Fill | None = None) -> int:
    """Write one row per image to ``out`` and return the number of rows; list skipped files beside it.

    An interrupted request is resumed by an equal one. The last lines on standard error say how many images were found,
    predicted, flagged, doubtful and skipped, and where the files are. ``fill`` is another engine: it records all parts
    that are missing in a scattered file.
    """
    path = request.path
    if path is not None and path.suffix not in (SUFFIXES if fill is None else (*SUFFIXES, "")):
        raise UsageError(
            f"--out '{path}': end the name in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, or use - to print"
        )
    check_flagged(request)
    with CountDisplay(f"loading '{request.model}'") as display:
        work = _open_work(request, display)
        done = _predict(work, fill)
    if done.tally.first_skipped is not None:
        where = "" if path is None else f"; all are listed in '{skipped_path(path)}'"
        warn(describe_skipped([done.tally.first_skipped], count=done.tally.skipped) + where)
    placed = place_flagged(request, work.source, work.predictor.class_names)
    for line in chain(_summarise(done, path, work.predictor), placed):
        say(line)
    return done.tally.rows


class _Done(NamedTuple):
    """What came of a request."""

    tally: Tally
    counts: Counts


def _open_work(request: PredictRequest, display: CountDisplay) -> Work:
    """Load the model and list the images."""
    check = partial(_check_request, request=request)
    predictor = ready_model(request.model, request.flags, fdr=request.fdr, check=check, trust=request.trust)
    source = open_source(request.sources, size=predictor.size, fit=predictor.fit, data_root=request.data_root)
    check_files(request, source)
    return Work(request, predictor, source, display)


def _predict(work: Work, fill: Fill | None) -> _Done:
    request, path = work.request, work.request.path
    if path is None:
        return _print(work) if request.fdr is None else _print_at_last(work)
    _check_place(path, work.source, request.sources)
    class_names, scattered = work.predictor.class_names, fill is not None
    file = ResumableFile(path, work.columns, class_names, _identify(work), request.overwrite, scattered)
    return _write(work, file, fill or _fill_in_order)


def _summarise(done: _Done, path: Path | None, predictor: BasePredictor) -> Iterator[str]:
    """The last lines: every image found is predicted or skipped, and which of those predicted are worth a look."""
    tally, counts = done
    listed = f", listed in '{skipped_path(path)}'" if tally.skipped and path is not None else ""
    yield f"{tally.rows + tally.skipped:,} found: {tally.rows:,} predicted, {tally.skipped:,} skipped{listed}"
    doubtful = f"{counts.doubtful:,} doubtful (not flagged, probability of the class below {DOUBTFUL_PROBABILITY:g})"
    flagged = f"{counts.flagged:,} flagged as unknown ({percent(counts.flagged / max(counts.images, 1))})"
    if not len(predictor.calibration):
        flagged = "none flagged, because the run has no calibration images"
    yield f"{flagged}, {doubtful}"
    if path is not None:
        yield f"predictions: {path}"


@dataclass(frozen=True, eq=False)
class Work:
    """A request with its predictor and images opened."""

    request: PredictRequest
    predictor: BasePredictor
    source: Source
    display: CountDisplay

    @property
    def columns(self) -> list[str]:
        sets = ["prediction_set"] if self.request.coverage is not None else []
        probabilities = [f"p_{name}" for name in self.predictor.class_names if self.request.all_probabilities]
        return [*PREDICTION_COLUMNS, *sets, *probabilities]

    @property
    def decoding(self) -> Decoding:
        return Decoding(self.predictor.size, self.predictor.fit)

    @property
    def extras(self) -> Extras:
        return Extras(self.request.coverage, self.request.all_probabilities)

    def chunks(self, start: int = 0) -> Generator[tuple[list[Row], Decoded]]:
        """The rows of each chunk of images, from image ``start`` on."""
        size, workers = self.request.batch_size, self.request.workers
        decoded = decode_stream(self.source, self.decoding, chunk_size=size, start=start, workers=workers)
        self.display.begin("predicting", start, len(self.source))
        with closing(decoded):
            for chunk in decoded:
                beside = range(max(chunk.first - BESIDE, 0), min(chunk.stop + BESIDE, len(self.source)))
                check_present(self.source, beside, chunk)
                yield predict_chunk(self.predictor, chunk, self.extras)
                self.display.update(chunk.stop, len(self.source))


Fill = Callable[[Work, ResumableFile], None]


class Extras(NamedTuple):
    """Columns beyond those that every prediction file has."""

    coverage: float | None = None  # of prediction sets
    all_probabilities: bool = False


def predict_chunk(predictor: BasePredictor, chunk: Decoded, extras: Extras) -> tuple[list[Row], Decoded]:
    """The rows of a chunk; images without a finite embedding and score join those that were skipped."""
    if not chunk.files:
        return [], chunk
    said, usable = predictor.predict_usable(chunk.pixels)
    unusable = [Skipped(file, _NO_SCORE) for file in compress(chunk.files, ~usable)]
    sets = None if extras.coverage is None else predictor.prediction_sets(said, extras.coverage)
    rows = said.rows(list(compress(chunk.files, usable)), extras.all_probabilities, sets)
    return list(rows), chunk._replace(skipped=[*chunk.skipped, *unusable])


def _write(work: Work, file: ResumableFile, fill: Fill) -> _Done:
    """Predict into a file all images that it does not hold."""
    with file:
        fill(work, file)
        if not file.tally.rows:
            file.discard()
        _check_losses(work.source, file.tally)
        is_ood, fdr = None, work.request.fdr
        if fdr is not None:
            is_ood = flag_together(file.read_column("p_value"), fdr, len(work.predictor.calibration))
        counts = file.count(is_ood)
        file.finish(is_ood, _describe_file(work, file.tally.rows))
        return _Done(file.tally, counts)


def _fill_in_order(work: Work, file: ResumableFile) -> None:
    """Predict in this process, from the first image that the file does not hold.

    The rows of a chunk are written while the next one is predicted.
    """
    if not file.tally.images and work.source.skipped:
        file.append([], work.source.skipped, images=0)
    with ThreadPoolExecutor(1, "write") as thread, closing(work.chunks(file.tally.images)) as chunks:
        written: Future[None] | None = None
        for rows, chunk in chunks:
            if written is not None:
                written.result()
            written = thread.submit(file.append, rows, chunk.skipped, chunk.stop)
    if written is not None:
        written.result()


def _print(work: Work) -> _Done:
    """Predict to standard output."""
    tally, counts = Tally().add(0, work.source.skipped), Counts()
    with closing(work.chunks()) as chunks:
        for rows, chunk in chunks:
            sys.stdout.write(to_csv(rows, work.columns, header=bool(rows) and not tally.rows))
            tally = tally.add(len(rows), chunk.skipped)
            is_ood = np.array([row["is_ood"] for row in rows], dtype=bool)
            counts += Counts.of(is_ood, np.array([row["probability"] for row in rows]))
    _check_losses(work.source, tally)
    return _Done(tally, counts)


def _print_at_last(work: Work) -> _Done:
    """Predict to standard output once all images have been seen, which decisions with ``--fdr`` need."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predictions.csv"
        done = _write(work, ResumableFile(path, work.columns, work.predictor.class_names), _fill_in_order)
        with path.open(encoding="utf-8", newline="") as file:
            shutil.copyfileobj(file, sys.stdout)
    return done


def _check_request(predictor: BasePredictor, request: PredictRequest) -> None:
    """Refuse options that the predictor cannot serve, before images are read."""
    fdr, coverage = request.fdr, request.coverage
    for flag, rate in (("--fdr", fdr), ("--coverage", coverage)):
        if rate is not None and not 0 < rate < 1:
            raise UsageError(f"{flag} {rate:g}: give a share between 0 and 1")
    if fdr is not None and not len(predictor.calibration):
        raise UsageError(f"--fdr needs calibration images, and the run has none: {MORE_CALIBRATION}")
    if coverage is not None and not len(predictor.calibration.set_scores):
        raise UsageError(f"--coverage needs labelled calibration images, and the run has none: {MORE_CALIBRATION}")
    taken = [name for name in predictor.class_names if request.all_probabilities and f"p_{name}" in PREDICTION_COLUMNS]
    if taken:
        raise UsageError(f"the class '{taken[0]}' would need the column p_{taken[0]}, which is taken: rename the class")
    if coverage is not None and (n := len(predictor.calibration.set_scores)) < min_labelled_images(coverage):
        flag, needed = f"--coverage {coverage:g}", min_labelled_images(coverage)
        too_few = too_few_images(flag, needed, n, "labelled calibration images")
        warn(f"every prediction set will hold all classes: {too_few}")


def _check_place(out: Path, source: Source, sources: Sequence[str]) -> None:
    """Refuse an output that would replace the images or their list, or turn their folder into a data set."""
    given = [Path(name) for name in sources] + ([] if source.path is None else [source.path])
    if out.resolve() in [expand_home(path).resolve() for path in given]:
        raise UsageError(f"--out '{out}' holds the images themselves, or lists them: choose another --out")
    folders = [Path(name).resolve() for name in sources if Path(name).is_dir()]
    if out.suffix == PARQUET_SUFFIX and out.resolve().parent in folders:
        raise UsageError(
            f"--out '{out}' would be read as the table of the images beside it: choose a folder without images"
        )


def _check_losses(source: Source, tally: Tally) -> None:
    """Raise an error if all images were skipped."""
    if tally.rows or tally.first_skipped is None:
        return
    first = f"'{tally.first_skipped.file}': {tally.first_skipped.reason}"
    if tally.skipped == 1:
        raise DataError(f"cannot use {first}; give another image")
    raise DataError(f"none of the {tally.skipped} images of '{source.name}' can be used ({first}): replace them")


def flag_together(p_values: np.ndarray, fdr: float, n_calibration: int) -> np.ndarray:
    """Flags (N,) by Benjamini-Hochberg over all p-values (N,); warn where nothing can be flagged."""
    flagged = benjamini_hochberg(p_values, fdr)
    n = len(p_values)
    least = 1 + bisect_left(range(1, n + 1), True, key=lambda k: can_flag(n_calibration, n, fdr, k))
    if least > max(n, 1):
        too_few = too_few_images(f"--fdr {fdr:g}", min_calibration_images(fdr), n_calibration)
        warn(f"nothing can be flagged, in batches of any size: {too_few}")
    elif least > 1 and not flagged.any():
        warn(
            f"with {n_calibration} calibration images and --fdr {fdr:g}, none of {n} images is flagged unless at least "
            f"{least} score above all calibration images: predict smaller batches, or {MORE_CALIBRATION}"
        )
    return flagged


def _identify(work: Work) -> dict[str, Any]:
    """Everything that an interrupted request and the one that resumes it must share.

    The batch size is left out: a request that ran out of memory may be resumed with a smaller one.
    """
    request = work.request
    return {
        "the model": _digest_model(request.model),
        "the images": work.source.digest(),
        "the version of maple": __version__,
        "the columns": list(PREDICTION_COLUMNS),
        "--fdr": request.fdr,
        "--coverage": request.coverage,
        "--all-probabilities": request.all_probabilities,
        **{flag_name(name): value for name, value in as_dict(work.predictor.options).items()},
    }


def _digest_model(model: Path) -> str:
    """A digest that changes when the run is trained or calibrated again, or the graph exported again."""
    found = hashlib.blake2b(digest_size=16)
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("network/*")]
    for path in sorted(files):
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "blake2b").digest())
    return found.hexdigest()


def _describe_file(work: Work, n_images: int) -> dict[str, str]:
    """Metadata of a Parquet file: the model, and the guarantees of decisions and prediction sets."""
    predictor, fdr, coverage = work.predictor, work.request.fdr, work.request.coverage
    about = {"version": __version__, "network": predictor.network, "score": predictor.score_name}
    about["decision"] = predictor.decision.sentence()
    if fdr is not None:
        about["decision"] = (
            f"of the images flagged, at most {percent(fdr, exact=True)} are in-distribution on average "
            f"(Benjamini-Hochberg over {n_images:,} images)"
        )
    if coverage is not None:
        n_labelled = len(predictor.calibration.set_scores)
        covered = f"holds the true class of at least {percent(coverage, exact=True)} of in-distribution images"
        about["prediction_set"] = f"{covered} on average over calibration sets ({n_labelled:,} labelled images)"
    return about
