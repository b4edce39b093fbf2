"""``maple explain``: images in, and for each of them why it was called what it was, in words or on a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import chdtri

from maple import __version__
from maple.data.image_set import ImageSet
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.files import RunFile, write_atomic
from maple.networks import embed_batches
from maple.prediction.explain import PART_MEANINGS, USUAL_SHARE, Components, Explanation, Match, explain_outputs
from maple.prediction.predictor import Predictor
from maple.progress import counting, warn
from maple.reporting.gallery import ClusterExemplars, ComponentEnd, ComponentExemplars, read_gallery, thumbnail
from maple.reporting.page import render_page
from maple.reporting.pictures import CRISP, data_uri
from maple.reporting.plots import plot_contributions
from maple.runs.loading import describe_skipped, open_like, ready_predictor
from maple.text import join_names, number, percent, plural, shorten
from maple.types import Outputs

MAX_IMAGES = 200  # on one page
MAX_BARS = 6  # components in the plot, besides those that speak most for and against the runner-up
SHOWN_EXEMPLARS = 6
THUMBNAIL = 144  # pixels a side
BAR = 160  # pixels: the whole score


@dataclass(frozen=True, eq=False)
class Case:
    """One image and why it was called what it was."""

    file: str
    image: np.ndarray  # (S, S, 3) uint8
    explanation: Explanation


def explain_images(
    folder: Path,
    sources: list[str],
    out: str | Path | None = None,
    *,
    decision: dict[str, Any] | None = None,
    limit: int | None = None,
    data_root: Path | None = None,
    workers: int = 0,
    trust: bool = False,
) -> list[Case]:
    """Explain the predictions of a run for some images; with ``out``, on one HTML page.

    ``decision`` holds options of the decision that differ from the run's. ``limit`` keeps the images with the highest
    scores, the highest first; without it there may be ``MAX_IMAGES``.
    """
    if out is not None and Path(out).suffix.lower() not in (".html", ".htm"):
        raise UsageError(f"--out '{out}': end the name in .html, or leave it out to print")
    if limit is not None and not 1 <= limit <= MAX_IMAGES:
        raise UsageError(f"--limit {limit}: explain between 1 and {MAX_IMAGES} images")
    predictor = ready_predictor(folder, decision, trust=trust)
    images = open_like(predictor, sources if len(sources) > 1 else sources[0], data_root)
    if limit is None and len(images) > MAX_IMAGES:
        raise UsageError(
            f"{plural(len(images), 'image')} are too many to explain: give at most {MAX_IMAGES}, or --limit "
            f"{MAX_IMAGES} for those with the highest scores"
        )
    if images.skipped:
        warn(describe_skipped(images.skipped))
    rows, outputs = _embed(predictor, images, limit, workers)
    explanations = explain_predictions(predictor, outputs, read_usual_distance(folder))
    cases = [Case(images.files[i], images.read(int(i)), found) for i, found in zip(rows, explanations)]
    if out is not None:
        write_atomic(Path(out), render_explanations(cases, folder))
    return cases


def explain_predictions(
    predictor: Predictor, outputs: Outputs, usual_distance: float | None = None
) -> list[Explanation]:
    """Why the predictor says what it says about these outputs."""
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
    results = Results.from_json(path.read_bytes()) if path.is_file() else None
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


def to_text(cases: Sequence[Case]) -> str:
    """The sentences of each image below its name."""
    return "\n\n".join("\n  ".join([case.file, *case.explanation.sentences()]) for case in cases)


def to_json(cases: Sequence[Case]) -> str:
    """All numbers and sentences."""
    return json.dumps([{"file": c.file, **c.explanation.to_dict()} for c in cases], ensure_ascii=False, indent=1)


# --- as a page -------------------------------------------------------------------------------------------------------


def render_explanations(cases: Sequence[Case], folder: Path) -> str:
    """One self-contained HTML page, with the training images that the run folder holds."""
    pictures = _Pictures(folder, cases[0].explanation.components)
    drawn = [_case(i, case, pictures) for i, case in enumerate(cases, start=1)]
    n_flagged = sum(case.explanation.is_ood for case in cases)
    components = cases[0].explanation.components
    context = {
        "version": __version__,
        "title": f"MAPLE explanations: {folder.resolve().name}",
        "subtitle": f"{plural(len(cases), 'image')}, {n_flagged} flagged as unknown",
        "cases": drawn,
        "pictures": list(pictures.uris),
        "crisp": pictures.is_crisp,
        "has_ends": pictures.has_ends,
        "has_parts": any(case.explanation.parts for case in cases),
        "n_components": len(components.axes),
        "component_words": _component_words(components),
    }
    return render_page("explain.html.j2", context)


class _Pictures:
    """Thumbnails of training images: each is on the page once, however often it is shown."""

    def __init__(self, folder: Path, components: Components) -> None:
        gallery = read_gallery(folder / RunFile.GALLERY)
        self.uris: dict[str, int] = {}
        self._clusters = {each.cluster: each for each in gallery.clusters}
        self._components = gallery.components if _are_same(gallery.components, components) else ()
        self.cluster = cache(self._cluster)
        self.ends = cache(self._ends)

    @property
    def has_ends(self) -> bool:
        return bool(self._components)

    @property
    def is_crisp(self) -> bool:
        return any(0 < each.thumbnails.shape[1] <= CRISP for each in self._clusters.values())

    def _add(self, image: np.ndarray, alt: str) -> dict[str, Any]:
        return {"number": self.uris.setdefault(data_uri(image), len(self.uris)), "alt": alt}

    def _cluster(self, cluster: int) -> list[dict[str, Any]]:
        """The exemplars of a cluster."""
        if cluster not in self._clusters:
            return []
        found: ClusterExemplars = self._clusters[cluster]
        pairs = zip(found.thumbnails[:SHOWN_EXEMPLARS], found.files)
        return [self._add(image, f"{found.class_name}: {file}") for image, file in pairs]

    def _ends(self, component: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The images at both ends of a component, the furthest outside."""
        if not self._components:
            return [], []
        found = self._components[component]
        return self._end(found.low), self._end(found.high)[::-1]

    def _end(self, end: ComponentEnd) -> list[dict[str, Any]]:
        triples = zip(end.thumbnails, end.class_names, end.files)
        return [self._add(image, f"{name}: {file}") for image, name, file in triples]

    def reach(self, component: int) -> list[float]:
        """How far the training images lie up and down a component."""
        if not self._components:
            return []
        found = self._components[component]
        return [*found.low.coordinates, *found.high.coordinates]


