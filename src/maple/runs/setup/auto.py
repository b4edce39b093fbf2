"""``maple train --init auto``: choose among the pretrained networks on this machine by a short probe.

The probe is a linear classifier on frozen embeddings: fitted on a sample of the training images, tested on one of the
validation images. It takes two forward passes over a few hundred images per network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from maple.data.image_set import ImageSet
from maple.data.splits import Splits
from maple.errors import MapleError, UsageError
from maple.networks import Backbone, embed
from maple.networks.pretrained import Pretrained, find_pretrained
from maple.progress import say, warn
from maple.text import percent, plural

SIZE = 128  # pixels, unless --size says otherwise: the networks' own 224 take three times as long
PROBE_IMAGES = 512  # of training and of validation
_RIDGE = 1.0


@dataclass(frozen=True, eq=False)
class Choice:
    """The network that was chosen."""

    network: Pretrained
    backbone: Backbone
    accuracy: float  # of the probe


def require_pretrained() -> list[Pretrained]:
    """The pretrained networks on this machine; :class:`UsageError` if there are none."""
    found = find_pretrained()
    if not found:
        raise UsageError(
            "--init auto finds no pretrained network on this machine, and downloads none: install one with pip install "
            "'maple-uncertainty[pretrained,timm]', or name a network with --init"
        )
    return found


def advertise_auto() -> str:
    """A line about ``--init auto``; empty if there is no pretrained network."""
    found = find_pretrained()
    others = len(found) - 1
    more = f" or {plural(others, 'other')}" if others else ""
    return f"--init auto would start from a pretrained network, {found[0].spec}{more}" if found else ""


def choose_pretrained(splits: Splits) -> Choice:
    """The network with the best probe; those that cannot be opened are named and passed over."""
    choices = []
    for network in require_pretrained():
        try:
            backbone = network.open(splits.train.size)
            accuracy = probe(backbone, splits.train, splits.validation)
        except MapleError as error:
            warn(f"--init auto passes over '{network.spec}': {error}")
            continue
        say(f"--init auto: {network.spec}, {percent(accuracy)} of validation images right in a linear probe")
        choices.append(Choice(network, backbone, accuracy))
    if not choices:
        raise UsageError("--init auto can open none of the pretrained networks: name one with --init")
    return max(choices, key=lambda choice: choice.accuracy)


def probe(backbone: Backbone, train: ImageSet, validation: ImageSet) -> float:
    """Accuracy of a linear classifier on the frozen embeddings of a sample of images."""
    known, asked = (_sample(backbone, images) for images in (train, validation))
    return linear_probe(*known, *asked, n_classes=len(train.class_names))


def _sample(backbone: Backbone, images: ImageSet) -> tuple[np.ndarray, np.ndarray]:
    rows = np.linspace(0, len(images) - 1, min(len(images), PROBE_IMAGES)).astype(np.int64)
    return embed(backbone, images, indices=rows, logits=False).embeddings, images.labels[rows]


def linear_probe(x: np.ndarray, y: np.ndarray, x_new: np.ndarray, y_new: np.ndarray, n_classes: int) -> float:
    """Accuracy of ridge regression to one-hot labels, W = (X'X + r N I)^-1 X'Y, on standardised embeddings.

    ``x`` (N, D) and ``y`` (N,) fit it, ``x_new`` and ``y_new`` test it.

    >>> rng = np.random.default_rng(0)
    >>> y = np.arange(200) % 2
    >>> x = rng.normal(size=(200, 3)) + 4 * y[:, None]
    >>> linear_probe(x[:100], y[:100], x[100:], y[100:], n_classes=2) > 0.95
    True
    """
    mean, std = x.mean(0), x.std(0) + 1e-6
    scaled = np.hstack([(x - mean) / std, np.ones((len(x), 1))]).astype(np.float64)  # (N, D + 1)
    new = np.hstack([(x_new - mean) / std, np.ones((len(x_new), 1))])
    gram = scaled.T @ scaled + _RIDGE * len(x) * np.eye(scaled.shape[1])
    weights = np.linalg.solve(gram, scaled.T @ np.eye(n_classes)[y])  # (D + 1, C)
    return float(((new @ weights).argmax(1) == y_new).mean())
