"""Saved predictors: the same answers after loading, and refusals."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from maple.decisions.options import DecisionOptions
from maple.errors import RunError, UsageError
from maple.files import load_arrays, save_arrays
from maple.networks import create_backbone, wrap_backbone
from maple.prediction.fit import fit_predictor
from maple.prediction.store import load_backbone, load_predictor, save_backbone
from maple.types import Relabelling


def test_saved_and_loaded_predict_the_same(backbone, whole, tmp_path):
    ids = whole.train.labels.copy()
    rows = np.flatnonzero(ids == 9)
    ids[rows[::2]] = 10
    mapping = np.array([*range(10), 9])
    relabelling = Relabelling(ids, mapping, mapping, np.r_[np.ones(9), 0.5, 0.5])
    torch.manual_seed(1)
    grown = create_backbone("resnet9", 11, embedding_size=24)
    options = DecisionOptions(false_alarm=0.1, confidence=0.8, per_class=True)
    before = fit_predictor(
        grown, whole.train, whole.validation, whole.calibration, relabelling=relabelling, options=options
    )
    before.save(tmp_path)
    after = load_predictor(tmp_path)
    a, b = before(whole.test), after(whole.test)
    for name in ("class_id", "probabilities", "score", "p_value", "is_ood", "cluster", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    np.testing.assert_array_equal(before.prediction_sets(a, 0.9), after.prediction_sets(b, 0.9))
    assert after.options == options and after.decision.describe() == before.decision.describe()
    assert after.class_names == whole.class_names


def test_weights_of_another_network_are_refused(backbone, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_backbone(path, backbone)
    assert isinstance(load_backbone(path).head, torch.nn.Linear)
    arrays, metadata = load_arrays(path)
    save_arrays(path, arrays, {**metadata, "backbone": "resnet18"})
    with pytest.raises(RunError, match="does not fit"):
        load_backbone(path)


@pytest.mark.parametrize(
    "lie",
    [
        {"n_outputs": 10**10},
        {"embedding_size": 10**10},
        {"backbone": "wrn-994-64"},
        {"backbone": "wrn-600004-1"},
        {"made_by": {"recipe": "maple", "options": {}, "n_outputs": 10**10}},
        {"made_by": {"recipe": "ensemble", "options": {"members": 4}, "n_outputs": 4, "embedding_size": 10**10}},
        pytest.param(
            {"origin": {"kind": "timm", "spec": "timm/eva_giant_patch14_224", "n_classes": 3, "head": "head"}},
            marks=pytest.mark.skipif(find_spec("timm") is None, reason="needs timm"),
        ),
    ],
)
def test_a_small_file_cannot_ask_for_a_huge_network(lie, backbone, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_backbone(path, backbone)
    arrays, metadata = load_arrays(path)
    headless = {name: array for name, array in arrays.items() if not name.startswith("head.")}
    save_arrays(path, headless if "made_by" in lie else arrays, {**metadata, **lie})
    with pytest.raises((RunError, UsageError), match=r"more than .* weights|too large"):
        load_backbone(path)


def test_a_wrapped_module_is_not_saved_as_a_run_that_cannot_be_loaded(whole, tmp_path):
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    wrapped = wrap_backbone(module, example=torch.rand(2, 3, 8, 8))
    predictor = fit_predictor(wrapped, whole.train, whole.validation, whole.calibration)
    with pytest.raises(RunError, match="create_backbone"):
        predictor.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(RunError, match="nowhere"):
        load_predictor(tmp_path / "nowhere")


def test_folders_without_a_finished_run_are_told_apart(tmp_path):
    with pytest.raises(RunError, match=r"'hf://me/plankton@v1' is on the hub.*--revision v1 --local-dir plankton"):
        load_predictor(Path("hf://me/plankton@v1"))
    with pytest.raises(RunError, match=rf"'{tmp_path}' is not a run folder.*config\.toml"):
        load_predictor(tmp_path)
    (tmp_path / "config.toml").touch()
    with pytest.raises(RunError, match=r"detector\.safetensors.*--resume"):
        load_predictor(tmp_path)
