"""Faults found in published code for this method, and the test that would catch each here.

The table is checked: a test that is renamed or removed shows up. The numbers follow the project's list of known faults.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

DEFECTS = {
    1: ("training crashes at its first checkpoint", "test_train.py::test_history_file"),
    2: (
        "the saved network cannot be loaded once its head has grown",
        "test_predictor.py::test_saved_and_loaded_predict_the_same",
    ),
    3: ("the AUROC call crashes", "test_cli.py::test_evaluate_adds_unknown_sets_and_the_report"),
    4: ("evaluation mode is never undone", "test_train.py::test_batch_norm_keeps_learning_after_validation"),
    5: ("the head is replaced although nothing was split", "test_recipe.py::test_relabelling_only_when_due_and_hard"),
    6: ("classifier and distance read different embeddings", "test_backbone.py::test_embedding_is_what_the_head_sees"),
    7: ("an image is its own positive; one-class batches crash", "test_loss.py::test_image_is_never_its_own_positive"),
    8: ("no crops, no schedule", "test_batches.py::test_every_augmented_image_is_one_of_the_allowed_ones"),
    9: ("one split chooses and judges", "test_splits.py::test_load_splits_of_a_plain_source"),
    10: (
        "clustering runs where nothing may be split",
        "test_cluster.py::test_cluster_points_does_nothing_where_nothing_may_be_split",
    ),
    11: ("clusters have no least size", "test_cluster.py::test_no_cluster_is_smaller_than_allowed"),
    12: ("PCA along the wrong axis", "test_gaussian.py::test_projection_keeps_the_stated_variance"),
    13: ("one component too few", "test_gaussian.py::test_component_count_is_exact"),
    14: (
        "total instead of within-class covariance",
        "test_gaussian.py::test_tied_distance_to_the_own_cluster_averages_to_the_components",
    ),
    15: ("far images tie at uncertainty 1", "test_gaussian.py::test_far_images_do_not_tie"),
    16: ("general eigensolver, ridge without effect", "test_gaussian.py::test_whitening_whitens_and_floors"),
    17: ("an N x N product for a diagonal", "test_gaussian.py::test_memory_does_not_grow_with_images"),
    18: (
        "ECE compares cluster ids with class ids",
        "test_benchmark.py::test_softmax_is_summed_over_the_clusters_of_a_class",
    ),
    19: ("random flips at test time", "test_cli.py::test_predictions_do_not_change_from_run_to_run"),
    20: ("statistics from augmented images", "test_predictor.py::test_fit_sees_no_augmentation"),
    22: (
        "the split depends on the listing order",
        "test_splits.py::test_splits_do_not_depend_on_names_or_listing_order",
    ),
    23: ("all embeddings are gathered and not used", "test_recipe.py::test_only_hard_classes_are_embedded"),
    24: ("sizes are hard-coded", "test_backbone.py::test_sizes_are_not_hard_coded"),
    25: ("files can run code", "test_backbone.py::test_files_with_code_are_not_run"),
}  # 21 (outdated libraries) shows as soon as anything runs; 26 (no results, no baselines) is not a fault of code
ALSO = {
    "the optimiser does not know the new head": "test_train.py::test_new_head_belongs_to_the_optimiser",
    "exactly as many bins as asked for": "test_metrics.py::test_ece_has_exactly_as_many_bins_as_asked_for",
    "batches too small for triplets": "test_batches.py::test_balanced_batches_hold_positives_and_negatives",
    "a one-class batch": "test_loss.py::test_batch_without_triplets_gives_zero_with_a_gradient",
}  # fmt: skip


@pytest.mark.parametrize("where", [where for _, where in DEFECTS.values()] + list(ALSO.values()))
def test_the_test_exists(where):
    file, name = where.split("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
