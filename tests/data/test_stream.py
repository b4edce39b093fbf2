"""Images are read in order and in constant memory, wherever they lie and whoever decodes them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from image_files import encode, endless_jpeg, noise, png_of_size, write_folder, write_parquet
from maple.data.decode import IMAGE_SECONDS, Decoding
from maple.data.decoders import decode_image, decode_kept
from maple.data.sources import open_images, open_source
from maple.data.sources.folders import Paths
from maple.data.stream import Decoded, decode_stream, read_sizes
from maple.errors import DataError, RunError, UsageError
from maple.types import Skipped


@pytest.fixture
def folder(tmp_path: Path, rng: np.random.Generator) -> Path:
    """Twenty images in folders whose order is not that of the strings, two of which are broken, and things beside."""
    write_folder(tmp_path / "images", {"a": 6, "a-b": 4, "a.b": 4, "Z/deep": 4}, rng)
    noise(rng).save(tmp_path / "images" / "top.png")
    (tmp_path / "images" / "a" / "002.png").write_bytes(b"not an image")
    (tmp_path / "images" / "a" / "huge.png").write_bytes(png_of_size(30_000, 30_000))
    (tmp_path / "images" / ".hidden.png").write_bytes(b"")
    (tmp_path / "images" / "notes.txt").write_text("no image")
    (tmp_path / "images" / "ring").symlink_to(tmp_path / "images")
    (tmp_path / "images" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    return tmp_path / "images"


def read_all(sources: list, size: int = 8, seconds: float = IMAGE_SECONDS, **options) -> Decoded:
    """All chunks as one, once it is clear that none is out of order."""
    how = Decoding(size, seconds=seconds, keys=True)
    source = open_source(sources, size=size)
    chunks = list(decode_stream(source, how, **options))
    stops = [chunk.stop for chunk in chunks]
    assert [chunk.first for chunk in chunks] == [options.get("start", 0), *stops[:-1]]
    assert all(len(chunk.files) == len(chunk.pixels) for chunk in chunks)
    rows, files, keys = (
        [each for chunk in chunks for each in getattr(chunk, name)] for name in ("rows", "files", "keys")
    )
    assert len(rows) == len(files) == len(keys) and rows == sorted(rows)
    pixels = np.concatenate([chunk.pixels for chunk in chunks])
    skipped = [*source.skipped, *(item for chunk in chunks for item in chunk.skipped)]
    return Decoded(chunks[0].first, rows, files, pixels, keys, skipped)


def assert_same(found: Decoded, sources: list) -> None:
    """What ``open_images`` finds, by itself, image by image."""
    expected = open_images(sources, size=8, labelled=False)
    assert found.files == list(expected.files)
    assert found.skipped == list(expected.skipped)
    np.testing.assert_array_equal(found.pixels, [expected.read(i) for i in range(len(expected))])


@pytest.mark.parametrize("chunk_size", [1, 7, 100])
def test_folders_globs_and_files_in_their_order(folder, chunk_size):
    lists = [
        [str(folder)],
        [str(folder / "*" / "*.png")],
        [str(folder / "**" / "*.png")],
        [str(folder / "a" / "002.png"), str(folder / "top.png"), str(folder / "a-b"), str(folder / "top.png")],
    ]
    for sources in lists:
        assert_same(read_all(sources, chunk_size=chunk_size), sources)
    order = [path.removeprefix(f"{folder}{os.sep}") for path in read_all([str(folder)]).files]
    by_parts = sorted(order, key=lambda path: Path(path).parts)
    assert order == by_parts != sorted(order)


def test_relative_paths_stay_relative(folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = read_all(["."])
    assert_same(found, ["."])
    assert "top.png" in found.files and str(Path("a", "000.png")) in found.files


def test_arrays_and_built_in_sets(tmp_path, rng):
    np.savez(tmp_path / "images.npz", images=rng.integers(0, 256, (9, 8, 8), dtype=np.uint8))
    for source in (
        str(tmp_path / "images.npz"),
        "simulated-diatoms?n=30",
        "corrupted:simulated-diatoms?n=30?family=fog",
    ):
        assert_same(read_all([source], chunk_size=20), [source])


@pytest.mark.parametrize("row_group_size", [4, 1000])
def test_parquet_from_any_row_on(tmp_path, rng, row_group_size):
    images = [encode(noise(rng)) for _ in range(150)]
    images[3], images[77], images[130] = None, b"not an image", png_of_size(30_000, 30_000)
    named = [{"bytes": data, "path": f"{i}.png" if i % 3 else None} for i, data in enumerate(images)]
    pq.write_table(pa.table({"image": images, "label": [0] * 150}), tmp_path / "a.parquet", row_group_size)
    pq.write_table(pa.table({"x": range(150), "img": named}), tmp_path / "b.parquet", row_group_size)
    for name in ("a.parquet", "b.parquet"):
        source = [str(tmp_path / name)]
        whole = read_all(source, chunk_size=32)
        assert_same(whole, source)
        assert len(whole.skipped) == 3
        for start in (1, 4, 64, 100, 149):
            rest = read_all(source, chunk_size=32, start=start)
            before = start - sum(i < start for i in (3, 77, 130))
            assert rest.files == whole.files[before:]
            np.testing.assert_array_equal(rest.pixels, whole.pixels[before:])


def test_names_of_data_sets(root):
    found = read_all_from(root, "pets")
    assert found[0] == "pets/test#0" and len(found) == 12
    assert len(read_all_from(root, "fish")) == 11


def read_all_from(root: Path, name: str) -> list[str]:
    source = open_source([name], size=8, data_root=root)
    return [file for chunk in decode_stream(source, Decoding(8)) for file in chunk.files]


def test_sources_that_hold_no_images(tmp_path, rng):
    (tmp_path / "empty").mkdir()
    write_parquet(tmp_path / "labels.parquet", {"label": [1]})
    write_parquet(tmp_path / "numbers.parquet", {"image": [1.5]})
    write_parquet(tmp_path / "none.parquet", {"image": pa.array([], pa.binary())})
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    cases = [
        ("empty", DataError),
        ("*.gif", DataError),
        ("missing.png", UsageError),
        ("labels.parquet", DataError),
        ("numbers.parquet", DataError),
        ("none.parquet", DataError),
        ("broken.parquet", DataError),
    ]
    for name, error in cases:
        with pytest.raises(error, match=re.escape(name)):
            open_source([str(tmp_path / name)], size=8)
    with pytest.raises(UsageError, match=r"labels.parquet"):
        open_source([str(tmp_path / "labels.parquet"), str(tmp_path / "empty")], size=8)


def test_names_that_are_not_utf_8_can_be_read_and_written(tmp_path, rng):
    data = encode(noise(rng))
    path = os.fsencode(tmp_path) + b"/caf\xe9.png"
    try:
        Path(os.fsdecode(path)).write_bytes(data)
    except OSError:
        pytest.skip("the file system takes no such names")
    found = read_all([str(tmp_path)])
    assert found.files == [f"{tmp_path}/caf\\xe9.png"] and not found.skipped
    np.testing.assert_array_equal(found.pixels[0], decode_image(data, 8))


def test_digests_tell_when_images_changed(folder, rng):
    def digest(*sources: object) -> str:
        return open_source([str(source) for source in sources], size=8).digest()

    first = digest(folder)
    assert digest(folder) == first != digest(folder, folder)
    noise(rng, (9, 9)).save(folder / "top.png")
    second = digest(folder)
    (folder / "top.png").rename(folder / "tip.png")
    third = digest(folder)
    os.utime(folder / "tip.png", ns=(1, 1))
    assert len({first, second, third, digest(folder)}) == 4
    table = write_parquet(folder / "t.parquet", {"image": [encode(noise(rng))]})
    before = digest(table)
    write_parquet(table, {"image": [encode(noise(rng))] * 2})
    assert digest(table) != before
    assert digest("simulated-diatoms?n=5&seed=1") != digest("simulated-diatoms?n=5&seed=2")


def test_paths_are_packed():
    paths = ["a", "", "dir/ü.png", "caf\udce9"]
    packed = Paths(iter(paths))
    assert [packed[i] for i in range(len(packed))] == paths


# --- processes


@pytest.fixture
def many(tmp_path, rng) -> list[str]:
    """Forty images of different contents, of which every eleventh is broken."""
    for i in range(40):
        path = tmp_path / f"{i:02}.png"
        Image.fromarray(np.full((8, 8, 3), i, np.uint8)).save(path)
        if i % 11 == 10:
            path.write_bytes(b"not an image")
    return [str(tmp_path)]


def count_running(processes: list[subprocess.Popen]) -> int:
    return sum(process.poll() is None for process in processes)


def test_processes_change_nothing(many, started, tmp_path):
    table = {"image": [Path(file).read_bytes() for file in sorted(Path(many[0]).iterdir())]}
    table["image"][20] = None
    (tmp_path / "table").mkdir()
    for sources in (many, [str(write_parquet(tmp_path / "table" / "all.parquet", table))]):
        started.clear()
        alone = read_all(sources, chunk_size=4)
        assert not started
        helped = read_all(sources, chunk_size=4, workers=3)
        assert len(started) == 3 and not count_running(started)
        assert helped.files == alone.files and helped.skipped == alone.skipped
        np.testing.assert_array_equal(helped.pixels, alone.pixels)
        broken = [10, 21, 32] if sources == many else [10, 20, 21, 32]
        np.testing.assert_array_equal(alone.pixels[:, 0, 0, 0], np.delete(np.arange(40), broken))


def test_few_chunks_start_few_processes(many, started):
    for chunk_size, n_processes in ((10, 2), (20, 1), (40, 1)):
        started.clear()
        stream = decode_stream(open_source(many, size=8), Decoding(8), chunk_size=chunk_size, workers=3)
        next(stream)
        assert count_running(started) == len(started) == n_processes
        stream.close()
        assert not count_running(started)
    started.clear()
    assert not list(decode_stream(open_source(many, size=8), Decoding(8), start=40, workers=3)) and not started


def test_a_process_that_dies_is_replaced_and_no_image_is_lost(many, started):
    whole = read_all(many, chunk_size=4)
    stream = decode_stream(open_source(many, size=8), Decoding(8), chunk_size=4, workers=1)
    first = next(stream)
    (process,) = started
    os.kill(process.pid, signal.SIGKILL)
    assert [file for chunk in (first, *stream) for file in chunk.files] == whole.files
    assert len(started) == 2 and not count_running(started)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
@pytest.mark.parametrize("chunk_size", [4, 100])
def test_an_image_that_decodes_forever_is_skipped_and_the_others_are_not(many, started, chunk_size):
    expected = read_all(many)
    place = Path(many[0]) / "09.png"  # in the chunk of the first that is broken
    place.write_bytes(endless_jpeg())
    found = read_all(many, chunk_size=chunk_size, workers=2, seconds=1.5)
    assert found.skipped[0] == Skipped(
        str(place), "takes longer than 1.5 s to decode: make it smaller, or save it again"
    )
    assert found.skipped[1:] == expected.skipped
    assert found.files == [file for file in expected.files if file != str(place)]
    np.testing.assert_array_equal(found.pixels, np.delete(expected.pixels, 9, axis=0))
    assert not count_running(started)


ENDING = """
import os, resource, signal
import maple.data.decode

