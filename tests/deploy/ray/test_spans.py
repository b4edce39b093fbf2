"""Ranges of sources, as another process reads them."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from clusters_of_ray import write_images
from maple.data.decode import Decoding
from maple.data.decoders import DecoderKilled, decode_kept
from maple.data.image_set import ImageSet, read_pixels
from maple.data.sources import open_images, open_source
from maple.data.stream import decode_stream
from maple.deploy.ray.spans import Span, can_cut, decode_chunk
from maple.errors import DataError, RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_images(tmp_path_factory.mktemp("spans") / "images", 20)


@pytest.fixture(scope="module")
def table(folder) -> Path:
    path = folder.parent / "images.parquet"
    rows = {"image": [file.read_bytes() for file in sorted(folder.iterdir())], "label": [i % 2 for i in range(20)]}
    pq.write_table(pa.table(rows), path, row_group_size=6)
    return path


def sent(source, first: int, stop: int) -> Span:
    """A span after its journey to another process."""
    return pickle.loads(pickle.dumps(Span.cut(source, first, stop)))  # noqa: S301


@pytest.mark.parametrize("kind", ["folder", "table"])
def test_spans_are_the_source_in_pieces(kind, folder, table, monkeypatch):
    monkeypatch.chdir(folder.parent)  # names are relative, as the user gives them
    source = open_source([folder.name if kind == "folder" else table.name], size=8)
    whole = [*decode_stream(source, Decoding(8), chunk_size=4)]
    spans = [sent(source, first, first + 8) for first in (0, 8)] + [sent(source, 16, 20)]
    monkeypatch.chdir("/")
    parts = [chunk for span in spans for chunk in span.decode(Decoding(8), 4)]
    assert [part.files for part in parts] == [part.files for part in whole]
    assert [part.first for part in parts] == [part.first for part in whole]
    assert [part.skipped for part in parts] == [part.skipped for part in whole]
    for part, known in zip(parts, whole, strict=True):
        np.testing.assert_array_equal(part.pixels, known.pixels)


@pytest.mark.parametrize("kind", ["folder", "table", "memory"])
@pytest.mark.parametrize("rows", [[3, 1, 17, 0, 6], [*range(2, 12)]])
def test_spans_of_an_image_set_are_its_rows(kind, rows, folder, table):
    limit = 2**30 if kind == "memory" else 0
    images = open_images(table if kind == "table" else folder, size=8, labelled=False, memory_limit=limit)
    chosen = images.subset(rows)
    span = sent(chosen, 1, len(rows))
    found = span.decode(Decoding(8), 100)
    assert found[0].files == list(chosen.files[1:])
    (known,) = read_pixels(chosen, [np.arange(1, len(rows))])
    np.testing.assert_array_equal(found[0].pixels, known)
    assert len(pickle.dumps(Span.cut(chosen, 0, 1))) < 2500  # not the whole list of images


def test_a_source_that_has_shrunk_is_named(table):
    source = open_source([str(table)], size=8)
    span = sent(source, 10, 20)
    pq.write_table(pq.read_table(table).slice(0, 15), other := table.with_name("short.parquet"))
    span.source.where = other
    with pytest.raises(DataError, match="fewer images than when the command started"):
        span.decode(Decoding(8), 4)


def test_images_that_vanish_within_a_span_are_not_skipped(folder, monkeypatch):
    """Half of them were decoded before."""
    images, gone = Path(shutil.copytree(folder, folder.parent / "leaving")), folder.parent / "left"
    span = sent(open_source([str(images)], size=8), 0, 12)
    decoded = []

    def decode(chunk, how):
        if len(decoded) == 2:
            images.rename(gone)
        decoded.append(chunk)
        return decode_chunk(chunk, how)

    monkeypatch.setattr("maple.deploy.ray.spans.decode_chunk", decode)
    with pytest.raises(DataError, match=r"leaving.*\.png.*gone"):
        span.decode(Decoding(8), 4)


def test_an_image_that_goes_alone_is_skipped_also_in_a_span_of_its_own(folder):
    images = Path(shutil.copytree(folder, folder.parent / "losing"))
    sources = open_source([str(images)], size=8), open_images(images, labelled=False, size=8, memory_limit=0)
    spans = [sent(source, len(source) - 1, len(source)) for source in sources]
    sorted(images.iterdir())[-1].unlink()
    for span in spans:
        ((skipped,),) = [chunk.skipped for chunk in span.decode(Decoding(8), 4)]
        assert skipped.file == span.names[0]
    shutil.rmtree(images)
    for span in spans:
        with pytest.raises(DataError, match="gone"):
            span.decode(Decoding(8), 4)


def test_what_cannot_travel_is_known():
    assert can_cut(ImageSet.from_arrays(np.zeros((2, 8, 8), np.uint8)))
    assert not can_cut(object())


def test_an_image_at_which_decoders_are_killed_fails_alone_and_a_machine_without_decoders_altogether(
    folder, monkeypatch
):
    (chunk,) = Span.cut(open_source([str(folder)], size=8), 0, 8).chunks(8)

    def kill_at(*names: str) -> None:
        def decode(items, how):
            if any(Path(item).stem in names for item in items):
                raise DecoderKilled("a decoding process ended with SIGKILL")
            return decode_kept(items, how)

        monkeypatch.setattr("maple.deploy.ray.spans.decode_kept", decode)

    kill_at("0001", "0002")
    decoded = decode_chunk(chunk, Decoding(8))
    assert [Path(each.file).stem for each in decoded.skipped] == ["0001", "0002", "0005"]
    assert decoded.rows == [0, 3, 4, 6, 7] and len(decoded.pixels) == 5
    kill_at(*(f"{i:04}" for i in range(8)))
    with pytest.raises(RunError, match=r"0000\.png.*SIGKILL"):
        decode_chunk(chunk, Decoding(8))
