"""Clusters that cannot be used, and why."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest
import ray
from PIL import Image

from commands import flat
from commands import run as maple
from maple import __version__
from maple.deploy.ray import cluster
from maple.errors import RunError, UsageError
from maple.runs._engine import EngineFlags


@pytest.fixture
def no_token(monkeypatch, tmp_path):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize(("flags", "named"), [
    (["--engine", "rya"], "did you mean 'ray'"),
    (["--ray-address", "auto"], "--ray-address needs --engine ray"),
    (["--engine", "ray", "--cpus-per-worker", "-1"], "--cpus-per-worker -1"),
    (["--engine", "ray", "--ray-address", "ray://head:10001"], "HOST:PORT"),
    (["--engine", "ray"], "--out"),
])  # fmt: skip
def test_flags_that_make_no_sense_are_refused(flags, named, capsys, tmp_path):
    assert maple("predict", tmp_path, tmp_path, *flags) == 2
    assert named in flat(capsys.readouterr().err)


def test_a_cluster_that_cannot_be_reached_is_named(monkeypatch):
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cluster.CONNECT_SECONDS == 30
        monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1.0)
        with pytest.raises(RunError, match=address):
            cluster._wait_for(address)


def test_a_command_whose_cluster_cannot_be_reached_names_it(monkeypatch, run, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1.0)
        monkeypatch.setattr("ray.is_initialized", lambda: False)  # the other tests of this folder have one
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        flags = ["--out", tmp_path / "p.csv", "--engine", "ray", "--ray-address", address]
        assert maple("predict", run, tmp_path / "a.png", *flags) == 1
    said = flat(capsys.readouterr().err)
    assert address in said and "HOST:PORT" in said and "Traceback" not in said


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_port_at_which_no_head_answers_is_named(answer, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    connections.append(other.accept()[0])
                    connections[-1].sendall(answer)

        connections: list[socket.socket] = []
        threading.Thread(target=serve, daemon=True).start()
        monkeypatch.setattr(cluster, "CONNECT_SECONDS", 1.0)
        with pytest.raises(RunError, match=address):
            cluster._wait_for(address)


def test_a_head_answers(nodes):
    cluster._wait_for(nodes.cluster.address)


def test_a_cluster_elsewhere_needs_a_token(no_token, monkeypatch):
    with pytest.raises(UsageError, match=r"10\.0\.0\.7:6379.*RAY_AUTH_MODE=token"):
        cluster.prepare(EngineFlags(engine="ray", ray_address="10.0.0.7:6379"))
    cluster.prepare(EngineFlags(engine="ray", ray_address="127.0.0.1:6379"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    cluster.prepare(EngineFlags(engine="ray", ray_address="10.0.0.7:6379"))


def test_a_cluster_of_one_command_has_a_token_that_is_in_no_file(no_token, monkeypatch):
    cluster.prepare(EngineFlags(engine="ray"))
    assert len(cluster.os.environ["RAY_AUTH_TOKEN"]) == 64 and not (Path.home() / ".ray").exists()


def test_nodes_with_another_version_are_named(nodes, tmp_path):
    package = tmp_path / "maple"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.0.1'")
    other = nodes.add(env_vars={"PYTHONPATH": str(tmp_path)})
    try:
        with (
            pytest.raises(RunError, match=rf"maple 0\.0\.1.*maple-uncertainty=={__version__}"),
            cluster.connected(EngineFlags(engine="ray"), cluster.Resources()),
        ):
            pass
    finally:
        nodes.cluster.remove_node(other)


def test_what_nodes_report_to_ray_is_not_among_the_results(capsys):
    from ray._private import worker

    report = {"lines": ["(raylet) A worker died: PartWriter.predict"], "pid": "raylet", "is_err": False}
    with cluster._silenced(ray):
        worker.print_to_stdstream(report, ignore_prefix=False)
    assert capsys.readouterr().out == ""
    worker.print_to_stdstream({**report, "lines": ["another"]}, ignore_prefix=False)
    assert "another" in capsys.readouterr().out  # a user of Ray sees them again


def test_a_worker_that_fits_on_no_node_is_refused(nodes):
    with pytest.raises(UsageError, match="--gpus-per-worker"):
        cluster._check_room(ray, cluster.Resources(1, 1, 4))
