"""Another model answers from one batch to the next; one that does not fit is not taken."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest

from maple.errors import RunError
from serving import THUMBNAILS, Colours, as_json, http_bytes, metrics, png, serve, server, talk


class Other(Colours):
    network = "others"


def test_another_model_answers() -> None:
    with serve() as client:
        before = client.post("/v1/predict", json=as_json(png((200, 40, 40)))).json()
        endpoints = client.app.state.endpoints
        client.portal.call(endpoints.reload, lambda: (Other(), THUMBNAILS))
        after = client.post("/v1/predict", json=as_json(png((200, 40, 40)))).json()
        assert client.get("/v1/clusters/0/exemplars.png").status_code == 200
        found = metrics(client)
    assert (before["model"]["name"], after["model"]["name"]) == ("colours", "others")
    assert before["predictions"] == after["predictions"]
    assert found["maple_images_total"] == 2  # of both
    assert found["maple_drift_distance"] > 0


def fail() -> tuple[Colours, dict]:
    raise RunError("'weights.safetensors' is damaged")


def larger() -> tuple[Colours, dict]:
    model = Other()
    model.size = 9
    return model, {}


@pytest.mark.parametrize(
    ("load", "names"),
    [(fail, "weights"), (larger, "size"), (lambda: (Other(calibrated=False), {}), "calibration")],
)
def test_a_model_that_does_not_fit_is_not_taken(load: Callable, names: str) -> None:
    with serve() as client:
        with pytest.raises(RunError, match=names):
            client.portal.call(client.app.state.endpoints.reload, load)
        assert client.get("/v1/model").json()["name"] == "colours"
        assert client.post("/v1/predict", json=as_json(png((200, 40, 40)))).status_code == 200


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="no SIGHUP here")
def test_sighup_loads_the_model_again() -> None:
    asked = http_bytes("/v1/clusters/0/exemplars.png", method="GET")
    with server(0.0) as (process, port):
        assert talk(port, asked).startswith(b"HTTP/1.1 404")
        process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 20
        while not talk(port, asked).startswith(b"HTTP/1.1 200") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert talk(port, asked).startswith(b"HTTP/1.1 200")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert process.stderr.read().count("loaded again") == 1
