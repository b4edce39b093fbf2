"""Notebook views: well-formed HTML without scripts, hostile names escaped, a limited number of rows."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from maple import notebook
from maple.detectors.estimator import MahalanobisClassifier
from maple.detectors.maple import MapleDetector
from maple.detectors.registry import create_detector
from maple.evaluation.cases import evaluate
from maple.evaluation.results import Results
from maple.networks import create_backbone
from maple.prediction.predictor import Predictor
from maple.types import Outputs, Prediction, Relabelling

HOSTILE = "<script>alert(1)</script>"
BREAKING = "\"'><img src=x onerror=y>&amp;\ud800"
VOID = {"img", "br", "meta", "link", "input"}


class Page(HTMLParser):
    """The tags and the text of a piece of HTML; tags must be closed in the order in which they were opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.rows: list[list[str]] = []
        self.text = ""
        text.encode("utf-8")  # what a notebook is written in
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        assert tag not in VOID
        self.open.append(tag)
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attributes}
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def read(shown: object) -> Page:
    """The notebook view of an object, checked for tags and attributes that are not allowed."""
    page = Page(shown._repr_html_())
    assert set(page.tags) <= {"div", "table", "thead", "tbody", "tr", "th", "td", "span", "b"}
    assert page.attributes <= {"style"}
    return page


def make_prediction(n: int, names: tuple[str, ...] = ("cod", "eel"), calibrated: bool = True) -> Prediction:
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(2), n).reshape(n, 2)
    typicality, p_value = rng.uniform(size=n), rng.uniform(size=n) if calibrated else np.full(n, np.nan)
    return Prediction(
        class_id=probabilities.argmax(1) if n else np.zeros(0, dtype=int),
        probability=probabilities.max(1, initial=0),
        typicality=typicality,
        uncertainty=1 - typicality,
        score=rng.normal(size=n),
        p_value=p_value,
        is_ood=p_value < 0.3 if calibrated else np.zeros(n, dtype=bool),
        cluster=np.zeros(n, dtype=int),
        md_class_id=np.zeros(n, dtype=int),
        softmax_class_id=np.zeros(n, dtype=int),
        log_probabilities=np.log(probabilities),
        squared_distance=np.ones(n),
        class_names=names,
    )


# --- predictions


def test_predictions():
    prediction = make_prediction(10_000)
    page = read(prediction)
    assert len(page.rows) == 1 + notebook.MAX_ROWS and "… and 9,990 more" in page.text
    assert page.rows[0] == ["image", "class", "probability", "decision", "p-value", "score"]
    for i, row in enumerate(page.rows[1:]):
        assert row[:2] == [str(i), ("cod", "eel")[prediction.class_id[i]]]
        numbers = (prediction.probability, prediction.p_value, prediction.score)
        assert [float(row[k]) for k in (2, 4, 5)] == pytest.approx([values[i] for values in numbers], abs=6e-4)
        assert row[3] == ("unknown" if prediction.is_ood[i] else "known")
    n_ood = int(prediction.is_ood.sum())
    assert f"images 10,000 · classes 2 · out of distribution {n_ood:,}" in page.text
    assert repr(prediction) == f"Prediction(n_images=10000, n_classes=2, n_ood={n_ood})"
    width = f"width:{100 * prediction.probability[0]:.0f}%"
    assert width in prediction._repr_html_()


def test_the_last_rows_are_not_announced_as_more():
    page = read(make_prediction(notebook.MAX_ROWS))
    assert len(page.rows) == 1 + notebook.MAX_ROWS and "more" not in page.text


def test_no_images_and_no_calibration():
    page = read(make_prediction(0))
    assert page.rows == [] and "images 0" in page.text
    assert repr(make_prediction(0)) == "Prediction(n_images=0, n_classes=2, n_ood=0)"
    uncalibrated = make_prediction(3, calibrated=False)
    page = read(uncalibrated)
    assert "not calibrated: nothing is flagged" in page.text and "out of distribution" not in page.text
    assert [row[3:5] for row in page.rows[1:]] == [["–", "–"]] * 3
    assert repr(uncalibrated) == "Prediction(n_images=3, n_classes=2, not calibrated)"


def test_names_of_classes_are_escaped():
    page = read(make_prediction(50, names=(HOSTILE, BREAKING)))
    shown = {row[1] for row in page.rows[1:]}
    assert shown == {HOSTILE, BREAKING.replace("\ud800", "?")}
    page = read(make_prediction(3, names=("x" * 500, "y" * 500)))
    assert all(len(row[1]) == notebook.MAX_CHARACTERS and row[1].endswith("…") for row in page.rows[1:])


def test_classes_without_names_are_numbered():
    assert {row[1] for row in read(make_prediction(50, names=())).rows[1:]} == {"0", "1"}


# --- detectors, predictors, results


@pytest.fixture(scope="module")
def blobs() -> Outputs:
    rng = np.random.default_rng(1)
    labels = np.arange(400) % 4
    embeddings = (rng.normal(size=(400, 6)) + 5 * np.eye(4, 6)[labels]).astype(np.float32)
    return Outputs(embeddings, embeddings[:, :4].copy(), labels)


def make_predictor(blobs: Outputs, names: list[str], calibrated: bool = True) -> Predictor:
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 4)
    predictor = Predictor(backbone, MapleDetector().fit(blobs[:200], blobs[200:300]), names, size=8)
    return predictor.calibrate(blobs[300:]) if calibrated else predictor


