"""``maple explain``: which images are explained, and what it prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import run
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import UsageError
from maple.evaluation.cases import evaluate
from maple.networks import embed
from maple.prediction.store import load_predictor
from maple.runs.predicting.explain import (
    MAX_IMAGES,
    ExplainRequest,
    explain_images,
    read_usual_distance,
    to_json,
    to_text,
)

# ---------------------------------------------------------------------------------------------------------------- text


def test_sentences_are_printed_for_every_image(
    explained_run: Path, new_images: Path, capsys: pytest.CaptureFixture
) -> None:
    assert run("explain", explained_run, new_images) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 4
    for block in blocks:
        file, *sentences = block.split("\n  ")
        assert file.endswith(".png")
        assert sentences[0].startswith(("Probably ", "Doubtful, ")) and sentences[1].startswith("Called ")
        assert sentences[-1].split(":")[0].endswith("-distribution")


def test_explanations_agree_with_predictions(explained_run: Path, new_images: Path) -> None:
    predictor = load_predictor(explained_run)
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)]))
    rows = ImageSet.from_arrays(np.stack([case.image for case in cases]))
    said = predictor(rows)
    for i, case in enumerate(cases):
        found = case.explanation
        assert found.class_name == predictor.class_names[said.class_id[i]]
        assert found.probability == pytest.approx(said.probability[i], rel=1e-3)
        assert found.nearest.cluster == said.cluster[i]
        assert found.nearest.squared_distance == pytest.approx(said.squared_distance[i], rel=1e-3)
        assert (found.is_ood, found.false_alarm) == (said.is_ood[i], predictor.false_alarm)
        assert found.p_value == pytest.approx(said.p_value[i])
        assert (found.score_by, found.score) == ("fused", pytest.approx(said.score[i], rel=1e-3))
    assert to_text(cases).count("\n\n") == len(cases) - 1
    assert [case["file"] for case in json.loads(to_json(cases))] == [case.file for case in cases]


def test_json_and_other_levels(explained_run: Path, new_images: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("explain", explained_run, new_images, "--json", "--false-alarm", 0.9) == 0
    cases = json.loads(capsys.readouterr().out)
    assert len(cases) == 4 and {case["false_alarm"] for case in cases} == {0.9}
    for case in cases:
        total = sum(part["contribution"] for part in case["components"])
        assert total == pytest.approx(case["nearest"]["squared_distance"], rel=1e-9)
        assert case["is_ood"] == (case["p_value"] <= 0.9)
        assert case["score_by"] == "fused" and set(case["parts"]) == {"energy", "spread", "shallow", "distance"}
        assert sum(case["parts"].values()) == pytest.approx(case["score"], rel=1e-9)


def test_a_level_without_enough_calibration_images_decides_nothing(explained_run: Path, new_images: Path) -> None:
    for case in explain_images(ExplainRequest(explained_run, [str(new_images)], flags={"false_alarm": 1e-6})):
        assert "was not decided: the run has too few calibration images" in case.explanation.sentences()[-1]


def test_p_values_per_class_are_about_known_images_of_that_class(
    explained_run: Path, new_images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maple.decisions.calibration.MIN_CLASS_IMAGES", 10)
    for case in explain_images(
        ExplainRequest(explained_run, [str(new_images)], flags={"per_class": True, "false_alarm": 0.1})
    ):
        called = f"of known images called {case.explanation.class_name} look as unusual"
        assert called in case.explanation.sentences()[-1]


def test_usual_distance_is_that_of_most_test_images(explained_run: Path, new_images: Path, tmp_path: Path) -> None:
    assert read_usual_distance(explained_run) is None
    assert not explain_images(ExplainRequest(explained_run, [str(new_images)]))[0].explanation.is_measured
    evaluated = Path(shutil.copytree(explained_run, tmp_path / "evaluated"))
    predictor, test = (
        load_predictor(explained_run),
        load_splits("digits").test.with_class_names([str(i) for i in range(10)]),
    )
    outputs = embed(predictor.backbone, test, cluster_to_class=predictor.cluster_to_class)
    (evaluated / "results.json").write_text(evaluate(predictor, outputs, {}).to_json())
    distances = predictor.detector.describe(outputs).squared_distance
    usual = read_usual_distance(evaluated)
    assert usual is not None
    assert abs((distances <= usual).sum() - 0.95 * len(distances)) <= 2
    found = explain_images(ExplainRequest(evaluated, [str(new_images)]))[0].explanation
    assert found.is_measured and found.usual_distance == usual


def test_the_highest_scores_first(explained_run: Path) -> None:
    cases = explain_images(ExplainRequest(explained_run, ["digits"], limit=5))
    predictor = load_predictor(explained_run)
    scores = predictor(open_images("digits")).score
    found = [predictor(case.image[None]).score[0] for case in cases]
    assert found == sorted(found, reverse=True) and len(cases) == 5
    np.testing.assert_allclose(found, np.sort(scores)[::-1][:5], rtol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["digits"], "1,797 images are too many to explain: give at most 200, or --limit 200"),
        (["digits", "--limit", MAX_IMAGES + 1], "between 1 and 200"),
        (["digits", "--limit", 0], "between 1 and 200"),
        (["digits", "--limit", 3, "--out", "why.csv"], "end the name in .html"),
    ],
)
def test_wrong_use(explained_run: Path, arguments: list, words: str, capsys: pytest.CaptureFixture) -> None:
    assert run("explain", explained_run, *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_files_that_are_no_images_are_named(
    explained_run: Path, new_images: Path, capsys: pytest.CaptureFixture
) -> None:
    (new_images / "broken.png").write_bytes(b"no image")
    assert run("explain", explained_run, new_images) == 0
    captured = capsys.readouterr()
    assert "broken.png" in captured.err and "broken.png" not in captured.out


def test_only_known_file_types_are_written(explained_run: Path, new_images: Path) -> None:
    with pytest.raises(UsageError, match=r"\.html"):
        explain_images(ExplainRequest(explained_run, [str(new_images)], Path("why.txt")))
