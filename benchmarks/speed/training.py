"""Epochs of MAPLE against cross-entropy, and our loop against a plain PyTorch loop.

``maple`` and ``cross-entropy`` share network, images, augmentation and settings of the machine. The plain loop runs in
processes of its own, because settings of the allocator cannot be taken back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from speed.measure import Effort, Row, compare

IMAGES, SIZE, BATCH, NETWORK = 4096, 32, 128, "resnet9"
VALIDATION = 1000  # images; the comparison of loops has a tenth of them
EPOCHS, EVENT = 4, 2  # the first epoch is not counted; classes are split after the second
RELABEL_EVERY = 10  # epochs between two events, by default
CLASSES = 10
HARD = {"maple": 4, "all hard": CLASSES}  # the last classes, which an event splits, whatever the network has learned


def run(effort: Effort) -> dict[str, Any]:
    n = effort.scale(IMAGES, 512)
    found = [train_both(n, repeat) for repeat in range(effort.few)]
    ours = [each["maple"] for each in found]
    rows = [compare_epochs(found, name, n) for name in HARD]
    rows.append(compare("waiting for data", "an epoch", [each["waiting"] for each in found], ours, "at most", 0.05))
    loops = {name: [run_alone(name, n) for _ in range(effort.few)] for name in ("ours", "plain")}
    note = "plain: float32, contiguous, default allocator, DataLoader"
    rows.append(
        compare("our loop, cross-entropy", "plain PyTorch loop", loops["ours"], loops["plain"], target=3.0, note=note)
    )
    facts = {
        "images/s in training": {
            name: round(n / float(np.median(seconds)), 1) for name, seconds in (*loops.items(), ("MAPLE", ours))
        }
    }
    return {"rows": [row.to_dict() for row in rows], "facts": facts}


def compare_epochs(found: list[dict[str, Any]], name: str, n: int) -> Row:
    """An epoch of MAPLE with its share of an event; the classes of the data decide which ones are hard."""
    epochs, events, peer = ([each[key] for each in found] for key in (name, f"event, {name}", "cross-entropy"))
    whole = [epoch + event / RELABEL_EVERY for epoch, event in zip(epochs, events)]
    split = ", ".join(str(each[f"split, {name}"]) for each in found)
    note = (
        f"{NETWORK}, {n:,} images of {SIZE} x {SIZE}, no extra images, validation of {VALIDATION:,} in both; an event "
        f"({split} classes split) takes {np.median(events) / np.median(epochs):.2f} epochs, one in {RELABEL_EVERY}"
    )
    work = f"an epoch of MAPLE, its share of relabelling {HARD[name]} classes of {CLASSES} included"
    target = 1.05 if name == "maple" else None
    return compare(work, "an epoch of cross-entropy, same augmentation", whole, peer, "at most", target, note)


def training_images(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise around a pattern per class (n, S, S, 3), of ten classes, the last four hard to tell apart."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % CLASSES
    patterns = rng.integers(60, 196, (CLASSES, SIZE, SIZE, 3))
    patterns[6:] = patterns[6]
    pixels = patterns[labels] + rng.normal(0, 40, (n, SIZE, SIZE, 3))
    return pixels.clip(0, 255).astype(np.uint8), labels


def train_both(n: int, seed: int) -> dict[str, Any]:
    """Median seconds of an epoch of each training, one after the other, and what relabelling took."""
    from maple.data.image_set import ImageSet
    from maple.networks import create_backbone
    from maple.training import loop, maple
    from maple.training.recipe import create_recipe

    pixels, labels = training_images(n + VALIDATION)
    names = [str(c) for c in range(10)]
    train = ImageSet.from_arrays(pixels[:n], labels[:n], names, name="bench", size=SIZE)
    validation = ImageSet.from_arrays(pixels[n:], labels[n:], names, name="bench", size=SIZE)
    recipes = {"cross-entropy": create_recipe("cross-entropy")}
    recipes |= dict.fromkeys(HARD, create_recipe("maple", relabel_every=EVENT))
    found: dict[str, Any] = {}
    for name in list(recipes)[:: 1 if seed % 2 else -1]:
        waits: list[float] = []
        original, find = loop.training_batches, maple.find_hard_classes
        loop.training_batches = partial(_timed, original, waits)  # type: ignore[assignment]
        hard = np.arange(CLASSES - HARD.get(name, 0), CLASSES)
        maple.find_hard_classes = lambda *_, hard=hard: hard
        try:
            result = loop.train_backbone(
                create_backbone(NETWORK, n_classes=10),
                recipes[name],
                train,
                validation,
                epochs=EPOCHS,
                batch_size=BATCH,
                augment="crop,flip",
                seed=seed,
                show_progress=False,
            )
        finally:
            loop.training_batches, maple.find_hard_classes = original, find
        history = result.history
        found[name] = float(np.median([row["seconds"] - row["relabel_seconds"] for row in history[1:]]))
        if name in HARD:
            events = [row for row in history if row["relabelled"]]
            found[f"event, {name}"] = max(float(row["relabel_seconds"]) for row in history)
            found[f"split, {name}"] = sum(len(row["relabelled"].split(";")) for row in events)
        if name == "maple":
            found["waiting"] = float(np.median(waits[1:]))
    return found


def _timed(batches: Any, waits: list[float], *arguments: Any, **options: Any) -> Iterator[Any]:
    """The same batches; the seconds that an epoch waited for them are added to ``waits``."""
    waits.append(0.0)
    read = batches(*arguments, **options)
    while True:
        start = time.perf_counter()
        batch = next(read, None)
        waits[-1] += time.perf_counter() - start
        if batch is None:
            return
        yield batch


# --- one loop per process --------------------------------------------------------------------------------------------


def run_alone(name: str, n: int) -> float:
    """Seconds of an epoch, the median of those after the first, of one loop in a process of its own."""
    code = f"from speed import training; training.say(training.{name}_loop({n}))"
    folders = [str(Path(__file__).parents[1]), *sys.path]
    start = f"import sys; sys.path[:0] = {folders!r}; {code}"
    said = subprocess.run([sys.executable, "-c", start], capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"the {name} loop failed:\n{said.stderr}")
    return float(np.median(json.loads(said.stdout.splitlines()[-1])[1:]))


def say(seconds: list[float]) -> None:
    print(json.dumps(seconds))


def ours_loop(n: int) -> list[float]:
    """Seconds of each epoch of our loop, with a small validation, which the plain one has not."""
    from lightning_fabric import Fabric  # noqa: F401  imported before timing

    from maple.data.image_set import ImageSet
    from maple.networks import create_backbone
    from maple.training import loop
    from maple.training.recipe import create_recipe

    pixels, labels = training_images(n + VALIDATION // 10)
    names = [str(c) for c in range(10)]
    train = ImageSet.from_arrays(pixels[:n], labels[:n], names, name="bench", size=SIZE)
    validation = ImageSet.from_arrays(pixels[n:], labels[n:], names, name="bench", size=SIZE)
    backbone, recipe = create_backbone(NETWORK, n_classes=10), create_recipe("cross-entropy")
    result = loop.train_backbone(
        backbone, recipe, train, validation, epochs=3, batch_size=BATCH, augment="crop,flip", show_progress=False
    )
    return [row["seconds"] for row in result.history]


def plain_loop(n: int) -> list[float]:
    """Seconds of each epoch of the loop of a tutorial, with the same network, optimiser and augmentation."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from maple.data.augment import augment_batch
    from maple.networks import create_backbone

    pixels, labels = training_images(n)
    backbone = create_backbone(NETWORK, n_classes=10).to(memory_format=torch.contiguous_format)
    backbone.memory_format = torch.contiguous_format
    optimizer = torch.optim.SGD(backbone.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    data = DataLoader(TensorDataset(torch.from_numpy(pixels), torch.from_numpy(labels)), BATCH, shuffle=True)
    generator, seconds = torch.Generator(), []
    for _ in range(3):
        start = time.perf_counter()
        backbone.train()
        for images, targets in data:
            x = augment_batch(images, "crop,flip", generator).permute(0, 3, 1, 2).contiguous().float() / 255
            loss = torch.nn.functional.cross_entropy(backbone(x)[1], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        seconds.append(time.perf_counter() - start)
    return seconds
