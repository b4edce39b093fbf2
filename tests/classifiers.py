"""A small classifier with outputs of many forms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Tail(nn.Module):
    """A small convolutional classifier whose output takes the form asked for."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.hidden = nn.Linear(6 * 16, 12)
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(12, 4)
        self.other = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.adaptive_avg_pool2d(self.conv(x), 4)
        x = x.view(len(x), -1)  # needs the default memory format
        x = self.drop(torch.relu(self.hidden(x)))
        logits = self.classifier(x)
        return {
            "tensor": lambda: logits,
            "dict": lambda: {"aux": x.sum(1), "logits": logits},
            "nested": lambda: (x.mean(), [None, {"out": logits}]),
            "two": lambda: (logits, self.other(x)),
            "softmax": lambda: logits.softmax(1),
            "inplace": lambda: logits.mul_(2),
            "slice": lambda: logits[:, :4],
        }[self.form]()
