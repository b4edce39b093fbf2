"""The service: every endpoint answers as described, requests share batches, and what was accepted is answered."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
import yaml
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

import maple
from image_files import encode, png_of_size
from maple.data import decode
from maple.decisions.drift import StreamMonitor, kolmogorov_smirnov
from maple.deploy.serve.app import create_app
from maple.deploy.serve.endpoints import N_BODIES
from maple.deploy.serve.metrics import PENDING_IMAGES, STREAM_IMAGES, WINDOW_IMAGES, DriftWatch, score_buckets
from maple.deploy.serve.options import MOST_PIXELS, ServeOptions
from maple.deploy.serve.schema import ModelAnswer, PredictAnswer
from maple.deploy.serve.server import listen_at, read_exemplars
from maple.deploy.serve.uploads import UploadError, read_uploads
from maple.errors import ConfigError, RunError, UsageError
from maple.options import build_options
from maple.types import PREDICTION_COLUMNS
from serving import CENTROIDS, NAMES, Colours, as_form, as_json, colours, http_bytes, png, server, talk

ROOT = Path(__file__).parents[3]
THUMBNAILS = {0: np.arange(3 * 8 * 8 * 3, dtype=np.uint8).reshape(3, 8, 8, 3)}


@pytest.fixture(scope="module")
def client():
    with TestClient(create_app(Colours(), ServeOptions(), THUMBNAILS)) as client:
        yield client


def serve(predictor: Colours | None = None, **options: Any) -> TestClient:
    return TestClient(create_app(predictor or Colours(), ServeOptions(**options)))


def metrics(client: TestClient) -> dict[str, float]:
    """All samples without labels, and the sum over all labels of the others."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


# --- what is said ----------------------------------------------------------------------------------------------------


def check_against(predictor: Any, pixels: np.ndarray, said: list[dict[str, Any]], files: list[str]) -> None:
    """What a predictor says of these pixels is what came over HTTP."""
    expected = predictor.predict_pixels(pixels)
    for i, (row, answer) in enumerate(zip(expected.rows(files), said, strict=True)):
        assert list(answer)[: len(PREDICTION_COLUMNS)] == list(PREDICTION_COLUMNS)
        for column in PREDICTION_COLUMNS:
            same = pytest.approx(row[column], rel=1e-4, abs=1e-9) if isinstance(row[column], float) else row[column]
            assert answer[column] == same, column
        ordered = sorted(zip(-expected.probabilities[i], range(100), predictor.class_names))[:5]
        assert [likely["class"] for likely in answer["probabilities"]] == [name for _, _, name in ordered]
        assert [likely["probability"] for likely in answer["probabilities"]] == pytest.approx(
            [-negative for negative, _, _ in ordered], rel=1e-3, abs=1e-9
        )
        assert answer["runner_up"] == answer["probabilities"][1]
        assert answer["position"] == pytest.approx(expected.position[i].tolist(), rel=1e-3, abs=1e-5)


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


def test_names_come_back_as_they_were_sent(client):
    names = [
        "../../etc/passwd",
        "C:\\x\\y.png",
        "a\x00b\x1b[31m.png",
        "<script>alert(1)</script>",
        "Zoë 猫 🐈.png",
        "",
        "x" * 1000,
    ]
    images = [{"name": name, "data": as_json(png((1, 2, 3)))["images"][0]["data"]} for name in names]
    answer = client.post("/v1/predict", json={"images": [*images, {"data": images[0]["data"]}]})
    shown = [name or f"image {i}" for i, name in enumerate(names, start=1)] + ["image 8"]
    assert [row["file"] for row in answer.json()["predictions"]] == shown


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
        "limits": {"max_images": 64, "max_bytes": 32 * 2**20, "max_pixels": 25_000_000},
        "needs_key": False,
    }
    ModelAnswer.model_validate(answer)


def test_thresholds_of_classes_are_described():
    with serve(Colours().decide(false_alarm=0.2, per_class=True)) as client:
        decision = client.get("/v1/model").json()["decision"]
    assert "threshold" not in decision and len(decision["thresholds"]) == 3


