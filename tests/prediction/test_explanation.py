"""Explanations in sentences and as values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from maple.detectors.scores import FUSED, Part
from maple.prediction.components import find_components
from maple.prediction.explain import name_clusters
from maple.prediction.explanation import Explanation, Match
from maple.stats.gaussians import Gaussians

NAMES = ("Navicula", "Nitzschia", "Cymbella")


@pytest.fixture
def plain() -> Explanation:
    """Two clusters of one class at 0 and 5 along the first of four components, another class at 8."""
    gaussians = Gaussians(
        np.eye(4), np.zeros(4), np.array([[0.0, 0, 0, 0], [5, 0, 0, 0], [8, 0, 0, 0]]), np.log([0.4, 0.2, 0.4])
    )
    components = replace(find_components(gaussians), axes=np.eye(4), centroids=gaussians.centroids)
    names = name_clusters(np.array([0, 0, 1]), NAMES)
    z = np.array([3.0, 0, 4, 0])
    nearest = Match(1, 0, NAMES[0], names[1], 0.93, z - gaussians.centroids[1])
    rival = Match(2, 1, NAMES[1], names[2], 0.05, z - gaussians.centroids[2])
    return Explanation(NAMES[0], 0.93, nearest, rival, z, components, names, 18.0, True, 0.004, True, 0.05)


def test_sentences(plain: Explanation) -> None:
    assert plain.sentences() == [
        "Probably not one of your classes: it is further from every class than at least 99.6 % of known images; "
        "nearest is Navicula.",
        "Called Navicula (probability 0.93): nearest to cluster 1 of Navicula, squared distance 20.0, where 95 % of "
        "known images stay below 18.0.",
        "80 % of that distance comes from component 3 (4.0 standard deviations).",
        "81.2 % of the unusual distance lies in components that do not separate clusters (2 to 4): it would be unusual "
        "in any of them.",
        "Runner-up Nitzschia (0.05), squared distance 41.0: component 1 is the strongest evidence against it (21.0).",
        "Out-of-distribution: at most 0.4 % of known images look as unusual (p-value 0.004, at most the false-alarm "
        "rate 0.05).",
    ]


def test_sentences_of_a_usual_image(plain: Explanation) -> None:
    usual = replace(plain, usual_distance=28.0, is_ood=False, p_value=0.42)
    assert len(usual.sentences()) == 5
    assert usual.sentences()[0] == "Probably Navicula (93 %): it looks like known images."
    assert usual.sentences()[-1] == (
        "In-distribution: at most 42 % of known images look as unusual (p-value 0.420, above the false-alarm rate "
        "0.05)."
    )


def test_sentences_where_class_and_nearest_cluster_differ(plain: Explanation) -> None:
    _, first, *_, second, _ = replace(plain, class_name=NAMES[1], probability=0.5).sentences()
    assert second.startswith("Second nearest is Nitzschia (0.05), ")  # as it was called: no runner-up to itself
    assert first.startswith(
        "Called Nitzschia (probability 0.50), although cluster 1 of Navicula (0.93) has the nearest mean, "
    )


def test_the_first_sentence_says_what_to_make_of_the_image(plain: Explanation) -> None:
    known = replace(plain, is_ood=False, p_value=0.42)
    doubtful = replace(known, probability=0.5)
    assert doubtful.sentences()[0] == "Doubtful, Navicula (50 %) or Nitzschia (5 %): it looks like known images."
    called_otherwise = replace(doubtful, class_name=NAMES[1]).sentences()[0]
    assert called_otherwise.startswith("Doubtful, Nitzschia (50 %) or Navicula (93 %): ")
    assert replace(doubtful, runner_up=None).sentences()[0].startswith("Doubtful, Navicula (50 %): ")
    for undecided in (replace(known, p_value=np.nan), replace(known, can_be_flagged=False)):
        assert (
            undecided.sentences()[0] == "Probably Navicula (93 %); whether it is one of your classes was not decided."
        )
    by_score = replace(plain, by_distance=False, known_images="known images called Navicula")
    assert "it looks more unusual than at least 99.6 % of known images called Navicula;" in by_score.sentences()[0]
    assert "at least 99.9 % of" in replace(plain, p_value=0.0).sentences()[0]


def test_deviations_point_to_clusters_that_lie_there(plain: Explanation) -> None:
    assert plain.say_deviation(0) == "2.0 standard deviations towards cluster 0 of Navicula"
    upwards = replace(plain.nearest, deviations=np.array([1.5, 0, 0, 0]))
    assert replace(plain, nearest=upwards).say_deviation(0) == "1.5 standard deviations towards Nitzschia"
    outermost = replace(plain.nearest, cluster=2, deviations=np.array([1.5, 0, 0, 0]))
    assert replace(plain, nearest=outermost).say_deviation(0) == "1.5 standard deviations"  # nothing lies further up
    assert plain.say_deviation(2, unit=False) == "4.0"
    assert plain.end_names(0) == ("cluster 0 of Navicula", "Nitzschia") and plain.end_names(2) is None


def test_what_speaks_for_the_runner_up_is_said(plain: Explanation) -> None:
    nearer = replace(plain.runner_up, deviations=np.array([-5.0, 0, 1, 0]))
    said = replace(plain, runner_up=nearer).sentences()[4]
    assert said.endswith("component 1 is the strongest evidence against it (21.0), component 3 for it (15.0).")


def test_a_distance_spread_evenly_says_so(plain: Explanation) -> None:
    n = 20
    components = replace(plain.components, axes=np.eye(n), centroids=5 * np.eye(3, n, k=10))
    even = replace(plain.nearest, deviations=np.full(n, 1.0))
    spread = replace(plain, nearest=even, runner_up=None, components=components, coordinates=np.zeros(n))
    assert spread.sentences()[2] == "None of the 20 components stands out: the largest makes 5 %."
    one_far = replace(even, deviations=np.where(np.arange(n) == 4, 3.5, 1.5))
    said = replace(spread, nearest=one_far).sentences()[2]
    assert said == (
        "The largest parts of that distance, together 30.5 %, come from components 5 (3.5 standard deviations), "
        "1 (1.5), 2 (1.5)."
    )


def test_a_decision_by_another_rule_names_no_rate(plain: Explanation) -> None:
    flagged = replace(plain, p_value=0.06).sentences()[-1]  # as with Benjamini-Hochberg, or thresholds per class
    assert flagged == "Out-of-distribution: at most 6 % of known images look as unusual (p-value 0.060)."
    per_class = replace(plain, known_images="known images called Navicula").sentences()[-1]
    assert per_class.startswith("Out-of-distribution: at most 0.4 % of known images called Navicula look as unusual")
    unlike_any = replace(plain, p_value=0.0001).sentences()[-1]
    assert "at most 0.1 % of known images look as unusual (p-value below 0.001" in unlike_any
    too_few = replace(plain, p_value=0.006, is_ood=False, false_alarm=0.001, can_be_flagged=False).sentences()[-1]
    assert too_few == (
        "Whether it is out-of-distribution was not decided: the run has too few calibration images for the "
        "false-alarm rate 0.001; at most 0.6 % of known images look as unusual (p-value 0.006)."
    )
    undecided = replace(plain, p_value=np.nan, is_ood=False).sentences()[-1]
    assert "no calibration images" in undecided
    unasked = replace(plain, p_value=np.nan, is_ood=False, false_alarm=np.nan).sentences()
    assert not any("istribution" in sentence for sentence in unasked)


def test_another_score_may_flag_a_usual_distance(plain: Explanation) -> None:
    by_score = replace(plain, usual_distance=28.0, by_distance=False)
    assert by_score.sentences()[-1].endswith("; its squared distance is usual, but the score also uses other evidence.")
    assert "other evidence" not in replace(by_score, by_distance=True).sentences()[-1]


def test_the_fused_score_in_words(plain: Explanation) -> None:
    """The part that is named is the largest bar of the page."""
    fused = replace(plain, score=9.1, score_by="fused", parts={"energy": 5.2, "spread": 1.0, "shallow": 2.9})
    assert fused.sentences()[-2] == (
        "Its score 9.1 is made of energy 5.2, spread 1.0 and shallow 2.9: most unusual is energy (little evidence "
        "for any class)."
    )
    between = replace(fused, score=5.0, parts={"energy": 1.0, "spread": 4.0})
    assert between.sentences()[-2] == (
        "Its score 5.0 is made of energy 1.0 and spread 4.0: most unusual is spread (lies between the classes)."
    )
    assert between.sentences()[-1] == plain.sentences()[-1]


@pytest.mark.parametrize(("surprise", "expected"), [(-np.log(0.051), None), (-np.log(0.049), "shallow")])
def test_a_part_is_unusual_beyond_most_known_images(plain: Explanation, surprise: float, expected: str | None) -> None:
    parts = {"energy": 0.1, "spread": 0.2, "shallow": FUSED["shallow"].add(np.array(surprise))}
    found = replace(plain, score=sum(parts.values()), score_by="fused", parts=parts)
    assert found.most_unusual_part == expected
    assert found.sentences()[-2].endswith(": none of them stands out.") == (expected is None)


def test_a_part_is_judged_as_the_run_counts_it(plain: Explanation) -> None:
    """A surprise of 2.5 is usual, of 5 it is not."""
    found = replace(plain, score=2.5, score_by="fused", parts={"energy": 2.5})
    assert replace(found, counted={"energy": Part(1.0)}).most_unusual_part is None
    assert replace(found, counted={"energy": Part(0.5)}).most_unusual_part == "energy"


def test_values_hold_what_was_found(plain: Explanation) -> None:
    values = json.loads(json.dumps(plain.to_dict(), allow_nan=False))
    assert values["nearest"] == {"cluster": 1, "class": "Navicula", "probability": 0.93, "squared_distance": 20.0}
    assert values["runner_up"]["class"] == "Nitzschia"
    assert sum(part["contribution"] for part in values["components"]) == pytest.approx(20)
    assert [part["component"] for part in values["components"]] == [1, 2, 3, 4]
    assert values["components"][0]["between"] == ["cluster 0 of Navicula", "Nitzschia"]
    assert values["sentences"] == plain.sentences()
    assert replace(plain, runner_up=None, p_value=np.nan).to_dict()["p_value"] is None
    fused = replace(plain, score=3.5, score_by="fused", parts={"energy": 2.5, "spread": 1.0})
    values = json.loads(json.dumps(fused.to_dict(), allow_nan=False))
    assert (values["score"], values["score_by"]) == (3.5, "fused")
    assert values["parts"] == {"energy": 2.5, "spread": 1.0}
