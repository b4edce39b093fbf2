"""``maple explain``: what it prints, and a page that is complete in itself, well-formed and safe with hostile names."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from commands import run as run_command
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.data.splits import load_splits
from maple.errors import UsageError
from maple.evaluation.evaluate import evaluate
from maple.files import load_json, save_json
from maple.networks import create_backbone, embed
from maple.prediction.explain import component_coordinates
from maple.prediction.predictor import fit_predictor, load_predictor
from maple.reporting.explanations import render_explanations
from maple.reporting.gallery import read_gallery, write_training_gallery
from maple.runs.explain import (
    MAX_IMAGES,
    explain_images,
    read_usual_distance,
    to_json,
    to_text,
)
from maple.types import Relabelling

HOSTILE = "<script>alert('x')</script>\x00"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on digits with a network as it starts: class 9 has two clusters, class 0 a hostile name."""
    splits = load_splits("digits")
    names = (HOSTILE, *splits.class_names[1:])
    train, validation, calibration = (
        ImageSet.from_arrays(part.pixels, part.labels, names, name="digits")
        for part in (splits.train, splits.validation, splits.calibration)
    )
    cluster_ids = train.labels.copy()
    cluster_ids[np.flatnonzero(train.labels == 9)[::2]] = 10
    cluster_to_class = np.array([*range(10), 9])
    relabelling = Relabelling(cluster_ids, cluster_to_class, cluster_to_class, np.r_[np.ones(9), 0.5, 0.5])
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 11).eval()
    predictor = fit_predictor(backbone, train, validation, calibration, relabelling=relabelling)
    folder = tmp_path_factory.mktemp("runs") / "digits"
    predictor.save(folder)
    outputs = embed(backbone, train, cluster_ids=cluster_ids, cluster_to_class=cluster_to_class)
    components = component_coordinates(predictor.detector.gaussians_, outputs.embeddings)
    write_training_gallery(folder / "gallery", train, outputs, components=components)
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three digits and a picture of noise, one of them with a hostile name."""
    folder = tmp_path / "new"
    folder.mkdir()
    test = load_splits("digits").test
    for i in range(3):
        Image.fromarray(test.pixels[i]).save(folder / f"{i}.png")
    noise = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    Image.fromarray(noise).save(folder / "<b>noise & co.png")
    return folder


# ---------------------------------------------------------------------------------------------------------------- text


def test_sentences_are_printed_for_every_image(run: Path, images: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_command("explain", run, images) == 0
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == 4
    for block in blocks:
        file, *sentences = block.split("\n  ")
        assert file.endswith(".png")
        assert sentences[0].startswith("Called ") and sentences[-1].split(":")[0].endswith("-distribution")


def test_explanations_agree_with_predictions(run: Path, images: Path) -> None:
    predictor = load_predictor(run)
    cases = explain_images(run, [str(images)])
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


def test_json_and_other_levels(run: Path, images: Path, capsys: pytest.CaptureFixture) -> None:
    assert run_command("explain", run, images, "--json", "--false-alarm", 0.9) == 0
    cases = json.loads(capsys.readouterr().out)
    assert len(cases) == 4 and {case["false_alarm"] for case in cases} == {0.9}
    for case in cases:
        total = sum(part["contribution"] for part in case["components"])
        assert total == pytest.approx(case["nearest"]["squared_distance"], rel=1e-9)
        assert case["is_ood"] == (case["p_value"] <= 0.9)
        assert case["score_by"] == "fused" and set(case["parts"]) == {"energy", "spread", "shallow", "distance"}
        assert sum(case["parts"].values()) == pytest.approx(case["score"], rel=1e-9)


def test_a_level_without_enough_calibration_images_decides_nothing(run: Path, images: Path) -> None:
    for case in explain_images(run, [str(images)], decision={"false_alarm": 1e-6}):
        assert "was not decided: the run has too few calibration images" in case.explanation.sentences()[-1]


def test_p_values_per_class_are_about_known_images_of_that_class(
    run: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("maple.decisions.calibration.MIN_CLASS_IMAGES", 10)
    for case in explain_images(run, [str(images)], decision={"per_class": True, "false_alarm": 0.1}):
        called = f"of known images called {case.explanation.class_name} look as unusual"
        assert called in case.explanation.sentences()[-1]


def test_usual_distance_is_that_of_most_test_images(run: Path, images: Path, tmp_path: Path) -> None:
    assert read_usual_distance(run) is None
    assert not explain_images(run, [str(images)])[0].explanation.is_measured
    evaluated = Path(shutil.copytree(run, tmp_path / "evaluated"))
    predictor, test = load_predictor(run), load_splits("digits").test.with_class_names([str(i) for i in range(10)])
    outputs = embed(predictor.backbone, test, cluster_to_class=predictor.cluster_to_class)
    (evaluated / "results.json").write_text(evaluate(predictor, outputs, {}).to_json())
    distances = predictor.detector.describe(outputs).squared_distance
    usual = read_usual_distance(evaluated)
    assert usual is not None
    assert abs((distances <= usual).sum() - 0.95 * len(distances)) <= 2
    found = explain_images(evaluated, [str(images)])[0].explanation
    assert found.is_measured and found.usual_distance == usual


def test_the_highest_scores_first(run: Path) -> None:
    cases = explain_images(run, ["digits"], limit=5)
    predictor = load_predictor(run)
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
def test_wrong_use(run: Path, arguments: list, words: str, capsys: pytest.CaptureFixture) -> None:
    assert run_command("explain", run, *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_files_that_are_no_images_are_named(run: Path, images: Path, capsys: pytest.CaptureFixture) -> None:
    (images / "broken.png").write_bytes(b"no image")
    assert run_command("explain", run, images) == 0
    captured = capsys.readouterr()
    assert "broken.png" in captured.err and "broken.png" not in captured.out


# ---------------------------------------------------------------------------------------------------------------- page


def check_page(path: Path) -> tuple[str, ElementTree.Element]:
    source = path.read_text(encoding="utf-8")
    page = ElementTree.fromstring(source.replace("<!DOCTYPE html>", ""))  # every element is closed, all text escaped
    tags = {element.tag for element in page.iter()}
    assert not tags & {"script", "link", "iframe", "object"}
    assert "default-src 'none'" in source and "@import" not in source
    assert not re.findall(r"url\((?!#|data:image/)", source)
    ids = [element.attrib["id"] for element in page.iter() if "id" in element.attrib]
    assert len(ids) == len(set(ids))
    links = {element.attrib["href"] for element in page.iter("a")}
    assert links <= {f"#{name}" for name in ids}
    return source, page


def words_of(element: ElementTree.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def test_page(run: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "deep" / "why.html"
    assert run_command("explain", run, images, "--out", path) == 0
    assert f"explanations: {path}" in capsys.readouterr().out
    source, page = check_page(path)
    cases = explain_images(run, [str(images)])
    sections = [section for section in page.iter("section") if section.attrib["id"].startswith("image-")]
    assert len(sections) == 4
    for case, section in zip(cases, sections):
        text = words_of(section)
        for sentence in case.explanation.sentences():
            assert " ".join(sentence.replace("\x00", "\ufffd").split()) in text
        assert len(list(section.iter("svg"))) == 1
        (picture,) = section.iter("img")
        assert picture.attrib["src"].startswith("data:image/") and picture.attrib["alt"] == case.file
        strips = [element for element in section.iter("ul") if element.attrib.get("class") == "strip"]
        n_components = len({*case.explanation.leading.tolist(), int(case.explanation.separation.argmax())})
        assert len(strips) == 2 + 2 * n_components  # nearest, runner-up; both ends of each component
        assert len(list(strips[0])) == 6
    assert source.count("<script") == 0
    used = set(re.findall(r'class="picture (p\d+)"', source))
    drawn = set(re.findall(r"^\.(p\d+) \{", source, re.MULTILINE))
    assert used == drawn  # each picture is there, and once
    assert path.stat().st_size < 400_000


def test_page_shows_the_exemplars_of_the_cluster_it_names(run: Path, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "why.html"
    cases = explain_images(run, [str(images)], path)
    _, page = check_page(path)
    exemplars = {cluster.cluster: cluster for cluster in read_gallery(run / "gallery").clusters}
    section = next(page.iter("section"))
    first = next(element for element in section.iter("ul") if element.attrib.get("class") == "strip")
    shown = [picture.attrib["title"] for picture in first.iter("span")]
    expected = exemplars[cases[0].explanation.nearest.cluster]
    assert [title.rpartition(": ")[2] for title in shown] == list(expected.files[:6])


def test_page_shows_what_the_score_is_made_of(run: Path, images: Path, tmp_path: Path) -> None:
    path = tmp_path / "why.html"
    cases = explain_images(run, [str(images)], path)
    _, page = check_page(path)
    sections = [section for section in page.iter("section") if section.attrib["id"].startswith("image-")]
    for case, section in zip(cases, sections):
        found = case.explanation
        (table,) = section.iter("table")
        rows = [[words_of(cell) for cell in row] for row in table.iter("tr")][1:]
        assert [heading.split()[0] for heading, *_ in rows] == [*found.parts, "score"]
        expected = [*found.parts.values(), found.score]
        assert [float(value.replace(",", "")) for _, value, _ in rows] == pytest.approx(expected, rel=1e-3, abs=0.06)
        bars = [bar for bar in table.iter("span") if bar.attrib["class"].startswith("bar")]
        widths = [int(bar.attrib["style"].removeprefix("width:").removesuffix("px")) for bar in bars]
        assert widths == [round(160 * part / found.score) for part in found.parts.values()]
        orange = [name for name, bar in zip(found.parts, bars) if bar.attrib["class"] == "bar out"]
        assert orange == ([found.most_unusual_part] if found.most_unusual_part else [])
    # The part called distance is not the squared distance that the page takes apart: the glossary tells them apart.
    assert "<em>distance</em>" in path.read_text()


def test_page_without_parts_has_no_table(run: Path, images: Path) -> None:
    cases = explain_images(run, [str(images)])
    bare = [replace(case, explanation=replace(case.explanation, parts={})) for case in cases]
    source = render_explanations(bare, run)
    assert "<table>" not in source and "<em>distance</em>" not in source


def test_equal_runs_give_equal_pages(run: Path, images: Path) -> None:
    cases = explain_images(run, [str(images)])
    assert render_explanations(cases, run) == render_explanations(cases, run)


def test_page_without_gallery(run: Path, images: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in run.glob("*.safetensors"):
        shutil.copy(path, bare)
    explain_images(bare, [str(images)], tmp_path / "why.html")
    _, page = check_page(tmp_path / "why.html")
    assert len(page.findall(".//p[@class='absent']")) == 8
    assert "training images at both ends" not in words_of(page)


def test_pictures_of_other_components_are_not_shown(run: Path, images: Path, tmp_path: Path) -> None:
    """The Gaussians may have been fitted again since the pictures were chosen."""
    changed = Path(shutil.copytree(run, tmp_path / "changed"))
    components = load_json(changed / "gallery" / "components.json")
    components["components"][0]["spread"] *= 1.1
    save_json(changed / "gallery" / "components.json", components)
    explain_images(changed, [str(images)], tmp_path / "why.html")
    _, page = check_page(tmp_path / "why.html")
    assert "training images at both ends" not in words_of(page) and "component 1" in words_of(page)


def test_only_known_file_types_are_written(run: Path, images: Path) -> None:
    with pytest.raises(UsageError, match=r"\.html"):
        explain_images(run, [str(images)], "why.txt")


def test_templates_are_part_of_the_package() -> None:
    for name in ("explain.html.j2", "style.css"):
        assert (files("maple.reporting") / "templates" / name).is_file()