def test_detectors(blobs: Outputs):
    detector = MapleDetector()
    assert "not fitted: call fit" in read(detector).text
    detector.fit(blobs[:200])
    rows = dict(read(detector).rows)
    assert rows["images"] == "200" and rows["classes"] == rows["clusters"] == "4" and rows["embedding size"] == "6"
    assert rows["components"] == str(detector.gaussians_.n_components) and rows["covariance"] == "tied"
    assert rows["score"] == "normalised"
    detector.partial_fit(blobs[200:])
    rows = dict(read(detector).rows)
    assert rows["images"] == "400" and "components" not in rows
    assert not detector.learned_.densities.is_derived  # looking at it computes nothing
    energy = create_detector("energy")
    assert repr(energy) == "EnergyDetector(not fitted)" and "not fitted" in read(energy).text
    energy.fit(blobs)
    assert repr(energy) == "EnergyDetector(fitted)" and "not fitted" not in read(energy).text


def test_predictors(blobs: Outputs):
    predictor = make_predictor(blobs, [HOSTILE, "eel", "ray", "sole"])
    page = read(predictor)
    rows = dict(page.rows)
    assert rows["network"] == "resnet9" and rows["images"] == "8 x 8 pixels"
    assert rows["classes"] == f"{HOSTILE}, eel, ray, sole"
    assert rows["decision"] == predictor.decision.sentence()
    assert "classes 4 · clusters 4" in page.text
    assert repr(predictor) == "Predictor('resnet9', size=8, n_classes=4, n_clusters=4, n_calibration=100)"
    bare = make_predictor(blobs, ["cod", "eel", "ray", "sole"], calibrated=False)
    assert "flags nothing" in dict(read(bare).rows)["decision"] and repr(bare).endswith("not calibrated)")
    page = read(predictor.predict_outputs(blobs[:0]))
    assert page.rows == [] and "images 0" in page.text


def test_many_classes_are_not_all_listed(blobs: Outputs):
    predictor = make_predictor(blobs, [f"class {i}" for i in range(2000)], calibrated=False)
    rows = dict(read(predictor).rows)
    assert rows["classes"].startswith("class 0, class 1, ") and rows["classes"].endswith("class 9 and 1,990 more")


def test_results(blobs: Outputs):
    predictor = make_predictor(blobs, ["cod", "eel", "ray", "sole"])
    rng = np.random.default_rng(2)
    far = Outputs(rng.normal(size=(60, 6)).astype(np.float32), rng.normal(size=(60, 4)).astype(np.float32))
    results = evaluate(predictor, blobs[200:], {HOSTILE: far})
    page = read(results)
    assert page.rows[0] == ["method", "accuracy ↑", "ECE ↓", "NLL ↓", f"AUROC ↑ {HOSTILE}"]
    table = {row[0]: row[1:] for row in page.rows[1:]}
    assert list(table) == list(results.methods)
    for name, method in results.methods.items():
        judged, found = method.classification, method.detection[HOSTILE]
        expected = [judged.accuracy, judged.ece, judged.nll] if judged else [np.nan] * 3
        shown = [np.nan if cell == "–" else float(cell.split()[0]) for cell in table[name]]
        assert judged is None or table[name][1].endswith(f"({judged.ece_floor:.3f})")
        assert shown == pytest.approx([*expected, found.auroc], abs=6e-4, nan_ok=True)
    assert "–" in table["energy"]  # which has no classes of its own
    top = max(method.detection[HOSTILE].auroc for method in results.methods.values())
    assert f"<b>{top:.3f}</b>" in results._repr_html_()
    assert "200 in-distribution images" in page.text and "maple flags" in page.text
    assert repr(results) == f"Results(methods={list(results.methods)}, n_ind=200, n_ood={{{HOSTILE!r}: 60}})"
    assert repr(Results.from_json(results.to_json())) == repr(results)
    assert len(repr(results.methods["maple"])) < 1000


def test_results_of_many_sets(blobs: Outputs):
    predictor = make_predictor(blobs, ["cod", "eel", "ray", "sole"])
    rng = np.random.default_rng(2)
    far = Outputs(rng.normal(size=(20, 6)).astype(np.float32), rng.normal(size=(20, 4)).astype(np.float32))
    page = read(evaluate(predictor, blobs[200:], {f"set {i}": far for i in range(13)}))
    assert len(page.rows[0]) == 4 + notebook.MAX_ROWS and "AUROC of 3 more OOD sets" in page.text
    page = read(evaluate(predictor, blobs[200:]))
    assert len(page.rows[0]) == 4 and "more" not in page.text


def test_the_classifier_looks_as_in_scikit_learn():
    rng = np.random.default_rng(0)
    model = MahalanobisClassifier(covariance="full").fit(rng.normal(size=(40, 3)), np.arange(40) % 2)
    assert repr(model) == "MahalanobisClassifier(covariance='full')"
    assert "sk-top-container" in model._repr_html_()


# --- plain text


def test_records_of_arrays_fit_into_a_line(blobs: Outputs):
    assert repr(blobs) == "Outputs(embeddings=(400, 6), logits=(400, 4), labels=(400,))"
    assert repr(Outputs(torch.zeros(3, 2))) == "Outputs(embeddings=(3, 2))"
    relabelling = Relabelling.initial(np.arange(400) % 4, 4)
    assert repr(relabelling) == "Relabelling(n_images=400, n_clusters=4, n_classes=4)"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (True, "True"),
        (0, "0"),
        (1234567, "1,234,567"),
        (0.1, "0.100"),
        (-1234.5, "-1,234.500"),
        (1.5e9, "1.5e+09"),
        (float("inf"), "inf"),
        (float("nan"), "–"),
        ("a\udcffb", "a?b"),
    ],
)
def test_values_as_html(value: object, shown: str):
    assert notebook.escape(value) == shown


def test_bars_stay_within_their_frame():
    for share, width in ((-1.0, 0), (0.0, 0), (0.333, 33), (7.0, 100), (float("nan"), 0)):
        assert f"width:{width}%" in notebook.bar(share)
