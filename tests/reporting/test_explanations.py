"""The page of explanations: self-contained, well-formed and safe with hostile names."""

from __future__ import annotations

import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from browser import open_browser
from commands import run
from maple.files import load_json, save_json
from maple.prediction.store import load_predictor
from maple.reporting.explanations import render_explanations
from maple.reporting.gallery import read_gallery
from maple.runs.predicting.explain import explain_images
from maple.runs.requests import ExplainRequest


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


def test_page(explained_run: Path, new_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "deep" / "why.html"
    assert run("explain", explained_run, new_images, "--out", path) == 0
    assert f"explanations: {path}" in capsys.readouterr().out
    source, page = check_page(path)
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)]))
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


def test_page_shows_the_exemplars_of_the_cluster_it_names(
    explained_run: Path, new_images: Path, tmp_path: Path
) -> None:
    path = tmp_path / "why.html"
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)], path))
    _, page = check_page(path)
    exemplars = {cluster.cluster: cluster for cluster in read_gallery(explained_run / "gallery").clusters}
    section = next(page.iter("section"))
    first = next(element for element in section.iter("ul") if element.attrib.get("class") == "strip")
    shown = [picture.attrib["title"] for picture in first.iter("span")]
    expected = exemplars[cases[0].explanation.nearest.cluster]
    assert [title.rpartition(": ")[2] for title in shown] == list(expected.files[:6])


def test_long_names_fit_narrow_screens_and_unknown_images_say_so_first(
    explained_run: Path, new_images: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(explained_run, tmp_path / "run")
    predictor = load_predictor(folder)
    predictor.class_names = tuple(f"copepod_calanoid_with_eggs_lateral_no_{i:02d}" for i in range(10))
    predictor.save(folder)
    path = tmp_path / "why.html"
    cases = explain_images(ExplainRequest(folder, [str(new_images)], path))
    _, page = check_page(path)
    headings = [words_of(each) for each in page.iter("h2") if words_of(each) != "Glossary"]
    assert {case.explanation.is_ood for case in cases} == {False, True}
    for case, heading in zip(cases, headings, strict=True):
        assert heading.startswith("unknown, otherwise" if case.explanation.is_ood else case.explanation.class_name)
    with open_browser() as browser:
        for width in (420, 1400, 1920):
            shown = browser.new_page(viewport={"width": width, "height": 900})
            shown.goto(path.as_uri())
            assert shown.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), width


def test_page_shows_what_the_score_is_made_of(explained_run: Path, new_images: Path, tmp_path: Path) -> None:
    path = tmp_path / "why.html"
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)], path))
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
        widths = [float(re.findall(r"calc\(([.\d]+) \* var\(--bar\)\)", bar.attrib["style"])[0]) for bar in bars]
        assert widths == pytest.approx([part / found.score for part in found.parts.values()], abs=6e-4)
        orange = [name for name, bar in zip(found.parts, bars) if bar.attrib["class"] == "bar out"]
        assert orange == ([found.most_unusual_part] if found.most_unusual_part else [])
    # The part called distance is not the squared distance that the page takes apart: the glossary tells them apart.
    assert "<em>distance</em>" in path.read_text()


def test_page_without_parts_has_no_table(explained_run: Path, new_images: Path) -> None:
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)]))
    bare = [replace(case, explanation=replace(case.explanation, parts={})) for case in cases]
    source = render_explanations(bare, explained_run)
    assert "<table>" not in source and "<em>distance</em>" not in source


def test_equal_runs_give_equal_pages(explained_run: Path, new_images: Path) -> None:
    cases = explain_images(ExplainRequest(explained_run, [str(new_images)]))
    assert render_explanations(cases, explained_run) == render_explanations(cases, explained_run)


def test_page_without_gallery(explained_run: Path, new_images: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in explained_run.glob("*.safetensors"):
        shutil.copy(path, bare)
    explain_images(ExplainRequest(bare, [str(new_images)], tmp_path / "why.html"))
    _, page = check_page(tmp_path / "why.html")
    assert len(page.findall(".//p[@class='absent']")) == 8
    assert "training images at both ends" not in words_of(page)


def test_pictures_of_other_components_are_not_shown(explained_run: Path, new_images: Path, tmp_path: Path) -> None:
    """The Gaussians may have been fitted again since the pictures were chosen."""
    changed = Path(shutil.copytree(explained_run, tmp_path / "changed"))
    components = load_json(changed / "gallery" / "components.json")
    components["components"][0]["spread"] *= 1.1
    save_json(changed / "gallery" / "components.json", components)
    explain_images(ExplainRequest(changed, [str(new_images)], tmp_path / "why.html"))
    _, page = check_page(tmp_path / "why.html")
    assert "training images at both ends" not in words_of(page) and "component 1" in words_of(page)
