"""Compare the default score with and without the shallow layer that wrap_backbone finds: results/shallow_rule.json.

    python benchmarks/shallow_rule.py --shared ../shared
    python benchmarks/shallow_rule.py --shared ../shared --networks wrn --precision bf16-mixed
    python benchmarks/shallow_rule.py --table

Rerun a command to resume it: networks that are measured already with these options are left out, and trainings
go on after their last whole epoch, which ``--folder`` holds.

A row also has the default score with more of the layer: ``fused, shallow x2`` and so on; and ``fused, weighed``, whose
layer counts ``1 / (2 A - 1)`` times as much, at most four times. A, ``error_auroc``, is the AUROC by which the energy
tells wrong from right images among those that fit the score: logits that know little of errors know little of unknown
images.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
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
MORE = (2, 3, 4)  # times the weight of the layer in the default score
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
    state = arguments.folder / f"{type(module).__name__}-{arguments.train}-{arguments.epochs}.safetensors"
    images = images.subset(np.arange(arguments.train))
    return wrap(train_module(module, images, arguments.epochs, 2e-3, state), mean=HALF, std=HALF)


def make_efficientnet(train: ImageSet, arguments: argparse.Namespace) -> Backbone:
    torch.manual_seed(0)
    module = efficientnet_lite0()
    module._fc = nn.Linear(module._fc.in_features, 10)  # type: ignore[union-attr, arg-type]
    trained = train_module(module, train, TUNED, 1e-3, arguments.folder / f"efficientnet-{len(train)}.safetensors")
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


def train_module(module: nn.Module, train: ImageSet, epochs: int, rate: float, path: Path) -> nn.Module:
    """Cross-entropy with AdamW and one cycle, on images (x - 0.5) / 0.5 that are mirrored at random.

    Each epoch has a seed of its own, and ``path`` the state after the last one.
    """
    assert train.pixels is not None
    x = torch.from_numpy(train.pixels).permute(0, 3, 1, 2).float().div(127.5).sub(1)
    labels, size = torch.from_numpy(train.labels), 128
    optimizer = torch.optim.AdamW(module.parameters(), rate, weight_decay=0.05)
    steps = epochs * (len(x) // size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    module.train()
    for epoch in range(load_state(path, module, optimizer), epochs):
        for _ in range(schedule.last_epoch, epoch * (len(x) // size)):
            schedule.step()  # to where the training was interrupted
        torch.manual_seed(epoch)
        start = time.perf_counter()
        for rows in torch.randperm(len(x))[: len(x) // size * size].split(size):
            batch = torch.where((torch.rand(size) < 0.5)[:, None, None, None], x[rows].flip(3), x[rows])
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batch), labels[rows]).backward()
            optimizer.step()
            schedule.step()
        save_state(path, module, optimizer, epoch + 1)
        print(f"{path.stem}: epoch {epoch + 1} of {epochs}, {time.perf_counter() - start:.0f} s", flush=True)
    return module


def save_state(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> None:
    """Weights and moments after so many ``epochs``."""
    moments = optimizer.state_dict()["state"]
    tensors = {f"module.{name}": value for name, value in module.state_dict().items()}
    tensors |= {f"moments.{i}.{name}": value for i, each in moments.items() for name, value in each.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, {"epochs": str(epochs)})
    part.replace(path)


def load_state(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put back what :func:`save_state` wrote; how many epochs are done."""
    if not path.exists():
        return 0
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
        epochs = int(file.metadata()["epochs"])
    module.load_state_dict({name[7:]: value for name, value in tensors.items() if name.startswith("module.")})
    moments: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "moments":
            index, _, moment = rest.partition(".")
            moments.setdefault(int(index), {})[moment] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
    return epochs


# --- measuring --------------------------------------------------------------------------------------------------------


