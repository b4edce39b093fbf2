"""The schema of requests and answers: columns of the prediction files, and what the page draws beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from maple import __version__
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.uploads import BINARY, FIELDS, ImageRequest
from maple.prediction.base import BasePredictor
from maple.types import Prediction

MOST_PROBABLE = 5  # classes listed for an image

Share = Annotated[float, Field(ge=0, le=1)]
Responses = dict[int | str, dict[str, Any]]  # of FastAPI, by status

_EXAMPLES: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text(encoding="utf-8"))


class Answer(BaseModel):
    """An answer as JSON; NaN and infinity, which JSON lacks, are an error."""

    model_config = ConfigDict(allow_inf_nan=False, populate_by_name=True)

    def to_json(self) -> bytes:
        """JSON without unset fields."""
        return self.model_dump_json(by_alias=True, exclude_unset=True).encode()


class ErrorAnswer(Answer):
    """An error."""

    error: Annotated[str, Field(description="one sentence: what is wrong, and what to do")]


class StatusAnswer(Answer):
    """The state of the server."""

    status: Literal["alive", "ready"]


class ClassProbability(Answer):
    """A class and its calibrated probability."""

    class_name: Annotated[str, Field(alias="class")]
    probability: Share


class ImageAnswer(Answer):
    """The prediction for one image."""

    file: Annotated[str, Field(description="its name in the request")]
    class_name: Annotated[str, Field(alias="class", description="the most probable class")]
    probability: Annotated[Share, Field(description="its calibrated probability")]
    is_ood: Annotated[bool, Field(description="flagged as out-of-distribution, at the level of /v1/model")]
    p_value: Annotated[Share | None, Field(description="conformal; null if the model was not calibrated")]
    score: Annotated[float, Field(description="higher is more out-of-distribution")]
    typicality: Annotated[Share, Field(description="chi-square tail of the distance to the nearest cluster")]
    uncertainty: Annotated[Share, Field(description="1 - typicality; says nothing about the decision")]
    cluster: Annotated[int, Field(ge=0, description="the nearest cluster")]
    md_class: Annotated[str, Field(description="the class of the nearest cluster")]
    softmax_class: Annotated[str, Field(description="the class of the network alone")]
    runner_up: Annotated[ClassProbability | None, Field(description="the second most probable class")]
    probabilities: Annotated[list[ClassProbability], Field(description="the most probable classes, best first")]
    position: Annotated[list[float], Field(min_length=2, max_length=2, description="on the map of the clusters")]


class ModelName(Answer):
    """Name and version of the model."""

    name: Annotated[str, Field(description="of the network")]
    version: Annotated[str, Field(description="of maple")]


class PredictAnswer(Answer):
    """One prediction per image, in the order of the request."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [_EXAMPLES["answer"] | {"model": {"name": "resnet9", "version": __version__}}]}
    )

    model: ModelName
    predictions: list[ImageAnswer]


class ClusterAnswer(Answer):
    """One cluster of the training images."""

    cluster: Annotated[int, Field(ge=0)]
    class_name: Annotated[str, Field(alias="class")]
    position: Annotated[list[float], Field(min_length=2, max_length=2, description="on the map of the clusters")]
    n_exemplars: Annotated[int, Field(ge=0, description="thumbnails in /v1/clusters/{cluster}/exemplars.png")]


class DecisionAnswer(Answer):
    """When an image is flagged, and with which guarantee."""

    kind: str
    false_alarm: Share
    confidence: Share | None
    per_class: bool
    n_calibration: Annotated[int, Field(ge=0)]
    n_own_thresholds: Annotated[int, Field(ge=0)]
    threshold: Annotated[float | None, Field(description="score above which images are flagged; null: never")] = None
    thresholds: Annotated[list[float | None], Field(description="one per class, where each has its own")] = []
    sentence: str


class LimitsAnswer(Answer):
    """Limits of one request."""

    max_images: int
    max_bytes: int
    max_pixels: int
    formats: tuple[str, ...]


