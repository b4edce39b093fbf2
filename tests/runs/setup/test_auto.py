"""``--init auto``: the network with the best probe is taken and recorded, nothing is downloaded."""

from __future__ import annotations

import shutil
import tomllib
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from commands import flat, run
from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.networks._torchvision import import_extra
from maple.networks.pretrained import Pretrained
from maple.prediction.store import load_predictor
from maple.runs.setup import auto
from maple.runs.setup.auto import advertise_auto, choose_pretrained, linear_probe

pytestmark = [
    pytest.mark.skipif(find_spec("timm") is None, reason="needs timm"),
]
SHORT = ("--epochs", "1", "--batch-size", "256", "--size", "32", "--recipe", "cross-entropy")


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """Two networks of random weights in place of those on the machine; the second embeds every image alike."""
    torch.manual_seed(0)
    module = import_extra("timm").create_model("test_resnet", num_classes=7)
    found = []
    for name in ("good", "dead"):
        if name == "dead":
            torch.nn.init.zeros_(next(module.parameters()))  # the first layer sees nothing
        save_file(module.state_dict(), tmp_path / f"{name}.safetensors")
        found.insert(0, Pretrained("timm/test_resnet", tmp_path / f"{name}.safetensors"))
    monkeypatch.setattr(auto, "find_pretrained", lambda: found)
    return found


def test_the_probe_tells_embeddings_apart(rng):
    y = np.arange(300) % 3
    x = rng.normal(size=(300, 8)) + 3 * np.eye(8)[y]
    assert linear_probe(x[:150], y[:150], x[150:], y[150:], 3) > 0.9
    assert linear_probe(x[:150], y[:150], x[150:], rng.permutation(y[150:]), 3) < 0.6
    assert linear_probe(np.zeros((9, 4)), y[:9], np.zeros((9, 4)), y[:9], 3) == pytest.approx(1 / 3)


def test_the_best_network_is_taken_recorded_and_resumed(networks, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("train", "digits", "--init", "auto", *SHORT, "--out", out) == 0
    said = flat(capsys.readouterr().err)
    assert said.count("linear probe") == 2 and "--preset finetune" in said
    config = tomllib.loads((out / "config.toml").read_text())
    assert config["origin"]["init"] == config["model"]["backbone"] == "timm/test_resnet"
    assert config["origin"]["weights"] == str(tmp_path / "good.safetensors")
    for network in networks:
        network.weights.unlink()
    assert len(load_predictor(out).class_names) == 10  # without the original, and without trust
    copy = shutil.copytree(out, tmp_path / "copy")
    assert run("train", "digits", "--init", "auto", "--out", copy, "--resume") == 2  # it is finished
    assert "finished" in flat(capsys.readouterr().err)


def test_a_network_that_cannot_be_opened_is_passed_over(networks, tmp_path, capsys):
    splits = load_splits("digits", DataOptions(size=32))
    broken = next(network for network in networks if network.weights.stem == "good")
    broken.weights.write_bytes(b"broken")
    assert choose_pretrained(splits).network != broken
    assert "passes over" in flat(capsys.readouterr().err)


def test_without_a_network_the_request_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(auto, "find_pretrained", list)
    assert run("train", "digits", "--init", "auto", "--out", tmp_path / "run") == 2
    assert "--init auto" in flat(capsys.readouterr().err) and not (tmp_path / "run").exists()
    assert advertise_auto() == ""


@pytest.mark.parametrize("wrong", [("--backbone", "resnet18"), ("--weights", __file__), ("--head", "fc")])
def test_options_of_other_networks_are_refused(networks, tmp_path, capsys, wrong):
    assert run("train", "digits", "--init", "auto", *wrong, "--out", tmp_path / "run") == 2
    assert wrong[0] in flat(capsys.readouterr().err) and not (tmp_path / "run").exists()


def test_one_line_says_that_it_is_there(networks):
    assert (
        "--init auto" in advertise_auto() and "timm/test_resnet" in advertise_auto() and "1 other" in advertise_auto()
    )
