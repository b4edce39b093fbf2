"""The whole graph: backbone, description by the detector, decision."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maple.deploy.graph._constants import SMALLEST, constant
from maple.deploy.graph.classes import ClassProbabilities, NetworkClass
from maple.deploy.graph.decision import Decide
from maple.deploy.graph.distances import Distances, Tail, on_map, projection
from maple.deploy.graph.scores import Surprises, score_part
from maple.detectors.scores import Score
from maple.errors import UsageError
from maple.networks import channel_responses, listening
from maple.prediction.predictor import Predictor

OUTPUTS = (  # the fields of a prediction and all probabilities; programs that open a .pt2 file read them by place
    "class_id", "probabilities", "probability", "typicality", "uncertainty", "score", "p_value", "is_ood",
    "cluster", "md_class_id", "softmax_class_id", "log_probabilities", "squared_distance", "position",
)  # fmt: skip


class Seen(NamedTuple):
    """The input of the scores."""

    embedding: Tensor  # (N, D)
    logits: Tensor | None  # (N, M) float64
    responses: Tensor | None  # (N, F) of the shallow layer
    squared_distances: Tensor  # (N, M)
    squared_distance: Tensor  # (N, 1)


class DescriptionGraph(nn.Module):
    """Detector and decision on the outputs of a backbone; see :class:`maple.detectors.description.Description`."""

    cluster_to_class: Tensor  # (M,)
    map: Tensor  # (K + 1, 2)

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        learned = predictor.detector.learned_
        gaussians, cluster_to_class = learned.densities.gaussians, learned.cluster_to_class
        n_columns = learned.n_columns
        self.score_name: Score = learned.score
        self.scores: list[Score] = list(learned.surprises) if self.score_name == "fused" else [self.score_name]
        needs_plain = learned.densities.exponent != 0 and not {"distance", "relative"}.isdisjoint(self.scores)
        self.project, self.distances = projection(gaussians), Distances(gaussians)
        plain = learned.densities.plain_gaussians if needs_plain else None
        self.plain = None if plain is None else nn.Sequential(projection(plain), Distances(plain))
        self.tail = Tail(gaussians.n_components)
        self.probabilities = ClassProbabilities(
            gaussians.log_weights, gaussians.log_priors, cluster_to_class, n_columns, predictor.probability
        )
        self.network_class = NetworkClass(cluster_to_class[:n_columns], predictor.probability.class_rule)
        self.decide = Decide(predictor.decision)
        self.parts = nn.ModuleDict({name: part for name in self.scores if (part := score_part(name, learned))})
        self.fuse = Surprises(learned.surprises, learned.parts) if self.score_name == "fused" else None
        self.register_buffer("cluster_to_class", constant(cluster_to_class, torch.int64))
        self.register_buffer("map", constant(on_map(gaussians)))

    @property
    def needs_responses(self) -> bool:
        """Whether a score uses the responses of the shallow layer."""
        return "shallow" in self.scores

    def forward(
        self, embedding: Tensor, logits: Tensor | None, responses: Tensor | None, false_alarm: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The ``OUTPUTS`` in their order, from embeddings (N, D), logits (N, M) and responses (N, F)."""
        z = self.project(embedding)  # (N, K + 1)
        squared = self.distances(z)  # (N, M)
        nearest = squared.amin(1, keepdim=True).clamp_min(SMALLEST)  # (N, 1)
        cluster = squared.argmin(1)
        wide = None if logits is None else logits.double()
        seen = Seen(embedding, wide, responses, squared, nearest)
        logs, class_id = self.probabilities(squared, wide)
        probabilities = logs.exp()
        score = self.score(seen)
        p_value, is_ood = self.decide(score, class_id, false_alarm)
        typicality = self.tail(nearest)
        md_class_id = self.cluster_to_class.index_select(0, cluster)
        found = {
            "class_id": class_id,
            "probabilities": probabilities,
            "probability": probabilities.amax(1),
            "typicality": typicality,
            "uncertainty": 1 - typicality,
            "score": score.squeeze(1),
            "p_value": p_value,
            "is_ood": is_ood,
            "cluster": cluster,
            "md_class_id": md_class_id,
            "softmax_class_id": md_class_id if wide is None else self.network_class(wide),
            "log_probabilities": logs,
            "squared_distance": nearest.squeeze(1),
            "position": z.mm(self.map),
        }
        return tuple(found[name] for name in OUTPUTS)

    def score(self, seen: Seen) -> Tensor:
        """The score (N, 1) of the run."""
        scores = [self._score_named(name, seen) for name in self.scores]
        return scores[0] if self.fuse is None else self.fuse(torch.cat(scores, dim=1))

    def _score_named(self, name: Score, seen: Seen) -> Tensor:
        """One score (N, 1); see the property of that name of :class:`maple.detectors.description.Description`."""
        if name == "normalised":
            return seen.squared_distance
        if name == "distance":
            return self._plain_distance(seen)
        if name == "relative":
            return self._plain_distance(seen) - self.parts[name](seen.embedding)
        if name == "residual":
            return self.parts[name](seen.embedding)
        if name == "spread":
            return seen.squared_distance / seen.squared_distances.mean(1, keepdim=True)
        if name == "energy":
            return self.parts[name](seen.logits, seen.squared_distances)
        assert name == "shallow"
        return self.parts[name](seen.responses)

    def _plain_distance(self, seen: Seen) -> Tensor:
        """Squared distance (N, 1) to the nearest cluster, of embeddings that are not divided by their norm."""
        return seen.squared_distance if self.plain is None else self.plain(seen.embedding).amin(1, keepdim=True)


