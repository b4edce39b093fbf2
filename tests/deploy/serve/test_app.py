"""The application: routes, page, keys, and every error as a status and one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.testclient import TestClient

from maple.deploy.serve.app import create_app
from serving import Colours, as_json, png, serve


def test_health_and_page(client):
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    for page in (client.get("/docs"), client.get("/")):
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert "default-src 'self'" in page.headers["content-security-policy"]
    script = client.get("/static/app.js")
    assert script.status_code == 200
    assert page.headers["cache-control"] == script.headers["cache-control"] == "no-cache"
    for path in ("/nowhere", "/redoc", "/static/../serve.py", "/static/%00", f"/static/{'a' * 5000}"):
        said = client.get(path)
        assert said.status_code == 404 and list(said.json()) == ["error"], path
    wrong = client.get("/v1/predict")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and list(wrong.json()) == ["error"]


def test_with_a_key_only_those_who_have_it_are_answered():
    with serve(api_key="s3cret") as client:
        asks = [("POST", "/v1/predict"), *(("GET", path) for path in ("/v1/model", "/metrics", "/openapi.json"))]
        asks.append(("GET", "/v1/clusters/0/exemplars.png"))
        for method, path in asks:
            for headers in (
                {},
                {"X-API-Key": ""},
                {"X-API-Key": "s3cre"},
                {"X-API-Key": "s3crets"},
                {b"x-api-key": b"\xe9"},
            ):
                said = client.request(method, path, headers=headers)
                assert said.status_code == 401 and "X-API-Key" in said.json()["error"]
            assert client.request(method, path, headers={"X-API-Key": "s3cret"}).status_code != 401
        assert all(client.get(path).status_code == 200 for path in ("/", "/docs", "/healthz", "/readyz"))
        key = {"X-API-Key": "s3cret"}
        assert client.get("/v1/model", headers=key).json()["needs_key"] is True
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3))), headers=key).status_code == 200


def test_the_key_is_compared_before_the_body_is_read():
    with serve(api_key="s3cret", max_bytes=10) as client:
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3)))).status_code == 401


def test_a_failure_is_one_sentence_and_the_next_request_works():
    class Moody(Colours):
        angry = False

        def predict_pixels(self, pixels: np.ndarray) -> Any:
            if self.angry:
                raise ArithmeticError("secret detail")
            return super().predict_pixels(pixels)

    predictor = Moody()
    app = create_app(predictor)
    with TestClient(app, raise_server_exceptions=False) as client:
        predictor.angry = True
        said = client.post("/v1/predict", json=as_json(png((1, 2, 3))))
        assert said.status_code == 500 and list(said.json()) == ["error"] and "log" in said.json()["error"]
        predictor.angry = False
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3)))).status_code == 200
