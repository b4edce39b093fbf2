"""Paths that users write: the home folder, misspelt names, links, and the list of skipped images."""

from __future__ import annotations

from pathlib import Path

import pytest

from maple.errors import RunError, UsageError
from maple.files.paths import check_links, check_weights_file, expand_home, nearest_path, skipped_path, suggest_path


def test_the_home_folder_is_written_as_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/home/of-someone")
    assert expand_home("~/runs") == Path("/home/of-someone/runs")
    assert expand_home("~$a.png") == Path("~$a.png")
    assert expand_home("a~b") == Path("a~b")


def test_the_first_misspelt_part_is_corrected(tmp_path):
    (tmp_path / "slides" / "train").mkdir(parents=True)
    (tmp_path / ".slide").mkdir()
    assert nearest_path(tmp_path / "slide" / "train") == tmp_path / "slides" / "train"
    assert nearest_path(tmp_path / "slide" / "test") is None  # nor is it there under the right name
    assert nearest_path(tmp_path / "weights") is None
    assert nearest_path(tmp_path / "slides") is None
    (tmp_path / "file").touch()
    assert nearest_path(tmp_path / "file" / "below") is None


def test_a_missing_weights_file_is_named_with_its_neighbour(tmp_path):
    (tmp_path / "line3.pth").touch()
    check_weights_file(tmp_path / "line3.pth")
    with pytest.raises(UsageError) as raised:
        check_weights_file(tmp_path / "line4.pth")
    assert "line4.pth" in str(raised.value) and suggest_path(tmp_path / "line4.pth") in str(raised.value)
    assert str(tmp_path / "line3.pth") in str(raised.value)
    with pytest.raises(UsageError):
        check_weights_file(tmp_path)  # a folder


@pytest.mark.parametrize(("out", "listed"), [("p.csv", "p.skipped.csv"), ("a.b.parquet", "a.b.skipped.csv")])
def test_skipped_images_are_listed_beside_a_file(out, listed):
    assert skipped_path(Path("runs") / out) == Path("runs") / listed


def test_skipped_images_are_listed_in_a_folder():
    assert skipped_path(Path("runs/parts")) == Path("runs/parts/_skipped.csv")


@pytest.mark.parametrize("target", ["../secret.txt", "../other", "/dev/zero", "../missing", "gallery/../../secret.txt"])
def test_links_that_lead_out_are_named(target: str, tmp_path: Path) -> None:
    (tmp_path / "run" / "gallery").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "run" / "inside").symlink_to("gallery")
    check_links(tmp_path / "run")
    link = tmp_path / "run" / "gallery" / "x.png"
    link.symlink_to(target if target.startswith("/") else tmp_path / "run" / target)
    with pytest.raises(RunError, match=r"x\.png"):
        check_links(tmp_path / "run")


def test_runs_in_the_cache_of_the_hub_are_links_to_its_blobs(tmp_path: Path) -> None:
    run, blobs = tmp_path / "models--lab--a" / "snapshots" / "abc", tmp_path / "models--lab--a" / "blobs"
    run.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text("weights")
    (run / "weights.safetensors").symlink_to("../../blobs/1")
    check_links(run)
    (blobs / "1").unlink()
    (blobs / "1").symlink_to("/etc/hostname")
    with pytest.raises(RunError, match=r"weights\.safetensors"):
        check_links(run)
