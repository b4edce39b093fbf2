"""Kinds, options and refusals of ``open_model``; rebuilding and saving."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from maple.data.image_set import ImageSet
from maple.detectors.maple import MapleDetector
from maple.errors import RunError, UsageError
from maple.networks import (
    create_backbone,
    embed,
    needs_weights,
    open_model,
    wrap_backbone,
)
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_backbone, save_backbone
from opening import N_CLASSES, Small, assert_survives, make_images, optional, traced


def save_folder(folder: Path, images: ImageSet) -> Path:
    """One subfolder per class."""
    for i, label in enumerate(images.labels):
        path = folder / images.class_names[label] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[i]).save(path)
    return folder


def test_folders_are_enough(tmp_path: Path) -> None:
    images = make_images(16, n=36)
    parts = [images.subset(np.arange(len(images)) // N_CLASSES % 3 == part) for part in range(3)]
    folders = [save_folder(tmp_path / name, part) for name, part in zip("abc", parts)]
    backbone = open_model("resnet9", n_classes=N_CLASSES)
    expected = fit_predictor(backbone, *parts)
    predictor = fit_predictor(backbone, *folders)
    assert predictor.class_names == ("0", "1", "2")
    np.testing.assert_allclose(predictor.calibration_scores, expected.calibration_scores, rtol=1e-6)
    files = [tmp_path / "c" / "1" / "1.png", tmp_path / "c" / "2" / "2.png"]  # of the third part, images 7 and 8
    np.testing.assert_allclose(predictor(files).score, expected(images.subset([7, 8])).score, rtol=1e-4)
    assert len(predictor(str(tmp_path / "c")).score) == 12
    again = predictor.calibrate(folders[2], false_alarm=0.2)
    np.testing.assert_allclose(again.calibration_scores, expected.calibration_scores, rtol=1e-6)
    assert len(again.calibration.set_scores) == 12


class Pairs(Dataset):
    """Images (3, S, S) in [0, 1] with labels."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images.pixels[i].transpose(2, 0, 1)).float() / 255, int(self.images.labels[i])


def test_a_detector_of_ones_own_makes_a_predictor() -> None:
    """A dataset of PyTorch in, and neither names nor sizes where the backbone knows them."""
    images = make_images(16)
    backbone = open_model("resnet9", n_classes=N_CLASSES, size=16)
    outputs, expected = embed(backbone, Pairs(images), batch_size=8), embed(backbone, images)
    np.testing.assert_allclose(outputs.embeddings, expected.embeddings, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs.labels, images.labels)
    done: list[tuple[int, int]] = []
    chosen = embed(
        backbone,
        Pairs(images),
        indices=np.array([9, 4]),
        cluster_ids=np.arange(30),
        cluster_to_class=np.arange(30) % N_CLASSES,
        progress=lambda *counts: done.append(counts),
    )
    np.testing.assert_allclose(chosen.embeddings, expected.embeddings[[9, 4]], rtol=1e-5, atol=1e-6)
    assert chosen.cluster_ids.tolist() == [9, 4] and chosen.labels.tolist() == [0, 1] and done == [(2, 2)]
    predictor = Predictor(backbone, MapleDetector().fit(outputs)).calibrate(DataLoader(Pairs(images), 7))
    assert predictor.class_names == ("0", "1", "2") and predictor.size == 16
    assert predictor(Pairs(images)).class_id.shape == (30,)
    with pytest.raises(UsageError, match="size="):
        Predictor(open_model("resnet9", n_classes=N_CLASSES), predictor.detector)
    with pytest.raises(UsageError, match="open_images"):
        embed(backbone, "folder")


def test_own_networks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create_backbone("resnet9", 4)
    state = {key.removeprefix("body."): value for key, value in network.state_dict().items() if key.startswith("body")}
    torch.save(state | {"fc.weight": network.head.weight, "fc.bias": network.head.bias}, tmp_path / "w.pth")
    backbone = open_model("resnet9", weights=tmp_path / "w.pth")
    assert backbone.head.out_features == 4 and backbone.origin is None
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(backbone(x)[1], network.eval()(x)[1])
    headless = open_model("resnet9", weights=tmp_path / "w.pth", drop_head=True)
    again = assert_survives(headless, tmp_path / "run", 16)
    assert again.head is None


def test_a_head_may_have_grown_since(zoo: str, tmp_path: Path) -> None:
    backbone = open_model(f"python:{zoo}:make", trust=True)
    backbone.head = nn.Linear(10, 5, bias=False)
    backbone.embedding_layer, backbone.embedding_size = nn.Linear(24, 10), 10
    save_backbone(tmp_path / "weights.safetensors", backbone)
    again = load_backbone(tmp_path / "weights.safetensors", trust=True)
    x = torch.rand(2, 3, 16, 16)
    assert again.embedding_size == 10
    torch.testing.assert_close(again(x), backbone(x))


def test_weights_of_another_network(tmp_path: Path) -> None:
    optional("timm")
    state = create_backbone("resnet20", 4).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w.safetensors")
    for spec, message in (("timm/resnet18", "--classes"), ("resnet32", "resnet32")):
        with pytest.raises(UsageError, match=message):
            open_model(spec, weights=tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"head\.bias"):
        open_model("resnet20", weights=tmp_path / "w.safetensors", n_classes=5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm/resnet81", "timm/resnet18"),
        ("timm/hf-hub:someone/theirs", "someone"),
        ("torchvision/resnet81", "torchvision/resnet18"),
        ("resnet81", "resnet18.*timm/NAME"),
        ("nowhere/net.pt2", "nowhere/net.pt2"),
        ("wrn-27-10", "wrn-27-10"),
    ],
)
def test_unknown_names(spec: str, message: str) -> None:
    if "/" in spec and not spec.startswith("nowhere"):
        optional(spec.partition("/")[0])
    with pytest.raises(UsageError, match=message):
        open_model(spec, n_classes=3)


def test_nothing_runs_code_unless_trusted(tmp_path: Path) -> None:
    path = str(traced(Small(), tmp_path / "net.pt"))
    with pytest.raises(UsageError, match=r"net.pt.*--trust"):
        open_model(path)
    torch.save(Small(), tmp_path / "whole.pth")
    with pytest.raises(UsageError, match=r"whole.pth"):
        open_model("resnet9", weights=tmp_path / "whole.pth")
    with pytest.raises(UsageError, match=r"whole.pth.*--weights"):
        open_model(str(tmp_path / "whole.pth"), trust=True)


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    path = str(traced(Small(), tmp_path / "net.pt"))
    for options, message in (
        ({"weights": path}, "--weights"),
        ({"shallow": "conv"}, "shallow"),
        ({"n_classes": 5}, "--classes"),
        ({"size": 2, "mean": (1, 2)}, "mean"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(path, trust=True, **options)
    with pytest.raises(UsageError, match="resnet9"):
        open_model("resnet9")
    assert needs_weights("resnet9") and not needs_weights(path)


def test_a_wrapped_module_without_origin_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"python:package\.module:function"):
        save_backbone(tmp_path / "weights.safetensors", wrap_backbone(Small()))
    assert not list(tmp_path.iterdir())


def test_a_run_and_a_missing_file_are_no_networks(tmp_path):
    (tmp_path / "config.toml").touch()
    with pytest.raises(UsageError, match=rf"--init '{tmp_path}'"):
        open_model(str(tmp_path))
    with pytest.raises(UsageError, match=r"nosuch\.onnx.*check the path"):
        open_model("nosuch.onnx")