def decode_bytes(data, *how, decode=maple.data.decode.decode_bytes):
    if data.startswith(b"SIG"):
        os.kill(os.getpid(), signal.Signals[data.decode()])
    return decode(data, *how)

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
maple.data.decode.decode_bytes = decode_bytes
"""


@pytest.fixture
def ending(tmp_path_factory, monkeypatch) -> None:
    """An image that holds the name of a signal ends its process by it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(ENDING)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_an_image_that_brings_its_decoder_down_is_skipped_and_the_others_are_not(many, started, ending):
    expected = read_all(many)
    bad = {0: "SIGSEGV", 9: "SIGABRT", 11: "SIGBUS", 39: "SIGSEGV"}
    for i, name in bad.items():
        (Path(many[0]) / f"{i:02}.png").write_text(name)
    found = read_all(many, chunk_size=4, workers=2)
    reasons = {f"{i:02}.png": f"its decoder ended with {name}: save it again" for i, name in bad.items()}
    reasons |= {Path(item.file).name: item.reason for item in expected.skipped}
    assert [(Path(item.file).name, item.reason) for item in found.skipped] == sorted(reasons.items())
    np.testing.assert_array_equal(found.pixels[:, 0, 0, 0], np.delete(np.arange(40), [0, 9, 10, 11, 21, 32, 39]))
    assert not count_running(started)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