def test_exemplars_are_a_strip(client):
    answer = client.get("/v1/clusters/0/exemplars.png")
    assert answer.headers["content-type"] == "image/png"
    strip = np.asarray(Image.open(io.BytesIO(answer.content)))
    np.testing.assert_array_equal(strip, np.concatenate(list(THUMBNAILS[0]), axis=1))
    for cluster, status in (("1", 404), ("99", 404), (str(10**30), 404), ("-1", 422), ("x", 422)):
        said = client.get(f"/v1/clusters/{cluster}/exemplars.png")
        assert said.status_code == status and list(said.json()) == ["error"]


def test_health_and_page(client):
    assert client.get("/healthz").json() == {"status": "alive"}
    assert client.get("/readyz").json() == {"status": "ready"}
    page = client.get("/")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    script = client.get("/static/app.js")
    assert script.status_code == 200
    assert page.headers["cache-control"] == script.headers["cache-control"] == "no-cache"
    for path in ("/nowhere", "/docs", "/static/../serve.py", "/static/%00", f"/static/{'a' * 5000}"):
        said = client.get(path)
        assert said.status_code == 404 and list(said.json()) == ["error"], path
    wrong = client.get("/v1/predict")
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST" and list(wrong.json()) == ["error"]


def test_browsers_are_told_to_be_careful(client):
    for path in ("/", "/v1/model", "/nowhere", "/static/nowhere"):
        headers = client.get(path, headers={"Origin": "https://elsewhere.example"}).headers
        assert "default-src 'self'; img-src 'self' blob: data:" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers


# --- who may ask -----------------------------------------------------------------------------------------------------


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
        assert all(client.get(path).status_code == 200 for path in ("/", "/healthz", "/readyz"))
        key = {"X-API-Key": "s3cret"}
        assert client.get("/v1/model", headers=key).json()["needs_key"] is True
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3))), headers=key).status_code == 200


def test_the_key_is_compared_before_the_body_is_read():
    with serve(api_key="s3cret", max_bytes=10) as client:
        assert client.post("/v1/predict", json=as_json(png((1, 2, 3)))).status_code == 401


@pytest.mark.parametrize("key", ["", " a", "ä", "a\nb"])
def test_keys_that_no_header_can_carry_are_refused(key):
    with pytest.raises(UsageError, match="API key"):
        create_app(Colours(), ServeOptions(api_key=key))


def test_options_that_do_not_fit_together_are_refused():
    with pytest.raises(UsageError, match="--queue 8 is shorter"):
        create_app(Colours(), ServeOptions(queue=8))
    with pytest.raises(ConfigError, match="--max-batch 0"):
        build_options(ServeOptions, {"max_batch": "0"}, where=None)
    assert build_options(ServeOptions, {"max_batch": "7", "access_log": True}, where=None).max_batch == 7
    assert MOST_PIXELS == decode.MAX_PIXELS


# --- limits ----------------------------------------------------------------------------------------------------------


def test_limits_are_exact():
    image, large = png((1, 2, 3)), png((1, 2, 3), (10, 10))
    body, kind = as_form(image, image)
    with serve(max_images=2, max_bytes=len(body), max_pixels=99) as client:

        def post(body: bytes, kind: str) -> tuple[int, str]:
            said = client.post("/v1/predict", content=body, headers={"content-type": kind})
            return said.status_code, said.json().get("error", "")

        assert post(body, kind)[0] == 200
        assert post(body + b"\n", kind) == (
            413,
            f"the body is longer than {len(body):,} bytes: send fewer or smaller images",
        )
        assert post(*as_form(large)) == (
            413,
            "cannot use '0.png': 10 x 10 pixels, and 99 are the most: make it smaller",
        )
        assert post(*as_form(png((1, 2, 3), (11, 9))))[0] == 200
        assert post(*as_form(b"", b"", b"")) == (422, "more than 2 images: send them in several requests")
        three = json.dumps({"images": [{"data": ""}] * 3}).encode()
        assert post(three, "application/json") == (422, "more than 2 images: send them in several requests")
        assert post(b'{"images": []}', "application/json") == (422, "the request holds no image: send at least one")
        assert post(*as_form())[0] == 422
        assert metrics(client)["maple_images_total"] == 3


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data; boundary=limit"])
def test_a_body_of_unknown_length_is_counted_while_it_arrives(kind):
    sent = []

    async def chunks():
        yield as_form(b"")[0].split(b"\r\n\r\n")[0] + b"\r\n\r\n"
        while True:
            sent.append(b"x" * 100)
            yield sent[-1]

    with pytest.raises(UploadError) as refused:
        asyncio.run(read_uploads({"content-type": kind}, chunks(), ServeOptions(max_images=1, max_bytes=1000)))
    assert refused.value.status == 413 and len(sent) <= 10


