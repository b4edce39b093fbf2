"""Tracing: from a predictor to an ONNX model."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from maple import __version__
from maple.baselines.mc_dropout import SampledBackbone
from maple.deploy.graph import OUTPUTS, PredictorGraph
from maple.deploy.parity import noise_images
from maple.errors import MapleError, UsageError, is_out_of_memory, naming_extras
from maple.networks import OnnxBackbone, as_image_batch, evaluating
from maple.prediction.onnx import INPUT, LEVEL, MAX_FILE_BYTES, METADATA
from maple.prediction.predictor import Predictor


def make_graph(predictor: Predictor, preprocess: bool) -> PredictorGraph:
    """The graph on the CPU; a network that cannot be traced is a :class:`UsageError`."""
    backbone = predictor.backbone
    if isinstance(backbone, SampledBackbone):
        raise UsageError(
            f"an MC-Dropout network takes {backbone.n_samples + 1} passes with random masks and cannot be exported: "
            "predict with the run itself, or export a run of another recipe"
        )
    scripted = any(isinstance(layer, torch.jit.ScriptModule) for layer in backbone.modules())
    if scripted or isinstance(backbone, OnnxBackbone):
        raise UsageError(
            f"the network of the run is {'a TorchScript' if scripted else 'an ONNX'} file ('{backbone.name}'), which "
            "cannot be traced: predict with the run itself, or fit the PyTorch network that the file was made from"
        )
    graph = PredictorGraph(predictor, preprocess)
    if backbone.mean.device.type != "cpu":
        graph = copy.deepcopy(graph).cpu()
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())
    if n_bytes > MAX_FILE_BYTES:
        raise UsageError(
            f"the network takes {n_bytes / 1e9:.1f} GB, but an ONNX file at most 2 GB: predict with the run itself"
        )
    return graph


@contextmanager
def tracing(graph: PredictorGraph, network: str) -> Iterator[None]:
    """Evaluation mode, no gradients, no warnings of torch; a failure of torch becomes a :class:`UsageError`."""
    try:
        with evaluating(graph), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except MapleError:
        raise
    except Exception as error:  # of any part of torch, or of the network
        if is_out_of_memory(error):
            raise
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"torch cannot turn the network '{network}' into a graph ({reason}): predict with the run itself"
        ) from error


def example_images(size: int, preprocess: bool) -> Tensor:
    pixels = noise_images(2, size)
    return torch.from_numpy(pixels) if preprocess else as_image_batch(pixels)


def trace_onnx(graph: PredictorGraph, predictor: Predictor, opset: int) -> Any:
    """The ONNX model of a graph, for any number of images.

    Its input ``false_alarm`` is optional: an initializer of the same name holds the level of the predictor.
    """
    with naming_extras():
        import onnx
    level = graph.description.decide.false_alarm
    buffer = io.BytesIO()
    with tracing(graph, predictor.network):
        torch.onnx.export(
            graph,
            (example_images(predictor.size, graph.preprocess), level),
            buffer,  # type: ignore[arg-type]  # which this exporter takes
            dynamo=False,
            input_names=[INPUT, LEVEL],
            output_names=list(OUTPUTS),
            dynamic_axes={name: {0: "n"} for name in (INPUT, *OUTPUTS)} | {LEVEL: {0: "levels"}},
            opset_version=opset,
        )
    model = onnx.load_from_string(buffer.getvalue())
    for node in model.graph.node:
        node.ClearField("doc_string")  # holds paths of this machine
    drop_idle_abs(model.graph)
    model.graph.initializer.append(onnx.numpy_helper.from_array(level.numpy(), LEVEL))
    return model


def drop_idle_abs(graph: Any) -> None:
    """Remove absolute values of tensors that are never negative, such as the outputs of a ReLU.

    ONNX Runtime then takes means over pixels in the layout of its convolutions, without a copy.
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


def with_metadata(model: Any, metadata: str) -> bytes:
    """The bytes of a model with only our metadata."""
    del model.metadata_props[:]
    model.metadata_props.add(key=METADATA, value=metadata)
    model.producer_name, model.producer_version = "maple", __version__
    return model.SerializeToString()
