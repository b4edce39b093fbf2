"""Heads of recipes."""

from __future__ import annotations

import pytest
import torch

from maple.errors import UsageError
from maple.networks import create_backbone
from maple.training.maple import MapleRecipe
from short_training import EAGER, start


def test_recipe_builds_a_missing_head(few, tmp_path):
    class Wide(MapleRecipe):
        def build_head(self, embedding_size, n_outputs):
            return torch.nn.Sequential(torch.nn.Linear(embedding_size, 12), torch.nn.Linear(12, n_outputs))

    runs = []
    for resume in (False, True):
        backbone = create_backbone("resnet9", 10)
        backbone.head = None
        runs.append(start(Wide(clustering=False), few, tmp_path, epochs=1, resume=resume, backbone=backbone))
        assert len(backbone.head) == 2
    for a, b in zip(runs[0].backbone.state_dict().values(), runs[1].backbone.state_dict().values()):
        assert torch.equal(a, b)


def test_head_of_wrong_size_is_an_error_with_a_remedy(few):
    with pytest.raises(UsageError, match=r"backbone\.head"):
        start(EAGER, few, backbone=create_backbone("resnet9", 7))
