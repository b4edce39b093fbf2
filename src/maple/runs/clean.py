"""``maple clean``: which labels of a run's images may be wrong, as a list to correct."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.decisions.labels import GIVEN, JudgedLabel, judge_labels, labels_csv
from maple.errors import UsageError
from maple.files import expand_home, write_atomic
from maple.prediction.predictor import Predictor
from maple.progress import counting
from maple.runs.folder import RunFolder
from maple.runs.loading import open_like, ready_predictor, warn_of_skipped
from maple.runs.requests import CleanRequest
from maple.runs.setup.splits import reopen_splits
from maple.text import plural

_SPLITS = ("train", "validation", "calibration", "test")


@dataclass(frozen=True)
class Cleaned:
    """How many labels of how many images may be wrong, and where they are listed."""

    out: str
    images: dict[str, int]  # by split
    issues: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def describe(self) -> str:
        """One line in all, and one per split.

        >>> print(Cleaned("labels.csv", {"train": 100, "test": 20}, {"train": 1, "test": 2}).describe())
        3 labels of 120 images may be wrong, listed first in labels.csv
        train: 1 of 100
        test: 2 of 20
        """
        n, total = sum(self.issues.values()), plural(sum(self.images.values()), "image")
        first = f"{plural(n, 'label')} of {total} may be wrong, listed first in {self.out}"
        return "\n".join([first, *(f"{name}: {self.issues[name]:,} of {n:,}" for name, n in self.images.items())])


def clean_run(request: CleanRequest) -> Cleaned:
    """Write the list of all labelled images of a run, or of a source, with those first whose label may be wrong.

    Training images are judged apart from the others: the network has learned their labels, also the wrong ones, and is
    surer of them.
    """
    if request.out.suffix.lower() != ".csv":
        raise UsageError(f"--out '{request.out}': end the name in .csv")
    _check_sources(request)
    predictor = ready_predictor(request.run, trust=request.trust)
    sets = _open_sets(request, predictor)
    groups = [("train",), _SPLITS[1:], (GIVEN,)]
    judged = [each for group in groups for each in _judge({k: sets[k] for k in group if k in sets}, predictor, request)]
    write_atomic(request.out, labels_csv(judged))
    issues = {name: sum(each.is_label_issue for each in judged if each.split == name) for name in sets}
    return Cleaned(str(request.out), {name: len(images) for name, images in sets.items()}, issues)


def _check_sources(request: CleanRequest) -> None:
    """Refuse to replace the list that the labels come from, perhaps corrected by hand."""
    origin = RunFolder(request.run).read_config().origin
    own = (origin.source, origin.validation, origin.calibration, origin.test)
    for source in own if request.data is None else (request.data,):
        if source and expand_home(source).resolve() == request.out.resolve():
            raise UsageError(f"--out '{request.out}' is the list that the labels come from: choose another --out")


def _open_sets(request: CleanRequest, predictor: Predictor) -> dict[str, ImageSet]:
    """The images by split, with the classes of the predictor."""
    run = RunFolder(request.run)
    root = request.data_root or run.read_config().origin.root
    if request.data is not None:
        given = open_like(predictor, request.data, root, labelled=True)
        warn_of_skipped(given.skipped, of=f" of '{given.name}'")
        return {GIVEN: given.with_class_names(predictor.class_names)}
    splits = reopen_splits(run, predictor.size, root, "give labelled images of its classes with --data")
    found = {name: getattr(splits, name) for name in _SPLITS}
    return {name: each.with_class_names(predictor.class_names) for name, each in found.items() if len(each)}


def _judge(sets: dict[str, ImageSet], predictor: Predictor, request: CleanRequest) -> list[JudgedLabel]:
    """The labels of images that share their thresholds."""
    if not sets:
        return []
    parts = []
    for name, images in sets.items():
        with counting(f"predicting {name}") as progress:
            batches = predictor.predict_batches(images, workers=request.workers, progress=progress)
            parts.append(np.concatenate([batch.probabilities for batch in batches]))
    probabilities, labels = np.concatenate(parts), np.concatenate([images.labels for images in sets.values()])
    files = [(name, file) for name, images in sets.items() for file in images.files]
    return judge_labels(probabilities, labels, predictor.class_names, files)
