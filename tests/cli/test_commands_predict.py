"""predict, explain, monitor as a user runs them."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from commands import flat, interrupt, read_rows, run
from maple.cli.commands import DRIFT
from maple.data.sources import open_images
from maple.prediction.store import load_predictor
from maple.types import PREDICTION_COLUMNS


def test_predictions_of_files_folders_and_globs(finished, image_folder, tmp_path):
    out = tmp_path / "predictions.csv"
    single = image_folder / "dark" / "0.png"
    assert (
        run("predict", finished, image_folder / "bright", single, image_folder / "dark" / "1*.png", "--out", out) == 0
    )
    rows = read_rows(out)
    assert tuple(rows[0]) == PREDICTION_COLUMNS
    assert len(rows) == 12 + 1 + 3
    for row in rows:
        assert 0 <= float(row["p_value"]) <= 1
        assert float(row["uncertainty"]) == pytest.approx(1 - float(row["typicality"]), abs=1e-12)
        assert row["is_ood"] in ("True", "False")


def test_json_lines_with_all_probabilities(finished, image_folder, tmp_path):
    out = tmp_path / "predictions.jsonl"
    assert run("predict", finished, image_folder / "dark", "--out", out, "--all-probabilities") == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 12
    for row in rows:
        assert sum(row[f"p_{i}"] for i in range(10)) == pytest.approx(1)
        assert row["probability"] == max(row[f"p_{i}"] for i in range(10))


def test_predictions_do_not_change_from_run_to_run(finished, image_folder, tmp_path):
    for name in ("a.csv", "b.csv"):
        run("predict", finished, image_folder / "dark", "--out", tmp_path / name)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()


def test_corrupt_images_are_listed_and_the_rest_predicted(finished, image_folder, tmp_path, capsys):
    (image_folder / "dark" / "broken.png").write_bytes(b"not an image")
    truncated = (image_folder / "dark" / "0.png").read_bytes()[:-40]
    (image_folder / "dark" / "truncated.png").write_bytes(truncated)
    out = tmp_path / "p.csv"
    assert run("predict", finished, image_folder / "dark", "--out", out) == 0
    assert len(out.read_text().splitlines()) == 1 + 12
    assert "2 files" in flat(capsys.readouterr().err)
    assert len((tmp_path / "p.skipped.csv").read_text().splitlines()) == 3


def test_false_alarm_moves_the_decisions_only(finished, tmp_path):
    shares = []
    for level in (0.02, 0.5):
        out = tmp_path / f"{level}.csv"
        assert run("predict", finished, "digits", "--out", out, "--false-alarm", level) == 0
        rows = read_rows(out)
        assert all((float(row["p_value"]) <= level) == (row["is_ood"] == "True") for row in rows)
        shares.append(np.mean([row["is_ood"] == "True" for row in rows]))
    assert shares[0] < shares[1]


def test_confidence_flags_less_and_classes_have_their_own_rate(finished, tmp_path):
    folder, images = tmp_path / "run", open_images("digits")
    shutil.copytree(finished, folder)
    load_predictor(folder).calibrate(images).save(folder)  # on all images, so that classes have enough of them

    def flagged(*flags: object) -> np.ndarray:
        out = tmp_path / "p.csv"
        assert run("predict", folder, "digits", "--out", out, "--false-alarm", 0.2, *flags) == 0
        return np.array([row["is_ood"] == "True" for row in read_rows(out)])

    shared, careful, own = flagged(), flagged("--confidence", 0.95), flagged("--per-class")
    assert 0 < careful.sum() < shared.sum()
    predictor = load_predictor(folder).decide(false_alarm=0.2, per_class=True)
    assert predictor.decision.n_own_thresholds == len(predictor.class_names)
    said = predictor(images)
    # A threshold is the score of one of these images, whose other digits depend on its batch.
    clear = ~np.isclose(said.score, predictor.decision.thresholds[said.class_id], rtol=1e-4)
    np.testing.assert_array_equal(own[clear], said.is_ood[clear])

    def rates_hold(is_ood: np.ndarray) -> bool:
        """Whether 0.2 of each class is flagged, give or take the image at the threshold and its neighbour."""
        counts, above = (np.bincount(ids, minlength=10) for ids in (said.class_id, said.class_id[is_ood]))
        return bool((np.abs(above - 0.2 * counts) <= 2).all())

    assert rates_hold(own) and not rates_hold(shared)


def test_batch_decides_by_benjamini_hochberg(finished, tmp_path):
    shares = []
    for source in ("digits", "simulated-diatoms/far?n=200"):
        out = tmp_path / "p.csv"
        assert run("predict", finished, source, "--out", out, "--fdr", 0.2) == 0
        rows = read_rows(out)
        p_values = np.array([float(row["p_value"]) for row in rows])
        flagged = np.array([row["is_ood"] == "True" for row in rows])
        np.testing.assert_array_equal(flagged, false_discovery_control(p_values) <= 0.2)
        shares.append(flagged.mean())
    assert shares[0] < 0.05 < 0.3 < shares[1]


def test_too_few_calibration_images_for_a_batch_are_reported(finished, capsys):
    assert run("predict", finished, "digits", "--fdr", 0.001) == 0
    captured = capsys.readouterr()
    assert "--fdr 0.001" in flat(captured.err)
    assert ",True," not in captured.out


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_prediction_sets_hold_the_class_and_cover(finished, tmp_path, suffix):
    out = tmp_path / f"p.{suffix}"
    assert run("predict", finished, "digits", "--out", out, "--coverage", 0.9) == 0
    lines = out.read_text().splitlines()
    rows = list(csv.DictReader(lines)) if suffix == "csv" else [json.loads(line) for line in lines]
    sets = [row["prediction_set"].split(" | ") if suffix == "csv" else row["prediction_set"] for row in rows]
    assert all(row["class"] == classes[0] for row, classes in zip(rows, sets))
    truth = open_images("digits")
    covered = np.mean([truth.class_names[label] in classes for label, classes in zip(truth.labels, sets)])
    assert covered > 0.87


def test_output_names_are_checked_before_images_are_read(finished, tmp_path, monkeypatch):
    monkeypatch.setattr("maple.runs.loading.open_images", interrupt)
    assert run("predict", finished, "digits", "--out", tmp_path / "p.xls") == 2


def test_full_disk_keeps_the_old_predictions(finished, tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.csv"
    out.write_text("old")
    monkeypatch.setattr(
        "maple.runs.predicting.writer.pq.write_table",
        lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")),
    )
    assert run("predict", finished, "digits", "--out", out) == 1
    assert "No space left" in capsys.readouterr().err
    assert out.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["p.csv"]


# --- explain, monitor


def test_explanations_as_text_json_and_page(finished, image_folder, tmp_path, capsys):
    assert run("explain", finished, image_folder / "dark", "--limit", 2) == 0
    assert "cluster" in capsys.readouterr().out
    assert run("explain", finished, image_folder / "dark", "--limit", 2, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == 2
    page = tmp_path / "e.html"
    assert run("explain", finished, image_folder / "dark", "--limit", 2, "--out", page) == 0
    assert str(page) in flat(capsys.readouterr().out).replace(" ", "") and "<html" in page.read_text()
    assert run("explain", finished, image_folder / "dark", "--limit", 0) == 2
    assert "--limit 0" in flat(capsys.readouterr().err)


def test_the_exit_code_of_monitor_is_the_answer(finished, capsys):
    assert run("monitor", finished, "simulated-diatoms/far?n=100", "--json") == DRIFT
    assert json.loads(capsys.readouterr().out)["drift"] is True
    assert run("monitor", finished, "digits", "--level", 2) == 2
    assert "level" in flat(capsys.readouterr().err)
