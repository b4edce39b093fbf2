"""Small complete run folders, prediction files, and reports as a browser reads them."""

from __future__ import annotations

import csv
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy.special import log_softmax
from sklearn.datasets import load_digits

from maple.data.image_set import ImageSet
from maple.decisions.labels import judge_labels, labels_csv
from maple.evaluation.gains import Reading, measure_gains
from maple.evaluation.results import ClassFlagged, Classification, Detection, Histogram, Method, Reliability, Results
from maple.files import RunFile, save_json
from maple.options import to_toml
from maple.reporting.gallery import write_evaluation_gallery, write_training_gallery
from maple.stats import metrics
from maple.stats.chi_square import gaussian_test, qq_points
from maple.types import PREDICTION_COLUMNS, Outputs, Prediction

HOSTILE = "<script>alert('x')</script>"
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SECTIONS = (
    "summary results unknown calibration coverage confusion labels clusters images embeddings gaussian history skipped "
    "glossary reproduce cite"
)

# --- a run about digits: nearest means of pixels, with mirrored digits and noise as unknown images


def classify(pixels: np.ndarray, means: np.ndarray, names: tuple[str, ...]) -> tuple[np.ndarray, Prediction]:
    """Log-probabilities (N, C) and a prediction; two clusters per class, 2c and 2c + 1."""
    distances = ((pixels[:, None] - means[None]) ** 2).sum(axis=2)  # (N, M)
    log_p = log_softmax(-1.5 * distances.reshape(len(pixels), -1, 2).min(axis=2), axis=1)
    nearest, cluster = distances.min(axis=1), distances.argmin(axis=1)
    typicality = np.exp(-nearest / 4)
    best = log_p.argmax(axis=1)
    p_value = np.clip(1.01 - nearest / 5.2, 0.001, 1)
    prediction = Prediction(
        class_id=best,
        probability=np.exp(log_p.max(axis=1)),
        typicality=typicality,
        uncertainty=1 - typicality,
        score=nearest,
        p_value=p_value,
        is_ood=p_value < 0.05,
        cluster=cluster,
        md_class_id=cluster // 2,
        softmax_class_id=best,
        log_probabilities=log_p,
        squared_distance=nearest,
        class_names=names,
    )
    return log_p, prediction


def judge(log_p: np.ndarray, labels: np.ndarray) -> Classification:
    p = np.exp(log_p)
    confidence, correct = p.max(axis=1), p.argmax(axis=1) == labels
    curve = metrics.reliability_curve(confidence, correct)
    above = {level: metrics.accuracy_above(confidence, correct, float(level)) for level in ("0.5", "0.8", "0.9")}
    kept, accuracy_kept = metrics.coverage_curve(confidence, correct)
    return Classification(
        accuracy=float(correct.mean()),
        ece=metrics.expected_calibration_error(confidence, correct),
        ece_floor=metrics.calibration_floor(confidence),
        nll=metrics.negative_log_likelihood(log_p, labels, log=True),
        brier=metrics.brier_score(p, labels),
        aurc=metrics.aurc(confidence, correct),
        accuracy_above={level: accuracy for level, (accuracy, _) in above.items()},
        share_above={level: share for level, (_, share) in above.items()},
        reliability=Reliability(
            curve.edges.tolist(), curve.count.tolist(), curve.accuracy.tolist(), curve.confidence.tolist()
        ),
        kept=kept.tolist(),
        accuracy_kept=accuracy_kept.tolist(),
    )


def detect(ind: np.ndarray, ood: Mapping[str, np.ndarray], judged: Classification | None, flagged: dict) -> Method:
    edges = np.linspace(0, max(s.max() for s in (ind, *ood.values())), 41)
    detection = {}
    for name, scores in ood.items():
        roc_ind, roc_ood, _ = metrics.roc_curve(ind, scores)
        detection[name] = Detection(
            auroc=metrics.auroc(ind, scores),
            aupr_out=metrics.aupr_out(ind, scores),
            aupr_in=metrics.aupr_in(ind, scores),
            fpr95_ood_positive=metrics.fpr95_ood_positive(ind, scores),
            fpr95_ind_positive=metrics.fpr95_ind_positive(ind, scores),
            flagged=flagged.get(name, math.nan),
            roc_ind=roc_ind.tolist(),
            roc_ood=roc_ood.tolist(),
        )
    counts = {name: np.histogram(scores, edges)[0].tolist() for name, scores in ood.items()}
    return Method(judged, detection, Histogram(edges.tolist(), np.histogram(ind, edges)[0].tolist(), counts))


