"""``maple export``: a run as one file, for ONNX Runtime or ``torch.export``, checked against the run before it is kept.

The graph is :class:`maple.deploy.graph.PredictorGraph`. A file appears under its name only after its graph, read
back from the
very bytes that will be written, has said the same as the run about real images (:func:`check_parity`).

ONNX graphs are made by torch's exporter of traces: that of ``torch.export`` yields more nodes for our networks, and
takes twenty times as long.
"""

from __future__ import annotations

import copy
import io
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.special import chdtr, chdtrc
from torch import Tensor

from maple import __version__
from maple.baselines.mc_dropout import SampledBackbone
from maple.data.image_set import ImageSet
from maple.data.splits import Splits
from maple.decisions.probability import raise_odds
from maple.deploy.graph import OUTPUTS, PredictorGraph
from maple.errors import MapleError, RunError, UsageError, naming_extras
from maple.files import RunFile, write_atomic
from maple.networks import OnnxBackbone, as_image_batch, embed, evaluating
from maple.prediction.onnx import INPUT, MAX_FILE_BYTES, METADATA, OnnxPredictor, write_metadata
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor
from maple.reporting.gallery import Gallery, read_gallery
from maple.runs.folder import RunFolder
from maple.runs.loading import open_like
from maple.runs.request import LEFT_OUT
from maple.runs.splits import left_out_images, reopen_splits
from maple.stats.metrics import auroc, expected_calibration_error
from maple.types import Prediction

OPSET = 18  # read by ONNX Runtime 1.14 and later
SUFFIXES = (".onnx", ".pt2")
EXEMPLARS_PER_CLUSTER = 4
CHECK_IMAGES = 256  # at most
NOISE_IMAGES = 16  # which lie far out
CHECK_BATCH = 64
MEASURE_IMAGES = 2000  # of each set, at most, to see what quantisation changes
HEAD = "/description/"  # of the names of nodes that quantisation leaves alone
METADATA_FILE = "maple.json"  # inside a .pt2 file

# What may differ between the graph and the run, which round differently; for ties, see _differences.
TOLERANCES = {
    "squared_distance": 1e-4,  # relative
    "probabilities": 1e-4,
    "typicality": 1e-6,  # from SciPy's, at the graph's own squared distance
    "uncertainty": 1e-6,
    "score": 5e-3,  # relative: surprises may be steep
    "position": 1e-3,  # relative
    "p_value": 1e-9,  # at the graph's own score
    "class_id": 2e-4,  # of probability, by which another class is said
    "cluster": 2e-4,  # of squared distance, relative, by which another cluster is said
    "md_class_id": 0.0,
    "softmax_class_id": 2e-4,
    "is_ood": 0.0,  # images decided otherwise, whose score is not within DECISION_BAND of the threshold
    "batch": 1e-4,  # squared distance, relative, of one image alone
}
DECISION_BAND = 1e-4  # relative

Run = Callable[[np.ndarray], dict[str, np.ndarray]]  # images (N, S, S, 3) uint8 to outputs by name
BeforeAfter = tuple[float, float]


