"""Processes that decode: what one image does to its process concerns no other image."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from image_files import encode, endless_jpeg, noise
from maple.data.decode import Decoding
from maple.data.decoders import DecoderKilled, DecoderPool, decode_image, decode_kept

# --- the pool of processes --------------------------------------------------------------------------------------------


def test_a_process_decodes_as_this_one_does(rng):
    pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = encode(Image.fromarray(pixels))
    with DecoderPool(Decoding(8, "pad", max_pixels=64), n=1) as pool:
        np.testing.assert_array_equal(pool.decode([image]).pixels, [pixels])
        batch = pool.decode([encode(Image.new("RGB", (9, 8))), b"", image, b"not an image"])
        assert [(failure.row, failure.too_large) for failure in batch.failures] == [(0, True), (1, False), (3, False)]
        np.testing.assert_array_equal(batch.pixels, [pixels])


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_an_image_that_hangs_fails_and_the_next_gets_another_process(started):
    image = encode(Image.new("RGB", (8, 8)))
    with DecoderPool(Decoding(8, seconds=0.5), n=1) as pool:
        (failure,) = pool.decode([endless_jpeg()]).failures
        assert "0.5 s" in failure.reason
        assert len(pool.decode([image]).pixels) == 1
    assert len(started) == 2 and all(process.poll() is not None for process in started)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_a_process_that_is_killed_says_nothing_about_the_image(started):
    image = encode(Image.new("RGB", (8, 8)))
    with DecoderPool(Decoding(8), n=1) as pool:
        os.kill(started[-1].pid, signal.SIGKILL)
        with pytest.raises(DecoderKilled, match="SIGKILL"):
            pool.decode([bytes(2**20)])
        assert len(pool.decode([image]).pixels) == 1
    assert len(started) == 2 and all(process.poll() is not None for process in started)


GREEDY = """
import maple.data.decode

def to_rgb(image, convert=maple.data.decode.to_rgb):
    if image.size == (7, 7):
        bytearray(2**40)
    return convert(image)

maple.data.decode.to_rgb = to_rgb
"""


@pytest.mark.skipif(sys.platform != "linux", reason="has no limit of address space")
def test_an_image_that_takes_too_much_memory_fails_alone(tmp_path, monkeypatch, started):
    (tmp_path / "sitecustomize.py").write_text(GREEDY)
    monkeypatch.syspath_prepend(tmp_path)
    image, greedy = encode(Image.new("RGB", (8, 8))), encode(Image.new("RGB", (7, 7)))
    with DecoderPool(Decoding(8), n=1) as pool:
        batch = pool.decode([image, greedy, image])
    assert [failure.row for failure in batch.failures] == [1] and "memory" in batch.failures[0].reason
    assert len(batch.pixels) == 2 and len(started) == 1


def test_where_one_process_cannot_be_started_none_is_left(monkeypatch):
    popen, started = subprocess.Popen, []

    def start(*arguments, **options):
        if started:
            raise OSError(11, "no more processes")
        started.append(popen(*arguments, **options))
        return started[0]

    monkeypatch.setattr("maple.data.decoders.subprocess.Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        DecoderPool(Decoding(8), n=2)
    assert started[0].returncode is not None


# --- the kept process -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")
def test_a_forked_child_has_a_process_of_its_own(rng):
    image = encode(noise(rng))
    expected = decode_image(image, 8)
    child = os.fork()
    if child == 0:
        os._exit(0 if (decode_image(image, 8) == expected).all() else 1)
    for _ in range(20):  # at the same time, through the pipes that both have
        np.testing.assert_array_equal(decode_image(image, 8), expected)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_only_accepted_formats_are_decoded(rng):
    how = Decoding(8, formats=("PNG", "JPEG"))
    batch = decode_kept([encode(noise(rng), kind) for kind in ("PNG", "GIF", "JPEG")], how)
    assert [failure.row for failure in batch.failures] == [1]


@pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")
def test_a_decoder_can_neither_write_nor_open_many_files(tmp_path):
    code = """
import sys
from maple.data._decoder import _obey_limits
_obey_limits()
for n, mode in ((1, "wb"), (100, "rb")):
    try:
        kept = [open(sys.argv[1], mode, 0) for _ in range(n)]
        kept[0].write(b"x")
    except OSError as error:
        print(error.strerror)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large", "Too many open files"]