def settings(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a row depends on."""
    trained = {"cnn": (arguments.train, arguments.epochs), "efficientnet": (arguments.fit, TUNED)}
    trained["vit"] = trained["cnn"]
    return {
        "network": name,
        "fit": arguments.fit,
        "images": arguments.images,
        "precision": arguments.precision if name == "wrn" else "32-true",
        **(dict(zip(("train", "epochs"), trained[name], strict=True)) if name in trained else {}),
    }


def measure(name: str, sets: dict[str, ImageSet], arguments: argparse.Namespace) -> dict[str, Any]:
    """AUROC of every score by OOD set; ``fused`` with the layer that was found, ``fused without`` without it."""
    backbone = MAKERS[name](sets["train"], arguments)
    outputs = {key: embed(backbone, images) for key, images in sets.items()}
    row = {
        **settings(name, arguments),
        "shallow": backbone.shallow,
        "accuracy": float((outputs["test"].logits.argmax(1) == sets["test"].labels).mean()),  # type: ignore[union-attr]
    }
    found, row["error_auroc"] = score_sets(outputs)
    without, _ = score_sets({key: Outputs(part.embeddings, part.logits, part.labels) for key, part in outputs.items()})
    row["auroc"] = {
        key: {**found[key], "fused without": without[key]["fused"]} for key in (*OOD, "mean") if key in found
    }
    return row


def score_sets(outputs: dict[str, Outputs]) -> tuple[dict[str, dict[str, float]], float]:
    """AUROC by OOD set and score, and the mean over the sets; and that of the energy of wrong against right images."""
    validation, measured = np.split(np.random.default_rng(0).permutation(len(outputs["test"])), 2)
    fitting = outputs["test"][np.sort(validation)]
    detector = MapleDetector().fit(outputs["train"], fitting)
    energy, right = detector.describe(fitting).score_named("energy"), fitting.logits.argmax(1) == fitting.labels
    error_auroc = 1.0 if right.all() else auroc(energy[right], energy[~right])
    known = detector.describe(outputs["test"][np.sort(measured)])
    more = {**{f"shallow x{times}": times for times in MORE}, "weighed": weigh(error_auroc)}
    found = {name: compare(known, detector.describe(outputs[name]), more) for name in OOD}
    mean = {score: float(np.mean([found[name][score] for name in OOD])) for score in found["svhn"]}
    return {**found, "mean": mean}, error_auroc


def weigh(error_auroc: float) -> float:
    """How many times the layer counts, by the AUROC of the energy of wrong against right known images.

    >>> weigh(1.0), weigh(0.75), weigh(0.5)
    (1.0, 2.0, 4.0)
    """
    return 1 / max(2 * error_auroc - 1, 0.25)


def compare(known: Description, unknown: Description, more: dict[str, float]) -> dict[str, float]:
    """AUROC by score, and of the default score with the layer's weight times the factors in ``more``."""
    found = {name: auroc(known.score_named(name), unknown.score_named(name)) for name in known.available_scores}
    if "shallow" in known.fused_parts():
        for name, times in more.items():
            ind, ood = (each.fused + (times - 1) * each.fused_parts()["shallow"] for each in (known, unknown))
            found[f"fused, {name}"] = auroc(ind, ood)
    return found


def best_single(scores: dict[str, float]) -> tuple[str, float]:
    """The best score that is not a sum of others.

    >>> best_single({"energy": 0.9, "distance": 0.8, "fused": 0.95, "fused without": 0.91})
    ('energy', 0.9)
    """
    single = {name: value for name, value in scores.items() if not name.startswith("fused")}
    best = max(single, key=lambda name: single[name])
    return best, single[best]


def print_table(rows: list[dict[str, Any]]) -> None:
    print("| network | accuracy | layer | unknown | fused | without the layer | best single | difference | weighed |")
    print("|---" * 9 + "|")
    for row in rows:
        for name, scores in row["auroc"].items():
            best, value = best_single(scores)
            cells = [row["network"], f"{row['accuracy']:.3f}", f"`{row['shallow']}`", name, f"{scores['fused']:.3f}"]
            cells += [f"{scores['fused without']:.3f}", f"{best} {value:.3f}", f"{scores['fused'] - value:+.3f}"]
            cells += [f"{weighed - value:+.3f}" if (weighed := scores.get("fused, weighed")) is not None else "–"]
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
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/shallow_rule"), help="of trained networks")
    parser.add_argument("--table", action="store_true", help="only print the rows that there are")
    parser.add_argument("--json", type=Path, default=Path("results/shallow_rule.json"), help="rows, read and written")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # of torchvision
    use_fast_allocator()
    rows = peers.read_rows(arguments.json)
    if not arguments.table:
        for name in arguments.networks:
            wanted = settings(name, arguments)
            if any(wanted.items() <= row.items() for row in rows):
                continue
            row = measure(name, open_sets(name, arguments), arguments)
            rows = [old for old in rows if old["network"] != name] + [row]
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    print_table(rows)


if __name__ == "__main__":
    main()
