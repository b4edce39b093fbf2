"""Compiled networks: TorchScript files and ``.pt2`` files of ``torch.export``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maple.errors import UsageError, is_out_of_memory
from maple.networks.backbone import UNCHANGED, Backbone, Preprocessing
from maple.networks.head_finder import Pick, check_dtype, leaves, run_example, same_values
from maple.networks.hooks import evaluating
from maple.networks.origin import Origin


class Graph(nn.Module):
    """A compiled network: its parameters are accessible, its layers are not.

    It has no modes: it stays in evaluation mode, in which graphs are exported.
    """

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def train(self, mode: bool = True) -> Graph:
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Any:
        return self.graph(x)


def load_graph(origin: Origin) -> Graph:
    """Open the file; this runs code."""
    path = Path(str(origin.file))
    if not path.is_file():
        raise UsageError(f"the network file '{path}' does not exist: restore it")
    try:
        if origin.kind == "export":
            return Graph(torch.export.load(path).module())
        return Graph(torch.jit.load(path, map_location="cpu").eval())
    except Exception as error:  # from the parser, the compiler, or an older format
        if is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read the network '{path}' ({reason}): save it again with this torch") from None


def open_graph(origin: Origin, head: str | None, wanted: Preprocessing) -> Backbone:
    """A compiled network as a backbone.

    Hooks do not work inside a graph. But with the identity as its weight and 0 as its bias a linear layer passes on
    its input: the head is the layer for which head(output of the changed graph) equals the original output.
    """
    graph = load_graph(origin)
    check_dtype(graph)
    wanted = wanted.over(Preprocessing(size=_static_size(graph, origin.spec))).over(UNCHANGED)
    with evaluating(graph):
        x, _, output = run_example(graph, wanted)
    name, path = _find_graph_head(graph, origin.spec, head, x, dict(leaves(output)))
    body, layer = split_graph(graph, name, path)
    n_in, (mean, std, size, _) = layer.in_features, wanted
    backbone = Backbone(body, layer, embedding_size=n_in, mean=mean, std=std, size=size)
    backbone.origin = replace(origin, head=name, path=path, embedding_size=n_in, size=size)
    return backbone


def _static_size(graph: Graph, spec: str) -> int | None:
    """The side of the images that an exported graph takes, if it is fixed."""
    if not isinstance(graph.graph, torch.fx.GraphModule):
        return None
    image = next(node for node in graph.graph.graph.nodes if node.op == "placeholder")
    shape: Sequence[Any] = image.meta["val"].shape
    if shape and isinstance(shape[0], int):
        raise UsageError(
            f"'{spec}' takes {shape[0]} images: export with dynamic_shapes=({{0: torch.export.Dim('n')}},)"
        )
    return shape[2] if len(shape) == 4 and isinstance(shape[2], int) else None


def _find_graph_head(
    graph: Graph, spec: str, head: str | None, x: Tensor, logits: Mapping[tuple[Any, ...], Tensor]
) -> tuple[str, tuple[Any, ...]]:
    """Name of the linear layer that gives an entry of the output, and the keys that lead to that entry."""
    matrices = {
        name.removesuffix(".weight"): len(parameter)
        for name, parameter in graph.graph.named_parameters()
        if name.endswith(".weight") and parameter.ndim == 2
    }
    if head is not None and head not in matrices:
        raise UsageError(f"'{spec}' has no linear layer '{head}'; it has: {', '.join(matrices) or 'none'}")
    widths = {leaf.shape[1] for leaf in logits.values() if leaf.ndim == 2}
    found: dict[str, tuple[Any, ...]] = {}
    for name in [name for name, width in matrices.items() if width in widths] if head is None else [head]:
        layer, seen = _see_through(graph, name, x)
        for path, leaf in logits.items():
            fits = path in seen and seen[path].shape == (len(x), layer.in_features)
            if fits and name not in found and same_values(layer(seen[path]), leaf):
                found[name] = path
    if len(found) > 1:
        raise UsageError(f"'{spec}' has several heads ({', '.join(found)}): name one, --head {next(iter(found))}")
    if not found:
        raise UsageError(f"no linear layer gives the output of '{spec}': save logits before freezing, or use python:")
    return next(iter(found.items()))


def _see_through(graph: Graph, name: str, x: Tensor) -> tuple[nn.Linear, dict[tuple[Any, ...], Tensor]]:
    """A linear layer, and the outputs of the graph while that layer is the identity; none if the graph then fails."""
    before = {key: parameter.data for key, parameter in _parameters_of(graph, name).items()}
    layer = _make_identity(graph, name)
    try:
        with evaluating(graph):
            return layer, dict(leaves(graph(x)))
    except Exception:  # not the head: a later layer does not accept that input
        return layer, {}
    finally:
        for key, parameter in _parameters_of(graph, name).items():
            parameter.data = before[key]


def _parameters_of(graph: Graph, name: str) -> dict[str, nn.Parameter]:
    """Weight and, if there is one, bias of a linear layer."""
    wanted = {f"{name}.weight": "weight", f"{name}.bias": "bias"}
    return {wanted[key]: parameter for key, parameter in graph.graph.named_parameters() if key in wanted}


def _make_identity(graph: Graph, name: str) -> nn.Linear:
    """Turn a linear layer of the graph into the identity; returns the original layer."""
    parameters = _parameters_of(graph, name)
    n_out, n_in = parameters["weight"].shape
    layer = nn.Linear(n_in, n_out, bias="bias" in parameters)
    layer.load_state_dict({key: parameter.data for key, parameter in parameters.items()})
    for key, parameter in parameters.items():
        parameter.data = torch.eye(n_in) if key == "weight" else torch.zeros(n_in)
    return layer


def split_graph(graph: Graph, head: str, path: Sequence[Any]) -> tuple[nn.Module, nn.Linear]:
    """The graph with its head turned into an identity that is not trained, and the head."""
    layer = _make_identity(graph, head)
    for parameter in _parameters_of(graph, head).values():
        parameter.requires_grad_(False)
    return (Pick(graph, tuple(path)) if path else graph), layer
