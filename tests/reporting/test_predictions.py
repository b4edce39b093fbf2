"""Prediction files in the report: every format, large sets, missing numbers, and files of another kind."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from maple.errors import DataError
from maple.files import to_csv
from maple.reporting.predictions import describe_sets, read_predictions, read_previews
from maple.reporting.report import write_report
from maple.runs.predicting.writer import to_json_lines
from run_folders import HOSTILE, Page, check_page, write_predictions

pytestmark = pytest.mark.usefixtures("no_plots")


def test_a_folder_of_images_holds_no_predictions(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "new" / "a.png")
    with pytest.raises(DataError, match="maple predict"):
        read_predictions(tmp_path / "new")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_predictions_are_counted_and_sorted(suffix: str, tmp_path: Path) -> None:
    found = read_predictions(write_predictions(tmp_path / f"p{suffix}", rows=30), keep=7)
    assert found.n_images == found.n_decided == 30
    assert found.counts == {"class 0": 10, "class 1": 10, "class 2": 10}
    assert found.n_flagged == found.n_reasons["unknown"] == 5  # p-value below 0.2
    assert [row.p_value for row in found.rows["unknown"]] == pytest.approx([(1 + i) / 30 for i in range(5)])
    assert [row.p_value for row in found.rows[None]] == pytest.approx(
        [(6 + i) / 30 for i in range(7)]
    )  # equal probabilities
    assert all(row.is_ood for row in found.rows["unknown"])


def test_images_to_look_at_are_listed_by_reason_p_value_and_probability(tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.jsonl", rows=200)
    rows = [json.loads(line) | {"p_value": 0.5, "is_ood": False} for line in path.read_text().splitlines()]
    rows[3] |= {"is_ood": True, "p_value": 0.03, "probability": 0.2}
    rows[4] |= {"is_ood": True, "p_value": 0.01, "probability": 0.99}
    rows[5] |= {"is_ood": True, "p_value": 0.01, "probability": 0.6}
    rows[6] |= {"probability": 0.5, "class": "seldom"}
    rows[7] |= {"probability": 0.6, "p_value": 0.3}
    rows[8] |= {"class": "seldom"}
    path.write_text(to_json_lines(rows))
    found = read_predictions(path)
    listed = {reason: [int(Path(row.file).stem) for row in kept] for reason, kept in found.rows.items()}
    assert listed | {None: []} == {"unknown": [5, 4, 3], "doubtful": [6, 7], "rare": [8], None: []}
    assert found.n_reasons == {"unknown": 3, "doubtful": 2, "rare": 1, None: 194} and len(listed[None]) == 100


def test_prediction_section(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html", write_predictions(tmp_path / "p.csv", rows=300)))
    check_page(page)
    assert "p.csv: 300 images, 59 (19.7 %)" in page.text
    assert "39 more" in page.text and "59 of 59" in page.text and "100 of 241" in page.text
    section = page.source.partition('id="predictions"')[2].partition("</section>")[0]
    headings = re.findall(
        r"<th[^>]*>(?:<span[^>]*>)?([^<]+)<", section.partition('class="predictions"')[2].partition("</thead>")[0]
    )
    assert headings == ["class", "probability", "decision", "p-value", "score", "file"]
    assert "uncertainty" not in section


def test_skipped_images_are_counted(run: Path, tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.csv", rows=30)
    assert read_predictions(path).n_skipped == 0
    (tmp_path / "p.skipped.csv").write_text("file,reason\nnotes.txt,no image\n'a, b.png',empty\n".replace("'", '"'))
    assert read_predictions(path).n_skipped == 2
    text = Page(write_report(run, tmp_path / "r.html", path)).text
    assert "2 files could not be used" in text and "p.skipped.csv" in text


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
    found = read_predictions(path)
    assert found.set_sizes == {1: 14, 2: 5, 20_000: 1}
    page = Page(write_report(run, tmp_path / "r.html", path))
    check_page(page)
    assert describe_sets(found.set_sizes) in page.text
    assert f"class 1, {HOSTILE}" in page.text and "long name 4 and 19,995 more" in page.text
    assert "rediction set" not in Page(write_report(run, tmp_path / "r.html", plain)).text


def test_sizes_of_sets_in_a_sentence() -> None:
    sentence = describe_sets(Counter({1: 14, 2: 5, 20_000: 1}))
    assert "70 %" in sentence and "20,000 classes" in sentence and describe_sets(Counter()) == ""


def test_predicted_images_are_shown_where_they_lie(run: Path, tmp_path: Path) -> None:
    (tmp_path / "slides").mkdir()
    Image.new("RGB", (40, 20), "red").save(tmp_path / "slides" / "29.png")
    (tmp_path / "slides" / "3.png").write_bytes(b"not an image")
    predictions = write_predictions(tmp_path / "p.csv")
    assert {file: image.shape for file, image in read_previews(read_predictions(predictions)).items()} == {
        "slides/29.png": (96, 96, 3)
    }
    page = Page(write_report(run, tmp_path / "r.html", predictions))
    check_page(page)
    assert [image["alt"] for image in page.all("img") if image["alt"].startswith("slides/")] == ["slides/29.png"]


def test_missing_numbers(run: Path, tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.csv", p_value="nan", score="", uncertainty="nan")
    check_page(Page(write_report(run, tmp_path / "r.html", path)))
    assert read_predictions(path).n_images == 30


def test_predictions_without_calibration_are_not_called_known(run: Path, tmp_path: Path) -> None:
    path = write_predictions(tmp_path / "p.csv", p_value="nan", is_ood="False")
    found = read_predictions(path)
    assert found.n_decided == 0 and "calibration" in found.verdict
    page = write_report(run, tmp_path / "r.html", path).read_text()
    section = page.partition('id="predictions"')[2].partition("</section>")[0]
    assert ">known<" not in section and "<td>–</td>" in section


def test_no_predictions_at_all(run: Path, tmp_path: Path) -> None:
    page = Page(write_report(run, tmp_path / "r.html", write_predictions(tmp_path / "p.csv", rows=0)))
    check_page(page)
    assert "p.csv: 0 images" in page.text


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("a.csv", b"file,class\nx.png,a\n", r"a\.csv.*probability, is_ood, p_value"),
        ("b.jsonl", b"not json\n", r"b\.jsonl"),
        ("c.jsonl", b"[1, 2]\n", r"c\.jsonl.*file"),
        ("d.parquet", b"not Parquet", r"d\.parquet"),
        ("e.csv", b"\xff\xfe\x00", r"e\.csv"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, content: bytes, named: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=named):
        read_predictions(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv"):
        read_predictions(tmp_path / "none.csv")


def test_a_missing_file_says_what_to_give(tmp_path):
    with pytest.raises(DataError, match=r"nosuch\.csv.*maple predict"):
        read_predictions(tmp_path / "nosuch.csv")
