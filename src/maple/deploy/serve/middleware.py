"""Middleware around all endpoints: counts, security headers, and the rest of refused bodies."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress
from ipaddress import ip_address

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from maple.deploy.serve.metrics import ServeMetrics

REST_SECONDS = 30  # to read the rest of the body of a refused request
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class OwnNames:
    """Refuse requests under a name that is not this machine's.

    A page elsewhere can let its own name lead to this machine (DNS rebinding) and then read the answers of a service
    that asks for no key. Numbers cannot be rebound.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_own_name(Headers(scope=scope).get("host", "")):
            await self._app(scope, receive, send)
            return
        text = "this service answers as localhost only: set MAPLE_API_KEY, and it answers under all names"
        await JSONResponse({"error": text}, 421, SECURITY_HEADERS)(scope, receive, send)


def is_own_name(host: str) -> bool:
    """Whether a header ``Host`` is absent, an address, or this machine.

    >>> [is_own_name(host) for host in ("127.0.0.1:80", "[::1]:80", "localhost", "", "evil.example:80")]
    [True, True, True, True, False]
    """
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    with suppress(ValueError):
        ip_address(name)
        return True
    return False


class Middleware:
    """Count answers, add security headers, and drain refused bodies.

    If a request is refused before its whole body has arrived, the rest is read and discarded after the answer: a client
    that is still sending when the connection closes may never read the answer.
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
            more_comes = message.get("more_body", False)  # False if the client has disconnected
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, end
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(SECURITY_HEADERS)
                headers.setdefault("Cache-Control", "no-cache")  # so that all files of the page have one version
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
            route = getattr(scope.get("route"), "path", "other")  # the template: paths are unbounded
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe((end or time.monotonic()) - start)


def _announces_body(scope: Scope) -> bool:
    """Whether the client sends a body without waiting for 100 Continue."""
    names = {name for name, _ in scope["headers"]}
    return not names.isdisjoint({b"content-length", b"transfer-encoding"}) and b"expect" not in names
