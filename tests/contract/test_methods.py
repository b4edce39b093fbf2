"""Every registered recipe and detector, a plug-in among them: fit, save, load, export or refusal, two processes."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from maple.data.sources import open_images
from maple.deploy.export import export_onnx
from maple.detectors.gradients.base import ImageDetector
from maple.detectors.registry import create_detector, list_detectors, restore_detector
from maple.errors import FitError, UsageError
from maple.networks import create_backbone, embed, linear_head
from maple.prediction.fit import fit_predictor
from maple.prediction.onnx import OnnxPredictor
from maple.prediction.store import load_predictor
from maple.registry import load_plugin
from maple.training.loop import train_backbone
from maple.training.options import TrainOptions
from maple.training.processes import make_fabric
from maple.training.recipe import create_recipe, find_recipe, list_recipes
from plugins import forgetting_plugins, write_plugins
from processes import in_processes
from ranks import in_two_ranks
from short_parallel import digest

RECIPES = [*list_recipes(), "cosine"]
DETECTORS = [*list_detectors(), "l1"]
SMALL = {
    "sngp": {"features": 32},
    "mc-dropout": {"samples": 2},
    "duq": {"centroid_size": 8},
    "ensemble": {"members": 1},
}
OPTIONS = TrainOptions(epochs=1, batch_size=32, precision="32-true")
NO_GRAPH = ("mc-dropout", "due")  # torch cannot trace them
NOT_MERGED = ("knn",)  # it keeps images, which sums cannot gather


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugins")
    write_plugins(folder)
    with forgetting_plugins():
        sys.path.insert(0, str(folder))
        load_plugin("my_detector")
        load_plugin("my_recipe")
        yield folder


@pytest.fixture(scope="module")
def digits():
    images = open_images("digits")
    return images.subset(np.arange(160)), images.subset(np.arange(160, 260))


@pytest.fixture(scope="module", params=RECIPES)
def trained(request, digits):
    """A recipe after one epoch, with its predictor."""
    name = request.param
    if name == "due":
        pytest.importorskip("gpytorch")
    recipe = create_recipe(name, **SMALL.get(name, {}))
    run = train_backbone(create_backbone("resnet9", 10), recipe, *digits, options=OPTIONS, show_progress=False)
    return name, fit_predictor(run.backbone, *digits, digits[1], relabelling=run.relabelling)


def sample(images):
    return np.stack([images.read(i) for i in range(8)])  # (N, S, S, 3) uint8


def test_a_recipe_is_saved_and_loaded(trained, digits, tmp_path):
    name, predictor = trained
    if name == "ensemble":
        pytest.skip("saved as the whole of its members: tests/baselines/test_ensemble.py")
    predictor.save(tmp_path)
    loaded = load_predictor(tmp_path)
    before, after = (each.predict_pixels(sample(digits[1])) for each in (predictor, loaded))
    np.testing.assert_allclose(after.probabilities, before.probabilities, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(after.score, before.score, rtol=1e-4, atol=1e-5)
    maker = loaded.backbone.made_by
    assert (maker.plugin if maker else "") == find_recipe(name).plugin == ("my_recipe" if name == "cosine" else "")


def test_a_recipe_is_exported_or_refused(trained, digits, tmp_path):
    name, predictor = trained
    images = sample(digits[1])
    if name in NO_GRAPH:
        with pytest.raises(UsageError, match=r"resnet9|MC-Dropout"):  # the network it names
            export_onnx(predictor, tmp_path / "graph.onnx", check=images)
        assert not (tmp_path / "graph.onnx").exists()
        return
    export_onnx(predictor, tmp_path / "graph.onnx", check=images)
    said = OnnxPredictor.open(tmp_path / "graph.onnx").predict_pixels(images)
    np.testing.assert_allclose(said.probabilities, predictor.predict_pixels(images).probabilities, rtol=1e-3, atol=1e-4)


def train_all(plugins: str, names: list[str]) -> dict[str, str]:
    """A digest of the weights that each recipe learns in this process and the other, or why it refuses."""
    sys.path.insert(0, plugins)
    load_plugin("my_recipe")
    images = open_images("digits")
    parts = images.subset(np.arange(96)), images.subset(np.arange(96, 128))
    options = replace(OPTIONS, devices=2)
    fabric, found = make_fabric(options), {}
    for name in names:
        network = create_backbone("resnet9", 10)
        try:
            run = train_backbone(
                network, create_recipe(name), *parts, options=options, fabric=fabric, show_progress=False
            )
        except UsageError as error:
            found[name] = str(error)
        else:
            found[name] = digest(*run.backbone.state_dict().values())
    return found


def test_two_processes_train_the_same_network_or_are_refused(plugins):
    """All recipes, one after the other: both processes end with the same weights, or with the same refusal."""
    first, second = in_processes(train_all, str(plugins), RECIPES)
    assert first == second and list(first) == RECIPES
    for name, said in first.items():
        assert ("--devices" in said) == find_recipe(name).kind.one_process, (name, said)


# --- detectors -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def network(digits):
    run = train_backbone(
        create_backbone("resnet9", 10), create_recipe("cross-entropy"), *digits, options=OPTIONS, show_progress=False
    )
    return run.backbone


@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_is_fitted_saved_and_restored(name, network, digits):
    detector = create_detector(name)
    if isinstance(detector, ImageDetector):
        ood = digits[1] if getattr(detector, "learns_from_ood", False) else None
        detector.fit_images(network, *digits, ood=ood)
        score = lambda fitted: fitted.score_images(network, digits[1])  # noqa: E731
    else:
        train, unseen = (embed(network, images) for images in digits)
        detector.fit(train, unseen, head=linear_head(network))
        score = lambda fitted: fitted.score(unseen)  # noqa: E731
    arrays, metadata = detector.get_state()
    restored = restore_detector(arrays, json.loads(json.dumps(metadata)))
    assert type(restored) is type(detector) and np.isfinite(score(detector)).all()
    np.testing.assert_array_equal(score(restored), score(detector))


@pytest.mark.parametrize("name", [name for name in DETECTORS if name not in ("odin", "lee-md", "lee-md-ood")])
def test_two_processes_fit_the_same_detector_or_are_refused(name, network, digits):
    train, unseen = (embed(network, images) for images in digits)
    head = linear_head(network)

    def fit_share(rank, sum_over_ranks):
        return create_detector(name).fit(train[rank::2], unseen, sum_over_ranks=sum_over_ranks, head=head)

    if name in NOT_MERGED:
        with pytest.raises(FitError, match="one process"):
            in_two_ranks(fit_share)
        return
    whole = create_detector(name).fit(train, unseen, head=head)
    for detector in in_two_ranks(fit_share):
        np.testing.assert_allclose(detector.score(unseen), whole.score(unseen), rtol=1e-4, atol=1e-4)
