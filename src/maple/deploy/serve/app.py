"""``maple serve``: a predictor behind HTTP, with a page to look at.

``POST /v1/predict`` takes images (a form or JSON with base64) and answers with the columns of the prediction files;
``GET /v1/model`` says what predicts and how it decides; ``/metrics`` is for Prometheus, ``/healthz`` and ``/readyz``
for whoever restarts or routes; ``/`` is the page. Requests share batches (:mod:`maple.deploy.serve.batching`),
uploads are limited
before they are read (:mod:`maple.deploy.serve.uploads`), and whatever is wrong is a status and one sentence, never a
traceback.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import socket
import time
import warnings
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import numpy as np
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.security import APIKeyHeader
from fastapi.staticfiles import StaticFiles
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from maple import __version__
from maple.deploy.serve.answers import ErrorAnswer, ModelAnswer, PredictAnswer, StatusAnswer
from maple.deploy.serve.batching import Busy
from maple.deploy.serve.metrics import ServeMetrics
from maple.deploy.serve.options import ServeOptions, check_options
from maple.deploy.serve.service import UPLOAD_SECONDS, Service
from maple.deploy.serve.uploads import FIELD, ImageRequest, Limits, UploadError
from maple.errors import RunError
from maple.files import RunFile
from maple.prediction.base import BasePredictor
from maple.progress import say, warn
from maple.reporting.gallery import read_gallery
from maple.runs.loading import ready_model

STATIC = Path(__file__).parent / "static"
KEY_HEADER = "X-API-Key"
MAX_HEADER_BYTES = 32 * 2**10
REST_SECONDS = 30  # in which the rest of a body is read whose request is refused
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


# --- the application -------------------------------------------------------------------------------------------------


def create_app(
    predictor: BasePredictor,
    options: ServeOptions | None = None,
    exemplars: Mapping[int, np.ndarray] | None = None,
) -> FastAPI:
    """The service as an ASGI application; ``exemplars`` are thumbnails (n, S, S, 3) of clusters."""
    options = options or ServeOptions()
    check_options(options)
    service = Service(predictor, options, exemplars or {})
    app = FastAPI(
        title="maple",
        version=__version__,
        description="Class, probability, uncertainty and an out-of-distribution decision for each image.",
        lifespan=service.running,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.add_middleware(_Shell, metrics=service.metrics)
    _add_error_handlers(app, service.metrics)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    key = service.options.api_key
    guards = (
        [] if key is None else [Security(APIKeyHeader(name=KEY_HEADER, auto_error=False)), Depends(_key_check(key))]
    )
    refusals = {} if key is None else _errors({401: "the API key is missing or wrong"})
    busy = _errors({503: "too busy, or shutting down"})
    app.add_api_route(
        "/v1/predict",
        service.predict,
        methods=["POST"],
        dependencies=guards,
        response_model=PredictAnswer,
        responses=refusals
        | busy
        | _errors({408: "too slow", 413: "too large", 415: "not understood", 422: "broken, or too many"}),
        openapi_extra={"requestBody": _request_body(service.limits)},
    )
    app.add_api_route("/v1/model", service.model, dependencies=guards, response_model=ModelAnswer, responses=refusals)
    app.add_api_route(
        "/v1/clusters/{cluster}/exemplars.png",
        service.cluster_exemplars,
        dependencies=guards,
        response_class=Response,
        responses=refusals
        | _errors({404: "no exemplars", 422: "not a number"})
        | {200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}}},
    )
    app.add_api_route("/healthz", service.healthz, response_model=StatusAnswer)
    app.add_api_route("/healthz", service.healthz, methods=["HEAD"], include_in_schema=False)
    app.add_api_route("/readyz", service.readyz, response_model=StatusAnswer, responses=busy)
    app.add_api_route(
        "/metrics",
        service.prometheus,
        dependencies=guards,
        response_class=Response,
        responses=refusals | {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
    )
    app.add_api_route(
        "/openapi.json", lambda: JSONResponse(app.openapi()), dependencies=guards, include_in_schema=False
    )
    app.add_api_route("/", _page, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC))


def _page() -> Response:
    return FileResponse(STATIC / "index.html")


def _key_check(key: str) -> Any:
    """A dependency that lets nobody in without the key; how much of it is right does not show in the time taken."""

    def check_key(request: Request) -> None:
        given = request.headers.get(KEY_HEADER, "")
        if not hmac.compare_digest(given.encode("latin-1", "replace"), key.encode("ascii")):
            raise HTTPException(401, f"the API key is missing or wrong: send it in the header {KEY_HEADER}")

    return check_key


_EXAMPLE_DATA = (  # one black pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNgYGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
)


def _request_body(limits: Limits) -> dict[str, Any]:
    """The two forms of a request to predict, for the OpenAPI description."""
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


def _errors(descriptions: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Answers that say what is wrong, for the OpenAPI description."""
    retry = {"Retry-After": {"description": "seconds", "schema": {"type": "integer", "minimum": 1}}}
    return {
        status: {"model": ErrorAnswer, "description": text, **({"headers": retry} if status == 503 else {})}
        for status, text in descriptions.items()
    }


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(ErrorAnswer(error=message).to_json(), status, headers, media_type="application/json")


