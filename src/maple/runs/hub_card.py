"""The model card of a run: what it is, how to load it, and what was measured."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from maple.evaluation.results import Results
from maple.files import RunFile, load_arrays, without_paths
from maple.stats.metrics import add_floor
from maple.text import percent, plural

MOST_CLASSES = 100  # listed
CARD = """---
library_name: maple
pipeline_tag: image-classification
tags:
- maple
- image-classification
- out-of-distribution-detection
- uncertainty-estimation
---

# {title}

Image classifier with {n_classes}, a calibrated probability, and a decision whether an image is of a known kind, from
one forward pass. Made with maple.

```python
import maple

predictor = maple.load("{place}")
prediction = predictor(["image.png"])
prediction.class_id, prediction.probability, prediction.is_ood
```

| | |
|---|---|
| network | {network} |
| images | {size} x {size} pixels, {fit} |
| decision | flags at most {level} of in-distribution images, from {n_calibration} |
| classes | {classes} |
{measured}
"""


def write_card(run: Path, place: str) -> str:
    """The card of a run that will be at ``place``, with the figures of its last evaluation."""
    _, said = load_arrays(run / RunFile.DETECTOR)
    network = without_paths(load_arrays(run / RunFile.WEIGHTS)[1])
    names, decision = said["class_names"], said.get("decision", {})
    listed = ", ".join(map(_cell, names[:MOST_CLASSES])) + (", ..." if len(names) > MOST_CLASSES else "")
    return CARD.format(
        title=place.rpartition("/")[2],
        place=place,
        n_classes=plural(len(names), "class"),
        network=_cell(network["backbone"]),
        size=said["size"],
        fit=said["fit"],
        level=percent(said["options"]["false_alarm"], exact=True),
        n_calibration=plural(decision.get("n_calibration", 0), "calibration image"),
        classes=listed,
        measured=_measured(run / RunFile.RESULTS),
    )


def _measured(path: Path) -> str:
    """A section with the figures of an evaluation; nothing without one."""
    if not path.is_file():
        return ""
    results = Results.load(path)
    row: dict[str, Any] = next((each for each in results.rows() if each.get("method") == "maple"), {})
    known = {"accuracy": row.get("accuracy"), "ECE (by chance)": row.get("ece")}
    known |= {f"AUROC, {set_name(name)}": row.get(f"auroc/{name}") for name in results.ood_names}
    figures = {name: f"{value:.3f}" for name, value in known.items() if value is not None and not math.isnan(value)}
    if "ECE (by chance)" in figures:
        figures["ECE (by chance)"] = add_floor(figures["ECE (by chance)"], [row["ece_floor"]])
    lines = [f"| {_cell(name)} | {value} |" for name, value in figures.items()]
    test = f"On {plural(results.n_ind, 'test image')} of the known classes:"
    return "\n".join(["", "## Measured", "", test, "", "| | |", "|---|---|", *lines]) if lines else ""


def set_name(name: str) -> str:
    """The name of a set of unknown images; of one that was given as a path the last part alone.

    >>> set_name("/home/me/debris"), set_name("../debris"), set_name("openood/cifar10-tin")
    ('debris', 'debris', 'openood/cifar10-tin')
    """
    path = Path(name)
    return path.name if path.is_absolute() or path.parts[:1] in (("..",), ("~",)) or path.exists() else name


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table: no line breaks, and nothing that is read as markup."""
    return re.sub(r"([\\|`*_<>\[\]#])", r"\\\1", " ".join(str(text).split()))
