"""A model repository for NVIDIA Triton: the exported graph, its configuration, and the names of the classes.

::

    REPOSITORY/NAME/config.pbtxt    inputs and outputs, read from the graph; dynamic batching
    REPOSITORY/NAME/labels.txt      one class per line, for the output ``probabilities``
    REPOSITORY/NAME/1/model.onnx    version 1
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maple.errors import UsageError
from maple.files import write_atomic
from maple.prediction.onnx import OnnxPredictor

TYPES = {  # of ONNX Runtime, and of Triton
    "tensor(float)": "TYPE_FP32",
    "tensor(double)": "TYPE_FP64",
    "tensor(uint8)": "TYPE_UINT8",
    "tensor(int64)": "TYPE_INT64",
    "tensor(bool)": "TYPE_BOOL",
}
MAX_BATCH = 64
MAX_DELAY = 1000  # microseconds that a batch waits for more requests
LABELS = "labels.txt"


def model_path(repository: Path, run: Path) -> Path:
    """Where the graph of a run belongs; the model is called after the folder of the run."""
    name = run.resolve().name
    if not re.fullmatch(r"[\w.-]+", name):
        raise UsageError(f"'{name}' is no name for a model of Triton: rename the run, with letters, digits, '-', '_'")
    return repository / name / "1" / "model.onnx"


def write_config(model: Path) -> Path:
    """Write ``config.pbtxt`` and ``labels.txt`` for a graph in a repository; the path of the former."""
    folder = model.parents[1]
    predictor = OnnxPredictor.open(model)
    names = (" ".join(name.split()) for name in predictor.class_names)
    write_atomic(folder / LABELS, "".join(f"{name}\n" for name in names))
    write_atomic(folder / "config.pbtxt", config_text(folder.name, predictor.session))
    return folder / "config.pbtxt"


def config_text(name: str, session: Any) -> str:
    """The configuration of a graph in the text format of protobuf.

    The first dimension of all tensors is the batch. The level of the graph, an input with a default, is left out:
    Triton's backend for ONNX Runtime refuses to load a model that has batches and an optional input.
    """
    inputs = [_tensor(each) for each in session.get_inputs()]
    labelled = {"probabilities": [f"label_filename: {json.dumps(LABELS)}"]}
    outputs = [[*_tensor(each), *labelled.get(each.name, [])] for each in session.get_outputs()]
    return "\n".join(
        [
            f"name: {json.dumps(name)}",
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            _listed("input", inputs),
            _listed("output", outputs),
            f"dynamic_batching {{ max_queue_delay_microseconds: {MAX_DELAY} }}",
            "",
        ]
    )


def _tensor(tensor: Any) -> list[str]:
    """Name, type and dimensions without the batch; Triton has no tensors without any, so these are reshaped."""
    shape = tensor.shape[1:]
    fields = [f"name: {json.dumps(tensor.name)}", f"data_type: {TYPES[tensor.type]}"]
    return [*fields, f"dims: {shape}"] if shape else [*fields, "dims: [ 1 ]", "reshape { shape: [ ] }"]


def _listed(field: str, tensors: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"{field} {{\n  " + "\n  ".join(lines) + "\n}" for lines in tensors)
