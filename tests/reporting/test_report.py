"""The report: complete, self-contained, well-formed, honest about what is missing, and safe with hostile names."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import Markup
from PIL import Image
from scipy.special import log_softmax
from sklearn.datasets import load_digits

import maple.reporting.report
from maple.data.image_set import ImageSet
from maple.errors import DataError, RunError
from maple.evaluation.results import ClassFlagged, Classification, Detection, Histogram, Method, Reliability, Results
from maple.files import save_json
from maple.options import to_toml
from maple.reporting.gallery import write_evaluation_gallery, write_training_gallery
from maple.reporting.plots import Plot
from maple.reporting.report import caught_at, compare, read_predictions, read_run, summary_sentences, write_report
from maple.runs.writer import to_csv, to_json_lines
from maple.stats import metrics
from maple.stats.chi_square import gaussian_test, qq_points
from maple.types import PREDICTION_COLUMNS, Outputs, Prediction

HOSTILE = "<script>alert('x')</script>"
SECTIONS = """summary results unknown calibration confusion clusters images latent gaussian history skipped words
reproduce cite"""

# ---------------------------------------------------------------------------------------------------------------------
# A small run folder: nearest means on the pixels of scikit-learn's digits, with rotated digits and noise as unknown


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


def detect(ind: np.ndarray, ood: dict[str, np.ndarray], judged: Classification | None, flagged: dict) -> Method:
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
    results = Results(
        class_names=list(names),
        methods={
            "softmax": detect(1 - said.probability, softmax, judge(log_softmax(4 * log_p, axis=1), labels[~train]), {}),
            "maple": detect(
                said.score, {n: p.score for n, p in said_ood.items()}, judge(log_p, labels[~train]), flagged
            ),
            "maple-paper": detect(said.score, {n: p.score for n, p in said_ood.items()}, paper, {}),
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
    write_evaluation_gallery(
        folder / "gallery",
        test=(as_set(pictures[~train], labels[~train], "digits/test"), said),
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


def write_predictions(path: Path, rows: int = 30, **changes: str) -> Path:
    def row(i: int) -> dict[str, object]:
        u = (i * 37 % rows) / rows
        values = (f"slides/{i}.png", f"class {i % 3}", 0.9, 1 - u, u, 10 * u, 1 - u, u > 0.8, 0, "a", "a")
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


TEN = tuple("zero one two three four five six seven eight nine".split())  # noqa: SIM905


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_run(tmp_path_factory.mktemp("runs") / "digits", TEN)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test is about words and tables, an empty drawing stands for each plot: Matplotlib takes its time."""
    blank = Plot(Markup('<svg role="img" aria-label="blank"></svg>'), "blank")
    for name in dir(maple.reporting.report):
        if name.startswith("plot_"):
            monkeypatch.setattr(maple.reporting.report, name, lambda *args: blank)


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


# ---------------------------------------------------------------------------------------------------------------------
# The page as such


def check_page(page: Page) -> None:
    """What must hold for every report, whatever is in the run."""
    ElementTree.fromstring(page.source.replace("<!DOCTYPE html>", ""))  # every element is closed, every text escaped
    assert not page.all("script") and not page.all("link") and not page.all("iframe") and not page.all("object")
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert "default-src 'none'" in page.source
    for address in (*page.values("href"), *page.values("src")):
        assert address.startswith(("#", "data:image/")), address
    assert "url(" not in re.sub(r"url\(#", "", page.source) and "@import" not in page.source
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in page.values("href") if link.startswith("#")} <= set(ids)
    assert set(SECTIONS.split()) <= set(ids)
    assert all(image["alt"] for image in page.all("img"))
    assert all(drawing["aria-label"] for drawing in page.all("svg"))
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))  # no level is left out


