"""The comparison with pytorch-ood: networks in stages equal the public ones, outputs are cached, rows are resumed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(ROOT / "benchmarks"))
import peers  # noqa: E402
import public  # noqa: E402
from public_study import make_study  # noqa: E402


@pytest.mark.parametrize("name", ["densenet-cifar10", "wrn-cifar100"])
def test_stages_give_the_logits_of_the_public_network(name, shared_dir):
    network, _, _ = public.load_network(name, shared_dir)
    kind, data = name.split("-")
    original, mean, std = public.load_public(shared_dir).load(public.FILES[kind].format(data))
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    x = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(network(x), original(x))


def test_every_output_detector_of_pytorch_ood_gets_a_row_once(theirs, tmp_path, monkeypatch):
    rows = tmp_path / "peers.json"
    study = make_study(tmp_path)
    peers.measure(study, theirs, 0, rows)
    found = json.loads(rows.read_text())["rows"]
    names = [row["detector"] for row in found]
    assert len(set(names)) == len(names) and sum(row["by"] != "maple" for row in found) == 24
    assert all(0 <= row["mean"] <= 1 for row in found)
    parts = sorted(study.cache.rglob("*.safetensors"))
    assert len(parts) == 5
    again = make_study(tmp_path)
    monkeypatch.setattr(public, "embed", lambda *_, **__: pytest.fail("outputs in the cache are not computed again"))
    peers.measure(again, theirs, 0, rows)
    assert json.loads(rows.read_text())["rows"] == found


def test_bfloat16_outputs_are_close_and_cached_apart(tmp_path):
    exact, half = (make_study(tmp_path, precision=name).outputs["test"] for name in ("32-true", "bf16-mixed"))
    assert len(list((tmp_path / "cache").iterdir())) == 2
    assert exact.logits.dtype == half.logits.dtype == np.float32
    assert 0 < np.abs(exact.embeddings - half.embeddings).max() < 0.02 * np.abs(exact.embeddings).max()


def test_near_is_the_mean_without_the_far_set():
    scores = {"test": np.arange(4.0), "cifar100": np.arange(4.0), "tiny_imagenet": np.full(4, 9.0), "svhn": np.zeros(4)}
    row = peers.compare(scores)
    assert row["cifar100"] == 0.5 and row["tiny_imagenet"] == 1.0 and row["near"] == 0.75
    assert row["mean"] == pytest.approx((row["cifar100"] + row["tiny_imagenet"] + row["svhn"]) / 3)
