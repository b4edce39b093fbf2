"""Compare the claims of the paper with our results: the tables of docs/reproduction.md, from the suites.

    maple benchmark cifar10 md ablation fnr clustering gaussian confidence microorganisms --data-root ../shared/data
    python benchmarks/reproduction.py --results results --profiles cpu resnet9

A claim is a change between two rows of a table of the paper. It holds if ours has the same sign and at least half of
the size; it is called small below that, and none within a tenth of the size. Each figure is of one network: small
differences are not significant (docs/reproduction.md states the difference between two seeds). Profiles of which
no suite was run are left out, other suites that were not run have empty cells.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Rows = dict[str, dict[str, Any]]  # of a suite, by title


@dataclass(frozen=True)
class Claim:
    """A figure changes from one row of a suite to another: read as in the paper, and of normalised embeddings."""

    says: str
    suite: str
    column: str
    before: str
    after: str
    normalised: tuple[str, str] | None = None  # the rows of the other reading; None where there is none


def claim_both(says: str, suite: str, column: str, before: str, after: str) -> Claim:
    """Both rows are read from distances."""
    return Claim(says, suite, column, before, after, (f"{before}, normalised", f"{after}, normalised"))


def claim_after(says: str, suite: str, column: str, before: str, after: str) -> Claim:
    """Only the second row is read from distances."""
    return Claim(says, suite, column, before, after, (before, f"{after}, normalised"))


MAPLE, DISTANCE, X_MEANS = "MAPLE, P_MD", "MAPLE's distance", "MAPLE, X-Means, P_MD"
PLAIN, TRIPLET, CLUSTERED = "DNN+PCA+MD", "DNN+Triplet+PCA+MD", "DNN+Clustering+PCA+MD"
CLAIMS = (
    claim_after("P_MD is a calibrated probability: ECE (Table 1)", "cifar10", "ece", "Deterministic", MAPLE),
    claim_after("its distance finds SVHN better than softmax: AUROC", "cifar10", "auroc/svhn", "Deterministic", MAPLE),
    claim_after("and CIFAR-100", "cifar10", "auroc/cifar100", "Deterministic", MAPLE),
    claim_after("better than an ensemble does: SVHN", "cifar10", "auroc/svhn", "Deep Ensemble", MAPLE),
    claim_after("and CIFAR-100", "cifar10", "auroc/cifar100", "Deep Ensemble", MAPLE),
    claim_after("better than the relative distance: CIFAR-100 (Table 4)", "md", "auroc/cifar100", "RMD", DISTANCE),
    Claim("PCA helps the distance: SVHN (Table 5)", "ablation", "auroc/svhn", "DNN+MD", PLAIN),
    Claim("and CIFAR-100", "ablation", "auroc/cifar100", "DNN+MD", PLAIN),
    Claim("and the ECE of P_MD", "ablation", "ece", "DNN+MD", PLAIN),
    Claim("Mahalanobis is better than Euclid: CIFAR-100", "ablation", "auroc/cifar100", "DNN+PCA+ED", PLAIN),
    claim_both("triplets help: SVHN", "ablation", "auroc/svhn", PLAIN, TRIPLET),
    claim_both("and CIFAR-100", "ablation", "auroc/cifar100", PLAIN, TRIPLET),
    claim_both("and the ECE of P_MD", "ablation", "ece", PLAIN, TRIPLET),
    claim_both("clusters without triplets help: SVHN", "ablation", "auroc/svhn", PLAIN, CLUSTERED),
    claim_both("clusters on top of triplets help: SVHN", "ablation", "auroc/svhn", TRIPLET, X_MEANS),
    claim_both("and CIFAR-100", "ablation", "auroc/cifar100", TRIPLET, X_MEANS),
    claim_both(
        "embeddings become Gaussian: error (Table 9)",
        "gaussian",
        "training/gaussian_error",
        "Deterministic",
        "MAPLE, X-Means",
    ),
    claim_after("confident predictions are right: above 0.9 (Table 8)", "confidence", "accuracy@0.9", "SNGP", MAPLE),
    claim_after("unknown taxa, better than SNGP (Table 7)", "microorganisms", "auroc/unknown", "SNGP", MAPLE),
    claim_after("and than an ensemble", "microorganisms", "auroc/unknown", "Deep Ensemble", MAPLE),
    Claim(
        "X-Means is better than K-Means: CIFAR-100 (Table 11)",
        "clustering",
        "auroc/cifar100",
        "",
        "",
        ("K-Means", "X-Means"),
    ),
    Claim("and than G-Means", "clustering", "auroc/cifar100", "", "", ("G-Means", "X-Means")),
    Claim("a low t splits too much: CIFAR-100 (Table 6)", "fnr", "auroc/cifar100", "", "", ("t = 0", "t = 0.3")),
    Claim("a high t too little", "fnr", "auroc/cifar100", "", "", ("t = 0.5", "t = 0.3")),
)
CLUSTERED_ROWS = {
    "clustering": ("K-Means", "G-Means", "X-Means"),
    "fnr": tuple(f"t = {t:g}" for t in (0, 0.1, 0.2, 0.3, 0.4, 0.5)),
}


def read_suites(folder: Path, profile: str) -> dict[str, Rows]:
    """The rows of every suite that was run with a profile."""
    found = {}
    for file in sorted(folder.glob(f"suites/*-{profile}/results.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        found[content["suite"]] = {row["title"]: row for row in content["rows"]}
    return found


def judge(paper: float, ours: float) -> str:
    """In words, how our change compares with the paper's.

    >>> [judge(0.2, ours) for ours in (0.3, 0.05, 0.01, -0.1)]
    ['yes', 'small', 'no difference', 'the reverse']
    """
    share = ours / paper
    if abs(share) <= 0.1:
        return "no difference"
    return "the reverse" if share < 0 else "yes" if share >= 0.5 else "small"


def claim_line(claim: Claim, profiles: list[dict[str, Rows]]) -> list[str]:
    """What it says, the paper's change, and ours in both readings with whether it held, for each profile."""
    raw, normalised = (claim.before, claim.after), claim.normalised
    said = raw if all(raw) else normalised or raw
    rows = next(suites[claim.suite] for suites in profiles if claim.suite in suites)
    before, after = (rows[title]["paper"][_column(claim, rows[title]["paper"])] for title in said)
    ours = [
        _our_cell(claim, suites.get(claim.suite), titles, after - before)
        for suites in profiles
        for titles in (raw, normalised)
    ]
    return [claim.says, f"{before:.3f} → {after:.3f}", *ours]