@dataclass(frozen=True)
class Change:
    """What quantisation changed, before and after."""

    same_class: float  # share of the images of the check
    accuracy: BeforeAfter | None = None  # of test images
    ece: BeforeAfter | None = None
    flagged: BeforeAfter | None = None  # share of the test images that are called out-of-distribution
    auroc: Mapping[str, BeforeAfter] | None = None  # of the score, by name of the unknown images

    def describe(self) -> str:
        """What people should know before they use the file."""
        lines = [f"quantised: {100 * self.same_class:.1f} % of the images of the check keep their class"]
        named = {"accuracy": self.accuracy, "ECE": self.ece, "share of test images flagged": self.flagged}
        named |= {f"AUROC {name}": pair for name, pair in (self.auroc or {}).items()}
        known = [f"{name} {pair[0]:.4f} -> {pair[1]:.4f}" for name, pair in named.items() if pair is not None]
        lines.append(", ".join(known) or "no test images: what it changes of accuracy, ECE and AUROC is not known")
        if known and not self.auroc:
            lines.append("no unknown images: what it changes of AUROC is not known; name some with --ood NAME=SOURCE")
        lines.append("thresholds are those of the network before: their promise holds no longer to the letter")
        return "\n".join(lines)


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how well it agrees with the run."""

    path: Path
    n_bytes: int
    input: str  # type and shape of the images
    n_nodes: int
    n_images: int  # of the check
    differences: Mapping[str, float]  # largest, by output: see TOLERANCES
    n_exemplars: int  # training images in the file
    change: Change | None = None  # by quantisation

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "path": str(self.path)}

    def describe(self) -> str:
        """Some sentences."""
        found, agrees = self.differences, "agrees" if self.change is None else "before quantisation it agreed"
        lines = [
            f"wrote '{self.path}': {self.n_bytes / 1e6:.1f} MB, {self.n_nodes} nodes, images {self.input}",
            f"{agrees} with the run on {self.n_images} images, {NOISE_IMAGES} of them noise: "
            f"squared distances to {found['squared_distance']:.0e}, "
            f"probabilities to {found['probabilities']:.0e}, chi-square tail to {found['typicality']:.0e}; "
            "classes and decisions are equal but for ties",
        ]
        if self.n_exemplars:
            lines.append(f"{self.n_exemplars} training images travel with the file: --no-exemplars leaves them out")
        return "\n".join([*lines, *([] if self.change is None else [self.change.describe()])])


# ------------------------------------------------------------------------------------------------- what is written


def export_onnx(
    predictor: Predictor,
    path: str | Path,
    *,
    preprocess: bool = False,
    exemplars: Mapping[int, np.ndarray] | None = None,
    check: np.ndarray | None = None,
    quantise: bool = False,
    test: ImageSet | None = None,
    ood: Mapping[str, ImageSet] | None = None,
    opset: int = OPSET,
) -> ExportReport:
    """Write network, Gaussians and decision as one ONNX graph, for any number of images.

    Its input ``images`` is (N, 3, S, S) float32 in [0, 1], or with ``preprocess`` (N, S, S, 3) uint8; its outputs are
    those of :data:`maple.deploy.graph.OUTPUTS`. ``exemplars`` are images (n, s, s, 3) uint8 by cluster that travel
    with the
    file, ``check`` images (N, S, S, 3) uint8 on which graph and predictor must agree (random ones if there are none):
    where they do not, nothing is written.

    ``quantise`` stores the weights of the network in 8 bits and computes with them, after the check; what that changes
    is measured on labelled ``test`` images and unknown ``ood`` images, at most 2,000 of each.
    """
    check = _as_check(check, predictor.size)
    graph = _make_graph(predictor, preprocess)
    model = _trace(graph, predictor, opset)
    tell = partial(write_metadata, predictor, preprocess=preprocess, exemplars=exemplars)
    content = _with_metadata(model, tell())
    exact = OnnxPredictor.open(content)
    differences = check_parity(predictor, exact.run, check)
    change = None
    if quantise:
        model = _quantise(content)
        content = _with_metadata(model, tell(quantised=True))
        change = _measure(exact, OnnxPredictor.open(content), check, test, ood or {})
    write_atomic(Path(path), content)
    return ExportReport(
        path=Path(path),
        n_bytes=len(content),
        input=_describe_input(predictor, preprocess),
        n_nodes=len(model.graph.node),
        n_images=len(check),
        differences=differences,
        n_exemplars=sum(map(len, (exemplars or {}).values())),
        change=change,
    )


def export_torch(
    predictor: Predictor,
    path: str | Path,
    *,
    preprocess: bool = False,
    exemplars: Mapping[int, np.ndarray] | None = None,
    check: np.ndarray | None = None,
) -> ExportReport:
    """Write the same graph by ``torch.export``, with its metadata as the extra file ``maple.json`` inside.

    ``torch.export.load(path).module()(images)`` then gives the outputs, in their order.
    """
    check = _as_check(check, predictor.size)
    graph = _make_graph(predictor, preprocess)
    n = torch.export.Dim("n", min=1, max=2**16)
    with _tracing(graph, predictor.network):
        program = torch.export.export(graph, (_example(predictor.size, preprocess),), dynamic_shapes=({0: n},))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # which tells where on this machine the code is
        metadata = write_metadata(predictor, preprocess=preprocess, exemplars=exemplars)
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={METADATA_FILE: metadata})
    content = buffer.getvalue()
    module = torch.export.load(io.BytesIO(content)).module()

    def run(pixels: np.ndarray) -> dict[str, np.ndarray]:
        images = torch.from_numpy(pixels) if preprocess else as_image_batch(pixels)
        with torch.no_grad():
            return {name: output.numpy() for name, output in zip(OUTPUTS, module(images), strict=True)}

    differences = check_parity(predictor, run, check)
    write_atomic(Path(path), content)
    return ExportReport(
        path=Path(path),
        n_bytes=len(content),
        input=_describe_input(predictor, preprocess),
        n_nodes=sum(node.op == "call_function" for node in program.graph.nodes),
        n_images=len(check),
        differences=differences,
        n_exemplars=sum(map(len, (exemplars or {}).values())),
    )


def _describe_input(predictor: Predictor, preprocess: bool) -> str:
    size = predictor.size
    return f"(N, {size}, {size}, 3) uint8" if preprocess else f"(N, 3, {size}, {size}) float32 in [0, 1]"


def _make_graph(predictor: Predictor, preprocess: bool) -> PredictorGraph:
    """The graph on the CPU, unless its network cannot become one."""
    backbone = predictor.backbone
    if isinstance(backbone, SampledBackbone):
        raise UsageError(
            f"an MC-Dropout network takes {backbone.n_samples + 1} passes, with masks that are drawn on the way, and "
            "is no graph: predict with the run itself, or export a run of another recipe"
        )
    if isinstance(backbone, OnnxBackbone):
        raise UsageError(
            f"the network of the run is an ONNX file itself ('{backbone.name}'), into which torch cannot see: predict "
            "with the run itself, or fit the PyTorch network that the file was made from"
        )
    if any(isinstance(layer, torch.jit.ScriptModule) for layer in backbone.modules()):
        raise UsageError(
            f"the network of the run is a TorchScript file ('{backbone.name}'), which cannot be traced again: predict "
            "with the run itself, or fit the PyTorch network that the file was made from"
        )
    graph = PredictorGraph(predictor, preprocess)
    if backbone.mean.device.type != "cpu":
        graph = copy.deepcopy(graph).cpu()
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())
    if n_bytes > MAX_FILE_BYTES:
        raise UsageError(
            f"the network takes {n_bytes / 1e9:.1f} GB, and a file of ONNX at most 2: predict with the run itself"
        )
    return graph


@contextmanager
def _tracing(graph: PredictorGraph, network: str) -> Iterator[None]:
    """Evaluation mode, without gradients and without the remarks of torch; what it cannot trace is an error of ours."""
    try:
        with evaluating(graph), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MapleError:
        raise
    except Exception as error:  # of any part of torch, or of the network
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"torch cannot turn the network '{network}' into a graph ({reason}): predict with the run itself"
        ) from error


def _example(size: int, preprocess: bool) -> Tensor:
    pixels = _noise(2, size)
    return torch.from_numpy(pixels) if preprocess else as_image_batch(pixels)


def _trace(graph: PredictorGraph, predictor: Predictor, opset: int) -> Any:
    """The ONNX model of a graph, for any number of images."""
    onnx = _import_onnx()
    buffer = io.BytesIO()
    with _tracing(graph, predictor.network):
        torch.onnx.export(
            graph,
            (_example(predictor.size, graph.preprocess),),
            buffer,  # type: ignore[arg-type]  # which this exporter takes
            dynamo=False,
            input_names=[INPUT],
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "n"} for name in (INPUT, *OUTPUTS)},
            opset_version=opset,
        )
    model = onnx.load_from_string(buffer.getvalue())
    for node in model.graph.node:
        node.ClearField("doc_string")  # which tells where on this machine the code is
    drop_idle_abs(model.graph)
    return model


def drop_idle_abs(graph: Any) -> None:
    """Leave out absolute values of what is never negative, such as what a ReLU gives to the shallow layer.

    ONNX Runtime then takes means over pixels in the layout of its convolutions, and copies nothing into another one.
    """
    made_by = {name: node for node in graph.node for name in node.output}

    def never_negative(name: str) -> bool:
        node = made_by.get(name)
        if node is None or node.op_type == "Relu":
            return node is not None
        return node.op_type in ("Add", "Cast", "MaxPool") and all(map(never_negative, node.input))

    idle = [node for node in graph.node if node.op_type == "Abs" and never_negative(node.input[0])]
    same = {node.output[0]: node.input[0] for node in idle}
    for node in graph.node:
        node.input[:] = [same.get(name, name) for name in node.input]
    for node in idle:
        graph.node.remove(node)


def _with_metadata(model: Any, metadata: str) -> bytes:
    """The bytes of a model with our metadata alone."""
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA, value=metadata)
    model.producer_name, model.producer_version = "maple", __version__
    return model.SerializeToString()


def _import_onnx() -> ModuleType:
    with naming_extras():
        import onnx

    return onnx


# ---------------------------------------------------------------------------------------------------------- parity


def check_parity(predictor: Predictor, run: Run, pixels: np.ndarray) -> dict[str, float]:
    """The largest difference of each output between a graph and the predictor that it was made from.

    :class:`RunError` where one exceeds its tolerance. ``pixels`` are images (N, S, S, 3) uint8.
    """
    batches = [run(pixels[start : start + CHECK_BATCH]) for start in range(0, len(pixels), CHECK_BATCH)]
    said = {name: np.concatenate([batch[name] for batch in batches]) for name in OUTPUTS}
    alone = float(run(pixels[:1])["squared_distance"][0])
    together = float(said["squared_distance"][0])
    found = _differences(predictor, said, pixels) | {"batch": abs(alone - together) / max(together, 1.0)}
    for name, difference in found.items():
        if not difference <= TOLERANCES[name]:  # NaN is not
            raise RunError(
                f"the exported graph and the run differ in '{name}' by {difference:.2g}, and {TOLERANCES[name]:g} is "
                f"allowed ({len(pixels)} images): no file was written; predict with the run itself, or fit it with "
                "fewer components (--explained-variance 0.9), so that less depends on rounding"
            )
    return found


def _differences(predictor: Predictor, said: Mapping[str, np.ndarray], pixels: np.ndarray) -> dict[str, float]:
    """What :func:`check_parity` compares with ``TOLERANCES``.

    Tail, p-value and decision are compared at the graph's own squared distance and score, since they may be steep
    there, probabilities with the graph's own class as the first one. Where two classes or clusters are all but equally
    good, either may be said: what counts is by how much the one that was said is the worse one.
    """
    found = predictor.detector.describe(embed(predictor.backbone, pixels, cluster_to_class=predictor.cluster_to_class))
    expected = predictor.predict_described(found)
    rows, decision = np.arange(len(pixels)), predictor.decision
    own = said["score"], said["class_id"]
    degrees, squared = found.degrees_of_freedom, said["squared_distance"]
    before = predictor.probability.log_pooled(found)  # (N, C)
    probabilities = np.exp(raise_odds(before, predictor.probability.odds_exponent, said["class_id"]))
    p_values = decision.p_values(*own)
    shortfall = {
        "class_id": np.exp(before.max(axis=1)) - np.exp(before[rows, said["class_id"]]),
        "cluster": _relative(found.squared_distances[rows, said["cluster"]], expected.squared_distance),
    }
    if found.logits is None:
        shortfall["softmax_class_id"] = (said["softmax_class_id"] != said["md_class_id"]).astype(float)
    else:
        network = predictor.probability.network_probabilities(found)  # (N, C)
        shortfall["softmax_class_id"] = network.max(axis=1) - network[rows, said["softmax_class_id"]]
    differences = {
        "squared_distance": _relative(squared, expected.squared_distance),
        "probabilities": np.maximum(
            np.abs(said["probabilities"] - probabilities), np.abs(np.exp(said["log_probabilities"]) - probabilities)
        ),
        "typicality": np.abs(said["typicality"] - chdtrc(degrees, squared)),
        "uncertainty": np.abs(said["uncertainty"] - chdtr(degrees, squared)),
        "score": _relative(said["score"], expected.score),
        "position": _relative(said["position"], found.position),
        "p_value": np.where(np.isnan(p_values), ~np.isnan(said["p_value"]), np.abs(said["p_value"] - p_values)),
        "md_class_id": (said["md_class_id"] != found.cluster_to_class[said["cluster"]]).astype(float),
        "is_ood": (said["is_ood"] != decision.is_ood(*own)) | _decided_otherwise(predictor, said, expected),
        **shortfall,
    }
    return {name: float(np.max(each)) for name, each in differences.items()}


def _relative(said: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Differences relative to what is expected; absolute below 1."""
    return np.abs(said - expected) / np.maximum(np.abs(expected), 1.0)