class ModelAnswer(Answer):
    """Description of the model and of the limits of requests."""

    name: Annotated[str, Field(description="of the network")]
    version: Annotated[str, Field(description="of maple")]
    runtime: Annotated[str, Field(description="torch or onnxruntime")]
    classes: list[str]
    size: Annotated[int, Field(description="side of the input images of the network, in pixels")]
    fit: Annotated[str, Field(description="how images that are not square are made square")]
    score: Annotated[str, Field(description="score by which images are ranked")]
    clusters: list[ClusterAnswer]
    map_radius: Annotated[float | None, Field(description="a standard deviation of each cluster on the map")]
    decision: DecisionAnswer
    limits: LimitsAnswer
    needs_key: Annotated[bool, Field(description="whether requests need the header X-API-Key")]


def describe_images(prediction: Prediction) -> list[ImageAnswer]:
    """One answer per image, without its file name."""
    names = prediction.class_names
    best = np.argsort(-prediction.probabilities, axis=1, kind="stable")[:, :MOST_PROBABLE]  # (N, 5)
    positions = np.zeros((len(prediction), 2)) if prediction.position is None else prediction.position  # (N, 2)
    answers = []
    for i, row in enumerate(prediction.rows([""] * len(prediction))):
        likely = [
            ClassProbability(class_name=names[c], probability=_share(prediction.probabilities[i, c])) for c in best[i]
        ]
        row |= {key: _share(row[key]) for key in ("probability", "typicality", "uncertainty")}
        row["p_value"] = None if row["p_value"] != row["p_value"] else row["p_value"]
        answers.append(
            ImageAnswer(
                **row,
                runner_up=likely[1] if len(likely) > 1 else None,
                probabilities=likely,
                position=positions[i].tolist(),
            )
        )
    return answers


def _share(value: float) -> float:
    """A share within [0, 1], which rounding may have left."""
    return min(max(float(value), 0.0), 1.0)


def describe_model(predictor: BasePredictor, exemplars: Mapping[int, np.ndarray], options: ServeOptions) -> ModelAnswer:
    """Everything about the model; ``exemplars`` are thumbnails (n, S, S, 3) by cluster."""
    names, decision = predictor.class_names, predictor.decision
    places = zip(predictor.cluster_to_class, predictor.map_centroids, strict=True)
    return ModelAnswer(
        name=predictor.network,
        version=__version__,
        runtime=predictor.runtime,
        classes=list(names),
        size=predictor.size,
        fit=predictor.fit,
        score=predictor.score_name,
        clusters=[
            ClusterAnswer(
                cluster=cluster,
                class_name=names[class_id],
                position=position.tolist(),
                n_exemplars=len(exemplars.get(cluster, ())),
            )
            for cluster, (class_id, position) in enumerate(places)
        ],
        map_radius=predictor.map_radius,
        decision=DecisionAnswer(**decision.describe(), sentence=decision.sentence()),
        limits=LimitsAnswer(**{name: getattr(options, name) for name in LimitsAnswer.model_fields}),
        needs_key=options.api_key is not None,
    )


# --- OpenAPI ----------------------------------------------------------------------------------------------------------


def request_body(limits: ServeOptions) -> dict[str, Any]:
    """The formats of a request to predict: form, JSON, and the bytes of one image."""

    def images(field: str, image: dict[str, Any]) -> dict[str, Any]:
        listed = {"type": "array", "minItems": 1, "maxItems": limits.max_images, "items": image}
        return {"type": "object", "required": [field], "additionalProperties": False, "properties": {field: listed}}

    file = {"type": "string", "format": "binary"}
    by_form = {"schema": images(FIELDS[0], file)}
    by_json = {"schema": images("images", ImageRequest.model_json_schema()), "example": _EXAMPLES["request"]}
    content = {"multipart/form-data": by_form, "application/json": by_json, BINARY: {"schema": file}}
    return {
        "required": True,
        "description": f"Up to {limits.max_images:,} images ({', '.join(limits.formats)}) and "
        f"{limits.max_bytes / 2**20:.4g} MiB. The field of a form may also be called {FIELDS[1]}. A body that is one "
        "image file may have any image type, that of an HTML form, which curl --data-binary sends, or none.",
        "content": content,
    }


def error_answers(descriptions: Mapping[int, str]) -> Responses:
    """Error answers by status."""
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
    return {
        status: {"model": ErrorAnswer, "description": text, **({"headers": retry} if status == 503 else {})}
        for status, text in descriptions.items()
    }