def _are_same(stored: Sequence[ComponentExemplars], components: Components) -> bool:
    """Whether the stored images are those of these components; the Gaussians may have been fitted again since."""
    spreads = np.array([each.spread for each in stored])
    return spreads.shape == components.spreads.shape and np.allclose(spreads, components.spreads, rtol=1e-3, atol=1e-3)


def _component_words(components: Components) -> str:
    """Which components tell clusters apart."""
    r, n = components.n_separating, len(components.axes)
    if r == 0:
        return "None of them tells clusters apart: along each, the images of one cluster differ from each other."
    if r == n:
        return "All of them tell clusters apart, the first best."
    which = "Component 1 tells" if r == 1 else f"Components 1 to {r} tell"
    return (
        f"{which} clusters apart, the first best; the others do not: along them the images of any cluster differ "
        "from each other."
    )


def _case(order: int, case: Case, pictures: _Pictures) -> dict[str, Any]:
    found = case.explanation
    matches = [match for match in (found.nearest, found.runner_up) if match is not None]
    image = thumbnail(case.image, THUMBNAIL)
    return {
        "anchor": f"image-{order}",
        "file": case.file,
        "short_name": shorten(Path(case.file).name, 28),
        "uri": data_uri(image),
        "crisp": image.shape[0] <= CRISP,
        "called": found.class_name,
        "probability": percent(found.probability),
        "is_ood": found.is_ood,
        "sentences": found.sentences(),
        "score": number(found.score, 2),
        "score_parts": _score_parts(found),
        "strips": [
            {"title": title, "note": _match_note(match), "pictures": pictures.cluster(match.cluster)}
            for title, match in zip((f"Nearest: {matches[0].name}", f"Runner-up: {matches[-1].name}"), matches)
        ],
        **_contributions(found, matches),
        "rows": [_component_row(found, matches, component, pictures) for component in _told(found)],
        "names": [match.name for match in matches],
    }


def _score_parts(found: Explanation) -> list[dict[str, Any]]:
    """What each part adds to the score, with a bar as long as its share."""
    return [
        {
            "name": name,
            "meaning": PART_MEANINGS[name],
            "value": number(part, 2),
            "width": f"{BAR * part / (found.score or 1.0):.0f}",
            "is_highest": name == found.most_unusual_part,
        }
        for name, part in found.parts.items()
    ]


def _match_note(match: Match) -> str:
    return f"squared distance {number(match.squared_distance, 2)}, probability {percent(match.probability)}"


def _told(found: Explanation) -> list[int]:
    """The components worth a picture: those that lead, and the one that speaks most against the runner-up."""
    against = [found.separation.argmax()] if found.runner_up else []
    return list(dict.fromkeys(int(component) for component in [*found.leading, *against]))


def _contributions(found: Explanation, matches: Sequence[Match]) -> dict[str, Any]:
    largest = np.argsort(-found.nearest.contributions, kind="stable")[:MAX_BARS]
    decisive = [found.separation.argmax(), found.separation.argmin()] if found.runner_up else []
    shown = sorted({int(c) for c in [*largest, *decisive]}, key=lambda c: -found.nearest.contributions[c])
    rest = np.setdiff1d(np.arange(found.degrees_of_freedom), shown)
    others = [number(float(match.contributions[rest].sum()), 2) for match in matches]
    note = f"Not shown: {plural(len(rest), 'component')} with {join_names(others)} in all, where {len(rest)} is usual."
    plot = plot_contributions(
        [f"component {component + 1}" for component in shown],
        [1.0] * len(shown),
        [(match.name, match.contributions[shown].tolist()) for match in matches],
    )
    return {"plot": plot, "plot_note": note if len(rest) else ""}


def _component_row(found: Explanation, matches: Sequence[Match], component: int, pictures: _Pictures) -> dict[str, Any]:
    centroids = found.components.centroids[:, component]
    image = float(found.coordinates[component])
    reached = [image, *centroids, *pictures.reach(component)]
    low, high = min(reached), max(reached)
    places = [100 * (x - low) / (high - low or 1) for x in (image, *(centroids[match.cluster] for match in matches))]
    names = found.end_names(component) or ("", "")
    low_pictures, high_pictures = pictures.ends(component)
    share = percent(float(found.nearest.contributions[component] / max(found.nearest.squared_distance, 1e-300)))
    return {
        "number": component + 1,
        "note": f"{found.say_deviation(component)}, {share} of the squared distance",
        "alt": f"component {component + 1}: where this image lies between both ends, at {places[0]:.0f} %",
        "places": [f"{place:.1f}" for place in places],
        "low": low_pictures,
        "high": high_pictures,
        "low_name": names[0],
        "high_name": names[1],
    }
