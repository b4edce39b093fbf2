"""ONNX graphs, computed by onnxruntime."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maple.errors import UsageError, is_out_of_memory
from maple.networks._torchvision import import_extra
from maple.networks.backbone import UNCHANGED, Backbone, Preprocessing, normalise_images
from maple.networks.head_finder import run_example, same_values
from maple.networks.origin import Origin

EMBEDDING_OUTPUTS = ("embedding", "embeddings")  # possible names of the output with the embedding


class OnnxGraph(nn.Module):
    """Some outputs of an ONNX graph, computed by onnxruntime on the CPU."""

    def __init__(self, session: Any, outputs: Sequence[str]) -> None:
        super().__init__()
        self.session, self.outputs = session, list(outputs)
        self.input = session.get_inputs()[0]
        self.batch = self.input.shape[0] if isinstance(self.input.shape[0], int) else None  # images per run, if fixed

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        images = x.detach().cpu().numpy().astype(np.float32)
        step = self.batch or max(len(images), 1)
        parts = [
            self.session.run(self.outputs, {self.input.name: images[start : start + step]})
            for start in range(0, len(images), step)
        ]
        return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*parts))


class OnnxHead(nn.Module):
    """Placeholder for the head of an ONNX graph, which cannot be computed alone."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.out_features = n_outputs

    def forward(self, embedding: Tensor) -> Tensor:
        if len(embedding):
            raise UsageError("the head of an ONNX network cannot be computed alone: open the network in PyTorch")
        return embedding.new_zeros(0, self.out_features)


class OnnxBackbone(Backbone):
    """A backbone whose embedding and logits come from one run of an ONNX graph."""

    def embed(self, x: Tensor) -> Tensor:
        return self.body(normalise_images(x, self.mean, self.std))[0].float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.head is None:
            return super().forward(x)
        embedding, logits = self.body(normalise_images(x, self.mean, self.std))
        return embedding.float(), logits.float()


def open_onnx(origin: Origin, embedding: str | None, wanted: Preprocessing, drop_head: bool) -> Backbone:
    """An ONNX classifier as a backbone; ``embedding`` names a tensor of the graph, ``None`` searches for it."""
    runtime, spec, path = import_extra("onnxruntime"), origin.spec, Path(str(origin.file))
    model = _read_onnx(path, spec)
    names = _find_outputs(model.graph, embedding, drop_head, spec)
    session = _start_session(runtime, model, path, names, spec)
    wanted = wanted.over(Preprocessing(size=_image_height(session, spec))).over(UNCHANGED)
    graph = OnnxGraph(session, names)
    _, _, found = run_example(graph, wanted)
    _check_outputs(names, found, spec)
    mean, std, size, _ = wanted
    head = OnnxHead(found[1].shape[1]) if len(names) == 2 else None
    backbone = OnnxBackbone(graph, head, embedding_size=found[0].shape[1], mean=mean, std=std, name=spec, size=size)
    backbone.origin = replace(origin, embedding=names[0], logits=names[1] if len(names) == 2 else None, size=size)
    return backbone


def _image_height(session: Any, spec: str) -> int | None:
    """Height of the images that a session takes, ``None`` if it is not fixed; refuses other inputs."""
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    any_number_or_one = len(shape) == 4 and (not isinstance(shape[0], int) or shape[0] == 1)
    if not any_number_or_one or shape[1] != 3 or inputs[0].type != "tensor(float)":
        taken = ", ".join(f"{one.type} {one.shape}" for one in inputs) or "no input"
        raise UsageError(f"'{spec}' takes {taken}: export it for float32 images (N, 3, H, W), with N any number or 1")
    return shape[2] if isinstance(shape[2], int) else None


def _check_outputs(names: Sequence[str], found: Sequence[Tensor], spec: str) -> None:
    """Refuse outputs that are not vectors, and probabilities instead of logits."""
    if any(part.ndim != 2 for part in found):
        given = {name: tuple(part.shape) for name, part in zip(names, found)}
        raise UsageError(f"'{spec}' gives {given}: embedding and logits must be one vector per image")
    if len(names) == 2 and same_values(found[1].sum(1), torch.ones(len(found[1]))) and (found[1] >= 0).all():
        raise UsageError(f"'{names[1]}' of '{spec}' are probabilities: export it without softmax, or add --drop-head")


def _read_onnx(path: Path, spec: str) -> Any:
    """The graph in a file, without external tensors; these must be in a file that a run copies too."""
    onnx = import_extra("onnx")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # from the parser
        if is_out_of_memory(error):
            raise
        raise UsageError(f"cannot read the network '{spec}' ({' '.join(str(error).split())})") from None
    if not model.graph.output:
        raise UsageError(f"'{spec}' has no outputs: export it again")
    tensors = [tensor for tensor in _all_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    beside = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    if elsewhere := sorted(beside - {f"{path.name}.data"}):
        raise UsageError(f"'{spec}' has tensors in '{elsewhere[0]}': save it in one file, or with '{path.name}.data'")
    return model


def _all_tensors(message: Any) -> Iterator[Any]:
    """Every tensor in a message of ONNX: initialisers, attributes of nodes, and those of subgraphs and functions."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in [value] if hasattr(value, "ListFields") else value:
                yield from _all_tensors(part)


def _start_session(runtime: ModuleType, model: Any, path: Path, names: Sequence[str], spec: str) -> Any:
    """An onnxruntime session with all ``names`` as outputs, also tensors that are not outputs of the file."""
    onnx = import_extra("onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3  # errors only
    hidden = [name for name in names if name not in {output.name for output in model.graph.output}]
    try:
        source: str | bytes = str(path)
        if hidden:
            onnx.load_external_data_for_model(model, str(path.parent))
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in hidden)
            source = model.SerializeToString()
        return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime has its own types
        if is_out_of_memory(error):
            raise
        raise UsageError(f"cannot read the network '{spec}' ({' '.join(str(error).split())})") from None


def _find_outputs(graph: Any, embedding: str | None, drop_head: bool, spec: str) -> list[str]:
    """Names of the tensors with the embedding and, unless dropped or missing, the logits."""
    outputs = [output.name for output in graph.output]
    made_by = {name: node for node in graph.node for name in node.output}
    if embedding is not None and embedding not in made_by:
        nearest = difflib.get_close_matches(embedding, made_by, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"its outputs are {', '.join(outputs)}"
        raise UsageError(f"'{spec}' has no tensor '{embedding}': {hint}")
    named = embedding or next((name for name in outputs if name in EMBEDDING_OUTPUTS), None)
    others = [name for name in outputs if name != named]
    if "logits" in others:
        others = ["logits"]
    if len(others) > 1 and not (named and drop_head):
        raise UsageError(f"'{spec}' has several other outputs ({', '.join(others)}): call the one with logits 'logits'")
    if named is None:
        named = _head_input(made_by, others[0])
    if named is None:
        raise UsageError(
            f"no linear layer gives '{others[0]}' of '{spec}': export logits, or name the embedding, --head"
        )
    return [named, *([] if drop_head else others)]


def _head_input(made_by: Mapping[str, Any], logits: str) -> str | None:
    """Input of the linear layer that gives the logits: Gemm, or MatMul and Add."""
    node = made_by.get(logits)
    if node is not None and node.op_type == "Add":
        node = next((made_by[name] for name in node.input if name in made_by), None)
    return node.input[0] if node is not None and node.op_type in ("Gemm", "MatMul") else None
