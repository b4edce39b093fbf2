"""Heads of recipes, and their growth: rows and their optimiser state."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from maple.errors import UsageError
from maple.networks import create_backbone, wrap_backbone
from maple.training import optimizers
from maple.training.head import grow_backbone, inherit_rows, named_state, replace_head
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe
from maple.types import Relabelling
from own_training import EAGER
from short_training import start

SPLIT = Relabelling(
    cluster_ids=np.array([0, 1, 2, 2]),
    cluster_to_class=np.array([0, 0, 1]),
    parents=np.array([0, 0, 1]),
    shares=np.array([0.5, 0.5, 1.0]),
)


OPTIMIZERS = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), ("momentum_buffer",)),
    "adam": (lambda p: torch.optim.AdamW(p, 0.1, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adafactor": (lambda p: torch.optim.Adafactor(p, 0.1), ()),  # what it keeps of a matrix has no rows
}


def tiny_backbone(bias=True):
    torch.manual_seed(0)
    backbone = wrap_backbone(nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2, bias=bias)), example=IMAGES)
    backbone.train()
    return backbone


IMAGES = torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))


def step(backbone, optimizer, targets):
    optimizer.zero_grad()
    F.cross_entropy(backbone(IMAGES)[1], targets).backward()
    optimizer.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_rows_that_live_on_keep_their_state(kind):
    make, keys = OPTIMIZERS[kind]
    backbone = tiny_backbone()
    groups = [{"params": [*backbone.body.parameters()]}, {"params": [*backbone.head.parameters()], "weight_decay": 0.3}]
    optimizer = make(groups)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    scheduler.step()
    before = {
        name: {key: torch.as_tensor(value).clone() for key, value in values.items()}
        for name, values in named_state(optimizer, backbone).items()
    }
    head = backbone.head
    replace_head(optimizer, head, backbone, grow_backbone(backbone, EAGER, SPLIT, named_state(optimizer, backbone)))
    after = named_state(optimizer, backbone)
    assert after["body.1.weight"].keys() == before["body.1.weight"].keys()
    if keys:
        for name in ("head.weight", "head.bias"):
            for key in keys:
                assert torch.equal(after[name][key], before[name][key][[0, 0, 1]]), (name, key)
    else:
        assert "head.weight" in before and "head.weight" not in after
    assert not any(parameter in optimizer.state for parameter in head.parameters())
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in backbone.head.parameters()]
    assert optimizer.param_groups[1]["weight_decay"] == 0.3 and optimizer.param_groups[1]["lr"] == 0.05
    weight = backbone.head.weight.detach().clone()
    assert torch.equal(weight[0], weight[1])
    for _ in range(2):  # of one parent, the rows now part: the optimiser moves the new head, and its states are apart
        step(backbone, optimizer, torch.tensor([0, 1, 2, 2]))
    assert not torch.allclose(backbone.head.weight[0], backbone.head.weight[1])


def test_a_new_bias_joins_the_group_of_the_weight():
    backbone = tiny_backbone(bias=False)
    optimizer = torch.optim.SGD(backbone.named_parameters(), 0.1, momentum=0.9)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    head = backbone.head
    replace_head(optimizer, head, backbone, grow_backbone(backbone, EAGER, SPLIT, named_state(optimizer, backbone)))
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(group["param_names"]) == 4
    assert group["params"][-1] is backbone.head.bias and group["param_names"][-1] == "head.bias"
    bias = backbone.head.bias.detach().clone()
    step(backbone, optimizer, torch.tensor([0, 1, 2, 2]))
    assert not torch.equal(backbone.head.bias, bias)


def test_a_fresh_head_starts_without_momentum():
    backbone = tiny_backbone()
    optimizer = torch.optim.SGD(backbone.parameters(), 0.1, momentum=0.9)
    step(backbone, optimizer, torch.tensor([0, 0, 1, 1]))
    head = backbone.head
    recipe = create_recipe("maple", head_growth="fresh", cluster_scope="class")
    replace_head(optimizer, head, backbone, grow_backbone(backbone, recipe, SPLIT, named_state(optimizer, backbone)))
    assert set(named_state(optimizer, backbone)) == {"body.1.weight", "body.1.bias"}
    assert not torch.equal(backbone.head.weight[0], head.weight[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_children_inherit_their_parents_momentum(optimizer):
    module = torch.nn.Module()
    module.head = torch.nn.Linear(3, 2)
    optimiser = optimizers.make_optimizer(module, TrainOptions(optimizer=optimizer))
    module.head(torch.randn(4, 3)).square().sum().backward()
    optimiser.step()
    state = named_state(optimiser, module)
    key = "momentum_buffer" if optimizer == "sgd" else "exp_avg"
    before = state["head.weight"][key].clone()
    inherit_rows(state, "head.", np.array([0, 0, 1]))
    assert torch.equal(state["head.weight"][key], before[[0, 0, 1]])


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
