"""Compare MAPLE's scores with every detector of pytorch-ood 0.4.0, on five public networks.

    python benchmarks/peers.py --shared ../shared --cache ~/outputs --networks resnet20 densenet-cifar10
    python benchmarks/peers.py --shared ../shared --cache ~/outputs --networks wrn-cifar10 --precision bf16-mixed
    python benchmarks/peers.py --shared ../shared --cache ~/outputs --networks wrn-cifar10 --images 2000
    python benchmarks/peers.py table

Each network is run once over its training images (``FIT_IMAGES`` of them, seed 0), its test images and three OOD sets
(the first ``OOD_IMAGES`` of each);
the outputs are kept in ``--cache`` in float16, in parts of 1,000 images, so an interrupted run continues. One half of
the test images (seed 0) is for what needs held-out known images: the fused score and pytorch-ood's temperature. All
detectors are measured on the other half, against all images of each OOD set. No detector sees an unknown image; all of
pytorch-ood's have their defaults, and those without one the value of their paper (DICE p = 0.9, ViM d by its rule).

ReAct, ASH, SCALE and VRA get the pooled features, as in OpenOOD. With ``--images N`` the detectors that need images
(gradients, feature maps of several layers) are measured too, and ours once more, on the first N images of each set.
Not comparable: MCD (needs dropout), MCM (CLIP), WeightedEBO (trained weights).

``--precision bf16-mixed`` runs the networks in bfloat16, twice as fast where the processor has it; all detectors then
read the same outputs. The WRN-20-10 has weights of one bit. Rows are added to results/peers.json; those that exist are
not measured again.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maple.data.batches import evaluation_batches
from maple.data.image_set import ImageSet
from maple.detectors.maple import MapleDetector
from maple.networks import normalise_images, use_fast_allocator
from maple.networks._torchvision import import_torchvision
from maple.stats.metrics import auroc
from public import NETWORKS, Call, Study, parse_study, study_parser

FAR = ("svhn",)

Row = dict[str, Any]
Scores = dict[str, np.ndarray]  # by set: "test" and the OOD sets


def compare(scores: Scores) -> Row:
    """AUROC of each OOD set, their mean, and the means of near and far sets."""
    found = {name: auroc(scores["test"], values) for name, values in scores.items() if name != "test"}
    near = [value for name, value in found.items() if name not in FAR]
    return {**found, "near": float(np.mean(near)), "mean": float(np.mean(list(found.values())))}


# --- detectors --------------------------------------------------------------------------------------------------------


def our_scores(study: Study) -> dict[str, Scores]:
    """Every score of MAPLE, fitted on training outputs and the validation half."""
    validation = study.outputs["test"][study.halves[0]]
    detector = MapleDetector().fit(study.outputs["train"], validation)
    found = {name: detector.describe(part) for name, part in study.measured.items()}
    return {
        f"maple, {score}": {name: part.score_named(score) for name, part in found.items()}
        for score in found["test"].available_scores
    }


def peers_on_outputs(study: Study, theirs: Any) -> Iterator[tuple[str, Callable[[], Scores]]]:
    """pytorch-ood's detectors of logits and features."""
    network = study.network[0]
    fc = network.fc
    train, validation = study.outputs["train"], study.outputs["test"][study.halves[0]]
    labels = torch.from_numpy(train.labels)
    z, logits = torch.from_numpy(train.embeddings), torch.from_numpy(train.logits)
    held_out = torch.from_numpy(validation.logits), torch.from_numpy(validation.labels)
    weight, bias = fc.weight.detach(), fc.bias.detach()
    size = z.shape[1]
    principal = 1000 if size >= 2048 else 512 if size >= 768 else size // 2  # ViM's rule

    def on(detector: Any, verb: str, reads: str, *fitted: Tensor) -> Callable[[], Scores]:
        def run() -> Scores:
            if fitted:
                getattr(detector, f"fit_{verb}")(*fitted)
            predict = getattr(detector, f"predict_{verb}")
            with torch.no_grad():
                return {
                    name: predict(shaped(torch.from_numpy(getattr(part, reads)), verb)).numpy()
                    for name, part in study.measured.items()
                }

        return run

    def shaped(values: Tensor, verb: str) -> Tensor:
        return values[:, :, None, None] if verb == "feature_maps" else values

    maps = shaped(z, "feature_maps")
    yield "MaxSoftmax", on(theirs.MaxSoftmax(None), "logits", "logits")
    yield "MaxLogit", on(theirs.MaxLogit(None), "logits", "logits")
    yield "EnergyBased", on(theirs.EnergyBased(None), "logits", "logits")
    yield "Entropy", on(theirs.Entropy(None), "logits", "logits")
    yield "GEN", on(theirs.GEN(None), "logits", "logits")
    yield "KLMatching", on(theirs.KLMatching(None), "logits", "logits", logits, labels)
    yield "TemperatureScaling", on(theirs.TemperatureScaling(None), "logits", "logits", *held_out)
    yield "OpenMax", on(theirs.OpenMax(None), "logits", "logits", logits, labels)
    features = ("features", "embeddings", z, labels)
    yield "Mahalanobis", on(theirs.Mahalanobis(None), *features)
    yield "RMD", on(theirs.RMD(None), *features)
    yield "GMM", on(theirs.GMM(None), *features)
    yield "KNN", on(theirs.KNN(None), *features)
    yield "ViM", on(theirs.ViM(None, d=principal, w=weight, b=bias), *features)
    yield "DICE", on(theirs.DICE(None, w=weight, b=bias, p=0.9), *features)
    yield "SHE", on(theirs.SHE(None, fc), *features)
    yield "NNGuide", on(theirs.NNGuide(None, fc), *features)
    yield "PNML", on(theirs.PNML(None, fc), *features)
    yield "fDBD", on(theirs.fDBD(nn.Identity(), fc), *features)
    yield "NCI", on(theirs.NCI(nn.Identity(), fc), *features)
    yield "LTS", on(theirs.LTS(None, fc), "features", "embeddings")
    yield "ReAct", on(theirs.ReAct(None, network.head), "feature_maps", "embeddings", maps, labels)
    yield "VRA", on(theirs.VRA(None, network.head), "feature_maps", "embeddings", maps, labels)
    yield "SCALE", on(theirs.SCALE(None, network.head), "feature_maps", "embeddings")
    yield "ASH", on(theirs.ASH(None, network.head), "feature_maps", "embeddings")


