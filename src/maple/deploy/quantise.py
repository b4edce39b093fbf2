"""8-bit weights for an exported graph, and what they change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.errors import naming_extras
from maple.prediction.onnx import OnnxPredictor
from maple.stats.metrics import auroc, calibration_floor, expected_calibration_error

MEASURE_IMAGES = 2000  # of each set, at most
LARGEST = 127  # of 8 bits with a sign
HEAD = "/description/"  # prefix of the nodes that stay in full precision

BeforeAfter = tuple[float, float]


@dataclass(frozen=True)
class Change:
    """Measures before and after quantisation."""

    same_class: float  # share of the images of the check
    accuracy: BeforeAfter | None = None  # of test images
    ece: BeforeAfter | None = None
    ece_floor: BeforeAfter | None = None  # of perfect probabilities, by chance
    flagged: BeforeAfter | None = None  # share of the test images that are flagged
    auroc: Mapping[str, BeforeAfter] | None = None  # of the score, by name of the unknown images

    def describe(self) -> str:
        """The change in a few lines."""
        lines = [f"quantised: {100 * self.same_class:.1f} % of the images of the check keep their class"]
        named = {"accuracy": self.accuracy, "ECE": self.ece, "share of test images flagged": self.flagged}
        named |= {f"AUROC {name}": pair for name, pair in (self.auroc or {}).items()}
        known = [f"{name} {_describe(pair)}" for name, pair in named.items() if pair is not None]
        if self.ece_floor is not None:
            known = [f"{each} (by chance {_describe(self.ece_floor)})" if "ECE" in each else each for each in known]
        lines.append(", ".join(known) or "no test images: the change of accuracy, ECE and AUROC is unknown")
        if known and not self.auroc:
            lines.append("no unknown images: the change of AUROC is unknown; add --ood NAME=SOURCE")
        lines.append("thresholds were calibrated before quantisation: their guarantee holds only approximately")
        return "\n".join(lines)


def quantise_model(content: bytes) -> Any:
    """The model with the weights of its network in 8 bits; Gaussians and decision stay in full precision.

    Only weights are rounded, each output channel to 255 steps; the runtime computes in float32. Rounding activations
    too would take their range from the whole batch, so that the answer for an image would depend on its neighbours.
    """
    with naming_extras():
        import onnx

    model = onnx.load_from_string(content)
    graph, axes = model.graph, _weight_axes(model.graph)
    kept, nodes = [], []
    for tensor in graph.initializer:
        axis = axes.get(tensor.name)
        if axis is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) < 2:
            kept.append(tensor)
            continue
        whole, scale = round_weights(onnx.numpy_helper.to_array(tensor), axis)
        names = f"{tensor.name}.int8", f"{tensor.name}.scale"
        kept += [onnx.numpy_helper.from_array(each, name) for each, name in zip((whole, scale), names, strict=True)]
        nodes.append(
            onnx.helper.make_node("DequantizeLinear", names, [tensor.name], f"/weights/{tensor.name}", axis=axis)
        )
    nodes += graph.node
    for field, values in ((graph.initializer, kept), (graph.node, nodes)):
        copies = [type(each).FromString(each.SerializeToString()) for each in values]
        del field[:]
        field.extend(copies)
    return model


def _weight_axes(graph: Any) -> dict[str, int]:
    """The axis of output channels of each tensor that layers of the network multiply by."""
    axes = {}
    for node in graph.node:
        if node.op_type in ("Conv", "Gemm", "MatMul") and not node.name.startswith(HEAD):
            turned = any(each.name == "transB" and each.i for each in node.attribute)
            axes[node.input[1]] = 0 if turned or node.op_type == "Conv" else 1
    return axes


def round_weights(weights: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights as int8, and the scale (channels,) float32 of each channel of ``axis`` that they are multiplied by.

    >>> whole, scale = round_weights(np.array([[1.0, -2.0], [0.5, 0.0]], np.float32), axis=0)
    >>> whole.tolist(), (whole[0] * scale[0]).tolist()
    ([[64, -127], [127, 0]], [1.0078740119934082, -2.0])
    """
    others = tuple(i for i in range(weights.ndim) if i != axis)
    largest = np.abs(weights).max(axis=others, keepdims=True)
    scale = np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)
    return np.rint(weights / scale).astype(np.int8), scale.reshape(-1)


def measure_change(
    exact: OnnxPredictor,
    quantised: OnnxPredictor,
    check: np.ndarray,
    test: ImageSet | None,
    ood: Mapping[str, ImageSet],
) -> Change:
    """Measures of both predictors on the same images."""
    both = exact, quantised
    before, after = (each.predict_pixels(check).class_id for each in both)
    same = float((before == after).mean())
    if test is None or not len(test):
        return Change(same)
    test = _sample(test)
    known = [each(test) for each in both]
    right = [each.class_id == test.labels for each in known]
    unknown = {name: [each(_sample(images)) for each in both] for name, images in ood.items()}
    ece = [expected_calibration_error(a.probability, b) for a, b in zip(known, right, strict=True)]
    return Change(
        same_class=same,
        accuracy=_pair(each.mean() for each in right),
        ece=_pair(ece),
        ece_floor=_pair(calibration_floor(each.probability) for each in known),
        flagged=_pair(each.is_ood.mean() for each in known),
        auroc={
            name: _pair(auroc(a.score, b.score) for a, b in zip(known, said, strict=True))
            for name, said in unknown.items()
        },
    )


def _describe(pair: BeforeAfter) -> str:
    return f"{pair[0]:.4f} -> {pair[1]:.4f}"


def _pair(values: Iterable[float]) -> BeforeAfter:
    before, after = map(float, values)
    return before, after


def _sample(images: ImageSet) -> ImageSet:
    """At most ``MEASURE_IMAGES`` images, evenly spread."""
    return images.subset(np.linspace(0, len(images) - 1, min(len(images), MEASURE_IMAGES)).astype(int))