def build_run(folder: Path, names: tuple[str, ...], ood_names: tuple[str, ...] = ("near", "far")) -> Path:
    """A complete run folder about digits, whose classes go by ``names``."""
    images, digits = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    seeds = rng.permutation(len(digits))[: len(names)]  # more than ten classes: nearest of as many random digits
    labels = digits if len(names) == 10 else ((images[:, None] - images[seeds]) ** 2).sum(axis=2).argmin(axis=1)
    pictures = (images.reshape(-1, 8, 8) * 15.9).astype(np.uint8)
    pixels = images / 16
    train = np.arange(len(digits)) % 2 == 0
    cluster_ids = 2 * labels[train] + (pixels[train].sum(axis=1) > np.median(pixels[train].sum(axis=1)))
    cluster_to_class = np.arange(2 * len(names)) // 2
    sums = np.stack([pixels[train][cluster_ids == m].sum(axis=0) for m in range(2 * len(names))])
    means = sums / np.maximum(np.bincount(cluster_ids, minlength=2 * len(names)), 1)[:, None]

    def as_set(shown: np.ndarray, of: np.ndarray | None, name: str) -> ImageSet:
        found = ImageSet.from_arrays(shown, of, names if of is not None else None, name=name)
        return replace(found, files=tuple(f"{name}/{i:04d}.png" for i in range(len(found))))

    unknown = {
        ood_names[0]: pictures[:300, :, ::-1],
        ood_names[1]: rng.integers(0, 255, (200, 8, 8)).astype(np.uint8),
    }
    log_p, said = classify(pixels[~train], means, names)
    said_ood = {name: classify(x.reshape(len(x), -1) / 254.4, means, names)[1] for name, x in unknown.items()}
    flagged = {name: float(p.is_ood.mean()) for name, p in said_ood.items()}
    softmax = {name: 1 - p.probability for name, p in said_ood.items()}
    confusion = metrics.confusion_matrix(labels[~train], said.class_id, len(names))
    theoretical, observed = qq_points(said.squared_distance, 9)
    paper = replace(judge(log_p, labels[~train]), brier=math.nan, ece=0.4)
    ours = Reading(log_p, said.score, {name: p.score for name, p in said_ood.items()})
    theirs = Reading(log_softmax(4 * log_p, axis=1), 1 - said.probability, softmax)
    results = Results(
        class_names=list(names),
        methods={
            "softmax": detect(theirs.ind, theirs.ood, judge(theirs.log_probabilities, labels[~train]), {}),
            "maple": detect(ours.ind, ours.ood, judge(log_p, labels[~train]), flagged),
            "maple-paper": detect(ours.ind, ours.ood, paper, {}),
        },
        n_ind=int((~train).sum()),
        n_ood={name: len(x) for name, x in unknown.items()},
        n_components=9,
        n_clusters=2 * len(names),
        false_alarm=float(said.is_ood.mean()),
        gaussian_error=gaussian_test(said.squared_distance, 9),
        qq_theoretical=theoretical.tolist(),
        qq_observed=observed.tolist(),
        confusion=confusion.tolist(),
        per_class_accuracy=metrics.per_class_accuracy(confusion).tolist(),
        latency_ms=0.31,
        unknown_classes={
            ood_names[0]: {"hard": ClassFlagged(100, 0.25), "easy": ClassFlagged(200, 0.75)},
            ood_names[1]: {"noise": ClassFlagged(200, 1.0)},
        },
        gains={"softmax": measure_gains(ours, theirs, labels[~train])},
        provenance={
            "seed": 0,
            "versions": {"maple": "0.1.0", "numpy": "2"},
            "command": "maple evaluate run --ood near=x",
        },
    )
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(results.to_json(), encoding="utf-8")
    origin = {"source": "digits", "command": "maple train digits --out run"}
    (folder / "config.toml").write_text(
        to_toml({"origin": origin, "model": {"backbone": "resnet9", "recipe": "maple"}, "train": {"seed": 0}})
    )
    classes = {
        "classes": list(names),
        "cluster_to_class": cluster_to_class.tolist(),
        "cluster_sizes": np.bincount(cluster_ids, minlength=2 * len(names)).tolist(),
        "skipped": [["broken.png", "truncated"], [f"{HOSTILE}.png", "0 bytes"]],
        "left_out": ["rare & tiny"],
    }
    save_json(folder / "classes.json", classes)
    write_history(folder / "history.csv", names)
    outputs = Outputs(pixels[train].astype(np.float32), None, labels[train], cluster_ids, cluster_to_class)
    before = Outputs(rng.normal(size=(899, 8)).astype(np.float32), labels=labels[train])
    write_training_gallery(
        folder / "gallery",
        as_set(pictures[train], labels[train], "train"),
        outputs,
        snapshots={"before": before, "after": outputs},
    )
    test = as_set(pictures[~train], labels[~train], "digits/test")
    judged = judge_labels(np.exp(log_p), labels[~train], names, [("test", file) for file in test.files])
    (folder / "labels.csv").write_text(labels_csv(judged), encoding="utf-8")
    write_evaluation_gallery(
        folder / "gallery",
        test=(test, said),
        ood={name: (as_set(unknown[name], None, name), said_ood[name]) for name in unknown},
    )
    return folder


