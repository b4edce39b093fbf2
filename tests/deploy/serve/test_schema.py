"""Answers and their schema: what is said is what the predictor says, and OpenAPI describes it."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import schemathesis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import maple
from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.schema import ModelAnswer, PredictAnswer
from serving import (
    CENTROIDS,
    NAMES,
    THUMBNAILS,
    Colours,
    as_json,
    check_against,
    colours,
    metrics,
    png,
    serve,
)


def test_a_form_and_json_say_what_the_predictor_says(client):
    images = [png(colour) for colour in colours(20)]
    pixels = np.array(colours(20), np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2)
    names = [f"{i}.png" for i in range(20)]
    form = client.post("/v1/predict", files=[("files", (name, image)) for name, image in zip(names, images)])
    by_json = client.post("/v1/predict", json=as_json(*images))
    assert form.status_code == by_json.status_code == 200 and form.json() == by_json.json()
    answer = form.json()
    assert answer["model"] == {"name": "colours", "version": maple.__version__}
    check_against(Colours(), pixels, answer["predictions"], names)
    assert {row["is_ood"] for row in answer["predictions"]} == {True, False}
    PredictAnswer.model_validate(answer)


def test_one_class_has_no_runner_up_and_no_calibration_no_p_value():
    class One(Colours):
        def predict_pixels(self, pixels: np.ndarray) -> Any:
            said, zeros = super().predict_pixels(pixels), np.zeros(len(pixels), int)
            ids = {"class_id": zeros, "md_class_id": zeros, "softmax_class_id": zeros}
            return replace(said, **ids, log_probabilities=np.zeros((len(pixels), 1)), class_names=("red",))

    with serve(One(calibrated=False)) as client:
        (said,) = client.post("/v1/predict", json=as_json(png((1, 2, 3)))).json()["predictions"]
        assert said["runner_up"] is None and len(said["probabilities"]) == 1
        assert said["p_value"] is None and said["is_ood"] is False
        decision = client.get("/v1/model").json()["decision"]
        assert decision["threshold"] is None and "flags nothing" in decision["sentence"]
        assert "maple_drift_distance" not in metrics(client)


def test_the_model_is_described(client):
    answer = client.get("/v1/model").json()
    predictor = Colours()
    assert answer == {
        "name": "colours",
        "version": maple.__version__,
        "runtime": "numpy",
        "classes": list(NAMES),
        "size": 8,
        "fit": "pad",
        "score": "distance",
        "clusters": [
            {"cluster": i, "class": name, "position": CENTROIDS[i, :2].tolist(), "n_exemplars": 3 if i == 0 else 0}
            for i, name in enumerate(["red", "green", "blue", "blue"])
        ],
        "map_radius": 1.0,
        "decision": {**predictor.decision.describe(), "sentence": predictor.decision.sentence()},
        "limits": {
            "max_images": 64,
            "max_bytes": 32 * 2**20,
            "max_pixels": 25_000_000,
            "formats": ["jpeg", "png", "webp"],
        },
        "needs_key": False,
    }
    ModelAnswer.model_validate(answer)


def test_thresholds_of_classes_are_described():
    with serve(Colours().decide(false_alarm=0.2, per_class=True)) as client:
        decision = client.get("/v1/model").json()["decision"]
    assert "threshold" not in decision and len(decision["thresholds"]) == 3


KEY = {"X-API-Key": "s3cret"}
schemathesis.openapi.format("byte", st.sampled_from([base64.b64encode(png(c)).decode() for c in colours(3)]))
schemathesis.openapi.format("binary", st.sampled_from([png(c) for c in colours(3)]))


schema = schemathesis.openapi.from_asgi(
    "/openapi.json",
    create_app(Colours(), ServeOptions(api_key=KEY["X-API-Key"], max_images=4), THUMBNAILS),
    headers=KEY,
)


@schema.parametrize()
@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_the_service_does_what_its_description_says(case):
    case.call_and_validate(headers=KEY)


def test_the_description_is_complete_and_its_example_works(client):
    described = client.get("/openapi.json").json()
    assert set(described["paths"]) == {
        "/v1/predict", "/v1/model", "/v1/clusters/{cluster}/exemplars.png", "/healthz", "/readyz", "/metrics",
    }  # fmt: skip
    predict = described["paths"]["/v1/predict"]["post"]
    assert set(predict["responses"]) == {"200", "408", "413", "415", "422", "503"}
    example = predict["requestBody"]["content"]["application/json"]["example"]
    assert client.post("/v1/predict", json=example).status_code == 200
    (answer,) = described["components"]["schemas"]["PredictAnswer"]["examples"]
    assert json.loads(PredictAnswer.model_validate(answer).to_json()) == answer
