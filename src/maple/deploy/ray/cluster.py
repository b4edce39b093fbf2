"""Start a Ray cluster of this machine, or connect to one that runs, and check that its nodes can do the work.

Ray's processes run whatever code they are sent, and listen on all network interfaces, also those of a cluster of one
machine. The cluster that a command starts therefore has a random token that only its processes know, and no dashboard;
a cluster elsewhere is used only with token authentication (``RAY_AUTH_MODE=token``).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maple import __version__
from maple.errors import RunError, UsageError, naming_extras
from maple.runs._engine import EngineFlags

CONNECT_SECONDS = 30.0
_PROBE_SECONDS = 60.0
_STARTS = 3  # attempts
_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_LOCAL = {  # of a cluster for one command, unless the user has set it
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 starves the workers where anything else runs
    "RAY_idle_worker_killing_time_threshold_ms": "600000",  # Ray's second ends decoding processes between two parts
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
}
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of HTTP/2, of this type


@dataclass(frozen=True)
class Resources:
    """How many workers, and the processors and GPUs of each."""

    workers: int = 2
    cpus: float = 1.0
    gpus: float = 0.0

    @classmethod
    def of(cls, request: Any) -> Resources:
        """Those of a request; ``--workers 0`` means one."""
        return cls(max(request.workers, 1), request.cpus_per_worker, request.gpus_per_worker)


def prepare(request: EngineFlags) -> None:
    """Check address and token, and that Ray is installed; before Ray is imported, which reads the environment."""
    if request.ray_address is not None:
        _check_address(request.ray_address)
    else:
        _protect()
    with naming_extras():
        import ray  # noqa: F401


@contextmanager
def connected(request: EngineFlags, resources: Resources) -> Iterator[None]:
    """Within it Ray is connected: to the cluster at the address, or to one of this machine that ends with it.

    A caller that is connected already keeps its cluster.
    """
    prepare(request)
    import ray

    if ray.is_initialized():
        _check_versions(ray)
        yield
        return
    with _silenced(ray):
        if request.ray_address is None:
            _start(ray, resources)
        else:
            _connect(ray, request.ray_address)
        try:
            _check_versions(ray)
            _check_room(ray, resources)
            yield
        finally:
            ray.shutdown()


@contextmanager
def _silenced(ray: Any) -> Iterator[None]:
    """Within it Ray prints no reports of its nodes, such as that a worker ended: to standard output, among results.

    ``log_to_driver`` does not cover them. The pool warns of a worker that ends, and what cannot be done is an error.
    """
    module = ray._private.worker
    module._worker_logs_enabled = False
    try:
        yield
    finally:
        module._worker_logs_enabled = True


def _start(ray: Any, resources: Resources) -> None:
    cpus = max(os.cpu_count() or 1, -(-resources.workers * resources.cpus // 1))
    for attempt in range(1, _STARTS + 1):  # on a busy machine Ray gives up its own start after 30 s
        try:
            ray.init(address="local", num_cpus=int(cpus), include_dashboard=False, **_QUIET)
            return
        except Exception as error:
            ray.shutdown()
            if attempt == _STARTS:
                raise RunError(f"cannot start Ray on this machine: {_first_line(error)}; look into /tmp/ray") from None


def _connect(ray: Any, address: str) -> None:
    if address != "auto":
        _wait_for(address)
    try:
        ray.init(address=address, **_QUIET)
    except Exception as error:
        raise RunError(
            f"cannot connect to the Ray cluster at {address}: {_first_line(error)}; check the address and its token, "
            "and run the command on a machine of the cluster"
        ) from None


def _wait_for(address: str) -> None:
    """Wait until a Ray head answers at the address, at most ``CONNECT_SECONDS``: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            left = max(end - time.monotonic(), 0.1)
            with socket.create_connection((host.strip("[]"), int(port)), timeout=left) as connection:
                _greet(connection)
            return
        except OSError as error:
            if time.monotonic() + 0.5 > end:
                reason = error.strerror or error
                raise RunError(
                    f"the Ray cluster at {address} cannot be reached within {CONNECT_SECONDS:g} s ({reason}): check "
                    "the address, HOST:PORT as ray start --head prints it"
                ) from None
        time.sleep(0.5)


def _greet(connection: socket.socket) -> None:
    """Exchange the first words of HTTP/2, which gRPC speaks; an ``OSError`` where something else or nothing answers."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
    answer = connection.recv(len(_SETTINGS), socket.MSG_WAITALL)
    if answer[3:4] != _SETTINGS[3:4]:
        raise OSError("it is no Ray head")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


# --- security ---------------------------------------------------------------------------------------------------------


def _protect() -> None:
    """Let a cluster of this process have a token of its own: Ray would write one to a file."""
    for name, value in _LOCAL.items():
        os.environ.setdefault(name, value)
    if not any(name in os.environ for name in _TOKEN):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _check_address(address: str) -> None:
    """Refuse an address that is none, and one beyond this machine without a token."""
    host, _, port = address.rpartition(":")
    if address != "auto" and ("/" in address or not host or not port.isdecimal()):
        raise UsageError(
            f"--ray-address '{address}': give HOST:PORT as ray start --head prints it, or auto, on a machine of the "
            "cluster"
        )
    has_token = any(name in os.environ for name in _TOKEN) or (Path.home() / ".ray" / "auth_token").is_file()
    if has_token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    if address == "auto" or is_loopback(host) or os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return
    raise UsageError(
        f"--ray-address {address}: without a token, anyone who reaches the cluster runs code on it; start all nodes "
        "and this command with RAY_AUTH_MODE=token and the same RAY_AUTH_TOKEN (ray get-auth-token --generate)"
    )


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, out of reach of others.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "[::1]", "10.0.0.7", "head")]
    [True, True, True, False, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- nodes ------------------------------------------------------------------------------------------------------------


def _check_versions(ray: Any) -> None:
    """Refuse nodes without the package, or with another version of it."""
    from ray.exceptions import GetTimeoutError, RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def ask() -> str:  # sent by value: a node may have no such module
        try:
            from maple import __version__ as found
        except ImportError:
            return "no maple"
        return found

    nodes = [node for node in ray.nodes() if node["Alive"]]
    remote = ray.remote(num_cpus=0, max_retries=1)(ask)
    here = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    asked = [remote.options(scheduling_strategy=each).remote() for each in here]
    for place, answer in zip([node["NodeManagerAddress"] for node in nodes], asked, strict=True):
        try:
            found = ray.get(answer, timeout=_PROBE_SECONDS)
        except (GetTimeoutError, RayError) as error:
            reason = _first_line(error)
            raise RunError(f"the Ray node {place} does not answer: {reason}; remove it or restart it") from None
        if found != __version__:
            has = found if found == "no maple" else f"maple {found}"
            raise RunError(
                f"the Ray node {place} has {has}, and this is {__version__}: install maple-uncertainty=={__version__} "
                "on all nodes"
            )


def _check_room(ray: Any, resources: Resources) -> None:
    """Refuse a worker that fits on no node."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(node.get("CPU", 0) >= resources.cpus and node.get("GPU", 0) >= resources.gpus for node in nodes):
        return
    most = max((node.get("CPU", 0), node.get("GPU", 0)) for node in nodes)
    raise UsageError(
        f"no node has {resources.cpus:g} processors and {resources.gpus:g} GPUs for a worker, the largest has "
        f"{most[0]:g} and {most[1]:g}: give smaller --cpus-per-worker and --gpus-per-worker"
    )
