"""MAPLE's recipe: two switches, hard classes, heads that grow without changing any class probability."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score
from torch import nn
from torch.nn import functional as F

from maple.decisions.pool import class_probabilities
from maple.errors import ConfigError, UsageError
from maple.networks import Backbone
from maple.runs.setup.presets import list_presets, read_preset
from maple.training.loss import boundary_distances, contrastive_loss
from maple.training.maple import MapleRecipe, false_negative_ratios, find_hard_classes, grow_linear
from maple.training.recipe import Step, create_recipe, find_recipe
from maple.training.relabel import PseudoLabels
from maple.types import Outputs, Relabelling

NAMES = ("cross-entropy", "triplet", "clustering", "maple")
SPLIT = Relabelling(
    np.array([0, 1, 2, 3]), np.array([0, 0, 0, 1]), np.array([0, 0, 0, 1]), np.array([0.2, 0.5, 0.3, 1])
)


def make_step(progress=0.0, head=None):
    """Eight images of two classes with embeddings of size 4, the same in every call."""
    drawn = torch.Generator().manual_seed(0)
    embeddings, logits = torch.randn(8, 4, generator=drawn), torch.randn(8, 2, generator=drawn)
    backbone = Backbone(nn.Identity(), head or nn.Linear(4, 2), embedding_size=4)
    return Step(torch.zeros(8, 3, 1, 1), embeddings, logits, torch.tensor([0, 1] * 4), progress, backbone)


@pytest.mark.parametrize("bias", [True, False])
def test_growing_keeps_every_class_probability(bias):
    torch.manual_seed(0)
    head = nn.Linear(16, 2, bias=bias)
    embeddings = 3 * torch.randn(100, 16)
    with torch.no_grad():
        before = class_probabilities(head(embeddings).numpy(), np.array([0, 1]))
        after = class_probabilities(grow_linear(head, SPLIT)(embeddings).numpy(), SPLIT.cluster_to_class)
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_children_learn_apart_without_noise():
    """The new targets alone break the symmetry of equal rows."""
    torch.manual_seed(0)
    head = grow_linear(nn.Linear(2, 2), SPLIT)
    points = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
    optimiser = torch.optim.SGD(head.parameters(), 1.0)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(points), torch.arange(4)).backward()
        optimiser.step()
    assert (head(points).argmax(1) == torch.arange(4)).all()


def test_fresh_head_has_the_new_size_and_no_parents():
    recipe = MapleRecipe(head_growth="fresh", cluster_scope="class")
    head, inherits = recipe.grow_head(nn.Linear(16, 2), SPLIT)
    assert head.out_features == 4
    assert not inherits


def test_switches():
    for name in NAMES:
        switches = find_recipe(name).fixed
        terms = create_recipe(name).loss(make_step(progress=1.0))
        assert ("triplet" in terms) == ("prototype" in terms) == switches["triplet"]


def test_prototypes_are_the_rows_of_a_linear_head():
    head = nn.Linear(4, 2)
    step = make_step(head=head)
    term = create_recipe("maple", prototype_weight=0.5).loss(step)["prototype"]
    assert term.weight == 0.5
    cosines = nn.functional.cosine_similarity(step.embeddings[:, None], head.weight[None], dim=2)
    torch.testing.assert_close(term.value, nn.functional.cross_entropy(10 * cosines, step.targets))
    assert "prototype" not in create_recipe("maple", prototype_weight=0).loss(step)
    assert "prototype" not in create_recipe("maple").loss(make_step(head=nn.Sequential(head)))


def test_cross_entropy_of_embeddings_of_one_length():
    """A longer embedding changes nothing, and the head is the one that sees embeddings as they are elsewhere."""
    head = nn.Linear(4, 2)
    step = make_step(head=head)
    value = create_recipe("triplet", cross_entropy_norm=10.0).loss(step)["cross_entropy"].value
    unit = step.embeddings / step.embeddings.norm(dim=1, keepdim=True)
    torch.testing.assert_close(value, nn.functional.cross_entropy(head(10 * unit), step.targets))
    longer = replace(step, embeddings=3 * step.embeddings)
    torch.testing.assert_close(
        create_recipe("triplet", cross_entropy_norm=10.0).loss(longer)["cross_entropy"].value, value
    )
    value.backward()
    assert head.weight.grad is not None and head.weight.grad.abs().sum() > 0


def test_cross_entropy_alone_leaves_embeddings_their_length():
    """It is the network that others are compared with, whatever the options of MAPLE."""
    step = make_step()
    plain = nn.functional.cross_entropy(step.logits, step.targets)
    assert (
        not {"cross_entropy_norm"} & (find_recipe("cross-entropy").options | find_recipe("clustering").options).keys()
    )
    for name in ("cross-entropy", "clustering"):
        assert create_recipe(name, cross_entropy_norm=10.0).loss(step)["cross_entropy"].value == plain


def test_triplet_weight_warms_up():
    """The weight grows, the value that the history shows does not depend on it."""
    recipe = create_recipe("triplet", triplet_warmup=0.5, triplet_weight=2.0)
    terms = [recipe.loss(make_step(progress=progress))["triplet"] for progress in (0.0, 0.25, 0.5, 1.0)]
    assert [term.weight for term in terms] == [0.0, 1.0, 2.0, 2.0]
    assert len({float(term.value) for term in terms}) == 1


def test_contrastive_loss_takes_the_place_of_the_triplet_loss():
    step = make_step(progress=1.0)
    terms = create_recipe("triplet", metric_loss="contrastive", triplet_space="raw", margin=1.5).loss(step)
    assert float(terms["triplet"].value) == pytest.approx(float(contrastive_loss(step.embeddings, step.targets, 1.5)))
    assert terms["triplet"].weight == 1.0


def test_cross_entropy_can_divide_logits_and_smooth_targets():
    step = make_step(progress=1.0)
    plain = create_recipe("cross-entropy")
    for options, logits in (
        ({"logit_norm": "length", "logit_temperature": 0.1}, 10 * F.normalize(step.logits, dim=1)),
        ({"logit_norm": "boundary"}, step.logits / boundary_distances(step.logits, step.head.weight)[:, None]),
        ({"logit_norm": "none"}, step.logits),
    ):
        found = create_recipe("cross-entropy", **options).loss(step)["cross_entropy"].value
        torch.testing.assert_close(found, F.cross_entropy(logits, step.targets))
    smooth = create_recipe("cross-entropy", label_smoothing=0.2).loss(step)["cross_entropy"].value
    uniform = -step.logits.log_softmax(1).mean()
    torch.testing.assert_close(smooth, 0.8 * plain.loss(step)["cross_entropy"].value + 0.2 * uniform)


def history(*triplets, spread=0.5):
    """Rows of the first epochs; the weight is full from the third of eight on."""
    return [{"epoch": i + 1, "triplet": value, "spread": spread} for i, value in enumerate(triplets)]


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("maple", history(0.6, 0.5, 0.4, 0.3), None),
        ("maple", history(0.6, spread=0.01), "collapsed"),
        ("cross-entropy", history(0.6, spread=0.01), "collapsed"),
        ("maple", history(0.6, 0.6, 0.505, 0.495), "at its margin"),
        ("cross-entropy", history(0.6, 0.6, 0.505, 0.495), None),
        ("maple", history(0.6, 0.6, 0.6, 0.5), None),  # it may be passing by
        ("maple", history(0.5, 0.5, 0.5), None),  # full weight in one of the epochs only
        ("maple", history(0.6, 0.6, 0.48, 0.48), None),
    ],
)
def test_collapse_has_two_signs(name, rows, message):
    recipe = create_recipe(name, margin=0.5, triplet_warmup=0.25)
    found = recipe.find_collapse(rows, epochs=8)
    if message is None:
        assert found is None
    else:
        assert message in found and "--learning-rate" in found
        assert ("--triplet-warmup" in found) == recipe.triplet


@pytest.mark.parametrize("space", ["raw", "normalised"])
def test_a_remedy_is_not_what_is_set_already(space):
    recipe = create_recipe("maple", margin=0.5, triplet_warmup=0.25, triplet_space=space)
    found = recipe.find_collapse(history(0.6, 0.6, 0.505, 0.495), epochs=8)
    assert found is not None and ("--triplet-space normalised" in found) == (space == "raw")


def test_a_margin_of_zero_is_not_a_collapse():
    assert MapleRecipe(margin=0.0).find_collapse(history(0.0, 0.0, 0.0, 0.0), epochs=8) is None


def test_relabelling_only_when_due_and_hard(rng):
    recipe = MapleRecipe(relabel_every=2, hard_class_error=0.3, min_cluster_size=5, cluster_space="raw")
    points = np.concatenate(
        [rng.normal([5, 0], 0.1, (30, 2)), rng.normal([0, 5], 0.1, (30, 2)), rng.normal([-5, -5], 0.1, (30, 2))]
    )
    points = points.astype(np.float32)
    current = Relabelling.initial(np.repeat([0, 0, 1], 30), 2)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    right = np.array([[0.9, 0.1], [0.1, 0.9]]), np.array([0, 1])
    embed = points.__getitem__
    assert PseudoLabels(recipe, current, 0).propose(1, *wrong, embed) is None
    assert PseudoLabels(recipe, current, 0).propose(2, *right, embed) is None
    after = PseudoLabels(recipe, current, 0).propose(2, *wrong, embed)
    assert after.cluster_to_class.tolist() == [0, 0, 1]
    assert PseudoLabels(create_recipe("triplet", relabel_every=2), current, 0).propose(2, *wrong, embed) is None


def test_same_clusters_with_other_numbers_are_no_event(rng):
    """Clustering a class anew may number its clusters differently: the head must not start afresh for that."""
    recipe = MapleRecipe(
        relabel_every=1, min_cluster_size=5, cluster_space="raw", cluster_scope="class", head_growth="fresh"
    )
    points = np.concatenate([rng.normal([9 * k, 0], 0.1, (30, 2)) for k in range(3)]).astype(np.float32)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    first = PseudoLabels(recipe, Relabelling.initial(np.repeat([0, 0, 1], 30), 2), 0).propose(
        1, *wrong, points.__getitem__
    )
    assert first.n_clusters == 3
    mirrored = Relabelling(
        np.array([1, 0, 2])[first.cluster_ids], first.cluster_to_class, first.parents, first.shares[[1, 0, 2]]
    )
    assert PseudoLabels(recipe, mirrored, 0).propose(2, *wrong, points.__getitem__) is None


def test_the_space_of_clustering_is_an_option(rng):
    """A class that is only long is split on the sphere; whitened, and by held-out images, it is not."""
    points = (rng.standard_normal((400, 32)) * np.geomspace(9, 0.5, 32) + 50).astype(np.float32)
    current = Relabelling.initial(np.repeat([0, 1], [399, 1]), 2)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    for options, is_split in (
        ({"cluster_space": "normalised"}, True),
        ({"cluster_space": "whitened"}, False),
        ({"cluster_space": "projected", "cluster_components": 32}, True),
        ({"cluster_space": "normalised", "cluster_method": "tmeans"}, False),
    ):
        recipe = MapleRecipe(**{"relabel_every": 1, "cluster_method": "xmeans", **options})
        assert (PseudoLabels(recipe, current, 0).propose(1, *wrong, points.__getitem__) is not None) == is_split


@pytest.mark.parametrize("method", ["gmeans", "xmeans", "tmeans"])
def test_no_limit_of_clusters_finds_more_than_the_default(rng, method):
    """Eight groups in one class, which all methods find where they may."""
    centres = 60 * np.array(list(product((0, 1), repeat=3)))  # (8, 3)
    points = np.concatenate([rng.normal(centre, 1, (60, 3)) for centre in centres]).astype(np.float32)
    labels = np.zeros(len(points), int)
    current = Relabelling.initial(labels, 1)
    wrong = np.tile([[0.0, 1.0]], (len(points), 1))
    found = {}
    for limit in (5, 0):
        recipe = MapleRecipe(cluster_method=method, cluster_space="raw", max_clusters=limit, relabel_every=1)
        found[limit] = recipe.relabel(1, wrong, labels, current, lambda rows: points[rows], 0).n_clusters
    assert found == {5: 5, 0: 8}


def test_k_means_needs_a_number_of_clusters():
    with pytest.raises(ConfigError, match="max_clusters"):
        MapleRecipe(cluster_method="kmeans", max_clusters=0)


def test_presets_cluster_raw_embeddings_as_the_paper_does():
    papers = [read_preset(name)["maple"] for name in list_presets() if name.startswith("paper")]
    assert {preset["cluster_space"] for preset in papers} == {"raw"}


def test_only_hard_classes_are_embedded():
    asked = []

    def embed_rows(rows):
        asked.extend(rows)
        return np.eye(4, 2, dtype=np.float32)[: len(rows)]

    current = Relabelling.initial(np.array([0, 1, 0, 1]), 2)
    wrong = np.array([[0.1, 0.9], [0.1, 0.9]]), np.array([0, 1])
    PseudoLabels(MapleRecipe(relabel_every=1), current, 0).propose(1, *wrong, embed_rows)
    assert asked == [0, 2]


def test_paper_rule_is_max_and_ours_is_sum():
    outputs = Outputs(np.zeros((1, 2)), np.log([[0.3, 0.3, 0.4]]), cluster_to_class=np.array([0, 0, 1]))
    assert MapleRecipe().class_probabilities(outputs).argmax() == 0
    assert MapleRecipe(class_rule="max").class_probabilities(outputs).argmax() == 1
    assert read_preset("paper")["maple"]["class_rule"] == "max"


def test_presets_are_valid_recipes():
    for preset in list_presets():
        create_recipe("maple", **read_preset(preset).get("maple", {}))


def test_errors_name_the_remedy():
    with pytest.raises(ConfigError, match="head_growth 'fresh'"):
        MapleRecipe(head_growth="keep", cluster_scope="class")
    with pytest.raises(UsageError, match="did you mean 'maple'"):
        create_recipe("mapel")
    with pytest.raises(UsageError, match="linear head"):
        MapleRecipe().grow_head(nn.Sequential(), SPLIT)


def test_false_negative_ratio_is_one_minus_recall(rng):
    labels, predicted = rng.integers(0, 4, 200), rng.integers(0, 4, 200)
    expected = 1 - recall_score(labels, predicted, average=None)
    np.testing.assert_allclose(false_negative_ratios(predicted, labels, 4), expected)


def test_class_without_validation_images_is_never_hard():
    predicted, labels = np.array([1, 0]), np.array([0, 0])
    assert find_hard_classes(predicted, labels, 3, 0.3).tolist() == [0]


def test_threshold_is_exclusive():
    predicted, labels = np.array([0, 1]), np.array([0, 0])
    assert find_hard_classes(predicted, labels, 2, 0.5).tolist() == []