def test_a_process_that_others_end_says_nothing_about_an_image(many, started, ending):
    for first in ("SIGKILL", "SIGSEGV"):  # the second is found out when images are decoded one at a time
        (Path(many[0]) / "00.png").write_text(first)
        (Path(many[0]) / "01.png").write_text("SIGKILL")
        with pytest.raises(RunError, match=r"SIGKILL.*00\.png.*03\.png.*--workers") as caught:
            read_all(many, chunk_size=4, workers=2)
        assert "\n" not in str(caught.value) and not count_running(started)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
@pytest.mark.parametrize("inherited", ["ignored", "blocked"])
@pytest.mark.parametrize("ends_by", ["SIGALRM", "SIGPROF"])
def test_the_timers_end_a_process_whatever_it_inherits(many, ending, inherited, ends_by):
    place = Path(many[0]) / "00.png"
    place.write_text(ends_by)
    number = signal.Signals[ends_by]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {number} if inherited == "blocked" else ())
    handler = signal.signal(number, signal.SIG_IGN) if inherited == "ignored" else None
    try:
        found = read_all(many, chunk_size=4, workers=1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if inherited == "ignored":
            signal.signal(number, handler)
    assert found.skipped[0] == Skipped(
        str(place), "takes longer than 60 s to decode: make it smaller, or save it again"
    )


def test_processes_load_neither_torch_nor_pyarrow():
    code = "import sys, maple.data._decoder; print(*[m for m in ('torch', 'pyarrow', 'scipy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == ""


@pytest.mark.skipif(sys.platform == "win32", reason="has no such signal")
def test_without_workers_the_limits_hold_too(many, started):
    expected = read_all(many)
    place = Path(many[0]) / "09.png"
    place.write_bytes(endless_jpeg())
    found = read_all(many, chunk_size=100, seconds=1.0)
    assert found.skipped[0].file == str(place) and "1 s" in found.skipped[0].reason
    assert found.files == [file for file in expected.files if file != str(place)]
    assert len(started) == 2  # the kept one ended at the chunk, the next at the image alone


def test_headers_are_read_in_the_process_too(tmp_path, rng):
    noise(rng, (30, 20)).save(tmp_path / "wide.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    assert read_sizes(open_source([str(tmp_path)], size=8), 10) == [(30, 20)]
    slow = Decoding(8, seconds=0.5, only_headers=True)
    comment = b"P6\n#" + bytes(2**25) + b"\n8 8\n255\n"  # of which Pillow reads byte by byte
    batch = decode_kept([encode(noise(rng)), comment], slow)
    assert batch.dimensions == [(8, 8)]
    assert sys.platform == "win32" or "0.5 s" in batch.failures[0].reason