def test_types_that_are_not_understood(client):
    body, kind = as_form(png((1, 2, 3)))
    for given in (
        "",
        "text/plain",
        "image/png",
        "application/x-www-form-urlencoded",
        "multipart/mixed; boundary=limit",
    ):
        said = client.post("/v1/predict", content=body, headers={"content-type": given} if given else {})
        assert said.status_code == 415 and "multipart/form-data" in said.json()["error"]
    said = client.post("/v1/predict", content=body, headers={"content-type": kind, "content-encoding": "gzip"})
    assert said.status_code == 415


@pytest.mark.parametrize(
    ("image", "status"),
    [
        (b"", 422),
        (b"text", 422),
        (png((1, 2, 3))[:45], 422),
        (png_of_size(30_000, 30_000), 422),
        (png_of_size(9000, 9000), 413),
    ],
    ids=["nothing", "text", "truncated", "too long a side", "too many pixels"],
)
def test_what_is_not_an_image_is_named(client, image, status):
    said = client.post("/v1/predict", json=as_json(png((1, 2, 3)), image))
    assert said.status_code == status and said.json()["error"].startswith("cannot use '1.png': ")


@pytest.mark.parametrize("data", ["é", "a", "aGk=\n", " aGk=", "aGk-", "data:image/png;base64,aGk="])
def test_base64_is_strict(client, data):
    said = client.post("/v1/predict", json={"images": [{"data": data}]})
    assert said.status_code == 422 and "base64" in said.json()["error"]


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_every_format_is_decoded_as_from_a_file(client, format):
    image = encode(Image.new("RGB", (30, 20), (200, 40, 40)), format)
    (said,) = client.post("/v1/predict", files=[("files", ("x", image))]).json()["predictions"]
    expected = Colours().predict_pixels(decode.decode_image(image, 8)[None])
    assert said["score"] == pytest.approx(expected.score[0])


# --- batches, back-pressure, deadlines -------------------------------------------------------------------------------


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
            assert "queue" in said.json()["error"]
        assert client.get("/readyz").status_code == 200
        assert metrics(client)["maple_refused_total"] == 2


def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    predictor = Colours(seconds_per_image=0.05)
    with serve(predictor, max_batch=4, deadline_ms=1000) as client:  # 0.7 s are promised: 13 images at most
        answers = ask_together(client, [as_json(png(colour)) for colour in colours(40)])
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503} and 4 <= statuses.count(200) <= 39
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
        assert refused.status_code == 503 and "uploads" in refused.json()["error"]
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
    assert said.status_code == 503 and "shutting down" in said.json()["error"]


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


# --- counts ----------------------------------------------------------------------------------------------------------


def test_what_is_counted():
    predictor = Colours()
    chosen = colours(30, seed=1)
    expected = predictor.predict_pixels(np.array(chosen, np.uint8)[:, None, None].repeat(8, 1).repeat(8, 2))
    with serve(predictor) as client:
        for colour in chosen:
            client.post("/v1/predict", json=as_json(png(colour)))
        client.post("/v1/predict", content=b"", headers={"content-type": "text/plain"})
        text = client.get("/metrics").text
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["maple_requests_total", ("route", "/v1/predict"), ("status", "200")] == 30
    assert samples["maple_requests_total", ("route", "/v1/predict"), ("status", "415")] == 1
    assert samples["maple_request_seconds_count", ("route", "/v1/predict")] == 31
    assert samples["maple_images_total",] == 30
    assert samples["maple_images_flagged_total",] == expected.is_ood.sum() > 0
    assert samples["maple_share_flagged",] == pytest.approx(expected.is_ood.mean())
    assert samples["maple_score_sum",] == pytest.approx(expected.score.sum())
    for bound in score_buckets(predictor.calibration_scores):
        assert samples["maple_score_bucket", ("le", str(bound))] == (expected.score <= bound).sum()
    distance = kolmogorov_smirnov(expected.score, predictor.calibration_scores)[0]
    assert samples["maple_drift_distance",] == pytest.approx(distance)
    stream = StreamMonitor(predictor.calibration_scores)
    stream.update(expected.score)
    assert samples["maple_drift_log_wealth",] == pytest.approx(stream.log_wealth_[-1])
    assert samples["maple_drift_alarm",] == (stream.alarm_at_ is not None)
    assert samples["maple_queue_images",] == 0
    assert all(samples["maple_refused_total", ("reason", reason)] == 0 for reason in ("full", "deadline", "closing"))


