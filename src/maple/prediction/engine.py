"""Where networks run: in this process, or on the machines that another engine has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Unpack

import numpy as np

from maple.data.image_set import ImageSet, Progress
from maple.detectors.base import Source
from maple.prediction.base import BasePredictor
from maple.types import Outputs

if TYPE_CHECKING:  # an exported graph is predicted without torch
    from maple.networks import Backbone
    from maple.networks.embedding import EmbedOptions


class Engine(ABC):
    """Runs networks over image sets. Options of all are those of :func:`maple.networks.embed`."""

    @abstractmethod
    def embed(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> Outputs:
        """Embeddings, logits and labels of all images, in order."""

    @abstractmethod
    def training(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> Source:
        """The outputs of training images as detectors are fitted on them, without holding all."""

    @abstractmethod
    def scores(
        self, predictor: BasePredictor, images: ImageSet, *, batch_size: int, workers: int, progress: Progress | None
    ) -> np.ndarray:
        """The score of each image (N,), in order."""


class LocalEngine(Engine):
    """Networks run in this process."""

    def embed(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> Outputs:
        from maple.networks import embed

        return embed(backbone, images, **options)

    def training(self, backbone: Backbone, images: ImageSet, **options: Unpack[EmbedOptions]) -> Source:
        from maple.networks import embed_batches

        return partial(embed_batches, backbone, images, **options)

    def scores(
        self, predictor: BasePredictor, images: ImageSet, *, batch_size: int, workers: int, progress: Progress | None
    ) -> np.ndarray:
        said = predictor.predict_batches(images, batch_size=batch_size, workers=workers, progress=progress)
        return np.concatenate([prediction.score for prediction in said])


LOCAL = LocalEngine()
