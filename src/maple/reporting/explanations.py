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
from maple.reporting.gallery._sheet import thumbnail
from maple.reporting.gallery.store import ClusterExemplars, ComponentEnd, ComponentExemplars, read_gallery
from maple.reporting.page import any_crisp, data_uri, render_page
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
        "has_ends": bool(pictures.components),
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
        self.clusters = {each.cluster: each for each in gallery.clusters}
        self.components = gallery.components if _are_same(gallery.components, components) else ()
        self.show = cache(self._show)

    @property
    def is_crisp(self) -> bool:
        return any_crisp(each.thumbnails for each in self.clusters.values())

    def _show(self, found: ClusterExemplars | ComponentEnd) -> list[Picture]:
        """The images of a cluster or of one end of a component, in order."""
        n = min(len(found.files), SHOWN_EXEMPLARS)
        names = found.class_names if isinstance(found, ComponentEnd) else [found.class_name] * n
        uris = [data_uri(image) for image in found.thumbnails[:n]]
        numbers = [self.uris.setdefault(uri, len(self.uris)) for uri in uris]
        return [Picture(number, f"{name}: {file}") for number, name, file in zip(numbers, names, found.files)]

    def ends(self, component: int) -> list[ComponentEnd]:
        """Both ends of a component, low and high; empty if the run holds no images of them."""
        if not self.components:
            return []
        return [self.components[component].low, self.components[component].high]


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
    clusters = [pictures.clusters.get(match.cluster) for match in matches]
    return Section(
        file=image.file,
        thumbnail=thumbnail(image.image, THUMBNAIL),
        explanation=found,
        strips=[
            Strip(title, _note(match), pictures.show(cluster) if cluster else [])
            for title, match, cluster in zip(titles, matches, clusters)
        ],
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
    note = f"Not shown: {plural(len(rest), 'component')}, in sum {sums} (expected: {len(rest)})."
    plot = plot_contributions(
        [f"component {component + 1}" for component in shown],
        [1.0] * len(shown),
        [(match.name, match.contributions[shown].tolist()) for match in matches],
    )
    return plot, note if len(rest) else ""


def _component_row(found: Explanation, matches: Sequence[Match], component: int, pictures: _Pictures) -> ComponentRow:
    centroids = found.components.centroids[:, component]
    image = float(found.coordinates[component])
    ends = pictures.ends(component)
    reached = [image, *centroids, *(coordinate for end in ends for coordinate in end.coordinates)]
    low, high = min(reached), max(reached)
    places = [100 * (x - low) / (high - low or 1) for x in (image, *(centroids[match.cluster] for match in matches))]
    shown = [pictures.show(end) for end in ends]
    share = percent(float(found.nearest.contributions[component] / max(found.nearest.squared_distance, 1e-300)))
    return ComponentRow(
        number=component + 1,
        note=f"{found.say_deviation(component)}, {share} of the squared distance",
        places=places,
        low=shown[0] if shown else [],
        high=shown[1][::-1] if shown else [],  # outermost at the margin
        end_names=found.end_names(component) or ("", ""),
    )