def peers_on_images(study: Study, theirs: Any, n: int) -> Iterator[tuple[str, Callable[[], Scores]]]:
    """pytorch-ood's detectors that need images: gradients with respect to them, or feature maps of several layers."""
    network, mean, std = study.network
    images = study.measured_images(n)
    moments = torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1)

    def batches(source: ImageSet) -> Iterator[Tensor]:
        for x, _ in evaluation_batches(source, batch_size=50, workers=0):
            yield normalise_images(x, *moments)

    class Loader:
        """Batches of training images with labels, as often as they are asked for."""

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            rows = np.sort(np.random.default_rng(0).permutation(len(study.images["train"]))[:n])
            source = study.images["train"].subset(rows)
            labels = torch.from_numpy(source.labels).split(50)
            yield from zip(batches(source), labels, strict=True)

    def on(detector: Any, fit: bool = False) -> Callable[[], Scores]:
        def run() -> Scores:
            if fit:
                detector.fit(Loader())
            return {
                name: torch.cat([detector.predict(x).detach() for x in batches(source)]).numpy()
                for name, source in images.items()
            }

        return run

    def own(model: nn.Module) -> nn.Module:
        return copy.deepcopy(model)

    stages = list(network.stages)
    n_classes = network.fc.out_features
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.fc)
    yield "ODIN", on(theirs.ODIN(own(network), norm_std=std))
    yield "GradNorm", on(theirs.GradNorm(own(network), param_filter=lambda name: name.startswith("fc")))
    yield "GradUncertainty", on(theirs.GradUncertainty(own(network), param_filter=lambda name: name.startswith("fc")))
    yield "RankFeat", on(theirs.RankFeat(network.maps, network.head))
    yield "MultiMahalanobis", on(theirs.MultiMahalanobis(stages), fit=True)
    yield "Gram", on(theirs.Gram(pooled, stages, n_classes), fit=True)
    yield "NACUE", on(theirs.NACUE(network, stages), fit=True)
    wrapped = nn.Sequential(Call(network.maps), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    yield "MahalanobisODIN", on(theirs.MahalanobisODIN(wrapped, norm_std=std), fit=True)


# --- rows -------------------------------------------------------------------------------------------------------------


def read_rows(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.exists() else []


def measure(study: Study, theirs: Any, n_images: int, path: Path) -> None:
    """Add the missing rows of one network."""
    done = {(row["network"], row["detector"], row["images"]) for row in read_rows(path)}

    def add(name: str, by: str, images: int | str, scores: Scores) -> None:
        key = {"network": study.name, "detector": name, "by": by, "images": images, "precision": study.precision}
        row = {**key, **compare(scores)}
        path.write_text(json.dumps({"rows": [*read_rows(path), row]}, indent=1) + "\n")
        print(f"{study.name:18s} {name:20s} {images!s:5s} near {row['near']:.4f}  mean {row['mean']:.4f}", flush=True)

    ours = our_scores(study)
    wanted: list[tuple[int | str, Any]] = [("all", peers_on_outputs(study, theirs))]
    if n_images:
        wanted.append((n_images, peers_on_images(study, theirs, n_images)))
    for images, peers in wanted:
        for name, scores in ours.items():
            if (study.name, name, images) not in done:
                add(name, "maple", images, scores if images == "all" else {k: v[:images] for k, v in scores.items()})
        for name, run in peers:
            if (study.name, name, images) not in done:
                add(name, "pytorch-ood 0.4.0", images, run())


def print_table(rows: list[Row]) -> None:
    """The default score, the best of pytorch-ood, and the rank of ours among all; per network and number of images."""
    for network in NETWORKS:
        for images in dict.fromkeys(row["images"] for row in rows if row["network"] == network):
            own = [row for row in rows if row["network"] == network and row["images"] == images]
            theirs = sorted((row for row in own if row["by"] != "maple"), key=lambda row: -row["mean"])
            ours = next((row for row in own if row["detector"] == "maple, fused"), None)
            for row in [*([ours] if ours else []), *theirs[:5]]:
                print(
                    f"{network:18s} {images!s:5s} {row['detector']:20s} near {row['near']:.4f}  mean {row['mean']:.4f}"
                )


def main() -> None:
    parser = study_parser(__doc__, "results/peers.json")
    parser.add_argument("--images", type=int, default=0, help="images per set for detectors that need images; 0: none")
    arguments = parse_study(parser)
    if arguments.mode == "table":
        print_table(read_rows(arguments.json))
        return
    use_fast_allocator()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_torchvision()
        import pytorch_ood.detector as theirs
    for name in arguments.networks:
        study = Study(name, arguments.shared, arguments.cache, arguments.precision)
        measure(study, theirs, arguments.images, arguments.json)


if __name__ == "__main__":
    main()