class PredictorGraph(nn.Module):
    """From images to ``OUTPUTS``: (N, 3, S, S) float32 in [0, 1], or with ``preprocess`` (N, S, S, 3) uint8.

    ``false_alarm``, the level of the decision, is one value (1,) or one for each image (N,), float64; without it, it is
    that of the predictor.

    >>> from maple.networks import create_backbone, embed
    >>> from maple.detectors.maple import MapleDetector
    >>> from dataclasses import replace
    >>> import numpy as np
    >>> pixels = np.random.default_rng(0).integers(0, 256, (64, 8, 8, 3), dtype=np.uint8)
    >>> backbone = create_backbone("resnet9", n_classes=2).eval()
    >>> known = replace(embed(backbone, pixels), labels=np.arange(64) % 2)
    >>> predictor = Predictor(backbone, MapleDetector().fit(known), size=8)
    >>> with torch.no_grad():
    ...     said = dict(zip(OUTPUTS, PredictorGraph(predictor, preprocess=True)(torch.from_numpy(pixels))))
    >>> bool((said["class_id"].numpy() == predictor(pixels).class_id).all())
    True
    """

    def __init__(self, predictor: Predictor, preprocess: bool = False) -> None:
        super().__init__()
        self.preprocess = preprocess
        self.backbone = predictor.backbone
        self.description = DescriptionGraph(predictor)
        if self.description.needs_responses and self.backbone.shallow is None:
            raise UsageError("the score needs a shallow layer, but the backbone has none: fit the detector again")

    def forward(self, images: Tensor, false_alarm: Tensor | None = None) -> tuple[Tensor, ...]:
        x = images.permute(0, 3, 1, 2).float() / 255 if self.preprocess else images
        heard: list[Tensor] = []

        def hear(name: str, layer: nn.Module, inputs: Any, output: Tensor) -> None:
            heard.append(channel_responses(output))

        layers = {}
        if self.description.needs_responses:
            assert self.backbone.shallow is not None
            layers = {"shallow": self.backbone.body.get_submodule(self.backbone.shallow)}
        with listening(layers, hear):
            if self.backbone.head is None:
                embedding, logits = self.backbone.embed(x), None
            else:
                embedding, logits = self.backbone(x)
        return self.description(embedding, logits, heard[0] if heard else None, false_alarm)