def _decided_otherwise(predictor: Predictor, said: Mapping[str, np.ndarray], expected: Prediction) -> np.ndarray:
    """Images (N,) of the same class that are decided otherwise, though their score is not right at the threshold."""
    thresholds = predictor.decision.thresholds[expected.class_id]
    with np.errstate(invalid="ignore"):  # of infinite thresholds
        near = np.abs(expected.score - thresholds) <= DECISION_BAND * np.maximum(np.abs(thresholds), 1.0)
    near &= np.isfinite(thresholds)
    return (said["is_ood"] != expected.is_ood) & (said["class_id"] == expected.class_id) & ~near


def _as_check(check: np.ndarray | None, size: int) -> np.ndarray:
    """The images of the check, and a few that are noise."""
    noise = _noise(NOISE_IMAGES, size)
    return noise if check is None else np.concatenate([check[:CHECK_IMAGES], noise])


def _noise(n: int, size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (n, size, size, 3), dtype=np.uint8)


# ---------------------------------------------------------------------------------------------------- quantisation


def _quantise(content: bytes) -> Any:
    """The model with the weights of its network in 8 bits; Gaussians and decision stay as they are."""
    onnx = _import_onnx()
    with naming_extras():
        from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(content)
    head = [node.name for node in model.graph.node if node.name.startswith(HEAD)]
    keep = [*head, *(f"{name}_MatMul" for name in head)]  # what onnxruntime calls the product it makes of a Gemm
    with tempfile.TemporaryDirectory() as folder, _without_log():
        path = Path(folder) / "model.onnx"
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            nodes_to_exclude=keep,
            weight_type=QuantType.QUInt8,  # convolutions of the CPU take no other
        )
        return onnx.load(path)


