"""The section of a report about labels: those of the test images that may be wrong, as a table and as CSV."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from maple.decisions.labels import JudgedLabel, labels_csv
from maple.reporting.record import RunRecord

MAX_LABELS = 100  # listed in the report; the file holds all


@dataclass(frozen=True, eq=False)
class LabelSection:
    """Probable wrong labels among the images of the last evaluation."""

    n_images: int
    issues: tuple[JudgedLabel, ...]  # least probable labels first
    thumbnails: Mapping[str, np.ndarray]  # (S, S, 3) uint8 by file, of the first ones

    @property
    def listed(self) -> tuple[JudgedLabel, ...]:
        return self.issues[:MAX_LABELS]

    @property
    def csv_uri(self) -> str:
        """The issues as a file inside the page."""
        content = base64.b64encode(labels_csv(self.issues).encode()).decode("ascii")
        return f"data:text/csv;charset=utf-8;base64,{content}"


def label_section(record: RunRecord) -> LabelSection | None:
    """The section; None for runs that were evaluated by an earlier version, or not at all."""
    if record.labels is None:
        return None
    shown = [image for group in record.gallery.examples if group.kind == "labels" for image in group.images]
    issues = tuple(each for each in record.labels if each.is_label_issue)
    return LabelSection(len(record.labels), issues, {image.file: image.thumbnail for image in shown})
