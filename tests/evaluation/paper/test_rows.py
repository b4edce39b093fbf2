"""Rows of suites: readings of one network, and methods that follow from the registries."""

from __future__ import annotations

from maple.detectors.logits import EnergyDetector
from maple.detectors.registry import DETECTORS, list_detectors, register_detector
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import Line
from maple.evaluation.paper.suites import SUITES
from maple.training.loss import LossTerm
from maple.training.recipe import RECIPES, Recipe, Step, list_recipes, register_recipe


def test_only_networks_trained_as_in_the_paper_have_a_single_reading():
    titles = {name: [row.title for row in SUITES["ablation"].rows(PROFILES[name])] for name in ("cpu", "paper")}
    assert [title for title in titles["cpu"] if not title.endswith(", normalised")] == titles["paper"]
    assert sum(title.endswith(", normalised") for title in titles["cpu"]) == 6


def test_a_new_recipe_has_a_row_in_every_comparison(monkeypatch):
    list_recipes()
    monkeypatch.setattr(RECIPES, "_methods", dict(RECIPES._methods))

    @register_recipe("new")
    class NewRecipe(Recipe):
        def loss(self, step: Step) -> dict[str, LossTerm]:
            return {}

    for name in ("cifar10", "cifar100", "imagenet", "microorganisms", "confidence", "calibration"):
        added = [row for row in SUITES[name].rows(PROFILES["cpu"]) if row.recipe == "new"]
        assert [(row.title, row.method) for row in added] == [("new", "new")], name


def test_a_new_detector_has_a_row(monkeypatch):
    list_detectors()
    monkeypatch.setattr(DETECTORS, "_methods", dict(DETECTORS._methods))

    @register_detector("new")
    class NewDetector(EnergyDetector):
        pass

    assert "new" in [row.method for row in SUITES["detectors"].rows(PROFILES["cpu"])]
    assert "new" in SUITES["detectors"].detectors(PROFILES["cpu"])


def test_a_line_is_trained_as_the_profile_says():
    line = Line("X", paper_clusters=True, method="maple-paper", flags={"max_clusters": 3})
    (row,) = line.rows(PROFILES["cpu"], "cifar10")
    assert dict(row.training.flags) == {
        "recipe": "maple", "cluster_method": "xmeans", "cluster_space": "raw", "hard_class_error": 0.3,
        "max_clusters": 3, "relabel_every": 2,
    }  # fmt: skip
    assert (row.method, row.paper) == ("maple-paper", "X")


def test_small_profiles_take_the_small_backbone():
    line = Line("ResNet-18", flags={"backbone": "resnet18"}, small="resnet20", method="maple")
    rows = {name: line.rows(PROFILES[name], "cifar10")[0] for name in ("paper", "cpu")}
    assert [row.title for row in rows.values()] == ["ResNet-18", "resnet20 for ResNet-18"]
    assert [dict(row.training.flags)["backbone"] for row in rows.values()] == ["resnet18", "resnet20"]
    assert {row.paper for row in rows.values()} == {"ResNet-18"}
