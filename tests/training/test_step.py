"""The training step: used by the loop, an own loop and the timing."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from maple.errors import TrainError
from maple.networks import create_backbone
from maple.training.head import prepare_backbone
from maple.training.loss import weighted_sum
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.recipe import create_recipe
from maple.training.step import TrainingStep, forward_batch
from short_training import start

CPU = TrainOptions(epochs=1, accelerator="cpu", precision="32-true")


def test_divergence_is_an_error_with_a_remedy(few):
    with pytest.raises(TrainError, match=r"--overwrite .* --learning-rate 1e\+29"):
        start(create_recipe("cross-entropy"), few, learning_rate=1e30, schedule="constant")


def test_own_loop_and_training_loop_share_the_loss():
    """The first half of the step gives the loss that the whole step reports."""
    fabric, recipe, options = make_fabric(CPU), create_recipe("triplet"), CPU
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 4).train()
    images, targets = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    terms = recipe.loss(forward_batch(recipe, copy.deepcopy(backbone), images, targets, progress=0.5))
    found = TrainingStep(fabric, recipe, backbone, options)(images, targets, epoch=1, share=0.5)
    assert found.pop("loss") == weighted_sum(terms).item()
    assert found == {name: term.value.item() for name, term in terms.items()}


def test_a_step_updates_network_and_running_state():
    fabric, recipe = make_fabric(CPU), create_recipe("duq")
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 4)
    prepare_backbone(backbone, recipe, 4, fabric)
    step = TrainingStep(fabric, recipe, backbone, CPU)
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    terms = step(torch.rand(8, 3, 16, 16), torch.arange(8) % 4, epoch=1, share=0.0)
    assert set(terms) == {"loss", "binary_cross_entropy", "gradient_penalty"}
    after = backbone.state_dict()
    for name in ("body.blocks.0.0.weight", "head.weight", "head.centroids"):
        assert not torch.equal(before[name], after[name]), name
    assert step.learning_rate == pytest.approx(0.1 * CPU.learning_rate)


def test_outliers_are_images_with_shuffled_patches():
    torch.manual_seed(0)
    images = torch.rand(8, 3, 16, 16)
    outliers = create_recipe("cross-entropy", outlier_share=0.25).extra_images(images)
    pixels = [each.flatten(1).sort().values for each in (images[:2], outliers)]
    assert torch.equal(*pixels) and not torch.equal(images[:2], outliers)
    assert create_recipe("cross-entropy").extra_images(images) is None


def test_outliers_run_with_the_batch_and_teach_the_uniform_distribution():
    recipe = create_recipe("cross-entropy", outlier_share=0.25, outlier_weight=2.0)
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 4).eval()
    images, targets = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    step = forward_batch(recipe, backbone, images, targets, progress=0.5)
    assert step.extra_logits.shape == (2, 4) and step.logits.shape == (8, 4) and len(step.embeddings) == 8
    torch.testing.assert_close(step.logits, backbone(images)[1])
    terms = recipe.loss(step)
    uniform = torch.full((2, 4), 0.25)
    expected = torch.nn.functional.cross_entropy(step.extra_logits, uniform)
    torch.testing.assert_close(terms["outlier"].value, expected)
    torch.testing.assert_close(weighted_sum(terms), terms["cross_entropy"].value + 2 * expected)


def test_rotations_run_after_the_outliers_and_are_told_apart():
    recipe = create_recipe("triplet", outlier_share=0.25, rotation_share=0.5, rotation_weight=3.0)
    torch.manual_seed(0)
    backbone = create_backbone("resnet9", 4).eval()
    recipe.prepare(backbone)
    torch.nn.init.normal_(backbone.rotation_head.weight)
    images, targets = torch.rand(8, 3, 16, 16), torch.arange(8) % 4
    step = forward_batch(recipe, backbone, images, targets, progress=1.0)
    assert step.extra_embeddings.shape == (6, 128)  # two outliers, four rotated images
    turned = torch.stack([torch.rot90(images[i], quarters, (1, 2)) for i, quarters in enumerate((1, 2, 3, 1))])
    torch.testing.assert_close(step.extra_embeddings[2:], backbone.embed(turned))
    terms = recipe.loss(step)
    logits = backbone.rotation_head(torch.cat([step.embeddings, step.extra_embeddings[2:]]))
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor([0] * 8 + [1, 2, 3, 1]))
    torch.testing.assert_close(terms["rotation"].value, expected)
    assert terms["rotation"].weight == 3.0 and "outlier" in terms
    assert not hasattr(recipe.finish(backbone), "rotation_head")


def test_a_batch_too_small_for_rotated_copies_trains_on_upright_images():
    recipe = create_recipe("cross-entropy", rotation_share=0.1)
    backbone = create_backbone("resnet9", 2).eval()
    recipe.prepare(backbone)
    step = forward_batch(recipe, backbone, torch.rand(2, 3, 16, 16), torch.tensor([0, 1]), progress=0.0)
    assert step.extra_embeddings is None
    assert recipe.loss(step)["rotation"].value.item() == pytest.approx(np.log(4))  # the new head knows nothing
