"""Endpoints: requests share batches, are refused in time, and what was accepted is answered."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import io
import json
import time
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from image_files import encode
from maple.deploy.serve.batching import Busy
from maple.deploy.serve.endpoints import N_BODIES, Endpoints
from maple.deploy.serve.options import ServeOptions
from maple.types import Prediction
from serving import (
    THUMBNAILS,
    Colours,
    as_json,
    colours,
    metrics,
    png,
    serve,
)


def test_exemplars_are_a_strip(client):
    answer = client.get("/v1/clusters/0/exemplars.png")
    assert answer.headers["content-type"] == "image/png"
    strip = np.asarray(Image.open(io.BytesIO(answer.content)))
    np.testing.assert_array_equal(strip, np.concatenate(list(THUMBNAILS[0]), axis=1))
    for cluster, status in (("1", 404), ("99", 404), (str(10**30), 404), ("-1", 422), ("x", 422)):
        said = client.get(f"/v1/clusters/{cluster}/exemplars.png")
        assert said.status_code == status and list(said.json()) == ["error"]


def ask_together(client: TestClient, requests: list[dict[str, Any]]) -> list[Any]:
    with concurrent.futures.ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda body: client.post("/v1/predict", json=body), requests))


def test_requests_share_batches_and_nobody_notices():
    predictor = Colours(seconds=0.02)
    chosen = colours(40)
    with serve(predictor, max_batch=16) as client:
        together = ask_together(client, [as_json(*map(png, chosen[i : i + 2])) for i in range(0, 40, 2)])
        shared, predictor.batches = predictor.batches[2:], []  # without the warm-up
        counted = metrics(client)
        alone = [client.post("/v1/predict", json=as_json(png(colour))).json()["predictions"][0] for colour in chosen]
    said = [row for answer in together for row in answer.json()["predictions"]]
    assert [row | {"file": ""} for row in said] == [row | {"file": ""} for row in alone]
    assert sum(shared) == 40 and max(shared) > 2 and len(shared) < 20
    assert counted["maple_batch_images_count"] == len(shared) and counted["maple_batch_images_sum"] == 40


class Blinded(Colours):
    """Gives NaN for white images."""

    def predict_pixels(self, pixels: np.ndarray) -> Prediction:
        prediction = super().predict_pixels(pixels)
        score = np.where(pixels.min((1, 2, 3)) < 255, prediction.score, np.nan)
        p_value = self.decision.p_values(score, prediction.class_id)  # an error, as of every predictor
        return dataclasses.replace(prediction, score=score, p_value=p_value)


def test_an_image_with_nan_is_refused_by_name_and_spares_the_others_of_its_batch():
    predictor = Blinded()
    with serve(predictor, max_batch=8) as client:
        predictor.seconds = 0.1  # requests meet in batches
        good, white = as_json(png((9, 9, 9))), as_json(png((9, 9, 9)), png((255, 255, 255)))
        answers = ask_together(client, [good, white, good, white, good])
    assert [answer.status_code for answer in answers] == [200, 422, 200, 422, 200]
    for answer in (answers[1], answers[3]):
        assert "1.png" in answer.json()["error"] and "NaN" in answer.json()["error"]


def test_back_pressure_answers_503_and_when_to_try_again():
    predictor = Colours()
    with serve(predictor, max_images=4, queue=8) as client:
        predictor.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            waiting = [pool.submit(client.post, "/v1/predict", json=as_json(*[png((1, 2, 3))] * 4)) for _ in range(2)]
            while metrics(client)["maple_queue_images"] < 8:
                time.sleep(0.01)
            refused, unready = client.post("/v1/predict", json=as_json(png((1, 2, 3)))), client.get("/readyz")
            assert client.get("/healthz").status_code == 200
            predictor.gate.set()
            assert [answer.result().status_code for answer in waiting] == [200, 200]
        for said in (refused, unready):
            assert said.status_code == 503 and int(said.headers["retry-after"]) >= 1
        assert client.get("/readyz").status_code == 200
        assert metrics(client)["maple_refused_total"] == 2


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    predictor = Colours(seconds_per_image=0.05)
    with serve(predictor, max_batch=4, deadline_ms=1000) as client:  # 0.7 s are promised: 13 images at most
        answers = ask_together(client, [as_json(png(colour)) for colour in colours(40)])
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503}  # how many of each depends on the load of the machine
    assert sum(predictor.batches[2:]) == statuses.count(200)  # nothing was computed in vain


def test_many_large_uploads_at_a_time_are_refused():
    predictor = Colours()
    large = as_json(encode(Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 60, 3), np.uint8))))
    length = len(json.dumps(large))
    with serve(predictor, max_bytes=length + 100) as client:
        predictor.gate.clear()
        with concurrent.futures.ThreadPoolExecutor(N_BODIES + 1) as pool:
            waiting = [pool.submit(client.post, "/v1/predict", json=large) for _ in range(N_BODIES)]
            while metrics(client)["maple_queue_images"] < N_BODIES:
                time.sleep(0.01)
            refused = client.post("/v1/predict", json=large)
            predictor.gate.set()
            assert all(answer.result().status_code == 200 for answer in waiting)
        assert refused.status_code == 503
        assert client.post("/v1/predict", json=large).status_code == 200


def test_before_it_started_and_after_it_ended_nothing_is_accepted():
    client = serve()
    service = client.app.state.endpoints
    assert client.get("/readyz").status_code == 503 and client.get("/healthz").status_code == 200
    assert service._decoders is None
    with client:
        assert client.get("/readyz").status_code == 200 and service._decoders is not None
    assert service._decoders is None
    said = client.post("/v1/predict", json=as_json(png((1, 2, 3))))
    assert said.status_code == 503 and 'maple_refused_total{reason="closing"}' in client.get("/metrics").text


def test_bodies_are_counted_as_they_arrive():
    service = Endpoints(Colours(), ServeOptions(max_bytes=1000), {})

    async def chunks(n: int):
        for _ in range(n):
            yield bytes(1000)

    async def read(body) -> int:
        return sum([len(chunk) async for chunk in body])

    async def scene() -> None:
        with service._holding(chunks(N_BODIES)) as body:
            assert await read(body) == 1000 * N_BODIES
            with service._holding(chunks(1)) as other, pytest.raises(Busy) as refused:
                await read(other)
            assert refused.value.reason == "uploads"
        with service._holding(chunks(1)) as body:  # all given back
            assert await read(body) == 1000

    asyncio.run(scene())
