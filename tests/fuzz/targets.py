"""What reads data from outside: one function per parser, which takes a file and may end with a ``MapleError`` alone."""

from __future__ import annotations

import asyncio
import shutil
import zipfile
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

from maple.data.catalogue.archive import Archive
from maple.data.decode import Decoding
from maple.data.decoders import decode_kept
from maple.data.headers import image_suffix, read_header
from maple.data.sources import open_images, open_source
from maple.data.stream import decode_stream
from maple.decisions.labels import read_labels
from maple.deploy.serve.options import ServeOptions
from maple.deploy.serve.uploads import read_uploads
from maple.errors import MapleError
from maple.networks.weights import read_state
from maple.options import read_toml
from maple.prediction.onnx import OnnxPredictor, read_metadata
from maple.prediction.store import load_predictor
from maple.reporting.predictions import read_predictions
from maple.reporting.record import read_run
from maple.runs.folder import RunFolder
from maple.runs.plugins import load_plugin_file
from maple.training.resume import Checkpoint

CORPUS = Path(__file__).with_name("corpus")
RUN = Path(__file__).parents[1] / "samples" / "run_format2" / "maple.zip"
Target = Callable[[Path], None]
TARGETS: dict[str, Target] = {}
ENDED = "its decoder ended with"  # a crash of the decoder, which no image may cause


def target(function: Target) -> Target:
    """A parser; its inputs are in the folder of its name in the corpus."""
    TARGETS[function.__name__] = function
    return function


@target
def images(path: Path) -> None:
    data = path.read_bytes()
    read_header(data)
    image_suffix(data)
    for how in (Decoding(16, keys=True), Decoding(16, "crop", max_pixels=5000), Decoding(16, only_headers=True)):
        for failure in decode_kept([data], how).failures:
            if ENDED in failure.reason:
                raise AssertionError(failure.reason)


@target
def tables(path: Path) -> None:
    for labelled in (True, False):
        open_images(str(path), size=8, labelled=labelled)
    source = open_source([str(path)], size=8)
    for _ in decode_stream(source, Decoding(8)):
        pass


@target
def lists(path: Path) -> None:
    """Lists of files and labels, whose files are not there or not images."""
    open_source([str(path)], size=8)


@target
def configs(path: Path) -> None:
    folder = path.parent / "run"
    folder.mkdir(exist_ok=True)
    shutil.copy(path, folder / "config.toml")
    RunFolder(folder).read_config().resolve()
    read_toml(path)


@target
def plugins(path: Path) -> None:
    load_plugin_file(path)


@target
def runs(path: Path) -> None:
    """A file of a run, among the others as they were written; in its name ``+`` stands before the name in a folder."""
    folder = path.parent / "whole"
    if not folder.is_dir():
        with zipfile.ZipFile(RUN) as packed:
            packed.extractall(folder)
    place = folder / path.name.replace("+", "/")
    own = place.read_bytes()
    try:
        shutil.copy(path, place)
        errors = [_error(partial(read, folder)) for read in _READERS]
    finally:
        place.write_bytes(own)
    for error in errors:
        if error is not None:
            raise error


_READERS: tuple[Callable[[Path], object], ...] = (
    load_predictor,
    read_run,
    lambda folder: RunFolder(folder).read_classes(),
    lambda folder: RunFolder(folder).read_config().resolve(),
)


def _error(read: Callable[[], object]) -> MapleError | None:
    try:
        read()
    except MapleError as error:
        return error
    return None


@target
def checkpoints(path: Path) -> None:
    Checkpoint.load(path)


@target
def weights(path: Path) -> None:
    read_state(path)


@target
def graphs(path: Path) -> None:
    if path.suffix == ".json":
        read_metadata(path.read_text(encoding="utf-8", errors="replace"), "graph.onnx")
    else:
        _ = OnnxPredictor.open(path, threads=1).exemplars


@target
def bodies(path: Path) -> None:
    """A request: its content type in the first line, then its body."""
    kind, _, body = path.read_bytes().partition(b"\n")

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    options = ServeOptions(max_images=4, max_bytes=2**20, max_pixels=1_000_000)
    asyncio.run(read_uploads({"content-type": kind.decode("latin-1")}, chunks(), options))


@target
def predictions(path: Path) -> None:
    read_labels(path) if path.name.endswith("labels.csv") else read_predictions(path)


@target
def archives(path: Path) -> None:
    with Archive(path) as archive:
        for name in archive.names:
            archive.read(name)


def read_corpus(name: str) -> dict[str, bytes]:
    """The files of a target's corpus."""
    found = {path.name: path.read_bytes() for path in sorted((CORPUS / name).glob("*")) if path.is_file()}
    if name == "runs":
        with zipfile.ZipFile(RUN) as packed:
            found |= {member.replace("/", "+"): packed.read(member) for member in packed.namelist()}
    return found
