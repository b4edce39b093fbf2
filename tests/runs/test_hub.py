"""Runs on the Hugging Face Hub: pushed to and loaded from a hub on this machine, through huggingface_hub itself."""

from __future__ import annotations

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from commands import flat, run
from exported import fit_pictures, pictures
from hub_server import TOKEN, serving_hub
from maple.errors import RunError, UsageError
from maple.files import load_arrays, save_arrays
from maple.networks import create_backbone
from maple.prediction.store import load_predictor
from maple.reporting.gallery import read_gallery
from maple.reporting.gallery.write import write_examples
from maple.runs.folder import RunFolder
from maple.runs.hub import LIMITS, HubPlace, _outgoing
from maple.runs.hub_card import write_card
from processes import MAPLE, Forked

pytest.importorskip("huggingface_hub")


class Ended(NamedTuple):
    stdout: str
    stderr: str
    returncode: int


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run as ``maple train`` leaves it, with images in its gallery."""
    folder = tmp_path_factory.mktemp("hub") / "run"
    torch.manual_seed(0)
    predictor = fit_pictures(create_backbone("resnet9", 4))
    predictor.save(folder)
    origin = 'format = 2\nsource = "/secret/place/pictures"\ncommand = "maple train /secret/place/pictures"'
    (folder / "config.toml").write_text(f'[origin]\n{origin}\n\n[data]\nfit = "pad"\n')
    classes = {"format": 2, "classes": ["a", "b", "c", "d"], "skipped": [["/secret/place/x.png", "broken"]]}
    (folder / "classes.json").write_text(json.dumps(classes))
    (folder / "report.html").write_text("<script>")
    (folder / "gallery").mkdir()
    (folder / "gallery" / "clusters.5f48abfe.png").write_bytes(b"an image")
    return folder


@pytest.fixture
def hub():
    with serving_hub() as hub:
        yield hub


@pytest.fixture
def maple_at(hub, tmp_path):
    """Run code, or a command, in a process of its own, with this hub and an empty cache."""

    def call(code: str, *arguments: object, token: str = TOKEN, **more: str) -> Ended:
        environment = {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": token, **more,
        }  # fmt: skip
        process = Forked(code, *arguments, cwd=tmp_path, **environment)
        return Ended(*process.communicate(), process.returncode)

    return call


LOAD = """
import sys, numpy as np, maple
predictor = maple.load(sys.argv[1])
np.save("score.npy", predictor(np.load("images.npy")).score)
"""


def test_a_run_goes_there_and_back(run_folder, hub, maple_at, tmp_path):
    from maple.prediction.store import load_predictor

    said = maple_at(MAPLE, "push", run_folder, "hf://lab/pictures", "--json")
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    files = hub.find("lab/pictures", "main")[1]
    wanted = {
        "weights.safetensors",
        "detector.safetensors",
        "manifest.json",
        "config.toml",
        "classes.json",
        "README.md",
    }
    assert set(files) == set(report["files"]) == wanted and not hub.private["lab/pictures"]
    assert not any(b"secret" in content for content in files.values())
    assert tomllib.loads(files["config.toml"].decode())["origin"]["source"] == "pictures"
    images = pictures(20, seed=9).pixels
    np.save(tmp_path / "images.npy", images)
    expected = load_predictor(run_folder)(images).score
    for place in ("hf://lab/pictures", report["place"]):
        (tmp_path / "score.npy").unlink(missing_ok=True)
        done = maple_at(LOAD, place, token="")
        assert done.returncode == 0, done.stderr
        np.testing.assert_array_equal(np.load(tmp_path / "score.npy"), expected)
    hub.asked.clear()
    again = maple_at(LOAD, "hf://lab/pictures", HF_HUB_OFFLINE="1")  # from the cache, nobody is asked
    assert again.returncode == 0 and hub.asked == [], again.stderr


def test_links_are_not_published(run_folder, tmp_path):
    folder, secret = shutil.copytree(run_folder, tmp_path / "run"), tmp_path / "id_rsa"
    secret.write_text("a key")
    (folder / "gallery" / "clusters.0.png").symlink_to(secret)
    with pytest.raises(RunError, match=r"clusters\.0\.png"):
        _outgoing(RunFolder(folder), HubPlace.parse("hf://lab/pictures"), gallery=True)


def test_weights_of_an_earlier_version_lose_the_folder_of_their_network(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    arrays, metadata = load_arrays(folder / "weights.safetensors")
    stored = metadata | {"backbone": "/secret/vit", "origin": {"kind": "huggingface", "spec": "/secret/vit"}}
    save_arrays(folder / "weights.safetensors", arrays, stored)
    sent = _outgoing(RunFolder(folder), HubPlace.parse("hf://lab/pictures"), gallery=False)["weights.safetensors"]
    assert b"secret" not in sent and b"vit" in sent
    (tmp_path / "sent.safetensors").write_bytes(sent)
    again = load_arrays(tmp_path / "sent.safetensors")[0]
    assert all((again[name] == arrays[name]).all() for name in arrays)


def content(sent: dict[str, bytes | str]) -> dict[str, bytes]:
    return {name: each if isinstance(each, bytes) else Path(each).read_bytes() for name, each in sent.items()}


@pytest.mark.parametrize(
    ("origin", "given"),
    [
        ({"kind": "onnx", "spec": "/secret/net.onnx", "file": "net.onnx"}, "../secret/net.onnx"),  # of maple fit
        (None, "/secret/runs/first"),  # of maple train --init RUN
    ],
)
def test_no_path_of_this_machine_is_published(origin, given, run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    arrays, metadata = load_arrays(folder / "weights.safetensors")
    stored = metadata | {"origin": origin} | ({"backbone": origin["spec"]} if origin else {})
    save_arrays(folder / "weights.safetensors", arrays, stored)
    (folder / "config.toml").write_text(f'[origin]\nformat = 3\n[model]\nbackbone = "{given}"\n[train]\nseed = 3\n')
    sent = content(_outgoing(RunFolder(folder), HubPlace.parse("hf://lab/pictures"), gallery=True))
    assert not any(b"secret" in each for each in sent.values())
    config = tomllib.loads(sent["config.toml"].decode())
    assert config["model"]["backbone"] == ("net.onnx" if origin else "resnet9") and config["train"]["seed"] == 3


def test_the_gallery_goes_without_the_folders_of_its_images(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    images = replace(pictures(6), files=tuple(f"/secret/place/{i}.png" for i in range(6)))
    prediction = load_predictor(folder)(images.pixels)
    for source in ("near", "/secret/set"):  # as --ood near=FOLDER, and as --near FOLDER
        write_examples(folder / "gallery", "caught", images, prediction, source=source)
    sent = content(_outgoing(RunFolder(folder), HubPlace.parse("hf://lab/pictures"), gallery=True))
    assert not any("secret" in name or b"secret" in each for name, each in sent.items())
    (back := tmp_path / "back").mkdir()
    for name in (name for name in sent if name.startswith("gallery/")):
        (back / Path(name).name).write_bytes(sent[name])
    (examples,) = read_gallery(back).examples
    assert {each.file for each in examples.images} == {f"{i}.png" for i in range(6)}


def test_a_network_with_a_name_keeps_it(run_folder, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    arrays, metadata = load_arrays(folder / "weights.safetensors")
    stored = metadata | {"origin": {"kind": "timm", "spec": "convnext_tiny"}, "backbone": "convnext_tiny"}
    save_arrays(folder / "weights.safetensors", arrays, stored)
    (folder / "config.toml").write_text('[origin]\nformat = 3\n[model]\nbackbone = "timm/convnext_tiny"\n')
    sent = _outgoing(RunFolder(folder), HubPlace.parse("hf://lab/pictures"), gallery=False)
    assert tomllib.loads(sent["config.toml"].decode())["model"]["backbone"] == "timm/convnext_tiny"


def test_the_card_is_one(run_folder, hub, maple_at):
    from huggingface_hub import ModelCard

    maple_at(MAPLE, "push", run_folder, "hf://lab/pictures")
    card = ModelCard(hub.find("lab/pictures", "main")[1]["README.md"].decode())
    assert card.data.library_name == "maple" and card.data.pipeline_tag == "image-classification"
    assert 'maple.load("hf://lab/pictures")' in card.text and "a, b, c, d" in card.text and "5 %" in card.text


def test_only_files_of_a_run_are_fetched(run_folder, hub, maple_at, tmp_path):
    maple_at(MAPLE, "push", run_folder, "hf://lab/pictures@v2", "--gallery", "--private")
    _, files = hub.find("lab/pictures", "v2")
    assert hub.private["lab/pictures"] and "gallery/clusters.5f48abfe.png" in files
    assert "weights.safetensors" not in hub.find("lab/pictures", "main")[1]
    files |= {
        "setup.py": b"x",
        "network/evil.pt": b"x",
        "gallery/a.html": b"x",
        "weights.bin": b"x",
        "report.html": b"",
    }
    np.save(tmp_path / "images.npy", pictures(4).pixels)
    hub.asked.clear()
    assert maple_at(LOAD, "hf://lab/pictures@v2").returncode == 0
    fetched = {line.rpartition("/")[2] for line in hub.asked if line.startswith("GET /lab")}
    safe = {"weights.safetensors", "detector.safetensors", "manifest.json", "config.toml", "classes.json"}
    safe |= {"clusters.5f48abfe.png"}
    assert fetched == safe
    # Without the gallery, that of the earlier commit goes; what is not of a run stays.
    maple_at(MAPLE, "push", run_folder, "hf://lab/pictures@v2")
    now = hub.find("lab/pictures", "v2")[1]
    assert "gallery/clusters.5f48abfe.png" not in now and "setup.py" in now


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ("hf://lab/nowhere", "hf://lab/nowhere"),
        ("hf://lab/pictures@lost", "'lost'"),
        ("hf://lab/empty", "weights.safetensors"),
        ("hf://lab/large", "larger than"),
    ],
)
def test_what_cannot_be_loaded_is_a_sentence(run_folder, hub, maple_at, tmp_path, place, named):
    np.save(tmp_path / "images.npy", pictures(4).pixels)
    for name in ("pictures", "empty", "large"):
        hub.create(f"lab/{name}")
    hub.commit("lab/large", "main", {"weights.safetensors": b"", "detector.safetensors": b"", "config.toml": b""})
    hub.sizes["config.toml"] = LIMITS["config.toml"] + 1
    done = maple_at(LOAD, place)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("maple.errors.RunError: ") and named in last, done.stderr
    assert not [line for line in hub.asked if "/resolve/" in line]


def test_without_a_token_nothing_is_written(run_folder, hub, maple_at):
    done = maple_at(MAPLE, "push", run_folder, "hf://lab/pictures", token="wrong")
    assert done.returncode == 1 and "HF_TOKEN" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert hub.commits == {}


def test_a_hub_that_does_not_answer_is_a_sentence(run_folder, maple_at):
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    pushed = maple_at(MAPLE, "push", run_folder, "hf://lab/pictures", **nowhere)
    assert pushed.returncode == 1 and len(pushed.stderr.splitlines()) == 1, pushed.stderr
    loaded = maple_at("import sys, maple; maple.load(sys.argv[1])", "hf://lab/pictures", **nowhere)
    for done in (pushed, loaded):
        assert "cannot reach the hub for 'hf://lab/pictures'" in done.stderr and "HF_HUB_OFFLINE" in done.stderr
    assert "maple.errors.RunError" in loaded.stderr


def test_wrong_places_and_runs_are_refused_before_the_hub_is_asked(run_folder, tmp_path, capsys):
    for text in ("hf://name", "hf://a/b/c", "hf:/a/b", "hf://../b", "hf://a/b@", "s3://a/b"):
        with pytest.raises(UsageError, match="hf://ORG/NAME"):
            HubPlace.parse(text)
    assert run("push", run_folder, "elsewhere") == 2
    assert run("push", tmp_path, "hf://a/b") == 1
    assert str(tmp_path.name) in flat(capsys.readouterr().err)


def test_names_of_classes_are_text_in_the_card(run_folder, monkeypatch):
    import maple.runs.hub_card as module

    monkeypatch.setattr(module, "load_arrays", lambda path: ({}, DETECTOR if "detector" in str(path) else NETWORK))
    assert "a\\|b\\<script\\>" in write_card(run_folder, "hf://lab/x")


DETECTOR = {"class_names": ["a|b<script>\n"], "size": 8, "fit": "pad", "options": {"false_alarm": 0.05}}
NETWORK = {"backbone": "resnet9"}