def test_routes_are_as_many_as_there_are():
    with serve() as client:
        for i in range(5):
            client.get(f"/nowhere/{i}")
            client.get(f"/v1/clusters/{i}/exemplars.png")
        routes = set(re.findall(r'maple_requests_total{route="([^"]*)"', client.get("/metrics").text))
    assert routes == {"other", "/v1/clusters/{cluster}/exemplars.png"}


def test_the_watch_remembers_a_bounded_number_of_images(rng, monkeypatch):
    monkeypatch.setattr("maple.deploy.serve.metrics.STREAM_IMAGES", 2000)
    assert STREAM_IMAGES > PENDING_IMAGES > WINDOW_IMAGES
    watch = DriftWatch(rng.normal(size=200))
    for _ in range(50):
        watch.update(rng.normal(size=100))
        assert (
            len(watch._stream) <= 2000 and len(watch._pending) <= PENDING_IMAGES and len(watch._window) <= WINDOW_IMAGES
        )
    assert not watch.alarm() and watch.distance() < 0.15
    watch.update(rng.normal(3, size=300))
    assert watch.alarm()
    for _ in range(30):
        watch.update(rng.normal(size=100))
    assert watch.alarm()  # it stays, though the stream is another


def test_buckets_of_scores_that_are_all_alike_or_missing():
    assert score_buckets(np.full(10, 3.0)) == (3.0,)
    assert score_buckets(np.empty(0))[0] == 0.01


# --- the description -------------------------------------------------------------------------------------------------

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


# --- a real model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    import torch

    from maple.data.splits import load_splits
    from maple.networks import create_backbone, embed
    from maple.prediction.fit import fit_predictor
    from maple.reporting.gallery import write_cluster_gallery

    splits = load_splits("digits")
    torch.manual_seed(0)
    predictor = fit_predictor(
        create_backbone("resnet9", 10).eval(), splits.train, splits.validation, splits.calibration
    )
    folder = tmp_path_factory.mktemp("run")
    predictor.save(folder)
    some = splits.train.subset(np.arange(200))
    write_cluster_gallery(folder / "gallery", some, embed(predictor.backbone, some))
    return folder


def test_a_run_is_served(run_folder):
    from maple.data.splits import load_splits
    from maple.runs.loading import ready_model

    predictor = ready_model(run_folder, {"false_alarm": 0.1})
    test = load_splits("digits").test
    pixels = np.stack([test.read(i) for i in range(24)])
    exemplars = read_exemplars(run_folder, predictor)
    assert sorted(exemplars) == list(range(10))
    with TestClient(create_app(predictor, ServeOptions(max_batch=16), exemplars)) as client:
        said = client.post("/v1/predict", json=as_json(*[encode(Image.fromarray(image)) for image in pixels])).json()
        check_against(predictor, pixels, said["predictions"], [f"{i}.png" for i in range(24)])
        described = client.get("/v1/model").json()
        assert described["runtime"] == "torch" and described["decision"]["false_alarm"] == 0.1
        assert [cluster["n_exemplars"] for cluster in described["clusters"]] == [len(exemplars[i]) for i in range(10)]
        assert client.get("/v1/clusters/3/exemplars.png").status_code == 200


