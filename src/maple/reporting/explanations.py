"""The page of ``maple explain``: for each image, its nearest clusters and the components of its squared distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from maple.files import RunFile
from maple.prediction.components import Components
from maple.prediction.explanation import PART_MEANINGS, Explanation, Match
from maple.reporting.gallery import ComponentEnd, ComponentExemplars, read_gallery, thumbnail
from maple.reporting.page import data_uri, is_crisp, render_page
from maple.reporting.plots import Plot, plot_contributions
from maple.text import join_names, number, percent, plural

MAX_BARS = 6  # components in the plot, besides those that count most for and against the runner-up
SHOWN_EXEMPLARS = 6
THUMBNAIL = 144  # pixels a side


@dataclass(frozen=True, eq=False)
class ExplainedImage:
    """One image and the explanation of its prediction."""

    file: str
    image: np.ndarray  # (S, S, 3) uint8
    explanation: Explanation


def render_explanations(images: Sequence[ExplainedImage], folder: Path) -> str:
    """One self-contained HTML page, with the training images from the gallery of the run ``folder``."""
    components = images[0].explanation.components
    pictures = _Pictures(folder, components)
    context = {
        "title": f"MAPLE explanations: {folder.resolve().name}",
        "subtitle": f"{plural(len(images), 'image')}, {sum(each.explanation.is_ood for each in images)} flagged",
        "sections": [_section(each, pictures) for each in images],
        "pictures": pictures.uris,
        "crisp": pictures.is_crisp,
        "has_ends": pictures.has_ends,
        "has_parts": any(each.explanation.parts for each in images),
        "part_meanings": PART_MEANINGS,
        "n_components": len(components.axes),
        "component_note": _component_note(components),
    }
    return render_page("explain.html.j2", context)


def _component_note(components: Components) -> str:
    """Which components separate clusters."""
    r, n = components.n_separating, len(components.axes)
    if r == 0:
        return "No component separates clusters: along each, the images of one cluster differ from each other."
    if r == n:
        return "All components separate clusters, the first one best."
    which = "Component 1 separates" if r == 1 else f"Components 1 to {r} separate"
    return f"{which} clusters, the first one best; along the others the images of any cluster differ from each other."


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    """A thumbnail by its number on the page."""

    number: int
    alt: str


class _Pictures:
    """Thumbnails of training images; the page holds each once, however often it is shown."""

    def __init__(self, folder: Path, components: Components) -> None:
        gallery = read_gallery(folder / RunFile.GALLERY)
        self.uris: dict[str, int] = {}
        self._clusters = {each.cluster: each for each in gallery.clusters}
        self._components = gallery.components if _are_same(gallery.components, components) else ()
        self.of_cluster = cache(self._of_cluster)
        self.of_component = cache(self._of_component)

    @property
    def has_ends(self) -> bool:
        return bool(self._components)

    @property
    def is_crisp(self) -> bool:
        return any(len(each.thumbnails) and is_crisp(each.thumbnails[0]) for each in self._clusters.values())

    def _add(self, image: np.ndarray, alt: str) -> Picture:
        return Picture(self.uris.setdefault(data_uri(image), len(self.uris)), alt)

    def _of_cluster(self, cluster: int) -> list[Picture]:
        """The exemplars of a cluster."""
        found = self._clusters.get(cluster)
        if found is None:
            return []
        pairs = zip(found.thumbnails[:SHOWN_EXEMPLARS], found.files)
        return [self._add(image, f"{found.class_name}: {file}") for image, file in pairs]

    def _of_component(self, component: int) -> tuple[list[Picture], list[Picture]]:
        """The images at both ends of a component, outermost at the margins."""
        if not self._components:
            return [], []
        found = self._components[component]
        return self._of_end(found.low), self._of_end(found.high)[::-1]

    def _of_end(self, end: ComponentEnd) -> list[Picture]:
        triples = zip(end.thumbnails, end.class_names, end.files)
        return [self._add(image, f"{name}: {file}") for image, name, file in triples]

    def coordinates(self, component: int) -> list[float]:
        """The coordinates of the images at both ends of a component."""
        if not self._components:
            return []
        found = self._components[component]
        return [*found.low.coordinates, *found.high.coordinates]


def _are_same(stored: Sequence[ComponentExemplars], components: Components) -> bool:
    """Whether the stored images belong to these components; the Gaussians may have been fitted again since."""
    spreads = np.array([each.spread for each in stored])
    return spreads.shape == components.spreads.shape and np.allclose(spreads, components.spreads, rtol=1e-3, atol=1e-3)


# ---------------------------------------------------------------------------------------------------------------------
# One section per image
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """The exemplars of one cluster."""

    title: str
    note: str
    pictures: list[Picture]


@dataclass(frozen=True)
class ComponentRow:
    """Where the image and the clusters lie along one component."""

    number: int
    note: str
    places: list[float]  # in percent, of the image and of each cluster
    low: list[Picture]
    high: list[Picture]
    end_names: tuple[str, str]


@dataclass(frozen=True, eq=False)
class Section:
    """One image on the page."""

    file: str
    thumbnail: np.ndarray  # (S, S, 3) uint8
    explanation: Explanation
    strips: list[Strip]
    plot: Plot
    plot_note: str
    rows: list[ComponentRow]
    cluster_names: list[str]


def _section(image: ExplainedImage, pictures: _Pictures) -> Section:
    found = image.explanation
    matches = [match for match in (found.nearest, found.runner_up) if match is not None]
    titles = (f"Nearest: {matches[0].name}", f"Runner-up: {matches[-1].name}")
    plot, plot_note = _plot_contributions(found, matches)
    return Section(
        file=image.file,
        thumbnail=thumbnail(image.image, THUMBNAIL),
        explanation=found,
        strips=[Strip(title, _note(each), pictures.of_cluster(each.cluster)) for title, each in zip(titles, matches)],
        plot=plot,
        plot_note=plot_note,
        rows=[_component_row(found, matches, component, pictures) for component in _main_components(found)],
        cluster_names=[match.name for match in matches],
    )


def _note(match: Match) -> str:
    return f"squared distance {number(match.squared_distance, 2)}, probability {percent(match.probability)}"


def _main_components(found: Explanation) -> list[int]:
    """The components with the largest contributions, and the one that counts most against the runner-up."""
    against = [found.separation.argmax()] if found.runner_up else []
    return list(dict.fromkeys(int(component) for component in [*found.leading, *against]))


def _plot_contributions(found: Explanation, matches: Sequence[Match]) -> tuple[Plot, str]:
    """The largest contributions to the squared distance, and a note on those not shown."""
    largest = np.argsort(-found.nearest.contributions, kind="stable")[:MAX_BARS]
    decisive = [found.separation.argmax(), found.separation.argmin()] if found.runner_up else []
    shown = sorted({int(c) for c in [*largest, *decisive]}, key=lambda c: -found.nearest.contributions[c])
    rest = np.setdiff1d(np.arange(found.degrees_of_freedom), shown)
    sums = join_names([number(float(match.contributions[rest].sum()), 2) for match in matches])
    note = f"Not shown: {plural(len(rest), 'component')} with a sum of {sums}, {len(rest)} expected."
    plot = plot_contributions(
        [f"component {component + 1}" for component in shown],
        [1.0] * len(shown),
        [(match.name, match.contributions[shown].tolist()) for match in matches],
    )
    return plot, note if len(rest) else ""


def _component_row(found: Explanation, matches: Sequence[Match], component: int, pictures: _Pictures) -> ComponentRow:
    centroids = found.components.centroids[:, component]
    image = float(found.coordinates[component])
    reached = [image, *centroids, *pictures.coordinates(component)]
    low, high = min(reached), max(reached)
    places = [100 * (x - low) / (high - low or 1) for x in (image, *(centroids[match.cluster] for match in matches))]
    low_pictures, high_pictures = pictures.of_component(component)
    share = percent(float(found.nearest.contributions[component] / max(found.nearest.squared_distance, 1e-300)))
    return ComponentRow(
        number=component + 1,
        note=f"{found.say_deviation(component)}, {share} of the squared distance",
        places=places,
        low=low_pictures,
        high=high_pictures,
        end_names=found.end_names(component) or ("", ""),
    )
