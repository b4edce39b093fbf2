"""What processes exchange is what one process has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from maple.data.image_set import ImageSet
from maple.errors import DataError
from maple.networks import create_backbone, embed
from maple.stats.moments import Moments
from maple.training.options import TrainOptions
from maple.training.processes import (
    agree_on_state,
    embed_shared,
    gather_rows,
    make_fabric,
    mean_over_ranks,
    share_of,
    share_work,
    sum_over_ranks,
)
from processes import in_processes

CPU = TrainOptions(accelerator="cpu", precision="32-true")
N, D, M = 1000, 24, 5


@pytest.mark.parametrize(("n", "world_size", "block"), [(10, 3, 2), (1, 4, 8), (0, 2, 3), (129, 2, 128), (7, 7, 1)])
def test_shares_are_blocks_that_cover_all_rows_once(n, world_size, block):
    shares = [share_of(n, rank, world_size, block) for rank in range(world_size)]
    assert sorted(np.concatenate(shares)) == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= block
    for share in shares:
        starts = share[share % block == 0]
        assert all(np.isin(np.arange(start, min(start + block, n)), share).all() for start in starts)


def points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((N, D)) * 3 + 50).astype(np.float32), rng.integers(0, M, N)


def images() -> ImageSet:
    rng = np.random.default_rng(1)
    return ImageSet.from_arrays(rng.integers(0, 256, (300, 16, 16, 3), np.uint8), rng.integers(0, 3, 300))


def fixed_backbone(seed: int) -> Any:
    torch.manual_seed(seed)
    return create_backbone("resnet9", 3)


def exchange() -> dict[str, Any]:
    fabric = make_fabric(CPU)
    rank, world_size = fabric.global_rank, fabric.world_size
    embeddings, cluster_ids = points()
    mine = share_of(N, rank, world_size)
    moments = Moments(M, D).update(embeddings[mine], cluster_ids[mine]).merge(lambda a: sum_over_ranks(fabric, a))
    backbone = fixed_backbone(rank)
    agree_on_state(fabric, backbone)
    found = embed_shared(fabric, backbone, images(), np.arange(299, 9, -1))
    few = embed_shared(fabric, backbone, images(), np.arange(5))  # of which only the first process has any
    try:
        share_work(fabric, fail_at_two, [1, 2, 3])
        error = ""
    except DataError as caught:
        error = str(caught)
    return {
        "rank": rank,
        "rows": gather_rows(fabric, embeddings[mine], N),
        "none": gather_rows(fabric, embeddings[:0], 0).shape,
        "moments": (moments.counts, moments.means, moments.within_covariance),
        "mean": mean_over_ranks(fabric, {"loss": float(rank)}),
        "outputs": (found.embeddings, found.logits, found.shallow, found.labels),
        "few": few[np.arange(5) % 2 == 0],
        "squares": share_work(fabric, square, [3, 1, 2, 5]),
        "error": error,
    }


def square(value: int) -> int:
    return value * value


def fail_at_two(value: int) -> int:
    if value == 2:
        raise DataError("two")
    return value


@pytest.fixture(scope="module", params=[2, 3])
def found(request) -> list[dict[str, Any]]:
    return in_processes(exchange, n=request.param)


def test_rows_and_work_come_back_in_order(found):
    for each in found:
        np.testing.assert_array_equal(each["rows"], points()[0])
        assert each["none"] == (0, D)
        assert each["squares"] == [9, 1, 4, 25]
        assert each["mean"] == {"loss": pytest.approx((len(found) - 1) / 2)}


def test_an_error_in_shared_work_is_raised_in_all(found):
    assert [each["error"] for each in found] == ["two"] * len(found)


def test_moments_are_those_of_one_process(found):
    alone = Moments(M, D).update(*points())
    for each in found:
        counts, means, covariance = each["moments"]
        np.testing.assert_array_equal(counts, alone.counts)
        np.testing.assert_allclose(means, alone.means, rtol=1e-10)
        np.testing.assert_allclose(covariance, alone.within_covariance, rtol=1e-10, atol=1e-10)


def test_embeddings_are_those_of_one_process_to_the_last_bit(found):
    alone = embed(fixed_backbone(0), images(), indices=np.arange(299, 9, -1))
    for each in found:
        for ours, theirs in zip(each["outputs"], (alone.embeddings, alone.logits, alone.shallow, alone.labels)):
            np.testing.assert_array_equal(ours, theirs)
        few = embed(fixed_backbone(0), images(), indices=np.arange(0, 5))[::2]
        np.testing.assert_array_equal(each["few"].embeddings, few.embeddings)
        assert each["few"].cluster_ids is None