# --- a real process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_everything_accepted_is_answered(sign):
    body, kind = as_form(png((200, 40, 40)))
    with server(1.0) as (process, port):  # seconds per batch of at most four images
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            waiting = [pool.submit(talk, port, http_bytes("/v1/predict", body, kind)) for _ in range(12)]
            deadline = time.monotonic() + 10
            while b"maple_queue_images 12.0" not in talk(port, http_bytes("/metrics", method="GET")):
                assert time.monotonic() < deadline
            slow = socket.create_connection(("127.0.0.1", port), 20)  # its body arrives after the signal
            request = http_bytes("/v1/predict", body, kind)
            slow.sendall(request[:-10])
            time.sleep(0.3)  # until it has begun to read
            process.send_signal(sign)
            time.sleep(0.1)
            slow.sendall(request[-10:])
            refused = b""
            while chunk := slow.recv(2**16):
                refused += chunk
            slow.close()
            answers = [answer.result() for answer in waiting]
        assert process.wait(20) == 0
        errors = process.stderr.read()
    assert all(answer.startswith(b"HTTP/1.1 200") and b'"class":"red"' in answer for answer in answers)
    assert refused.startswith(b"HTTP/1.1 503") and b"shutting down" in refused
    assert errors == ""


def test_nothing_is_computed_for_clients_that_left():
    body, kind = as_form(*[png((200, 40, 40))] * 4)
    with server(1.0) as (_, port):
        first = threading.Thread(target=talk, args=(port, http_bytes("/v1/predict", body, kind)))
        first.start()
        time.sleep(0.1)
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", port), 20) as leaving:
                leaving.sendall(http_bytes("/v1/predict", body, kind))
                time.sleep(0.05)
        assert talk(port, http_bytes("/v1/predict", body, kind)).startswith(b"HTTP/1.1 200")
        first.join()
        text = talk(port, http_bytes("/metrics", method="GET")).decode()
        computed = float(re.search(r"^maple_images_total (\S+)$", text, re.MULTILINE)[1])
        assert computed <= 12 and 'status="499"' in text  # of 28: the two who stayed, and who left in mid-batch


def test_a_port_that_is_taken_is_a_sentence():
    with listen_at("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot listen at 127.0.0.1, port {port}: .*choose another --port"):
            listen_at("127.0.0.1", port)
    with pytest.raises(RunError, match=r"cannot listen at no\.such\.host\.invalid"):
        listen_at("no.such.host.invalid", 0)


def test_the_whole_of_it_serves_a_run(run_folder):
    code = f"""
from pathlib import Path
from maple.deploy.serve.server import serve_model
from maple.deploy.serve.options import ServeOptions
serve_model(Path({str(run_folder)!r}), ServeOptions(port=0), {{"false_alarm": 0.2}})
"""
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        port = int(re.search(r":(\d+)/", process.stderr.readline())[1])
        answer = talk(port, http_bytes("/v1/model", method="GET"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0 and process.stderr.read() == ""
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stderr.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert json.loads(body)["decision"]["false_alarm"] == 0.2
    assert b"server:" not in head.lower()


def test_without_torch_the_service_loads():
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "lightning_fabric", "matplotlib"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import maple.deploy.serve.server
print("loaded")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "loaded\n", done.stderr


# --- the image of a container ----------------------------------------------------------------------------------------


in_repository = pytest.mark.skipif(
    not (ROOT / "Dockerfile").exists(), reason="containers are not part of a source distribution"
)


@in_repository
def test_the_dockerfile_names_what_exists():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    named = [word for step, rest in steps if step == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert named and all((ROOT / name).exists() for name in named)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (wanted,) = re.findall(r"\.\[([\w,]+)\]", text)
    assert set(wanted.split(",")) <= set(extras) and not any("torch" in name for name in wanted.split(","))
    assert not any("torch" in package for name in wanted.split(",") for package in extras[name])
    users = [rest for step, rest in steps if step == "USER"]
    assert users and users[-1].split(":")[0] not in ("root", "0")
    assert any(step == "HEALTHCHECK" for step, _ in steps)


@in_repository
def test_the_compose_file_is_strict_and_its_files_exist():
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert set(services) == {"maple", "prometheus"}
    for service in services.values():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    files = [volume.split(":")[0] for volume in services["prometheus"]["volumes"] if volume.startswith("./")]
    assert files and all((ROOT / name).exists() for name in files)
    jobs = yaml.safe_load((ROOT / "deploy" / "prometheus.yml").read_text())["scrape_configs"]
    assert jobs[0]["static_configs"][0]["targets"] == ["maple:8000"]
