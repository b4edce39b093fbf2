"""Choose the parts of the fused score on known images alone, and say what that costs: results/score_parts.json.

    python benchmarks/score_parts.py choose --shared ../shared --folds a b c d --epochs 5 12
    python benchmarks/score_parts.py cost --shared ../shared --cache ~/outputs --networks resnet20-cifar10
    python benchmarks/score_parts.py cost --shared ../shared --networks --trained runs/strength/trainings/HASH
    python benchmarks/score_parts.py table

``choose`` trains networks on seven classes of CIFAR-10 (the trainings of ``strength.py screen``, cross-entropy, of two
lengths) and takes as unknown what known images provide: test images of the three left-out classes (near), test images
of the seven with shuffled patches, and fractals (far). For every candidate it stores the AUROC of each set. Chosen is
the candidate with the best mean of near and far over all networks, among those whose mean near AUROC is not lower than
that of the former default, ``FORMER``, by more than ``NOISE``. Sums with ``relative`` are measured, but not chosen:
distances of raw embeddings fail on networks whose embeddings of unknown images are short (docs/scores.md), and all
networks here are of one kind. ``cost`` compares it with the former ones on the OOD sets of ``peers.py``, which the
choice has not seen: on public networks, and on runs that know CIFAR-10 (``--trained``). A candidate is the weight of
each surprise, counted above a level.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import peers
import strength
from maple.data.augment import make_fractals, shuffle_patches
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import FUSED, Part, Score, fit_surprise
from maple.evaluation.paper.rows import Training
from maple.networks import embed
from maple.prediction.store import load_predictor
from maple.runs.benchmark.jobs import Job
from maple.runs.benchmark.trainings import ensure_trained
from maple.runs.folder import RunFolder
from maple.runs.setup.splits import left_out_images, reopen_splits
from maple.stats.metrics import auroc
from public import SHARED_OOD

NETWORK, EPOCHS = "airbench-32-average", (5, 12)
N_FAR = 2000  # pictures of each far set
NEAR = ("left-out",)
SHALLOW = [Part(0.0), *(Part(weight, beyond) for weight in (0.25, 0.5, 1.0) for beyond in (0.0, 1.0, 2.0, 3.0))]
NOISE = 0.002  # AUROC; two trainings that differ in the number of threads alone differ by more
FAR_TAIL = FUSED["distance"]  # the paper's distance far out: for images that logits and directions miss

Parts = dict[Score, Part]
FORMER: Parts = {
    "energy": Part(1.0),
    "spread": Part(1.0),
    "shallow": Part(0.5),
    "distance": FAR_TAIL,
}  # was chosen with CIFAR-100 and SVHN
BEFORE: Parts = {**FORMER, "spread": Part(0.5)}  # was chosen on the shorter trainings alone
Scores = dict[str, dict[Score, np.ndarray]]  # by set and name


def candidates() -> Iterator[Parts]:
    """The sums that are compared: energy, and how much of every other score."""
    for spread, relative, shallow in product((0.0, 0.5, 1.0), (0.0, 0.5, 1.0), SHALLOW):
        yield {
            "energy": Part(1.0),
            "spread": Part(spread),
            "relative": Part(relative),
            "shallow": shallow,
            "distance": FAR_TAIL,
        }


def describe(parts: Parts) -> str:
    """A sum in words.

    >>> describe({"energy": Part(1.0), "spread": Part(0.0), "shallow": Part(0.5, beyond=2.0)})
    'energy + 0.5 shallow beyond 2'
    """
    said = []
    for name, part in parts.items():
        if part.weight:
            weight = "" if part.weight == 1 else f"{part.weight:g} "
            said.append(f"{weight}{name}" + (f" beyond {part.beyond:g}" if part.beyond else ""))
    return " + ".join(said)


def surprises(found: dict[str, Description], validation: Description) -> Scores:
    """The surprise of every score that is a part of some candidate."""
    names: list[Score] = ["energy", "spread", "relative", "shallow", "distance"]
    fitted = {name: fit_surprise(validation.score_named(name)) for name in names}
    return {
        set_name: {name: fitted[name](part.score_named(name)) for name in names} for set_name, part in found.items()
    }


def total(parts: Parts, of: dict[Score, np.ndarray]) -> np.ndarray:
    """The sum (N,) of the parts."""
    return np.sum([part.add(of[name]) for name, part in parts.items() if part.weight], axis=0)


def measure(parts: Parts, scores: Scores) -> dict[str, float]:
    """AUROC of each set of unknown images."""
    known = total(parts, scores["test"])
    return {name: auroc(known, total(parts, of)) for name, of in scores.items() if name != "test"}


# --- choice -----------------------------------------------------------------------------------------------------------


def make_far(test: ImageSet) -> dict[str, ImageSet]:
    """Pictures that are far from all classes, from known images or from nothing."""
    rows = np.random.default_rng(0).permutation(len(test))[:N_FAR]
    pixels = torch.from_numpy(np.stack([test.read(i) for i in rows])).permute(0, 3, 1, 2)  # (N, 3, S, S)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        shuffled = shuffle_patches(pixels.float()).to(torch.uint8).permute(0, 2, 3, 1)
    fractals = make_fractals(test.size, n=N_FAR, seed=1)
    return {name: ImageSet.from_arrays(x.numpy()) for name, x in (("shuffled", shuffled), ("fractals", fractals))}


def choose(fold: str, seed: int, epochs: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """The AUROCs of all candidates on one network that was trained without the classes of a fold."""
    options = argparse.Namespace(
        network=NETWORK, precision=arguments.precision, **dict.fromkeys(strength.TRAIN_OPTIONS, None)
    )
    training = Training.of(f"fold-{fold}", **strength.RECIPES["cross-entropy"])
    profile = strength.make_profile(options)
    job = Job(training, profile, seed, arguments.runs, arguments.shared / "data", {"epochs": epochs})
    folder = ensure_trained(job)
    predictor = load_predictor(folder)
    splits = reopen_splits(RunFolder(folder), predictor.size, arguments.shared / "data")
    sets = {"test": splits.test, "left-out": left_out_images(splits), **make_far(splits.test)}
    found = {name: predictor.detector.describe(embed(predictor.backbone, images)) for name, images in sets.items()}
    validation = predictor.detector.describe(embed(predictor.backbone, splits.validation))
    scores = surprises(found, validation)
    rows = [{"parts": describe(parts), **measure(parts, scores)} for parts in candidates()]
    return {"mode": "choose", "network": NETWORK, "epochs": epochs, "fold": fold, "seed": seed, "candidates": rows}


def rank(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Candidates with the means of near and far over all networks, the best mean first.

    ``loses`` says whether the former default is better near by more than ``NOISE``; such candidates are last.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for row in rows:
        for candidate in row["candidates"] if row["mode"] == "choose" else ():
            near = np.mean([value for name, value in candidate.items() if name in NEAR])
            far = np.mean([value for name, value in candidate.items() if name not in (*NEAR, "parts")])
            found.setdefault(candidate["parts"], []).append({"near": float(near), "far": float(far)})
    means = {
        parts: {key: float(np.mean([value[key] for value in values])) for key in ("near", "far")}
        for parts, values in found.items()
    }
    least = means.get(describe(FORMER), {"near": 0.0})["near"] - NOISE
    ranked = [{"parts": parts, **mean, "loses": mean["near"] < least} for parts, mean in means.items()]
    return sorted(ranked, key=lambda row: (row["loses"], -(row["near"] + row["far"])))


def choose_sum(ranked: list[dict[str, Any]]) -> Parts:
    """The best sum without ``relative``."""
    by_name = {describe(parts): parts for parts in candidates() if not parts["relative"].weight}
    return next(by_name[row["parts"]] for row in ranked if row["parts"] in by_name)


# --- cost -------------------------------------------------------------------------------------------------------------


def cost(name: str, chosen: Parts, arguments: argparse.Namespace) -> dict[str, Any]:
    """The chosen sum and the former one on a public network and OOD sets that the choice has not seen."""
    study = peers.Study(name, arguments.shared, arguments.cache, arguments.precision)
    detector = MapleDetector().fit(study.outputs["train"], study.outputs["test"][study.halves[0]])
    validation = detector.describe(study.outputs["test"][study.halves[0]])
    scores = surprises({key: detector.describe(part) for key, part in study.measured.items()}, validation)
    return {"mode": "cost", "network": name, "precision": arguments.precision, **compare(chosen, scores)}


def cost_of_run(folder: Path, chosen: Parts, arguments: argparse.Namespace) -> dict[str, Any]:
    """The same on a network of ``strength.py``."""
    predictor, root = load_predictor(folder), arguments.shared / "data"
    splits = reopen_splits(RunFolder(folder), predictor.size, root)
    sources = {"cifar100": "cifar100/test", **SHARED_OOD}
    ood = {name: open_images(source, size=predictor.size, data_root=root) for name, source in sources.items()}
    sets = {"test": splits.test, "validation": splits.validation, **ood}
    found = {name: predictor.detector.describe(embed(predictor.backbone, images)) for name, images in sets.items()}
    scores = surprises(found, found.pop("validation"))
    return {"mode": "cost", "network": folder.name, **compare(chosen, scores)}


def compare(chosen: Parts, scores: Scores) -> dict[str, Any]:
    """Both sums and the energy: their parts, and the AUROC of each OOD set."""
    both = {"chosen": chosen, "before": BEFORE, "former": FORMER, "energy": {"energy": Part(1.0)}}
    return {key: {"parts": describe(parts), **measure(parts, scores)} for key, parts in both.items()}


def print_table(rows: list[dict[str, Any]]) -> None:
    ranked = rank(rows)
    others = (describe(FORMER), describe(BEFORE), describe({"energy": Part(1.0), "distance": FAR_TAIL}))
    shown = [*ranked[:6], *(row for row in ranked[6:] if row["parts"] in others)]
    print("| parts | near | far | mean | loses |\n|---|---|---|---|---|")
    for row in shown:
        both = (row["near"] + row["far"]) / 2
        loses = "yes" if row["loses"] else ""
        print(f"| {row['parts']} | {row['near']:.4f} | {row['far']:.4f} | {both:.4f} | {loses} |")
    for row in rows:
        for key in (key for key in ("chosen", "before", "former", "energy") if key in row):
            values = {name: value for name, value in row[key].items() if name != "parts"}
            cells = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
            print(f"{row['network']}: {key} ({row[key]['parts']}): {cells}, mean {np.mean(list(values.values())):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["choose", "cost", "table"])
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--folds", nargs="*", default=list(strength.FOLDS), choices=list(strength.FOLDS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--epochs", nargs="*", type=int, default=list(EPOCHS), help="of choose: lengths of trainings")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"])
    parser.add_argument("--runs", type=Path, default=Path("runs/strength"), help="folder of the trainings")
    parser.add_argument("--cache", type=Path, help="of cost: folder of the outputs of peers.py")
    parser.add_argument("--networks", nargs="*", default=["resnet20-cifar10"], choices=list(peers.NETWORKS))
    parser.add_argument("--trained", nargs="*", type=Path, default=[], help="of cost: run folders of strength.py")
    parser.add_argument("--json", type=Path, default=Path("results/score_parts.json"), help="rows, read and written")
    arguments = parser.parse_args()
    rows = peers.read_rows(arguments.json)
    if arguments.mode == "choose":
        asked = product(arguments.folds, arguments.seeds, arguments.epochs)
        new = (choose(fold, seed, epochs, arguments) for fold, seed, epochs in asked)
    elif arguments.mode == "cost":
        chosen = choose_sum(rank(rows))
        new = chain(
            (cost(name, chosen, arguments) for name in arguments.networks),
            (cost_of_run(folder, chosen, arguments) for folder in arguments.trained),
        )
    else:
        new = iter(())
    for row in new:
        same = ("mode", "network", "epochs", "fold", "seed")
        rows = [old for old in rows if any(old.get(key) != row.get(key) for key in same)] + [row]
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
