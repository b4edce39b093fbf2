"""Requests: what they record of their sources, and where a run goes if no folder is named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from maple.errors import UsageError
from maple.runs.requests import FitRequest, TrainRequest
from maple.runs.setup.request import (
    LEFT_OUT,
    absolute_source,
    check_files,
    check_unknown,
    default_out,
    describe_request,
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("images", "held", "fc"):
        (tmp_path / name).mkdir()
    (tmp_path / "net.pth").touch()
    return tmp_path


def test_paths_of_a_training_hold_in_every_folder(here):
    asked = TrainRequest(
        source="images",
        out=Path("run"),
        data_root=Path("data"),
        test="cifar10/test",
        validation="held",
        init="resnet18",
        weights=Path("net.pth"),
        head="fc",
        class_names=("b", "a"),
        preset="finetune",
    )
    origin = describe_request(asked)
    assert (origin.source, origin.validation) == (str(here / "images"), str(here / "held"))
    assert (origin.data_root, origin.weights) == (str(here / "data"), str(here / "net.pth"))
    assert (origin.test, origin.init, origin.calibration) == ("cifar10/test", "resnet18", None)
    assert (origin.head, origin.preset) == ("fc", "finetune"), "names, even where a folder has the same"
    assert origin.classes == ("b", "a") and origin.model is None


def test_paths_of_a_fit_hold_in_every_folder(here):
    origin = describe_request(FitRequest(source="digits", out=Path("run"), model="net.pth", calibrate="held"))
    assert (origin.source, origin.model, origin.calibrate) == ("digits", str(here / "net.pth"), str(here / "held"))
    assert origin.classes is None and origin.weights is None


@pytest.mark.parametrize("prefix", ["", "corrupted:"])
def test_the_rest_of_a_source_stays(here, prefix):
    assert absolute_source(f"{prefix}images?family=fog" if prefix else "images") == (
        f"corrupted:{here / 'images'}?family=fog" if prefix else str(here / "images")
    )
    assert absolute_source(None) is None


def test_the_folder_of_a_run_is_named_after_its_images(here):
    np.savez(here / "few.npz", images=np.zeros((1, 8, 8, 3), np.uint8))
    assert default_out("few.npz") == Path("runs/few")
    assert default_out(f"images{os.sep}train") == Path("runs/images")


def test_unknown_images_that_are_missing_are_found_early(here):
    known = {"a": "images", "b": "digits", "c": LEFT_OUT, "d": "images/*.png"}
    check_unknown(TrainRequest(source="digits", out=Path("run"), ood=known))
    with pytest.raises(UsageError, match="nowhere"):
        check_unknown(TrainRequest(source="digits", out=Path("run"), ood={**known, "e": "nowhere"}))


def test_only_the_path_of_a_corrupted_source_is_made_absolute(here):
    (here / "c").mkdir()
    assert absolute_source("corrupted:c?family=fog") == f"corrupted:{here / 'c'}?family=fog"


@pytest.mark.parametrize("described", [{"head": "fc"}, {"weights": Path("net.pth")}])
@pytest.mark.parametrize("init", [None, "auto"])
def test_a_description_without_a_network_is_refused_before_torch_is_loaded(here, init, described):
    with pytest.raises(UsageError, match="give it with --init"):
        check_files(TrainRequest(source="digits", init=init, **described))
