"""``maple serve`` as an ASGI application: a predictor behind HTTP, with a page.

``POST /v1/predict`` takes images (form, JSON or a body) and answers with the columns of the prediction files;
``GET /v1/model`` describes the model and its decision; ``/metrics`` is for Prometheus, ``/healthz`` and ``/readyz`` for
orchestration; ``/`` is the page, and ``/docs`` describes the API. Requests share batches
(:mod:`maple.deploy.serve.batching`), uploads are limited before they are read (:mod:`maple.deploy.serve.uploads`), and
every error is a status and one sentence.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Depends, FastAPI, HTTPException, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import APIKeyHeader
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteHTTPException

from maple import __version__
from maple.deploy.serve.batching import Busy
from maple.deploy.serve.endpoints import Endpoints
from maple.deploy.serve.metrics import ServeMetrics
from maple.deploy.serve.middleware import Middleware
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.schema import (
    ErrorAnswer,
    ModelAnswer,
    PredictAnswer,
    Responses,
    StatusAnswer,
    error_answers,
    request_body,
)
from maple.deploy.serve.watch import UploadError
from maple.prediction.base import BasePredictor

STATIC = Path(__file__).parent / "static"
KEY_HEADER = "X-API-Key"


def create_app(
    predictor: BasePredictor,
    options: ServeOptions | None = None,
    exemplars: Mapping[int, np.ndarray] | None = None,
) -> FastAPI:
    """The service as an ASGI application; ``exemplars`` are thumbnails (n, S, S, 3) of clusters."""
    endpoints = Endpoints(predictor, options or ServeOptions(), exemplars or {})
    app = FastAPI(
        title="maple",
        version=__version__,
        description="Class, probability, uncertainty and an out-of-distribution decision for each image.",
        lifespan=endpoints.running,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.endpoints = endpoints
    app.add_middleware(Middleware, metrics=endpoints.metrics)
    _add_error_handlers(app, endpoints.metrics)
    _add_routes(app, endpoints)
    return app


def _add_routes(app: FastAPI, endpoints: Endpoints) -> None:
    key = endpoints.options.api_key
    guards = [Security(APIKeyHeader(name=KEY_HEADER, auto_error=False)), Depends(_key_check(key))] if key else []
    refusals = error_answers({401: "the API key is missing or wrong"}) if key else {}
    busy = error_answers({503: "too busy, or shutting down"})
    bad_body = error_answers({408: "too slow", 413: "too large", 415: "not understood", 422: "broken, or too many"})
    no_exemplars = error_answers({404: "no exemplars", 422: "not a number"})
    png: Responses = {200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}}
    text: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
    add = partial(app.add_api_route, response_description="answered")
    guarded = partial(add, dependencies=guards)
    guarded(
        "/v1/predict",
        endpoints.predict,
        methods=["POST"],
        response_model=PredictAnswer,
        responses=refusals | busy | bad_body,
        openapi_extra={"requestBody": request_body(endpoints.options)},
    )
    guarded("/v1/model", endpoints.model, response_model=ModelAnswer, responses=refusals)
    guarded(
        "/v1/clusters/{cluster}/exemplars.png",
        endpoints.cluster_exemplars,
        response_class=Response,
        responses=refusals | no_exemplars | png,
    )
    guarded("/metrics", endpoints.prometheus, response_class=Response, responses=refusals | text)
    guarded("/openapi.json", lambda: JSONResponse(app.openapi()), include_in_schema=False)
    add("/healthz", endpoints.healthz, response_model=StatusAnswer)
    app.add_api_route("/healthz", endpoints.healthz, methods=["HEAD"], include_in_schema=False)
    add("/readyz", endpoints.readyz, response_model=StatusAnswer, responses=busy)
    for path, file in (("/", "index.html"), ("/docs", "docs.html")):
        app.add_api_route(path, _page(file), methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))


def _page(file: str) -> Callable[[], Response]:
    return lambda: FileResponse(STATIC / file)


def _key_check(key: str) -> Any:
    """A dependency that requires the key, compared in constant time."""

    def check_key(request: Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), key.encode("ascii")):
            raise HTTPException(401, f"the API key is missing or wrong: send it in the header {KEY_HEADER}")

    return check_key


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(ErrorAnswer(error=message).to_json(), status, headers, media_type="application/json")


def _add_error_handlers(app: FastAPI, metrics: ServeMetrics) -> None:
    """Turn every error into a status and one sentence."""

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        metrics.refused.labels(error.reason).inc()
        return _error(503, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(UploadError)
    async def upload(_: Request, error: UploadError) -> Response:
        return _error(error.status, str(error))

    @app.exception_handler(StarletteHTTPException)
    async def http(_: Request, error: StarletteHTTPException) -> Response:
        known = {404: "no such path", 405: "method not allowed for this path"}
        framework = not isinstance(error, HTTPException) and error.status_code in known
        text = f"{known[error.status_code]}: see /docs" if framework else error.detail
        return _error(error.status_code, text, error.headers)

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(422, f"{first['loc'][-1]} cannot be used ({first['msg']}): see /docs")

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> Response:
        return _error(500, "internal error: see the log of the server")
