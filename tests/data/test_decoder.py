"""The decoding process: what it decodes, its wire format, and its limits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from image_files import encode
from maple.data._decoder import (
    Batch,
    Failure,
    content_key,
    decode_items,
    receive_batch,
    receive_items,
    send_batch,
    send_items,
)
from maple.data.decode import Decoding
from maple.errors import DataError


def coloured(*colour: int) -> bytes:
    return encode(Image.new("RGB", (8, 8), colour))


def test_images_keep_their_order_and_failures_their_rows(tmp_path) -> None:
    (tmp_path / "red.png").write_bytes(coloured(255, 0, 0))
    array = np.full((8, 8, 3), 7, np.uint8)
    items = [b"broken", str(tmp_path / "red.png"), DataError("no bytes"), coloured(0, 0, 255), str(tmp_path), array]
    batch = decode_items(items, Decoding(8, keys=True))
    assert batch.pixels[:, 0, 0].tolist() == [[255, 0, 0], [0, 0, 255], [7, 7, 7]]
    assert [failure.row for failure in batch.failures] == [0, 2, 4] and batch.failures[1].reason == "no bytes"
    encoded = (tmp_path / "red.png").read_bytes()
    assert batch.keys == [content_key(encoded), content_key(items[3]), content_key(array)]
    assert decode_items(items, Decoding(8)).keys == []
    measured = decode_items([*items, encode(Image.new("RGB", (9, 5)))], Decoding(8, only_headers=True))
    assert measured.dimensions == [(8, 8), (8, 8), (8, 8), (9, 5)] and measured.pixels.shape == (0, 8, 8, 3)


def test_more_pixels_than_allowed_are_marked_as_too_many() -> None:
    wide = encode(Image.new("RGB", (9, 8)))
    (failure,) = decode_items([wide], Decoding(8, max_pixels=64)).failures
    assert failure.too_large and "9 x 8" in failure.reason
    assert not decode_items([wide], Decoding(8, max_pixels=72)).failures


def test_the_alarm_is_set_before_each_image_and_cancelled_after_it() -> None:
    alarms: list[float] = []
    decode_items([b"broken", coloured(0, 0, 0), DataError("none")], Decoding(8, seconds=5), alarms.append)
    assert alarms == [5, 0, 5, 0, 0]  # an image that is not there needs no time


@given(st.lists(st.one_of(st.text(), st.binary(), st.builds(DataError, st.text())), max_size=5))
def test_requests_arrive_as_they_were_sent(items) -> None:
    pipe = io.BytesIO()
    how = Decoding(8, "crop", max_pixels=9, formats=("PNG",))
    send_items(pipe, items, how)
    asked, received = receive_items(io.BytesIO(pipe.getvalue()))
    assert asked == how
    names = {DataError: str, str: os.path.abspath, bytes: bytes}
    assert [names[type(item)](item) for item in received] == [names[type(item)](item) for item in items]
    assert all(Path(item).is_absolute() for item in received if isinstance(item, str))


@given(n=st.integers(0, 4), failed=st.integers(0, 3), keyed=st.booleans())
def test_answers_arrive_as_they_were_sent(n: int, failed: int, keyed: bool) -> None:
    pixels = np.arange(n * 4 * 4 * 3, dtype=np.uint8).reshape(n, 4, 4, 3)
    keys = [content_key(bytes([i])) for i in range(n)] if keyed else []
    failures = [Failure(row, f"broken {row}", row == 1) for row in range(failed)]
    pipe = io.BytesIO()
    send_batch(pipe, Batch(pixels, keys, failures))
    received = receive_batch(io.BytesIO(pipe.getvalue()), n + failed, 4)
    np.testing.assert_array_equal(received.pixels, pixels)
    assert (received.keys, received.failures) == (keys, failures)


@pytest.mark.parametrize("kept", [0, 1, 20, 59])
def test_an_answer_that_is_cut_short_is_none(kept: int) -> None:
    pipe = io.BytesIO()
    send_batch(pipe, Batch(np.zeros((1, 4, 4, 3), np.uint8), [], []))
    assert len(pipe.getvalue()) > 59
    assert receive_batch(io.BytesIO(pipe.getvalue()[:kept]), 1, 4) is None
    assert receive_items(io.BytesIO(b"")) is None


def test_a_process_answers_until_its_input_ends() -> None:
    request = io.BytesIO()
    send_items(request, [coloured(1, 2, 3), b"broken"], Decoding(8))
    command = [sys.executable, "-c", "from maple.data._decoder import run; run()"]
    done = subprocess.run(command, input=request.getvalue() * 2, capture_output=True, check=True)
    answers = io.BytesIO(done.stdout)
    for _ in range(2):
        batch = receive_batch(answers, 2, 8)
        assert batch.pixels[0, 0, 0].tolist() == [1, 2, 3] and [failure.row for failure in batch.failures] == [1]
    assert answers.read() == b"" and done.stderr == b""