def test_full_report(run: Path, tmp_path: Path) -> None:
    path = write_report(run, tmp_path / "out.html", write_predictions(tmp_path / "predictions.csv"))
    assert path == tmp_path / "out.html"
    page = Page(path)
    check_page(page)
    assert "http://" not in page.source and "https://" not in page.source
    assert "predictions" in page.values("id")
    assert (
        len(page.all("svg")) == 2 * 2 + 1 + 1 + 1 + 2 + 3
    )  # per set, reliability, coverage, Q-Q, latent space, history
    assert "has not been evaluated" not in page.text and "The run holds no" not in page.text
    for words in ("Most uncertain known images", "Most confident mistakes", "look most familiar: near", "ICCVW60793"):
        assert words in page.text
    row = r'<th scope="row">(\w+)</th><td class="num">(\d+)</td><td><span class="bar"[^>]*></span> (\d+)\s?%'
    of_unknown = page.source.partition('id="unknown"')[2].partition("</section>")[0]
    assert re.findall(row, of_unknown) == [("easy", "200", "75"), ("hard", "100", "25")]  # "far" has one class only
    assert "matrix" in page.values("class") and "heat" not in page.values("class")
    assert path.stat().st_size < 2e6


def test_report_goes_into_the_run_and_is_the_same_every_time(copied: Path) -> None:
    path = write_report(copied)
    assert path == copied / "report.html"
    first = path.read_bytes()
    write_report(copied)
    assert path.read_bytes() == first


def test_template_is_part_of_the_package() -> None:
    assert (files("maple.reporting") / "templates" / "report.html.j2").is_file()


def test_hostile_names_are_text(tmp_path: Path) -> None:
    names = (
        HOSTILE,
        "a\"b'c&d",
        "$x^2$ \\frac",
        "]]>",
        "--><b>",
        "珪藻 🦠 naïve",
        "nul\x00 \x1b[0m \ufffe",
        "{{ 7 * 7 }}",
        "%s {0} #010101 url(#x)",
        "x" * 300,
    )
    folder = build_run(tmp_path / "run", names, ood_names=(HOSTILE, "$a$ & b"))
    predictions = write_predictions(tmp_path / "p.csv", file=f"{HOSTILE}.png", **{"class": names[1]})
    page = Page(write_report(folder, predictions=predictions))
    check_page(page)
    for name in names:
        shown = re.sub("[\x00-\x1f\ufffe]", "\ufffd", name)
        assert page.text.count(shown) >= 3, name
    assert HOSTILE in " ".join(drawing["aria-label"] for drawing in page.all("svg"))


# ---------------------------------------------------------------------------------------------------------------------
# What it says


def test_summary_in_plain_words(run: Path) -> None:
    record = read_run(run)
    assert record.results is not None
    maple, softmax = (record.results.methods[name] for name in ("maple", "softmax"))
    first, second, third = summary_sentences(record)
    assert (
        first
        == "This network tells 10 classes apart, which were split into 20 clusters; it learnt them from 899 images."
    )
    assert f"{100 * maple.classification.accuracy:.1f}".removesuffix(".0") in second and "898 test images" in second
    assert f"{100 * record.results.false_alarm:.1f}" in third
    assert f"{100 * maple.detection['near'].flagged:.1f}" in third
    at_same_rate = np.interp(
        record.results.false_alarm, softmax.detection["near"].roc_ind, softmax.detection["near"].roc_ood
    )
    assert f"{100 * at_same_rate:.0f}" in third.split("softmax")[1]


@pytest.mark.usefixtures("no_plots")
def test_a_defeat_is_not_hidden(copied: Path) -> None:
    results = Results.from_json((copied / "results.json").read_bytes())
    worse = replace(results.methods["maple"].detection["near"], auroc=0.4)
    maple = replace(results.methods["maple"], detection=results.methods["maple"].detection | {"near": worse})
    (copied / "results.json").write_text(replace(results, methods=results.methods | {"maple": maple}).to_json())
    page = Page(write_report(copied))
    assert "Softmax ranks the images of near better than MAPLE does." in page.text
    assert "0.400 ▼ worse than softmax" in page.text


