"""Hooks and modes are undone on leaving the block."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maple.networks import evaluating, listening


def test_hooks_are_removed_after_an_exception() -> None:
    layer, heard = nn.Identity(), []
    with pytest.raises(KeyError), listening({"a": layer}, lambda key, *_: heard.append(key)):
        layer(torch.ones(1))
        raise KeyError
    layer(torch.ones(1))
    assert heard == ["a"]


def test_each_layer_gets_its_own_mode_back() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Dropout()).train()
    module[1].eval()
    with evaluating(module):
        assert not any(layer.training for layer in module.modules()) and not torch.is_grad_enabled()
    assert [layer.training for layer in module.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