def write_history(path: Path, names: tuple[str, ...]) -> None:
    with path.open("w", newline="") as file:
        columns = "epoch learning_rate loss cross_entropy triplet validation_accuracy validation_loss clusters"
        writer = csv.DictWriter(file, [*columns.split(), "relabelled", "relabel_shift", "seconds"])
        writer.writeheader()
        for epoch in range(1, 13):
            row = {"epoch": epoch, "cross_entropy": 2 / epoch, "triplet": 0.7 - epoch / 50, "seconds": 3.5}
            row |= {"validation_accuracy": 1 - 0.6 / epoch, "validation_loss": 2.2 / epoch, "clusters": 10}
            if epoch in (4, 8):
                row |= {"relabelled": ";".join(names[:2]), "relabel_shift": 3e-7}
            writer.writerow(row | {"clusters": 10 + 2 * (epoch >= 4) + 3 * (epoch >= 8)})


def change_results(folder: Path, **changes: object) -> Results:
    """Replace fields of the results of a run; return the results it had."""
    results = Results.from_json((folder / RunFile.RESULTS).read_bytes())
    (folder / RunFile.RESULTS).write_text(replace(results, **changes).to_json())
    return results


# --- predictions


def write_predictions(path: Path, rows: int = 30, **changes: str) -> Path:
    def row(i: int) -> dict[str, object]:
        u = (i * 37 % rows) / rows
        values = (f"slides/{i}.png", f"class {i % 3}", 0.9, u > 0.8, 1 - u, 10 * u, 1 - u, u, 0, "a", "a")
        return dict(zip(PREDICTION_COLUMNS, values)) | changes

    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([row(i) for i in range(rows)]), path)
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".csv":
            writer = csv.DictWriter(file, PREDICTION_COLUMNS)
            writer.writeheader()
            writer.writerows(row(i) for i in range(rows))
        else:
            file.writelines(json.dumps(row(i)) + "\n" for i in range(rows))
    return path


# --- reports


class Page(HTMLParser):
    """What a browser would make of a report."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", self.text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


def check_page(page: Page) -> None:
    """What must hold for every report, whatever is in the run."""
    ElementTree.fromstring(page.source.replace("<!DOCTYPE html>", ""))  # every element is closed, every text escaped
    assert not page.all("script") and not page.all("link") and not page.all("iframe") and not page.all("object")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in page.source
    for address in (*page.values("href"), *page.values("src")):
        assert address.startswith(("#", "data:image/", "data:text/csv")), address
    assert "url(" not in re.sub(r"url\(#", "", page.source) and "@import" not in page.source
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href") if link.startswith("#")} <= set(ids)
    assert set(SECTIONS.split()) <= set(ids)
    assert all(image["alt"] for image in page.all("img"))
    assert all(drawing["aria-label"] for drawing in page.all("svg"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))  # no level is left out
