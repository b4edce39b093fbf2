"""Images of three colours and a smooth network, for detectors of image gradients."""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from maple.data.image_set import ImageSet
from maple.detectors.gradients.base import gradient_sign, image_gradients
from maple.detectors.gradients.odin import log_odds_gradient
from maple.networks import Backbone, normalise_images

MEAN, STD = (0.4, 0.5, 0.6), (0.1, 0.2, 0.4)
COLOURS = np.array([[0.3, 0.5, 0.5], [0.5, 0.3, 0.6], [0.6, 0.6, 0.4]])


def make_body(seed: int = 0) -> nn.Sequential:
    """Smooth (tanh), two sizes, batch normalisation with statistics of its own, no average that is the embedding."""
    torch.manual_seed(seed)
    body = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Tanh()),
        nn.Sequential(nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Tanh()),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    body[0][1].running_mean.normal_(0, 0.1)
    body[0][1].running_var.uniform_(0.5, 1.5)
    return body


def make_images(n: int, seed: int, colours: np.ndarray = COLOURS) -> ImageSet:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % len(colours)
    pixels = colours[labels][:, None, None] + 0.15 * rng.normal(size=(n, 8, 8, 3))
    return ImageSet.from_arrays(pixels.clip(0, 1), labels)


def tensor_of(images: ImageSet) -> torch.Tensor:
    return torch.from_numpy(images.pixels).permute(0, 3, 1, 2).float() / 255


def in_float64(backbone: Backbone, z: torch.Tensor) -> torch.Tensor:
    """Logits from normalised images, all in float64, by a copy of the network."""
    body, head = copy.deepcopy(backbone.body).double().eval(), copy.deepcopy(backbone.head).double()
    return head(body(z.double()))


def normalised(x: torch.Tensor) -> torch.Tensor:
    return normalise_images(x.double(), torch.tensor(MEAN, dtype=torch.float64), torch.tensor(STD, dtype=torch.float64))


def odin_step(backbone: Backbone, x: torch.Tensor, temperature: float = 1000.0) -> torch.Tensor:
    with image_gradients(backbone):
        x = x.clone().requires_grad_()
        logits = backbone(x)[1]
        derivative = log_odds_gradient(logits.detach().double().numpy(), np.arange(logits.shape[1]), temperature)
        return gradient_sign(logits, x, derivative)
