"""Metrics: what is counted, and the watch for drift."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maple.decisions.drift import StreamMonitor, kolmogorov_smirnov
from maple.deploy.serve.metrics import PENDING_IMAGES, STREAM_IMAGES, WINDOW_IMAGES, DriftWatch, score_buckets
from serving import Colours, as_json, colours, png, serve


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
