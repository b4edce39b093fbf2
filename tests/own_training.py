"""A short training with an own loop."""

from __future__ import annotations

import torch

from maple.networks import create_backbone
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions

EPOCHS = 3


BATCH = 64


SEED = 5


EAGER = MapleRecipe(relabel_every=1, hard_class_error=0.0, min_cluster_size=10, max_clusters=3)


OPTIONS = TrainOptions(epochs=EPOCHS, batch_size=BATCH, seed=SEED, precision="32-true")


def make_backbone():
    torch.manual_seed(SEED)
    return create_backbone("resnet9", 10)


def make_optimizer(module):
    return torch.optim.SGD(
        module.parameters(), lr=OPTIONS.learning_rate, momentum=0.9, nesterov=True, weight_decay=OPTIONS.weight_decay
    )