def test_verdicts() -> None:
    lower = compare({"softmax": 0.05, "maple": 0.01, "energy": math.nan}, higher=False)
    assert (lower["maple"].verdict, lower["maple"].best) == ("better", True)
    assert (lower["softmax"].verdict, lower["softmax"].best) == ("", False)
    assert (lower["energy"].text, lower["energy"].best) == ("–", False)
    assert compare({"maple": 0.8, "softmax": 0.9}, higher=True)["maple"].verdict == "worse"
    tie = compare({"maple": 0.90004, "softmax": 0.90001}, higher=True)
    assert tie["maple"].verdict == "same" and tie["maple"].best and tie["softmax"].best
    assert compare({"maple": math.inf, "softmax": math.inf}, higher=False)["maple"].verdict == "same"
    assert compare({"maple": math.nan, "softmax": 0.1}, higher=False)["maple"].verdict == ""


def test_caught_at_follows_the_curve(rng: np.random.Generator) -> None:
    ind, ood = rng.normal(size=200).round(1), rng.normal(1, size=150).round(1)
    roc_ind, roc_ood, thresholds = metrics.roc_curve(ind, ood)
    for threshold in thresholds:
        false_alarm = float((ind >= threshold).mean())
        caught = [float((ood >= t).mean()) for t in thresholds if (ind >= t).mean() == false_alarm]
        assert caught_at(roc_ind, roc_ood, false_alarm) == pytest.approx((min(caught) + max(caught)) / 2)
    between = [caught_at(roc_ind, roc_ood, rate) for rate in np.linspace(0, 1, 333)]
    assert between == sorted(between)


