"""The server: opens the port, loads the model and runs the application until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import warnings
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import numpy as np
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from maple.deploy.serve.app import create_app
from maple.deploy.serve.endpoints import UPLOAD_SECONDS, Endpoints, Model
from maple.deploy.serve.middleware import OwnNames
from maple.deploy.serve.options import ServeOptions
from maple.errors import MapleError, RunError
from maple.files import RunFile
from maple.options import Values
from maple.prediction.base import BasePredictor
from maple.progress import say, warn
from maple.reporting.gallery import read_gallery
from maple.runs.loading import ready_model

MAX_HEADER_BYTES = 32 * 2**10
LOCAL = ("127.0.0.1", "::1", "localhost")


def serve_model(source: Path, options: ServeOptions, decision: Values | None = None, trust: bool = False) -> None:
    """Serve a run folder or an exported ``.onnx`` file until a signal; SIGHUP loads it again.

    ``decision`` holds options that override the decision of the model; ``trust`` allows a network that runs code.
    """
    with closing(listen_at(options.host, options.port)) as listener:

        def load() -> Model:
            predictor = ready_model(source, decision, trust=trust)
            return predictor, read_exemplars(source, predictor)

        predictor, exemplars = load()
        run_app(create_app(predictor, options, exemplars), options, listener, load)


def read_exemplars(source: Path, predictor: BasePredictor) -> dict[int, np.ndarray]:
    """The thumbnails of each cluster, from an exported file or from the gallery of a run."""
    own = getattr(predictor, "exemplars", None)
    if own is not None:
        return dict(own)
    return {found.cluster: found.thumbnails for found in read_gallery(source / RunFile.GALLERY).clusters}


def listen_at(host: str, port: int) -> socket.socket:
    """A listening socket, opened before the model is loaded so that a port in use is reported at once."""
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


def run_app(
    app: FastAPI, options: ServeOptions, listener: socket.socket, load: Callable[[], Model] | None = None
) -> None:
    """Answer requests until SIGTERM or SIGINT; accepted requests are finished. On SIGHUP ``load`` gives the model."""
    is_local = options.host in LOCAL
    config = uvicorn.Config(
        OwnNames(app) if is_local and options.api_key is None else app,
        http=_Http,
        ws="none",
        lifespan="on",
        log_config=_log_config() if options.access_log else None,
        log_level="info" if options.access_log else "error",
        access_log=options.access_log,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=int(options.deadline_ms / 1000) + UPLOAD_SECONDS,
    )
    # Parser warnings about broken requests go into the answers, not into the log.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    host = f"[{options.host}]" if ":" in options.host else options.host
    if options.api_key is None and not is_local:
        warn("no API key: everyone who reaches this address can send requests; set MAPLE_API_KEY to require a key")
    _Server(config, app.state.endpoints, f"http://{host}:{listener.getsockname()[1]}/", load).run([listener])


def _log_config() -> dict[str, Any]:
    """That of uvicorn, whose lines for requests go to standard output."""
    config = deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config


class _Http(H11Protocol):
    """uvicorn's protocol with a single answer to a broken body; the original sends two and logs a traceback."""

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # already answered
            self.transport.close()
            return
        super().send_400_response(msg)
        if self.cycle is not None:  # discard the answer of the application
            self.cycle.disconnected = True
            self.cycle.message_event.set()


class _Server(uvicorn.Server):
    """Prints its address, and refuses new requests as soon as a signal arrives."""

    def __init__(
        self, config: uvicorn.Config, endpoints: Endpoints, address: str, load: Callable[[], Model] | None
    ) -> None:
        super().__init__(config)
        self._endpoints, self._address, self._load = endpoints, address, load
        self._reloading: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._load is not None and hasattr(signal, "SIGHUP"):  # Windows has none
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._begin_reload)
        say(f"page: {self._address}  (Ctrl-C ends it)")

    def _begin_reload(self) -> None:
        if self._reloading is None or self._reloading.done():
            self._reloading = asyncio.create_task(self._reload())

    async def _reload(self) -> None:
        assert self._load is not None
        try:
            await self._endpoints.reload(self._load)
        except MapleError as error:
            warn(f"the model was not loaded again, the former one answers: {error}")
        else:
            say("the model was loaded again")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal finishes accepted requests, with exit code 0; a second Ctrl-C exits at once."""
        self._endpoints.refuse_all()
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
