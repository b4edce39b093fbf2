"""A study of benchmarks/public.py on a small network, without the real weights and images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import public
from maple.data.image_set import ImageSet


def make_study(tmp_path: Path, n: int = 60, precision: str = "32-true") -> public.Study:
    """A study of a small network whose classes are red, green and blue noise; unknown images are of any colour."""
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    stages = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2)]
    network = public.Staged(stages, nn.Linear(16, 3)).eval()
    labels = np.arange(n) % 3

    def images(known: bool) -> ImageSet:
        pixels = rng.integers(0, 128, (n, 32, 32, 3), dtype=np.uint8)
        pixels[np.arange(n), :, :, labels if known else rng.integers(0, 3, n)] += np.uint8(128 if known else 60)
        return ImageSet.from_arrays(pixels, labels, ("a", "b", "c"))

    known, test = images(True), images(True)
    x = torch.stack([torch.from_numpy(known.read(i)) for i in range(n)]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():  # a head that finds the classes: least squares
        found = torch.linalg.lstsq(network.maps(x).mean((2, 3)), torch.eye(3)[labels] * 8)
        network.fc.weight.copy_(found.solution.T)
        network.fc.bias.zero_()
    ood = {name: images(False) for name in ("cifar100", *public.SHARED_OOD)}
    study = public.Study("resnet20-cifar10", tmp_path, tmp_path / "cache", precision)
    sets = {"train": known, "test": test, **ood}
    vars(study).update(network=(network, (0.0,) * 3, (1.0,) * 3), images=sets)
    return study
