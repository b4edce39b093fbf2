"""Compare the default score with and without the shallow layer that wrap_backbone finds: results/shallow_rule.json.

    python benchmarks/shallow_rule.py --shared ../shared
    python benchmarks/shallow_rule.py --shared ../shared --networks wrn --precision bf16-mixed
    python benchmarks/shallow_rule.py --table

Each network knows CIFAR-10. Gaussians are fitted on the first ``--fit`` training images, the score on one half of
``--images`` test images, AUROC is that of the other half against the first ``--images`` of each OOD set.

``resnet20``, ``densenet`` and ``wrn`` (weights of one bit) are the public ones beside the data. ``cnn`` and ``vit`` are
small networks of timm, trained here from scratch for ``--epochs`` passes over the first ``--train`` images, with random
flips. ``efficientnet`` is EfficientNet-Lite0 of the extra ``pretrained``, fine-tuned in the same way at 64 pixels for
``TUNED`` passes over the images of the Gaussians. The accuracy of each is part of its row.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import peers
from efficientnet_lite import PREPROCESSING, efficientnet_lite0
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.detectors.description import Description
from maple.detectors.maple import MapleDetector
from maple.networks import Backbone, embed, use_fast_allocator, wrap_backbone
from maple.networks._torchvision import import_extra
from maple.networks.backbone import use_channels_last
from maple.stats.metrics import auroc
from maple.types import Outputs
from public import load_network, load_public
from resnet20 import public_resnet20

OOD = {"cifar100": "cifar100/test", "tiny_imagenet": "tiny_imagenet/val", "svhn": "svhn/test"}
HALF = (0.5, 0.5, 0.5)
SIZES = {"efficientnet": 64}  # in pixels; others take 32
TUNED = 3  # epochs of fine-tuning


def open_sets(name: str, arguments: argparse.Namespace) -> dict[str, ImageSet]:
    """The first images of each set, in the size of the network; ``train`` has the images of the Gaussians."""
    sources = {"train": "cifar10/train", "test": "cifar10/test", **OOD}
    return {
        key: open_images(source, size=SIZES.get(name, 32), data_root=arguments.shared / "data").subset(
            np.arange(arguments.fit if key == "train" else arguments.images)
        )
        for key, source in sources.items()
    }


# --- networks ---------------------------------------------------------------------------------------------------------


def make_resnet20(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    """The public ResNet-20, as a module whose shallow layer is not known."""
    public = public_resnet20(arguments.shared)
    assert public.head is not None
    module = nn.Sequential(public.body, public.head)
    return wrap(module, mean=public.mean.tolist(), std=public.std.tolist())


def make_densenet(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    network, mean, std = load_public(arguments.shared).load("densenet_bc100_12_cifar10_fp16")
    return wrap(network, mean=mean, std=std)


def make_wrn(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    network, mean, std = load_network("wrn-cifar10", arguments.shared)
    network.half_maps = arguments.precision == "bf16-mixed"
    return wrap(network, mean=mean, std=std)


def make_cnn(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    module = import_extra("timm").create_model("test_resnet", num_classes=10, stem_type="")
    return from_scratch(module, arguments)


def make_vit(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    transformer = import_extra("timm").models.vision_transformer.VisionTransformer
    module = transformer(
        img_size=32, patch_size=4, embed_dim=96, depth=6, num_heads=3, num_classes=10, global_pool="avg"
    )
    return from_scratch(module, arguments)


def from_scratch(module: nn.Module, arguments: argparse.Namespace) -> Backbone:
    images = open_images("cifar10/train", size=32, data_root=arguments.shared / "data")
    torch.manual_seed(0)
    for layer in module.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()  # type: ignore[operator]
    trained = train_module(module, images.subset(np.arange(arguments.train)), arguments.epochs, rate=2e-3)
    return wrap(trained, mean=HALF, std=HALF)


def make_efficientnet(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    torch.manual_seed(0)
    module = efficientnet_lite0()
    module._fc = nn.Linear(module._fc.in_features, 10)  # type: ignore[union-attr, arg-type]
    trained = train_module(module, train, TUNED, rate=1e-3)
    return wrap(trained, mean=PREPROCESSING["mean"], std=PREPROCESSING["std"])


MAKERS: dict[str, Callable[[ImageSet, argparse.Namespace], Backbone]] = {
    "resnet20": make_resnet20,
    "densenet": make_densenet,
    "wrn": make_wrn,
    "cnn": make_cnn,
    "vit": make_vit,
    "efficientnet": make_efficientnet,
}


def wrap(module: nn.Module, **preprocessing: Any) -> Backbone:
    return use_channels_last(wrap_backbone(module.eval(), example=torch.zeros(2, 3, 32, 32), **preprocessing))


def train_module(module: nn.Module, train: ImageSet, epochs: int, rate: float) -> nn.Module:
    """Cross-entropy with AdamW and one cycle, on images (x - 0.5) / 0.5 that are mirrored at random."""
    assert train.pixels is not None
    x = torch.from_numpy(train.pixels).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    labels, size = torch.from_numpy(train.labels), 128
    optimizer = torch.optim.AdamW(module.parameters(), rate, weight_decay=0.05)
    steps = epochs * (len(x) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    module.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(x))[: len(x) // size * size].split(size):
            batch = torch.where((torch.rand(size) < 0.5)[:, None, None, None], x[rows].flip(3), x[rows])
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch), labels[rows]).backward()
            optimizer.step()
            schedule.step()
    return module


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(name: str, sets: dict[str, ImageSet], arguments: argparse.Namespace) -> dict[str, Any]:
    """AUROC of every score by OOD set; ``fused`` with the layer that was found, ``fused without`` without it."""
    backbone = MAKERS[name](sets["train"], arguments)
    outputs = {key: embed(backbone, images) for key, images in sets.items()}
    trained = {"cnn": (arguments.train, arguments.epochs), "efficientnet": (arguments.fit, TUNED)}
    trained["vit"] = trained["cnn"]
    row = {
        "network": name,
        "fit": arguments.fit,
        "images": arguments.images,
        "precision": arguments.precision if name == "wrn" else "32-true",
        **(dict(zip(("train", "epochs"), trained[name], strict=True)) if name in trained else {}),
        "shallow": backbone.shallow,
        "accuracy": float((outputs["test"].logits.argmax(1) == sets["test"].labels).mean()),  # type: ignore[union-attr]
    }
    found = score_sets(outputs)
    without = score_sets({key: Outputs(part.embeddings, part.logits, part.labels) for key, part in outputs.items()})
    row["auroc"] = {
        key: {**found[key], "fused without": without[key]["fused"]} for key in (*OOD, "mean") if key in found
    }
    return row


def score_sets(outputs: dict[str, Outputs]) -> dict[str, dict[str, float]]:
    """AUROC by OOD set and score, and the mean over the sets."""
    validation, measured = np.split(np.random.default_rng(0).permutation(len(outputs["test"])), 2)
    detector = MapleDetector().fit(outputs["train"], outputs["test"][np.sort(validation)])
    known = detector.describe(outputs["test"][np.sort(measured)])
    found = {name: compare(known, detector.describe(outputs[name])) for name in OOD}
    return {**found, "mean": {score: float(np.mean([found[name][score] for name in OOD])) for score in found["svhn"]}}


def compare(known: Description, unknown: Description) -> dict[str, float]:
    return {name: auroc(known.score_named(name), unknown.score_named(name)) for name in known.available_scores}


def best_single(scores: dict[str, float]) -> tuple[str, float]:
    """The best score that is not a sum of others.

    >>> best_single({"energy": 0.9, "distance": 0.8, "fused": 0.95, "fused without": 0.91})
    ('energy', 0.9)
    """
    single = {name: value for name, value in scores.items() if not name.startswith("fused")}
    best = max(single, key=lambda name: single[name])
    return best, single[best]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| network | accuracy | layer | unknown | fused | without the layer | best single score | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        for name, scores in row["auroc"].items():
            best, value = best_single(scores)
            cells = [row["network"], f"{row['accuracy']:.3f}", f"`{row['shallow']}`", name, f"{scores['fused']:.3f}"]
            cells += [f"{scores['fused without']:.3f}", f"{best} {value:.3f}", f"{scores['fused'] - value:+.3f}"]
            print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/ and weights/")
    parser.add_argument("--networks", nargs="*", default=list(MAKERS), choices=list(MAKERS))
    parser.add_argument("--fit", type=int, default=5000, help="training images for the Gaussians")
    parser.add_argument("--train", type=int, default=50_000, help="training images of the networks trained here")
    parser.add_argument("--images", type=int, default=2000, help="images of the test set and of each OOD set")
    parser.add_argument("--epochs", type=int, default=10, help="of the networks that are trained here")
    parser.add_argument("--precision", default="32-true", choices=["32-true", "bf16-mixed"], help="of the WRN")
    parser.add_argument("--table", action="store_true", help="only print the rows that there are")
    parser.add_argument("--json", type=Path, default=Path("results/shallow_rule.json"), help="rows, read and written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # of torchvision
    use_fast_allocator()
    rows = peers.read_rows(arguments.json)
    if not arguments.table:
        for name in arguments.networks:
            row = measure(name, open_sets(name, arguments), arguments)
            rows = [old for old in rows if old["network"] != name] + [row]
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
