"""Request body and error answers for the OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maple.deploy.serve.schema import ErrorAnswer
from maple.deploy.serve.uploads import FIELD, ImageRequest, Limits

_EXAMPLE_DATA = (  # one black pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)


def request_body(limits: Limits) -> dict[str, Any]:
    """The two formats of a request to predict: form and JSON."""
    bounds = {"type": "array", "minItems": 1, "maxItems": limits.max_images}
    image = {"type": "string", "format": "binary"}
    by_json = {
        "type": "object",
        "required": ["images"],
        "additionalProperties": False,
        "properties": {"images": {**bounds, "items": ImageRequest.model_json_schema()}},
    }
    by_form = {
        "type": "object",
        "required": [FIELD],
        "additionalProperties": False,
        "properties": {FIELD: {**bounds, "items": image}},
    }
    example = {"images": [{"name": "pixel.png", "data": _EXAMPLE_DATA}]}
    return {
        "required": True,
        "description": f"Up to {limits.max_images:,} images and {limits.max_bytes:,} bytes.",
        "content": {
            "multipart/form-data": {"schema": by_form},
            "application/json": {"schema": by_json, "example": example},
        },
    }


def error_answers(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Error answers by status."""
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
    return {
        status: {"model": ErrorAnswer, "description": text, **({"headers": retry} if status == 503 else {})}
        for status, text in descriptions.items()
    }