def _column(claim: Claim, figures: dict[str, Any]) -> str:
    """The column of a claim; older tables have test images where the paper and newer ones have training images."""
    return claim.column if claim.column in figures else claim.column.removeprefix("training/")


def _our_cell(claim: Claim, rows: Rows | None, titles: tuple[str, str] | None, paper: float) -> str:
    if rows is None or titles is None or not all(titles):
        return ""
    figures = [rows[title]["figures"] for title in titles]
    before, after = (float(np.mean(of[_column(claim, of)])) for of in figures)
    verdict = judge(paper, after - before)
    if claim.column.startswith("auroc/") and after < 0.5:
        verdict = "worse than chance"
    return f"{before:.3f} → {after:.3f}, {verdict}"


def cluster_lines(profiles: list[dict[str, Rows]]) -> list[list[str]]:
    """Clusters in total, the paper's and ours for each profile."""
    lines = []
    for suite, titles in CLUSTERED_ROWS.items():
        found = [suites.get(suite, {}) for suites in profiles]
        for title in titles if any(found) else ():
            paper = next(rows[title]["paper"]["clusters"] for rows in found if title in rows)
            ours = [f"{np.mean(rows[title]['figures']['clusters']):.0f}" if title in rows else "" for rows in found]
            lines.append([title, f"{paper:.0f}", *ours])
    return lines


def relabel_lines(recipes: list[dict[str, Any]]) -> list[list[str]]:
    """Validation accuracy before and after every relabelling."""
    return [
        [row["recipe"], str(event["epoch"]), str(event["clusters"])]
        + [f"{event[key]:.3f}" for key in ("accuracy_before", "accuracy_after")]
        for row in recipes
        if row["recipe"].startswith("X-Means")
        for event in row.get("events", ())
    ]


def to_markdown(headings: list[str], lines: list[list[str]]) -> str:
    rows = [headings, ["---"] + ["---:"] * (len(headings) - 1), *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder with suites/ and recipes.json")
    parser.add_argument("--profiles", nargs="+", default=["cpu", "resnet9"])
    arguments = parser.parse_args()
    results = arguments.results
    found = {name: suites for name in arguments.profiles if (suites := read_suites(results, name))}
    names, profiles = list(found), list(found.values())
    claims = [claim_line(claim, profiles) for claim in CLAIMS if any(claim.suite in suites for suites in profiles)]
    events = relabel_lines(json.loads((results / "recipes.json").read_text(encoding="utf-8")))
    readings = [f"{name}, {reading}" for name in names for reading in ("raw embeddings", "normalised")]
    tables = (
        (["the paper says", "the paper", *readings], claims),
        (["clusters in total", "the paper", *names], cluster_lines(profiles)),
        (["new clusters", "after epoch", "clusters", "accuracy then", "an epoch later"], events),
    )
    print("\n\n".join(to_markdown(headings, lines) for headings, lines in tables if lines))


if __name__ == "__main__":
    main()
