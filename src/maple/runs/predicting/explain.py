"""``maple explain``: the reasons for the prediction of each image, as text or on a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy.special import chdtri

from maple.data.image_set import ImageSet
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.files import RunFile, write_atomic
from maple.networks import embed_batches
from maple.prediction.explain import explain_outputs
from maple.prediction.explanation import USUAL_SHARE, Explanation
from maple.prediction.predictor import Predictor
from maple.progress import counting
from maple.reporting.explanations import ExplainedImage, render_explanations
from maple.runs.loading import open_like, ready_predictor, warn_of_skipped
from maple.runs.requests import ExplainRequest
from maple.text import plural
from maple.types import Outputs

MAX_IMAGES = 200  # on one page


def explain_images(request: ExplainRequest) -> list[ExplainedImage]:
    """Explain the predictions of a run for at most ``MAX_IMAGES`` images; with ``out``, on one HTML page."""
    out, limit = request.out, request.limit
    if out is not None and out.suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out '{out}': end the name in .html, or leave it out to print")
    if limit is not None and not 1 <= limit <= MAX_IMAGES:
        raise UsageError(f"--limit {limit}: explain between 1 and {MAX_IMAGES} images")
    predictor = ready_predictor(request.model, request.flags, trust=request.trust)
    images = open_like(predictor, request.sources, request.data_root)
    if limit is None and len(images) > MAX_IMAGES:
        raise UsageError(
            f"{plural(len(images), 'image')} are too many to explain: give at most {MAX_IMAGES}, or --limit "
            f"{MAX_IMAGES} for those with the highest scores"
        )
    warn_of_skipped(images.skipped)
    rows, outputs = _embed(predictor, images, limit, request.workers)
    explanations = explain_predictions(predictor, outputs, read_usual_distance(request.model))
    cases = [ExplainedImage(images.files[i], images.read(int(i)), found) for i, found in zip(rows, explanations)]
    if out is not None:
        write_atomic(out, render_explanations(cases, request.model))
    return cases


def explain_predictions(
    predictor: Predictor, outputs: Outputs, usual_distance: float | None = None
) -> list[Explanation]:
    """Reasons for the predictions of these outputs."""
    return explain_outputs(
        predictor.detector,
        outputs,
        predictor.probability.temperature,
        prediction=predictor.predict_outputs(outputs),
        false_alarm=predictor.false_alarm,
        can_be_flagged=predictor.decision.can_flag_any,
        known_images=predictor.decision.known_images(predictor.class_names),
        usual_distance=usual_distance,
    )


def read_usual_distance(folder: Path) -> float | None:
    """The squared distance below which ``USUAL_SHARE`` of the run's test images stay: a point of its Q-Q plot."""
    path = folder / RunFile.RESULTS
    results = Results.load(path) if path.is_file() else None
    if results is None or not results.qq_observed:
        return None
    expected = chdtri(results.n_components, 1 - USUAL_SHARE)
    return float(np.interp(expected, results.qq_theoretical, results.qq_observed))


def _embed(predictor: Predictor, images: ImageSet, limit: int | None, workers: int) -> tuple[np.ndarray, Outputs]:
    """Rows and outputs of all images, or of the ``limit`` images with the highest scores; only those are held."""
    kept: list[Outputs] = []
    rows, scores = np.empty(0, dtype=np.int64), np.empty(0)
    done = 0
    with counting("explaining") as progress:
        for outputs in embed_batches(
            predictor.backbone, images, cluster_to_class=predictor.cluster_to_class, progress=progress, workers=workers
        ):
            kept.append(outputs)
            rows = np.append(rows, np.arange(done, done + len(outputs)))
            done += len(outputs)
            if limit is not None:
                scores = np.append(scores, predictor.predict_outputs(outputs).score)
                highest = np.argsort(-scores, kind="stable")[:limit]
                kept = [Outputs.concatenate(kept)[highest]]
                rows, scores = rows[highest], scores[highest]
    return rows, Outputs.concatenate(kept)


# --- as text ---------------------------------------------------------------------------------------------------------


def to_text(cases: Sequence[ExplainedImage]) -> str:
    """The sentences of each image below its name."""
    return "\n\n".join("\n  ".join([case.file, *case.explanation.sentences()]) for case in cases)


def to_json(cases: Sequence[ExplainedImage]) -> str:
    """All numbers and sentences."""
    return json.dumps([{"file": c.file, **c.explanation.to_dict()} for c in cases], ensure_ascii=False, indent=1)
