"""The public CIFAR-10 weights reach the accuracy their authors state, through our networks, data and loader."""

from __future__ import annotations

from pathlib import Path

import pytest

from maple.data.sources import open_images
from maple.networks import create_backbone, embed, load_weights


@pytest.mark.shared
@pytest.mark.slow
def test_public_weights_reach_their_published_accuracy(shared_dir: Path) -> None:
    images = open_images(shared_dir / "data/cifar10/test.parquet")
    for name, file, accuracy in [
        ("resnet20", "resnet20-12fca82f.th", 0.9173),
        ("resnet56", "resnet56-4bfd9763.th", 0.9339),
    ]:
        backbone = load_weights(create_backbone(name, n_classes=10), shared_dir / "weights" / file)
        outputs = embed(backbone, images)
        assert outputs.embeddings.shape == (10_000, 64)
        assert (outputs.logits.argmax(1) == outputs.labels).mean() == pytest.approx(accuracy, abs=1e-4)
