"""Suites as tables: rows and figures of the paper, shared networks, detectors that the rows ask for."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from maple.errors import UsageError
from maple.evaluation.paper.columns import describe_columns
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import STANDARD_DETECTORS
from maple.evaluation.paper.suites import SUITES, find_suite

TEX = Path(__file__).parents[4] / "shared" / "paper" / "maple_paper.tex"


def test_tables_name_their_rows():
    for suite in SUITES.values():
        rows = suite.rows(PROFILES["cpu"])
        assert len({row.title for row in rows}) == len(rows), suite.name
        compared = {row.paper for row in rows if row.paper and suite.paper}
        assert set(suite.paper) <= compared, suite.name  # no row of the paper is left out
        for figures in suite.paper.values():
            assert set(figures) - {"latency_ms"} <= set(suite.columns) | {"components"}, suite.name


def test_detectors_follow_from_the_rows():
    profile = PROFILES["cpu"]
    assert SUITES["md"].detectors(profile) == ["lee-md"]
    assert SUITES["cifar10"].detectors(profile) == SUITES["ablation"].detectors(profile) == []
    beyond = SUITES["detectors"].detectors(profile)
    assert {"knn", "vim", "odin"} <= set(beyond) and not {*STANDARD_DETECTORS, "maple", "lee-md-ood"} & set(beyond)


def test_openood_has_near_and_far_means_and_both_conventions():
    suites = [suite for suite in SUITES.values() if suite.reference == "OpenOOD"]
    assert [suite.name for suite in suites] == ["openood-cifar10", "openood-cifar100", "openood-imagenet"]
    for suite in suites:
        titles = [column.title for column in describe_columns(suite.columns).values()]
        for group in ("near", "far"):
            assert {f"{group}-OOD AUROC", f"{group}-OOD FPR95 at 95 % of unknown flagged"} <= {*titles}
            assert f"{group}-OOD FPR95 at 95 % of known accepted" in titles
        protocol = PROFILES["paper"].protocols[suite.protocol]
        assert {f"auroc/{name}" for name in protocol.ood} <= {*suite.columns}
        assert all({"near/auroc", "far/auroc"} <= row.keys() for row in suite.paper.values())
    assert suites[0].paper["RMDS"] == {"softmax_accuracy": 0.9506, "near/auroc": 0.898, "far/auroc": 0.922}


def test_columns_have_titles():
    for suite in SUITES.values():
        assert all(column.title for column in describe_columns(suite.columns).values())


def test_an_unknown_suite_is_named():
    with pytest.raises(UsageError, match="cifar10"):
        find_suite("cifar")


def test_figures_that_the_paper_does_not_give_are_left_out():
    vmdls = find_suite("cifar10").paper["VMDLS"]
    assert vmdls["accuracy"] == 0.951 and vmdls["latency_ms"] == 5.61 and not {"ece", "nll"} & set(vmdls)
    assert not find_suite("detectors").paper


def test_a_simplified_comparator_bears_another_name():
    (row,) = [row for row in find_suite("cifar10").rows(PROFILES["cpu"]) if row.paper == "VMDLS"]
    assert row.title == "VMDLS-like" and row.method == "vmdls-like"


def test_ablations_without_prototypes():
    """For the mining of the profile and for all triplets, on networks of their own."""
    rows = [row for row in find_suite("ablation").rows(PROFILES["cpu"]) if "no prototypes" in row.title]
    flags = [dict(training.flags) for training in dict.fromkeys(row.training for row in rows)]
    assert all(each["prototype_weight"] == 0 and each["recipe"] == "triplet" for each in flags)
    assert [each.get("triplet_mining") for each in flags] == [None, "all"]


def test_clustering_of_every_class_without_a_limit():
    rows = {row.title: dict(row.training.flags) for row in find_suite("clustering").rows(PROFILES["cpu"])}
    unlimited = {title for title, flags in rows.items() if flags["max_clusters"] == 0}
    assert unlimited == {"G-Means", "X-Means, every class, no limit", "T-Means, every class, no limit"}
    assert all(rows[title]["hard_class_error"] == 0 for title in (*unlimited, "K-Means"))
    assert (rows["X-Means"]["max_clusters"], rows["X-Means"]["hard_class_error"]) == (5, 0.3)


def test_the_gaussian_test_has_both_data_sets_and_training_images():
    suite = find_suite("gaussian")
    protocols = {row.title: row.training.protocol for row in suite.rows(PROFILES["paper"])}
    assert protocols["MAPLE, X-Means"] == "cifar10" and protocols["CIFAR-100, MAPLE, X-Means"] == "cifar100"
    assert suite.paper["CIFAR-100, deterministic"] == {"training/gaussian_error": 4.479}


def test_small_networks_of_the_backbones_are_of_the_same_kind():
    networks = [dict(training.flags)["backbone"] for training in find_suite("backbones").trainings(PROFILES["cpu"])]
    assert networks == ["wrn-10-2", "resnet18-16", "efficientnet-b0"]


def tex_rows(label: str) -> list[str]:
    """The lines of a table that hold its figures, commands and spreads taken away."""
    text = TEX.read_text(encoding="utf-8")
    tables = re.findall(r"\\begin\{table\*?\}.*?\\end\{table\*?\}", text, flags=re.DOTALL)
    (table,) = [each for each in tables if f"\\label{{{label}}}" in each]
    body = table[table.index("\\hline") : table.index("\\end{tabular}")]
    lines = [re.sub(r"~?\\cite\{[^}]*\}|\$\\pm\$\s*[0-9.]+|\\\w+|[{}$]", " ", line) for line in body.split("\\\\")]
    return [line for line in lines if re.search(r"\d\.\d", line)]


@pytest.mark.skipif(not TEX.exists(), reason="the paper is not here")
@pytest.mark.parametrize(
    ("label", "suite"),
    [
        ("tab:cifar10_results", "cifar10"),
        ("tab:cifar100_results", "cifar100"),
        ("tab:imagenet_results", "imagenet"),
        ("tab:ablation", "ablation"),
        ("tab:ablation_fnr_cifar10", "fnr"),
        ("tab:diatoms", "microorganisms"),
        ("tab:cifar_acc", "confidence"),
        ("tab:gaussian_test", "gaussian"),
        ("tab:ablation_arch", "backbones"),
        ("tab:ablation_cluster", "clustering"),
        ("tab:ablation_max_clusters", "max-clusters"),
        ("tab:ablation_epochs", "frequency"),
    ],
)
def test_figures_are_those_of_the_paper(label, suite):
    """Every figure of a row stands in the line of the same place, accuracies perhaps in per cent."""
    table, lines = find_suite(suite).paper, tex_rows(label)
    lines *= 2 if suite == "gaussian" else 1  # its second column is for another data set, which has rows of its own
    assert len(lines) == len(table)
    for line, figures in zip(lines, table.values()):
        said = [float(number) for number in re.findall(r"(?<![\w.-])\d+(?:\.\d+)?", line)]
        for value in figures.values():
            assert any(math.isclose(value, n) or math.isclose(100 * value, n) for n in said), (line, value)
