"""Predictions of a Ray Dataset: one row per row, in or out of ``maple predict``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clusters_of_ray import write_images
from maple.deploy.ray import Scorer, score
from maple.deploy.ray.model import own_threads
from maple.errors import UsageError
from maple.runs.predicting.predict import predict_images
from maple.runs.requests import PredictRequest
from maple.types import PREDICTION_COLUMNS


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("archive") / "images", 24)


@pytest.fixture(scope="module")
def expected(run, images, tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("local") / "p.parquet"
    predict_images(PredictRequest(run, [str(images)], str(out), batch_size=24, workers=0))
    return {row["file"]: row for row in pq.read_table(out).to_pylist()}


def test_a_dataset_gets_the_columns_of_predict_and_loses_no_row(nodes, run, images, expected):
    import ray

    found = ray.data.read_binary_files(str(images), include_paths=True, override_num_blocks=2)
    rows = score(found.add_column("slide", lambda frame: 7), run, workers=1, batch_size=16).take_all()
    assert len(rows) == 24 and set(rows[0]) == {*PREDICTION_COLUMNS, "slide", "skipped"}
    for row in rows:
        assert row["slide"] == 7
        if row["file"].endswith("0005.png"):
            assert "not an image" in row["skipped"] and row["class"] is None and row["is_ood"] is None
            continue
        known = expected[row["file"]]
        assert row["skipped"] is None and row["class"] == known["class"] and row["is_ood"] == known["is_ood"]
        assert row["score"] == pytest.approx(known["score"], rel=1e-5)


def test_a_scorer_takes_bytes_records_and_pixels(run, images, expected, predictor):
    """In a process without Ray: what actors call."""
    scorer = Scorer(run, all_probabilities=True, coverage=0.9)
    paths = sorted(images.glob("*.png"))
    encoded = np.array([path.read_bytes() for path in paths], dtype=object)
    names = np.array([str(path) for path in paths])
    plain = scorer({"path": names, "bytes": encoded})
    records = scorer({"file": names, "image": np.array([{"bytes": data} for data in encoded], dtype=object)})
    assert plain.equals(records) and plain.schema.field("class").type == pa.string()
    known = [expected.get(name) for name in names]
    assert plain["class"].to_pylist() == [row and row["class"] for row in known]
    assert {"prediction_set", "p_a", "p_d"} <= set(plain.column_names)
    grey = np.full((2, 30, 20), 90, np.uint8)  # squared and resized as files are
    pixels = scorer({"image": grey})
    assert pixels["skipped"].to_pylist() == [None, None] and pixels["class"].null_count == 0
    nothing = scorer({"image": np.array([None, b""], dtype=object)})
    assert nothing["skipped"].null_count == 0 and nothing["class"].to_pylist() == [None, None]


def test_a_dataset_without_images_is_refused(run):
    with pytest.raises(UsageError, match=r"no column bytes.*text"):
        Scorer(run)({"text": np.array(["a"])})


def count_threads() -> tuple[int | None, set[int]]:
    """The threads of a worker, and those of BLAS, of which there were four."""
    from threadpoolctl import threadpool_info, threadpool_limits

    threadpool_limits(4, user_api="blas")
    n = own_threads()
    return n, {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_a_worker_computes_with_one_thread_per_processor(nodes):
    """Two workers on two processors, each with a thread on both, wait for each other."""
    import ray

    class Counter:
        def count(self, call):
            return call()

    actor = ray.remote(num_cpus=1)(Counter).remote()
    assert ray.get(actor.count.remote(count_threads)) == (1, {1})
    ray.kill(actor)
    assert own_threads() is None  # the driver keeps all
