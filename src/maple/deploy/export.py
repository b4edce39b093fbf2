"""``maple export``: a run as one file for ONNX Runtime or ``torch.export``, checked against the run.

The graph is :class:`maple.deploy.graph.PredictorGraph`. A file is written only after its graph, read back from the very
bytes of the file, agrees with the run on real images (:func:`maple.deploy.parity.check_parity`).

ONNX graphs come from torch's tracing exporter; that of ``torch.export`` yields more nodes for our networks and
takes twenty times as long.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from maple.data.image_set import ImageSet
from maple.data.splits import Splits
from maple.deploy.graph import OUTPUTS
from maple.deploy.parity import CHECK_IMAGES, NOISE_IMAGES, check_images, check_levels, check_parity
from maple.deploy.quantise import Change, measure_change, quantise_model
from maple.deploy.trace import example_images, make_graph, trace_onnx, tracing, with_metadata
from maple.deploy.triton import model_path, write_config
from maple.errors import MapleError, RunError, UsageError
from maple.files import RunFile, write_atomic
from maple.networks import as_image_batch
from maple.prediction.onnx import OnnxPredictor, write_metadata
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.reporting.gallery import Gallery, read_gallery
from maple.runs.folder import RunFolder
from maple.runs.loading import open_like
from maple.runs.requests import ExportRequest
from maple.runs.setup.request import LEFT_OUT
from maple.runs.setup.splits import left_out_images, omit_classes, reopen_splits

OPSET = 18  # read by ONNX Runtime 1.14 and later
SUFFIXES = (".onnx", ".pt2")
EXEMPLARS_PER_CLUSTER = 4
METADATA_FILE = "maple.json"  # inside a .pt2 file
Exemplars = Mapping[int, np.ndarray] | None  # images (n, s, s, 3) uint8 by cluster


@dataclass(frozen=True)
class ExportReport:
    """The file, and how closely it agrees with the run."""

    path: Path
    n_bytes: int
    input: str  # type and shape of the images
    n_nodes: int
    n_images: int  # of the check
    differences: Mapping[str, float]  # largest, by output: see TOLERANCES
    n_exemplars: int  # training images in the file
    change: Change | None = None  # by quantisation

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {**asdict(self), "path": str(self.path)}

    def describe(self) -> str:
        """The report in a few lines."""
        found, agrees = self.differences, "agrees" if self.change is None else "before quantisation it agreed"
        lines = [
            f"wrote '{self.path}': {self.n_bytes / 1e6:.1f} MB, {self.n_nodes} nodes, images {self.input}",
            f"{agrees} with the run on {self.n_images} images, {NOISE_IMAGES} of them noise: "
            f"squared distances to {found['squared_distance']:.0e}, "
            f"probabilities to {found['probabilities']:.0e}, chi-square tail to {found['typicality']:.0e}; "
            "classes and decisions are equal except for ties",
        ]
        if self.n_exemplars:
            lines.append(f"{self.n_exemplars} training images are part of the file; leave them out with --no-exemplars")
        return "\n".join([*lines, *([] if self.change is None else [self.change.describe()])])


def export_onnx(
    predictor: Predictor,
    path: str | Path,
    *,
    preprocess: bool = False,
    exemplars: Exemplars = None,
    check: np.ndarray | None = None,
    quantise: bool = False,
    test: ImageSet | None = None,
    ood: Mapping[str, ImageSet] | None = None,
    opset: int = OPSET,
) -> ExportReport:
    """Write network, Gaussians and decision as one ONNX graph, for any number of images.

    Its input ``images`` is (N, 3, S, S) float32 in [0, 1], or with ``preprocess`` (N, S, S, 3) uint8; the optional
    ``false_alarm`` (1,) or (N,) float64 is the level of ``is_ood``, by default that of the predictor. Its outputs are
    those of :data:`maple.deploy.graph.OUTPUTS`. ``exemplars`` are images (n, s, s, 3) uint8 by cluster that become part
    of the file. Graph and predictor must agree on the images ``check`` (N, S, S, 3) uint8, or on random ones without
    them; otherwise nothing is written.

    ``quantise`` stores the weights of the network in 8 bits, after the check; the change is measured on labelled
    ``test`` images and unknown ``ood`` images, at most 2,000 of each.
    """
    check = check_images(check, predictor.size)
    graph = make_graph(predictor, preprocess)
    model = trace_onnx(graph, predictor, opset)
    tell = partial(write_metadata, predictor, preprocess=preprocess, exemplars=exemplars)
    content = with_metadata(model, tell())
    exact = OnnxPredictor.open(content)
    found: dict[str, Any] = {"n_images": len(check), "differences": check_parity(predictor, exact.run, check)}
    check_levels(predictor, exact.run, check)
    if quantise:
        model = quantise_model(content)
        content = with_metadata(model, tell(quantised=True))
        found["change"] = measure_change(exact, OnnxPredictor.open(content), check, test, ood or {})
    return _write(path, content, predictor, preprocess, exemplars, n_nodes=len(model.graph.node), **found)


def export_torch(
    predictor: Predictor,
    path: str | Path,
    *,
    preprocess: bool = False,
    exemplars: Exemplars = None,
    check: np.ndarray | None = None,
) -> ExportReport:
    """Write the same graph by ``torch.export``, with its metadata as the extra file ``maple.json`` inside.

    ``torch.export.load(path).module()(images)`` then gives the outputs, in their order.
    """
    check = check_images(check, predictor.size)
    graph = make_graph(predictor, preprocess)
    n = torch.export.Dim("n", min=1, max=2**16)
    with tracing(graph, predictor.network):
        program = torch.export.export(graph, (example_images(predictor.size, preprocess),), dynamic_shapes=({0: n},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # holds paths of this machine
        metadata = write_metadata(predictor, preprocess=preprocess, exemplars=exemplars)
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={METADATA_FILE: metadata})
    content = buffer.getvalue()
    module = torch.export.load(io.BytesIO(content)).module()

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        images = torch.from_numpy(pixels) if preprocess else as_image_batch(pixels)
        with torch.no_grad():
            return {name: output.numpy() for name, output in zip(OUTPUTS, module(images), strict=True)}

    n_nodes = sum(node.op == "call_function" for node in program.graph.nodes)
    differences = check_parity(predictor, run, check)
    return _write(
        path, content, predictor, preprocess, exemplars, n_nodes=n_nodes, n_images=len(check), differences=differences
    )


def _write(
    path: str | Path, content: bytes, predictor: Predictor, preprocess: bool, exemplars: Exemplars, **found: Any
) -> ExportReport:
    """Write the file, and report on it with what was ``found`` in the check."""
    write_atomic(Path(path), content)
    size = predictor.size
    return ExportReport(
        path=Path(path),
        n_bytes=len(content),
        input=f"(N, {size}, {size}, 3) uint8" if preprocess else f"(N, 3, {size}, {size}) float32 in [0, 1]",
        n_exemplars=sum(map(len, (exemplars or {}).values())),
        **found,
    )


def export_run(request: ExportRequest) -> ExportReport:
    """Export the predictor of a run, with exemplars of its clusters.

    The check uses the images in the gallery of the run, or those of its test split without a gallery.
    """
    out = _check_request(request)
    predictor = load_predictor(request.run, trust=request.trust)
    gallery = read_gallery(request.run / RunFile.GALLERY)
    shown = {each.cluster: each.thumbnails[:EXEMPLARS_PER_CLUSTER] for each in gallery.clusters}
    check = _gallery_images(gallery, predictor.size)
    splits = _reopen(request, predictor.size, needed=not len(check))
    if not len(check) and splits is not None:
        check = _first_images(splits)
    export: Callable[..., ExportReport] = partial(
        export_torch if out.suffix.lower() == ".pt2" else export_onnx,
        predictor,
        out,
        preprocess=request.preprocess,
        exemplars=shown if request.exemplars else {},
        check=check,
    )
    if request.quantise:
        unknown = _unknown_images(request, predictor, splits)
        export = partial(export, quantise=True, test=None if splits is None else splits.test, ood=unknown)
    report = export()
    if request.triton is not None:
        write_config(out)
    return report


def _check_request(request: ExportRequest) -> Path:
    """Refuse combinations that do not fit; the file to write."""
    if (request.out is None) == (request.triton is None):
        raise UsageError("name the file to write, such as model.onnx, or a model repository with --triton: one of them")
    out = request.out or model_path(request.triton or Path(), request.run)
    suffix = out.suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"'{out}': end the name in {' or '.join(SUFFIXES)}")
    if request.quantise and suffix != ".onnx":
        raise UsageError("--quantise works for ONNX only: end the name of --out in .onnx, or omit --quantise")
    if request.ood and not request.quantise:
        raise UsageError("--ood measures the change by --quantise: add --quantise, or omit --ood")
    return out


def _reopen(request: ExportRequest, size: int, needed: bool) -> Splits | None:
    """The images of the run, if the check or the measurement uses them; None if they are gone and not ``needed``."""
    if not (request.quantise or needed):
        return None
    try:
        return reopen_splits(RunFolder(request.run), size, request.data_root)
    except MapleError as error:
        if request.ood or needed:
            raise RunError(
                f"cannot open the images of the run, which the check needs ({error}): give their folder with "
                "--data-root"
            ) from None
        return None


def _unknown_images(request: ExportRequest, predictor: Predictor, splits: Splits | None) -> dict[str, ImageSet]:
    """The images of ``--ood`` by name; without it, those of the classes that the run left out."""
    if request.ood:
        return {
            name: left_out_images(splits, predictor.class_names)
            if source == LEFT_OUT
            else open_like(predictor, source, request.data_root)
            for name, source in request.ood.items()
        }
    if splits is None or splits.left_out_images is None:
        return {}
    rest = omit_classes(splits.left_out_images, predictor.class_names)
    return {LEFT_OUT: rest} if len(rest) else {}


def _first_images(splits: Splits) -> np.ndarray:
    images = splits.test if len(splits.test) else splits.train
    return np.stack([images.read(i) for i in range(min(len(images), CHECK_IMAGES))])


def _gallery_images(gallery: Gallery, size: int) -> np.ndarray:
    """Images (n, S, S, 3) of the gallery in the size of the network, examples and exemplars in turn."""
    examples = [image.thumbnail for each in gallery.examples for image in each.images]
    exemplars = [thumbnail for each in gallery.clusters for thumbnail in each.thumbnails]
    turns = (image for pair in zip_longest(examples, exemplars) for image in pair if image is not None)
    chosen = islice(turns, CHECK_IMAGES)
    resized = [np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)) for image in chosen]
    return np.stack(resized) if resized else np.empty((0, size, size, 3), np.uint8)
