"""How large blocks are."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters_of_ray import write_images
from maple.data.image_set import ImageSet
from maple.data.sources import open_images, open_source
from maple.deploy.ray.totals import BLOCKS_PER_WORKER, SHARE, count_read, describe_call, plan_step
from maple.detectors.learned import ClusterMoments, Scatters
from maple.stats.gaussians import fit_gaussians
from maple.stats.moments import Moments


@given(st.integers(1, 10**8), st.integers(100, 10**6), st.integers(10, 10**9), st.integers(1, 64))
def test_sums_are_a_small_share_of_what_is_read(n, bytes_per_image, bytes_of_sums, workers):
    step = plan_step(n, n * bytes_per_image, bytes_of_sums, 128, workers)
    n_blocks = -(-n // step)
    assert step % 128 == 0 and n_blocks <= BLOCKS_PER_WORKER * workers
    if n_blocks > workers:
        assert bytes_of_sums <= SHARE * step * bytes_per_image
    elif n > workers * 128:  # few images: a block for each worker
        assert n_blocks > workers // 2


def test_bytes_are_those_of_files(tmp_path):
    folder = write_images(tmp_path / "images", 30)
    paths = sorted(folder.iterdir())
    size = sum(path.stat().st_size for path in paths)
    assert count_read(open_source([str(folder)], size=8)) == size
    table = tmp_path / "images.parquet"
    pq.write_table(pa.table({"image": [path.read_bytes() for path in paths]}), table)
    images = open_images(table, size=8, labelled=False, memory_limit=0)
    assert count_read(images.subset(range(10))) == pytest.approx(table.stat().st_size / 3, rel=0.25)
    assert count_read(ImageSet.from_arrays(np.zeros((5, 8, 8), np.uint8))) == 5 * 8 * 8 * 3


def test_a_call_is_described_by_all_that_changes_its_sums(rng):
    moments = Moments(2, 4).update(rng.normal(size=(50, 4)), np.arange(50) % 2)
    around = fit_gaussians(moments)
    moved = replace(around, centroids=around.centroids + 1e-12)
    calls = [
        partial(ClusterMoments.start, exponents=(0.0, 1.0)),
        partial(ClusterMoments.start, exponents=(1.0,)),
        partial(Scatters.start, around={0.0: around}),
        partial(Scatters.start, around={1.0: around}),
        partial(Scatters.start, around={0.0: moved}),
    ]
    texts = [describe_call(call) for call in calls]
    assert len(set(texts)) == len(calls)
    assert describe_call(partial(Scatters.start, around={0.0: replace(around)})) == texts[2]
