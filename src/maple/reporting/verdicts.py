"""Verdicts: in which figures MAPLE is ahead of the network's own probabilities, equal within noise, or behind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from maple.evaluation.results import Gain, Method, Results
from maple.reporting.comparison import OURS, SCALED, is_noise, method_name
from maple.text import join_names, number, percent

Verdict = Literal["behind", "equal", "ahead"]  # from the worst to the best
WORDS: dict[Verdict, str] = {"behind": "behind", "equal": "equal within noise to", "ahead": "ahead of"}
MAX_SETS = 4  # OOD sets that are compared


def judge_gain(gain: Gain) -> Verdict | None:
    """The verdict on a gain; None if there is no number.

    >>> judge_gain(Gain(0.02, 0.005)), judge_gain(Gain(-0.02, 0.02)), judge_gain(Gain(float("nan"), 0.0))
    ('ahead', 'equal', None)
    """
    if math.isnan(gain.value):
        return None
    if is_noise(gain):
        return "equal"
    return "ahead" if gain.value > 0 else "behind"


@dataclass(frozen=True)
class Figure:
    """One figure of the comparison."""

    key: str  # as in ``Results.rows``
    name: str
    higher: bool = True  # is better
    write: Callable[[float], str] = number

    def value_of(self, method: Method) -> float:
        """The value of a method; NaN if it has none."""
        measure, _, ood_name = self.key.partition("/")
        if ood_name:
            return method.detection[ood_name].auroc
        return math.nan if method.classification is None else float(getattr(method.classification, measure))

    def gain_over(self, rival: str, results: Results) -> Gain:
        """The gain of MAPLE with its noise; results without it (of earlier versions) count digits shown as certain."""
        if stored := results.gains.get(rival, {}).get(self.key):
            return stored
        ours, theirs = (round(self.value_of(results.methods[name]), 3) for name in (OURS, rival))
        return Gain(ours - theirs if self.higher else theirs - ours, 0.0)


@dataclass(frozen=True)
class Comparison:
    """A figure of MAPLE, the same of its rivals, and the verdicts on them."""

    figure: Figure
    value: float
    rivals: dict[str, float]  # by name on the page
    verdicts: dict[str, Verdict]  # likewise

    @property
    def verdict(self) -> Verdict | None:
        """The least favourable verdict."""
        return min(self.verdicts.values(), key=list(WORDS).index, default=None)

    @property
    def words(self) -> str:
        """The verdicts in words: 'ahead of softmax, equal within noise to scaled softmax'."""
        grouped = {verdict: [name for name, found in self.verdicts.items() if found == verdict] for verdict in WORDS}
        return ", ".join(f"{WORDS[verdict]} {join_names(names)}" for verdict, names in grouped.items() if names)

    @property
    def others(self) -> str:
        """The figures of the rivals; one number if they are all equal."""
        texts = {name: self.figure.write(value) for name, value in self.rivals.items()}
        if len(set(texts.values())) == 1:
            return f"{next(iter(texts))} {next(iter(texts.values()))}"
        return ", ".join(f"{name} {text}" for name, text in texts.items())


def compare_figures(results: Results) -> list[Comparison]:
    """Accuracy, ECE, NLL and the AUROC of the first OOD sets, each beside the baseline and its scaled softmax."""
    figures = [
        Figure("accuracy", "accuracy", write=percent),
        Figure("ece", "calibration error (ECE)", higher=False),
        Figure("nll", "negative log-likelihood", higher=False),
        *(Figure(f"auroc/{name}", f"AUROC of {name}") for name in list(results.n_ood)[:MAX_SETS]),
    ]
    found = [_compare(figure, results) for figure in figures]
    return [each for each in found if not math.isnan(each.value)]


def _compare(figure: Figure, results: Results) -> Comparison:
    rivals = [name for name in (results.baseline, SCALED) if name in results.methods]
    values = {method_name(name): figure.value_of(results.methods[name]) for name in rivals}
    verdicts = {method_name(name): judge_gain(figure.gain_over(name, results)) for name in rivals}
    known = {name: verdict for name, verdict in verdicts.items() if verdict}
    return Comparison(figure, figure.value_of(results.methods[OURS]), values, known)


def describe_comparison(compared: list[Comparison]) -> Iterator[str]:
    """One sentence that names the figures in which MAPLE is ahead, equal or behind; none without rivals."""
    judged = [each for each in compared if each.verdict]
    if not judged:
        return
    rivals = list(dict.fromkeys(name for each in judged for name in each.verdicts))
    parts = []
    for verdict, words in (("ahead", "ahead in"), ("equal", "equal within noise in"), ("behind", "behind in")):
        if names := [each.figure.name for each in judged if each.verdict == verdict]:
            parts.append(f"{words} {join_names(names)}")
    yield f"Compared with {join_names(rivals)} of the same network, MAPLE is {'; '.join(parts)}."