@pytest.mark.usefixtures("no_plots")
def test_relabelling_events_are_named(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html"))
    assert "After epoch 4, zero and one: 12 clusters from then on" in page.text
    assert "12 epochs in 0.7 minutes; 2 relabelling events" in page.text


@pytest.mark.usefixtures("no_plots")
def test_commands_versions_and_configuration(run: Path, tmp_path: Path) -> None:
    text = Page(write_report(run, tmp_path / "r.html")).text
    for part in ("maple train digits --out run", "maple evaluate run", "numpy 2", 'backbone = "resnet9"', "0.31 ms"):
        assert part in text


@pytest.mark.usefixtures("no_plots")
def test_commands_are_quoted(copied: Path, tmp_path: Path) -> None:
    folder = copied.rename(tmp_path / "my run")
    predictions = write_predictions(tmp_path / "a b.csv")
    text = Page(write_report(folder, predictions=predictions)).text
    assert f"maple report '{folder}' '{predictions}'" in text


@pytest.mark.usefixtures("no_plots")
def test_both_conventions_of_fpr95_are_named(run: Path, tmp_path: Path) -> None:
    text = Page(write_report(run, tmp_path / "r.html")).text
    assert "FPR95, unknown" in text and "FPR95, known" in text


def test_projections_tell_their_epoch(copied: Path) -> None:
    def titles() -> list[str]:
        record = read_run(copied)
        return [maple.reporting.report._projection_title(record, name) for name in ("before", "after")]

    assert titles() == ["Before the first relabelling", "After training"]
    classes = json.loads((copied / "classes.json").read_text())
    save_json(copied / "classes.json", classes | {"snapshot_epochs": {"before": 4, "after": 12}})
    assert titles() == ["Before the first relabelling, epoch 4", "After training, epoch 12"]
    history = (copied / "history.csv").read_text().replace("zero;one", "")
    (copied / "history.csv").write_text(history)
    assert titles() == ["During training, epoch 4", "After training, epoch 12"]


@pytest.mark.usefixtures("no_plots")
def test_threshold_out_of_reach_is_stated(copied: Path) -> None:
    assert "No image is ever flagged" not in Page(write_report(copied)).text
    results = Results.from_json((copied / "results.json").read_bytes())
    few = {"false_alarm": 0.05, "calibration_images": 7}
    results = replace(results, threshold=math.inf, false_alarm=0.0, provenance={**results.provenance, **few})
    (copied / "results.json").write_text(results.to_json())
    said = "No image is ever flagged: 7 calibration images are too few for a false-alarm rate of 5"
    assert said in Page(write_report(copied)).text


def test_many_classes_get_another_layout(tmp_path: Path) -> None:
    many = tuple(f"species {i:03d}" for i in range(121))
    page = Page(write_report(build_run(tmp_path / "run", many)))
    check_page(page)
    assert "matrix" not in page.values("class") and "heat" in page.values("class")
    assert "10 of 121 classes are coloured" in page.text
    assert len(page.source) < 4e6


# ---------------------------------------------------------------------------------------------------------------------
# What is not there


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("missing", ["results.json", "history.csv", "classes.json", "config.toml", "gallery"])
def test_each_part_may_be_missing(missing: str, copied: Path) -> None:
    path = copied / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = Page(write_report(copied))
    check_page(page)
    says = {
        "results.json": "has not been evaluated yet: maple evaluate",
        "history.csv": "holds no training history",
        "classes.json": "does not say which images it was trained on",
        "config.toml": "holds no configuration",
        "gallery": "holds no thumbnails of its clusters",
    }
    assert says[missing] in page.text


@pytest.mark.usefixtures("no_plots")
def test_configuration_alone_makes_a_report(run: Path, tmp_path: Path) -> None:
    shutil.copy(run / "config.toml", tmp_path / "config.toml")
    page = Page(write_report(tmp_path))
    check_page(page)
    assert "How good it is has not been measured yet." in page.text


@pytest.mark.usefixtures("no_plots")
def test_without_unknown_images_and_without_threshold(copied: Path) -> None:
    results = Results.from_json((copied / "results.json").read_bytes())
    (copied / "results.json").write_text(replace(results, false_alarm=math.nan).to_json())
    page = Page(write_report(copied))
    check_page(page)
    assert "assumed: the run has no threshold" in page.text
    blind = {
        name: replace(m, detection={}, histogram=replace(m.histogram, ood={})) for name, m in results.methods.items()
    }
    (copied / "results.json").write_text(replace(results, methods=blind, n_ood={}).to_json())
    page = Page(write_report(copied))
    check_page(page)
    assert "No unknown images were tried" in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_network_of_another_recipe_is_compared_with_its_own_method(copied: Path) -> None:
    results = Results.from_json((copied / "results.json").read_bytes())
    methods = {"sngp" if name == "softmax" else name: method for name, method in results.methods.items()}
    (copied / "results.json").write_text(replace(results, methods=methods).to_json())
    page = Page(write_report(copied))
    check_page(page)
    assert "Results next to sngp" in page.text
    assert "better than sngp" in page.text and "better than softmax" not in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_network_without_a_head_is_compared_with_nothing(copied: Path) -> None:
    results = Results.from_json((copied / "results.json").read_bytes())
    methods = {name: method for name, method in results.methods.items() if name.startswith("maple")}
    (copied / "results.json").write_text(replace(results, methods=methods).to_json())
    page = Page(write_report(copied))
    check_page(page)
    assert "next to" not in page.text and "better than" not in page.text


@pytest.mark.usefixtures("no_plots")
def test_a_single_epoch_without_triplet_loss(copied: Path) -> None:
    (copied / "history.csv").write_text("epoch,cross_entropy,validation_accuracy\n1,0.5,0.9\n")
    page = Page(write_report(copied))
    check_page(page)
    assert "1 epoch in 0.0 minutes; no class was split." in page.text


@pytest.mark.usefixtures("no_plots")
def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a folder"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"holds none of config\.toml"):
        write_report(tmp_path)


@pytest.mark.usefixtures("no_plots")
def test_damaged_results_are_named(copied: Path) -> None:
    (copied / "results.json").write_text("{")
    with pytest.raises(RunError, match=r"results\.json"):
        write_report(copied)
    assert not (copied / "report.html").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Predictions


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_predictions_are_counted_and_sorted(suffix: str, tmp_path: Path) -> None:
    found = read_predictions(write_predictions(tmp_path / f"p{suffix}", rows=30), keep=7)
    assert found.n_images == 30
    assert found.counts == {"class 0": 10, "class 1": 10, "class 2": 10}
    assert found.flagged.total() == 5  # uncertainty above 0.8
    assert [row["uncertainty"] for row in found.rows] == pytest.approx([(29 - i) / 30 for i in range(7)])
    assert found.rows[0]["is_ood"] is True


@pytest.mark.usefixtures("no_plots")
def test_prediction_section(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html", write_predictions(tmp_path / "p.csv", rows=300)))
    assert "p.csv: 300 images, of which 59" in page.text
    assert "175 more" in page.text and "200 of 300" in page.text


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_prediction_sets_are_summed_up_and_shown(run: Path, tmp_path: Path, suffix: str) -> None:
    plain = write_predictions(tmp_path / "plain.jsonl", rows=20)
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    for row in rows:
        row["prediction_set"] = [row["class"], HOSTILE] if row["uncertainty"] > 0.72 else [row["class"]]
    rows[0]["prediction_set"] = [f"long name {i}" for i in range(20_000)]  # more than a cell may hold by default
    path = tmp_path / f"p{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(to_csv(rows, list(rows[0]), header=True) if suffix == ".csv" else to_json_lines(rows))
    assert read_predictions(path).set_sizes == {1: 14, 2: 5, 20_000: 1}
    page = Page(write_report(run, tmp_path / "r.html", path))
    check_page(page)
    assert "70 % of them one class alone, the largest 20,000 classes." in page.text
    assert f"class 1, {HOSTILE}" in page.text and "long name 4 and 19,995 more" in page.text
    assert "rediction set" not in Page(write_report(run, tmp_path / "r.html", plain)).text


@pytest.mark.usefixtures("no_plots")
def test_predicted_images_are_shown_where_they_lie(run: Path, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    Image.new("RGB", (40, 20), "red").save(tmp_path / "slides" / "29.png")
    (tmp_path / "slides" / "3.png").write_bytes(b"not an image")
    page = Page(write_report(run, tmp_path / "r.html", write_predictions(tmp_path / "p.csv")))
    check_page(page)
    assert [image["alt"] for image in page.all("img") if image["alt"].startswith("slides/")] == ["slides/29.png"]


@pytest.mark.usefixtures("no_plots")
def test_missing_numbers_in_predictions(run: Path, tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.csv", p_value="nan", score="", uncertainty="nan")
    page = Page(write_report(run, tmp_path / "r.html", path))
    check_page(page)
    assert read_predictions(path).n_images == 30


@pytest.mark.usefixtures("no_plots")
def test_predictions_without_calibration_are_not_called_known(run: Path, tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.csv", p_value="nan", is_ood="False")
    assert read_predictions(path).n_decided == 0
    page = write_report(run, tmp_path / "r.html", path).read_text()
    assert "30 images, not decided about: the run had no calibration images." in page
    section = page.partition('id="predictions"')[2].partition("</section>")[0]
    assert ">known<" not in section and "<td>–</td>" in section
    assert read_predictions(write_predictions(tmp_path / "q.csv")).n_decided == 30


@pytest.mark.usefixtures("no_plots")
def test_no_predictions_at_all(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html", write_predictions(tmp_path / "p.csv", rows=0)))
    check_page(page)
    assert "p.csv: 0 images" in page.text


@pytest.mark.usefixtures("no_plots")
def test_other_files_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("file,class\nx.png,a\n")
    with pytest.raises(DataError, match=r"a\.csv' row 1 lacks probability, typicality, uncertainty"):
        write_report(run, tmp_path / "r.html", tmp_path / "a.csv")
    (tmp_path / "b.jsonl").write_text("not json\n")
    with pytest.raises(DataError, match="neither CSV nor JSON lines"):
        write_report(run, tmp_path / "r.html", tmp_path / "b.jsonl")
    (tmp_path / "d.parquet").write_bytes(b"not Parquet")
    with pytest.raises(DataError, match="nor Parquet"):
        write_report(run, tmp_path / "r.html", tmp_path / "d.parquet")
    (tmp_path / "c.jsonl").write_text("[1, 2]\n")
    with pytest.raises(DataError, match="row 1 lacks file"):
        write_report(run, tmp_path / "r.html", tmp_path / "c.jsonl")
    with pytest.raises(DataError, match="cannot read the predictions"):
        write_report(run, tmp_path / "r.html", tmp_path / "none.csv")
    (tmp_path / "d.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="neither CSV nor JSON lines"):
        write_report(run, tmp_path / "r.html", tmp_path / "d.csv")
