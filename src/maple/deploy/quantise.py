"""8-bit weights for an exported graph, and what they change."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maple.data.image_set import ImageSet
from maple.errors import naming_extras
from maple.prediction.onnx import OnnxPredictor
from maple.stats.metrics import auroc, calibration_floor, expected_calibration_error

MEASURE_IMAGES = 2000  # of each set, at most
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
    """The model with the weights of its network in 8 bits; Gaussians and decision stay in full precision."""
    with naming_extras():
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load_from_string(content)
    head = [node.name for node in model.graph.node if node.name.startswith(HEAD)]
    keep = [*head, *(f"{name}_MatMul" for name in head)]  # the name that onnxruntime gives to the product of a Gemm
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # about float64, which is excluded on purpose
        path = Path(folder) / "model.onnx"
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["Conv", "Gemm", "MatMul"],
            nodes_to_exclude=keep,
            weight_type=QuantType.QUInt8,  # the only type of convolutions on a CPU
        )
        return onnx.load(path)


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
