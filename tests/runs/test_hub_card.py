"""The model card of a run: facts from its files, and no markup from names."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from blobs import blobs, make_predictor
from maple.evaluation.cases import evaluate
from maple.files import RunFile, save_arrays
from maple.runs.hub_card import MOST_CLASSES, write_card

PLACE = "hf://lab/pictures"


def card_of(folder: Path, names: list[str], network: str = "resnet9") -> str:
    said = {"class_names": names, "size": 8, "fit": "crop", "options": {"false_alarm": 0.05}}
    save_arrays(folder / RunFile.DETECTOR, {"x": np.zeros(1)}, {**said, "decision": {"n_calibration": 120}})
    save_arrays(folder / RunFile.WEIGHTS, {"x": np.zeros(1)}, {"backbone": network})
    return write_card(folder, PLACE)


def test_the_facts_are_those_of_the_run(tmp_path):
    card = card_of(tmp_path, ["cat", "dog"])
    for fact in ("# pictures", f'maple.load("{PLACE}")', "2 classes", "8 x 8", "crop", "5 %", "120", "cat, dog"):
        assert fact in card
    assert "## Measured" not in card  # it was never evaluated


def test_figures_have_their_floor_and_no_paths(tmp_path):
    known, unknown = blobs(5), blobs(6)
    results = evaluate(make_predictor(), known, {"/secret/place/debris": unknown, "openood/near": unknown})
    (tmp_path / RunFile.RESULTS).write_text(results.to_json())
    card, judged = card_of(tmp_path, ["cat", "dog"]), results.methods["maple"].classification
    assert f"| {judged.ece:.3f} ({judged.ece_floor:.3f}) |" in card
    assert "AUROC, debris |" in card and "AUROC, openood/near |" in card and "secret" not in card


def test_names_are_no_markup(tmp_path):
    card = card_of(tmp_path, ["a|b", "<script>", "[x](http://e)", "line\nbreak"], network="`net`")
    assert r"a\|b, \<script\>, \[x\](http://e), line break" in card
    assert r"\`net\`" in card and "<script>" not in card


def test_of_many_classes_the_first_are_listed(tmp_path):
    card = card_of(tmp_path, [f"n{i:04}" for i in range(MOST_CLASSES + 1)])
    assert f"n{MOST_CLASSES - 1:04}, ..." in card and f"n{MOST_CLASSES:04}" not in card
    assert f"{MOST_CLASSES + 1} classes" in card
