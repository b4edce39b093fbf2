"""The sections of a report: numbers read back from records; thumbnails of clusters and examples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from maple.evaluation.results import Results
from maple.files import RunFile, save_json
from maple.reporting.comparison import list_classifiers
from maple.reporting.gallery.store import ClusterExemplars, Examples
from maple.reporting.record import read_run
from maple.reporting.sections import (
    ERROR_RATES,
    MAX_THUMBNAILS,
    MethodCalibration,
    calibration_section,
    cluster_section,
    confusion_section,
    coverage_section,
    draw_projections,
    draw_training,
    example_sections,
    list_confusions,
    list_recalls,
    projection_title,
    unknown_sets,
)
from maple.stats.metrics import coverage_at
from maple.text import percent


@pytest.fixture(scope="module")
def results(run: Path) -> Results:
    return Results.from_json((run / RunFile.RESULTS).read_bytes())


pytestmark = pytest.mark.usefixtures("no_plots")


def test_confusions_are_the_entries_off_the_diagonal(results: Results) -> None:
    counts = np.array(results.confusion)
    pairs = list_confusions(results)
    assert sum(pair.count for pair in pairs) == counts.sum() - np.trace(counts)
    assert [pair.count for pair in pairs] == sorted((pair.count for pair in pairs), reverse=True)
    names = list(results.class_names)
    for pair in pairs:
        row = counts[names.index(pair.label)]
        assert pair.count == row[names.index(pair.predicted)] and pair.share == pytest.approx(pair.count / row.sum())


def test_recalls_are_sorted(results: Results) -> None:
    recalls = [each.recall for each in list_recalls(results)]
    assert recalls == sorted(recalls) and len(recalls) == 10


def test_confusion_matrix_of_few_classes_is_a_table(results: Results) -> None:
    section = confusion_section(results)
    assert section.picture is None and section.matrix is not None and section.n_images == 898
    assert section.matrix == results.confusion


def test_calibration_verdicts(results: Results) -> None:
    for mean, verdict in ((0.95, "overconfident"), (0.85, "underconfident"), (0.902, "no bias beyond chance")):
        assert MethodCalibration("a", mean, 0.9, 0.001, 0.0, 0.0).verdict == verdict
    assert MethodCalibration("a", 0.95, 0.9, 0.03, 0.0, 0.0).verdict == "no bias beyond chance"  # of few images
    rows = calibration_section(results).rows
    assert [row.name for row in rows] == ["MAPLE", "softmax", "MAPLE, chi-square tail"]
    assert rows[1].verdict == "overconfident"
    assert [row.ece_floor for row in rows] == [found.ece_floor for found in list_classifiers(results).values()]
    assert all(0 < row.ece_floor < 0.05 for row in rows)


def test_coverages(results: Results) -> None:
    section = coverage_section(results)
    found = results.methods["maple"].classification
    assert section is not None and found is not None
    expected = [percent(coverage_at(found.kept, found.accuracy_kept, rate)) for rate in ERROR_RATES]
    assert section.rows[0].ours and [cell.text for cell in section.rows[0].cells] == expected


def test_unknown_classes_best_detected_first(results: Results) -> None:
    near, far = unknown_sets(results)
    assert [(name, each.images) for name, each in near.classes] == [("easy", 200), ("hard", 100)]
    assert far.classes == [] and far.count == 200  # a single class


def test_training_has_three_curves(run: Path) -> None:
    history = read_run(run).history
    assert history is not None
    assert [title for title, _ in draw_training(history)] == ["Losses.", "Validation accuracy.", "Clusters."]


def test_projections_are_titled_with_their_epoch(copied: Path) -> None:
    def titles() -> list[str]:
        record = read_run(copied)
        return [projection_title(record, name) for name in ("before", "after")]

    assert titles() == ["Before the first relabelling", "After training"]
    classes = json.loads((copied / RunFile.CLASSES).read_text())
    save_json(copied / RunFile.CLASSES, classes | {"snapshot_epochs": {"before": 4, "after": 12}})
    assert titles() == ["Before the first relabelling, epoch 4", "After training, epoch 12"]
    history = (copied / RunFile.HISTORY).read_text().replace("zero;one", "")
    (copied / RunFile.HISTORY).write_text(history)
    assert titles() == ["During training, epoch 4", "After training, epoch 12"]


def test_projections_share_limits_that_hold_all_of_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, used = read_run(run), []
    monkeypatch.setattr("maple.reporting.plots.plot_projection", lambda *arguments: used.append(arguments[-1]))
    draw_projections(record)
    projections = record.gallery.projections
    assert len(used) == len(projections) > 1 and len(set(used)) == 1
    low, high = np.transpose(used[0])
    assert all((low < each.points).all() and (each.points < high).all() for each in projections.values())


def make_cluster(cluster: int, name: str, count: int) -> ClusterExemplars:
    return ClusterExemplars(cluster, name, count, 0.5, ("a.png",), np.zeros((1, 32, 32, 3), np.uint8))


def test_split_classes_and_whole_ones() -> None:
    clusters = [
        make_cluster(0, "cod", 3),
        make_cluster(1, "eel", 4),
        make_cluster(2, "cod", 5),
        make_cluster(3, "x", 0),
    ]
    section = cluster_section(clusters)
    assert section is not None and not section.crisp
    (cod,), (eel,) = section.split, section.whole
    assert (cod.name, cod.count) == ("cod", 8) and [each.cluster for each in cod.clusters] == [2, 0]
    assert eel.name == "eel" and len(eel.clusters) == 1


def test_no_images_no_section() -> None:
    assert cluster_section([]) is None and cluster_section([make_cluster(0, "cod", 0)]) is None


@pytest.mark.parametrize(("n", "shown"), [(10, 150), (MAX_THUMBNAILS, 2)])
def test_many_clusters_show_few_thumbnails_each(n: int, shown: int) -> None:
    section = cluster_section([make_cluster(i, "cod", 1) for i in range(n)])
    assert section is not None and section.shown == shown


def test_order_of_examples() -> None:
    kinds = [
        ("caught", "near"),
        ("mistakes", "t"),
        ("missed", "far"),
        ("uncertain", "t"),
        ("missed", "near"),
        ("?", ""),
    ]
    sections = example_sections([Examples(kind, source, ()) for kind, source in kinds])
    assert [section.known for section in sections] == [True, True, False, False, False]
    assert [section.title.rpartition(" ")[2] for section in sections[2:]] == ["far", "near", "near"]
    assert "lowest" in sections[3].title and "highest" in sections[4].title