def _add_error_handlers(app: FastAPI, metrics: ServeMetrics) -> None:
    """Whatever goes wrong is one sentence."""

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        metrics.refused.labels(error.reason).inc()
        return _error(503, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(UploadError)
    async def upload(_: Request, error: UploadError) -> Response:
        return _error(error.status, str(error))

    @app.exception_handler(StarletteHTTPException)
    async def http(_: Request, error: StarletteHTTPException) -> Response:
        known = {
            404: "there is nothing here: /openapi.json says what there is",
            405: "this path takes another method: see /openapi.json",
        }
        own = isinstance(error, HTTPException)
        return _error(
            error.status_code, error.detail if own else known.get(error.status_code, error.detail), error.headers
        )

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _error(422, f"{first['loc'][-1]} cannot be used ({first['msg']}): see /openapi.json")

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> Response:
        return _error(500, "the service failed: its log says why")


class _Shell:
    """Around everything: counts the answers and gives them the headers that browsers act upon.

    Where a request is refused before all of it has arrived, the rest is read and forgotten once the answer is sent:
    whoever is still sending to a connection that is closed may never see why.
    """

    def __init__(self, app: ASGIApp, metrics: ServeMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, end, status, more_comes = time.monotonic(), 0.0, 500, _announces_body(scope)

        async def receive_body() -> Message:
            nonlocal more_comes
            message = await receive()
            more_comes = message.get("more_body", False)  # not so where whoever asked has left
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, end
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-cache")  # so that all files of a page are of one version
            elif not message.get("more_body", False):
                end = time.monotonic()
                if more_comes:
                    await send({**message, "more_body": True})
                    with suppress(TimeoutError):
                        async with asyncio.timeout(REST_SECONDS):
                            while more_comes:
                                await receive_body()
                    message = {"type": "http.response.body"}
            await send(message)

        try:
            await self._app(scope, receive_body, send_with_headers)
        finally:
            route = getattr(scope.get("route"), "path", "other")  # the template: paths are as many as one likes
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe((end or time.monotonic()) - start)


def _announces_body(scope: Scope) -> bool:
    """Whether a body follows a request, without having to be asked for."""
    names = {name for name, _ in scope["headers"]}
    return not names.isdisjoint({b"content-length", b"transfer-encoding"}) and b"expect" not in names


# --- the server ------------------------------------------------------------------------------------------------------


def serve_model(
    source: Path, options: ServeOptions, decision: dict[str, Any] | None = None, trust: bool = False
) -> None:
    """Serve a run folder or an exported ``.onnx`` file until a signal ends it.

    ``decision`` holds options of the decision that differ from the model's; ``trust`` allows a network that runs code.
    """
    check_options(options)
    with closing(listen_at(options.host, options.port)) as listener:
        predictor = ready_model(source, decision, trust=trust)
        run_app(create_app(predictor, options, read_exemplars(source, predictor)), options, listener)


def read_exemplars(source: Path, predictor: BasePredictor) -> dict[int, np.ndarray]:
    """The thumbnails of each cluster: an exported model has its own, a run has a gallery."""
    own = getattr(predictor, "exemplars", None)
    if own is not None:
        return dict(own)
    return {found.cluster: found.thumbnails for found in read_gallery(source / RunFile.GALLERY).clusters}


def listen_at(host: str, port: int) -> socket.socket:
    """A socket of ours alone, before anything else is done: a port that is taken is better known at once."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise RunError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; choose another --port or --host"
        ) from None
    return listener


def run_app(app: FastAPI, options: ServeOptions, listener: socket.socket) -> None:
    """Answer requests until SIGTERM or SIGINT; what was accepted by then is answered."""
    config = uvicorn.Config(
        app,
        http=_Http,
        ws="none",
        lifespan="on",
        log_config=uvicorn.config.LOGGING_CONFIG if options.access_log else None,
        log_level="info" if options.access_log else "error",
        access_log=options.access_log,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=int(options.deadline_ms / 1000) + UPLOAD_SECONDS,
    )
    # What parsers say of broken requests is answered, and need not fill the log.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    host = f"[{options.host}]" if ":" in options.host else options.host
    if options.api_key is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        warn("whoever reaches this address may ask: set an API key in the environment variable MAPLE_API_KEY")
    _Server(config, app.state.service, f"http://{host}:{listener.getsockname()[1]}/").run([listener])


class _Http(H11Protocol):
    """uvicorn's, but one answer to a request whose body is broken: its own tries two, and logs a traceback."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # it is answered already
            self.transport.close()
            return
        super().send_400_response(msg)
        if self.cycle is not None:  # what the application says of it goes nowhere
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class _Server(uvicorn.Server):
    """Says where it listens, and refuses new requests from the moment of the signal."""

    def __init__(self, config: uvicorn.Config, service: Service, address: str) -> None:
        super().__init__(config)
        self._service, self._address = service, address

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        say(f"page: {self._address}  (Ctrl-C ends it)")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal finishes what was accepted, and the exit code is 0; Ctrl-C once more does not wait."""
        self._service.refuse_all()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