@contextmanager
def _without_log() -> Iterator[None]:
    """Without the remarks of onnxruntime about float64, which is left alone on purpose."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _measure(
    exact: OnnxPredictor,
    quantised: OnnxPredictor,
    check: np.ndarray,
    test: ImageSet | None,
    ood: Mapping[str, ImageSet],
) -> Change:
    """What quantisation changes, on the same images."""
    both = exact, quantised
    before, after = (each.predict_pixels(check).class_id for each in both)
    same = float((before == after).mean())
    if test is None or not len(test):
        return Change(same)
    test = _some(test)
    known = [each(test) for each in both]
    unknown = {name: [each(_some(images)) for each in both] for name, images in ood.items()}
    right = [each.class_id == test.labels for each in known]
    return Change(
        same_class=same,
        accuracy=_pair([float(each.mean()) for each in right]),
        ece=_pair([expected_calibration_error(a.probability, b) for a, b in zip(known, right, strict=True)]),
        flagged=_pair([float(each.is_ood.mean()) for each in known]),
        auroc={
            name: _pair([auroc(a.score, b.score) for a, b in zip(known, said, strict=True)])
            for name, said in unknown.items()
        },
    )


def _pair(values: list[float]) -> BeforeAfter:
    before, after = values
    return before, after


def _some(images: ImageSet) -> ImageSet:
    """At most ``MEASURE_IMAGES`` images, evenly spread."""
    return images.subset(np.linspace(0, len(images) - 1, min(len(images), MEASURE_IMAGES)).astype(int))


# ------------------------------------------------------------------------------------------------------------ runs


def export_run(
    folder: Path,
    out: Path,
    *,
    preprocess: bool = False,
    exemplars: bool = True,
    quantise: bool = False,
    ood: Mapping[str, str] | None = None,
    data_root: Path | None = None,
    trust: bool = False,
) -> ExportReport:
    """Export the predictor of a run to ``out``, whose suffix says how; with images of its clusters, if wanted.

    The check uses the images in the gallery of the run, or those of its test split where there is no gallery. ``ood``
    are sources of unknown images by name, for what ``quantise`` changes.
    """
    if (suffix := out.suffix.lower()) not in SUFFIXES:
        raise UsageError(f"'{out}': end the name in {' or '.join(SUFFIXES)}")
    if quantise and suffix != ".onnx":
        raise UsageError("--quantise is for ONNX: end the name in .onnx, or leave it out")
    if ood and not quantise:
        raise UsageError("--ood is for what --quantise changes: add --quantise, or leave it out")
    predictor = load_predictor(folder, trust=trust)
    gallery = read_gallery(folder / RunFile.GALLERY)
    shown = {each.cluster: each.thumbnails[:EXEMPLARS_PER_CLUSTER] for each in gallery.clusters} if exemplars else {}
    check = _gallery_images(gallery, predictor.size)
    splits = None
    if quantise or not len(check):
        try:
            splits = reopen_splits(RunFolder(folder), predictor.size, data_root)
        except MapleError as error:
            if ood or not len(check):
                raise RunError(
                    f"the images of the run are needed, to check the graph or to measure what changes, and cannot be "
                    f"opened ({error}): say where they are with --data-root"
                ) from None
    if not len(check) and splits is not None:
        check = _first_images(splits)
    if suffix == ".pt2":
        return export_torch(predictor, out, preprocess=preprocess, exemplars=shown, check=check)
    unknown = {
        name: _still_unknown(predictor, left_out_images(splits))
        if source == LEFT_OUT
        else open_like(predictor, source, data_root)
        for name, source in (ood or {}).items()
    }
    if splits is not None and not ood and splits.left_out_images is not None:
        rest = _still_unknown(predictor, splits.left_out_images)
        unknown = {LEFT_OUT: rest} if len(rest) else {}
    test = None if splits is None else splits.test
    return export_onnx(
        predictor,
        out,
        preprocess=preprocess,
        exemplars=shown,
        check=check,
        quantise=quantise,
        test=test,
        ood=unknown,
    )


def _still_unknown(predictor: Predictor, images: ImageSet) -> ImageSet:
    """Images of the classes that were left out, but for those that ``maple update`` added."""
    unknown = np.array([name not in predictor.class_names for name in images.class_names], dtype=bool)
    return images.subset(unknown[images.labels])


def _first_images(splits: Splits) -> np.ndarray:
    images = splits.test if len(splits.test) else splits.train
    return np.stack([images.read(i) for i in range(min(len(images), CHECK_IMAGES))])


def _gallery_images(gallery: Gallery, size: int) -> np.ndarray:
    """Images (n, S, S, 3) of the gallery, as large as the network wants them; first the most striking."""
    examples = [image.thumbnail for each in gallery.examples for image in each.images]
    exemplars = [thumbnail for each in gallery.clusters for thumbnail in each.thumbnails]
    turns = [image for pair in zip(examples, exemplars) for image in pair]
    chosen = (turns + examples[len(exemplars) :] + exemplars[len(examples) :])[:CHECK_IMAGES]
    resized = [np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)) for image in chosen]
    return np.stack(resized) if resized else np.empty((0, size, size, 3), np.uint8)
