"""Opening a network by its specification, and building it again from its origin."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from maple.errors import UsageError, suggest
from maple.files import expand_home, suggest_path
from maple.networks.architectures import NETWORKS, is_network
from maple.networks.backbone import Backbone, Preprocessing, create_backbone, use_channels_last
from maple.networks.head_finder import split_head, timm_preprocessing, wrap_module
from maple.networks.hub import _modules, _transformers
from maple.networks.hub._graphs import Graph, load_graph, open_graph, split_graph
from maple.networks.hub._onnx import open_onnx
from maple.networks.origin import Kind, Origin
from maple.networks.shallow_finder import AUTO, OFF
from maple.networks.weights import load_state, load_weights, read_state, rename_state

RUNS_CODE = {  # why some kinds need trust
    "torchscript": "a TorchScript file is a program",
    "export": "a torch.export file is a program",
    "python": "the module is imported, which runs its code",
}
GRAPHS = ("torchscript", "export")
_ARCHITECTURES = ("own", "timm", "torchvision")  # layers without weights
_CHANNELS_LAST = ("timm", "torchvision")  # their networks are known to compute in that memory format
_MAKERS: dict[Kind | None, Callable[[Origin], nn.Module]] = {
    "timm": _modules.make_timm,
    "torchvision": _modules.make_torchvision,
    "python": _modules.make_python,
    "huggingface": _transformers.make,
}


@dataclass(frozen=True)
class _Request:
    """Arguments of ``open_model``."""

    spec: str
    weights: Path | None
    n_classes: int | None
    head: str | None
    wanted: Preprocessing
    shallow: str | None
    drop_head: bool


def open_model(
    spec: str,
    *,
    weights: str | Path | None = None,
    n_classes: int | None = None,
    head: str | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    shallow: str | None = AUTO,
    drop_head: bool = False,
    trust: bool = False,
) -> Backbone:
    """Open a trained classifier as a backbone that can be saved in a run.

    ``spec`` is one of

    - ``timm/NAME`` or ``torchvision/NAME`` with ``weights``, a local file (safetensors, or readable by
      ``torch.load(weights_only=True)``); the number of classes is read from the file. Without ``weights`` they
      are random, and ``n_classes`` is required,
    - a name of :func:`~maple.networks.backbone.list_backbones` (``resnet20``), with the same options,
    - a folder written by Hugging Face's ``save_pretrained``: image classification, safetensors,
    - a TorchScript file, or a ``.pt2`` file of ``torch.export`` with a dynamic batch size,
    - an ``.onnx`` file: the embedding is its output ``embedding``, else the input of its last linear layer, or the
      tensor that ``head`` names; the logits are its other output, or the one called ``logits``,
    - ``python:package.module:function``, a function without arguments that returns a module or a ``Backbone``.

    The head is found as in :func:`~maple.networks.head_finder.wrap_backbone`, or named by ``head``. ``drop_head``
    removes it, for data with other classes. ``size``, ``mean`` and ``std`` default to the configuration of the network
    if it has one; ``shallow`` is that of ``wrap_backbone``. ``trust`` allows specifications that run code.

    >>> open_model("resnet9", n_classes=3).embedding_size
    128
    >>> open_model("python:zoo:make_network")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: 'python:zoo:make_network' is not opened: the module is imported, which runs its code.
    If you trust it, add --trust (or trust=True)
    """
    kind = find_kind(spec)
    check_trust(kind, spec, trust)
    path = None if weights is None else Path(weights)
    request = _Request(spec, path, n_classes, head, Preprocessing(mean, std, size), shallow, drop_head)
    _check_request(request, kind)
    backbone = _open_own(request) if kind == "own" else _open_foreign(request, kind)
    n_outputs = getattr(backbone.head, "out_features", None)
    if n_classes is not None and n_outputs not in (None, n_classes):
        raise UsageError(f"'{spec}' has {n_outputs} logits, not {n_classes}: check --classes, or leave it out")
    if drop_head:
        backbone.head = None
    backbone.name = spec
    return backbone.eval()


def rebuild_model(origin: Origin, shapes: Mapping[str, Sequence[int]], *, trust: bool = False) -> Backbone:
    """The layers that ``origin`` describes, with arbitrary weights; ``shapes`` are those of its tensors by name.

    Head and embedding layer take the size of their tensors, since training may have changed them. Mean and standard
    deviation are among the tensors.
    """
    if origin.kind is None:
        raise UsageError("the network was wrapped in Python: only networks of open_model can be built again")
    check_trust(origin.kind, origin.spec, trust)
    if origin.kind == "onnx":
        return open_onnx(origin, origin.embedding, Preprocessing(size=origin.size), origin.logits is None)
    backbone = _rebuild_layers(origin)
    if (layer := _linear_like(shapes, "embedding_layer")) is not None:
        backbone.embedding_layer, backbone.embedding_size = layer, layer.out_features
    if not any(name.startswith("head.") for name in shapes):
        backbone.head = None
    elif (layer := _linear_like(shapes, "head")) is not None:
        backbone.head = layer
    backbone.name, backbone.size, backbone.origin = origin.spec, origin.size, origin
    return use_channels_last(backbone) if origin.kind in _CHANNELS_LAST else backbone


def _rebuild_layers(origin: Origin) -> Backbone:
    """Body and head as they were opened."""
    module = load_graph(origin) if origin.kind in GRAPHS else _MAKERS[origin.kind](origin)
    if isinstance(module, Backbone):
        return module
    cut = str(origin.head), origin.path
    body, head = split_graph(module, *cut) if isinstance(module, Graph) else split_head(module, *cut)
    return Backbone(body, head, embedding_size=origin.embedding_size, shallow=origin.shallow)


def _linear_like(shapes: Mapping[str, Sequence[int]], name: str) -> nn.Linear | None:
    """A linear layer for the tensors called ``name``; ``None`` if they are not those of one."""
    parts = {key.removeprefix(f"{name}."): shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
    weight = parts.pop("weight", ())
    if len(weight) != 2 or parts.keys() - {"bias"}:
        return None
    return nn.Linear(weight[1], weight[0], bias="bias" in parts)


# --- kinds ------------------------------------------------------------------------------------------------------------


def find_kind(spec: str) -> Kind | Literal["own"]:
    """The kind of network that a specification names.

    >>> find_kind("timm/resnet18"), find_kind("wrn-28-10"), find_kind("python:zoo:make")
    ('timm', 'own', 'python')
    >>> find_kind("resnet81")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown network 'resnet81': did you mean 'resnet18'? (other networks are written
    timm/NAME, torchvision/NAME, python:MODULE:FUNCTION, or are files or folders)
    """
    prefix = spec.partition("/")[0]
    if prefix in ("timm", "torchvision"):
        return "timm" if prefix == "timm" else "torchvision"
    if spec.startswith("python:"):
        return "python"
    if is_network(spec):
        return "own"
    path = expand_home(spec)
    if path.is_dir():
        return "huggingface"
    if path.is_file():
        return _kind_of_file(path)
    if path.suffix or "/" in spec:
        hint = suggest_path(path) or "check the path"
        raise UsageError(f"there is no network '{spec}', no such file or folder: {hint}")
    raise UsageError(
        f"unknown network '{spec}': {suggest(spec, NETWORKS)} (other networks are written timm/NAME, "
        "torchvision/NAME, python:MODULE:FUNCTION, or are files or folders)"
    )


def _kind_of_file(path: Path) -> Kind:
    """The kind of network in a file, by its suffix or its table of contents; nothing is loaded."""
    if path.suffix.lower() == ".onnx":
        return "onnx"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = {name.partition("/")[2] for name in archive.namelist()}  # below a folder of the file's own name
        if "archive_format" in inside:
            return "export"
        if "constants.pkl" in inside and any(name.startswith("code/") for name in inside):
            return "torchscript"
    raise UsageError(f"'{path}' contains no network: name that of a weights file, such as timm/NAME --weights FILE")


def check_trust(kind: str, spec: str, trust: bool) -> None:
    """Raise ``UsageError`` for kinds that run code, unless ``trust`` is given."""
    if kind in RUNS_CODE and not trust:
        raise UsageError(f"'{spec}' is not opened: {RUNS_CODE[kind]}. If you trust it, add --trust (or trust=True)")


def needs_weights(spec: str) -> bool:
    """Whether a specification names an architecture without weights."""
    return find_kind(spec) in _ARCHITECTURES


def _check_request(request: _Request, kind: str) -> None:
    """Refuse options that the kind of network does not take."""
    spec = request.spec
    if request.weights is not None and kind not in (*_ARCHITECTURES, "python"):
        raise UsageError(f"'{spec}' includes its weights: leave out --weights")
    if request.shallow not in (None, AUTO, OFF) and kind in ("own", *GRAPHS, "onnx"):
        raise UsageError(f"a shallow layer cannot be chosen in '{spec}': leave it out, or open the network by python:")
    if request.head is not None and kind == "own":
        raise UsageError(f"'{spec}' has one head, called 'head': leave out --head")


# --- opening ----------------------------------------------------------------------------------------------------------


def _open_own(request: _Request) -> Backbone:
    """A network of ``create_backbone``; it needs no origin to be built again."""
    weights, n_classes, wanted = request.weights, request.n_classes, request.wanted
    create = partial(create_backbone, request.spec, mean=wanted.mean, std=wanted.std)
    if weights is not None and n_classes is None:
        named = rename_state(read_state(weights), create(1), weights)
        n_classes = len(named["head.weight"]) if "head.weight" in named else 1  # loading reports what is missing
    backbone = create(_require_classes(n_classes, request.spec))
    backbone.size = wanted.size
    if request.shallow in (None, OFF):
        backbone.shallow = None
    return backbone if weights is None else load_weights(backbone, weights)


def _require_classes(n_classes: int | None, spec: str) -> int:
    if n_classes is None:
        raise UsageError(f"'{spec}' is an architecture: give a weights file, or the number of classes")
    return n_classes


def _open_foreign(request: _Request, kind: Kind) -> Backbone:
    """A network that ``create_backbone`` does not know."""
    origin = Origin(kind, request.spec)
    if kind == "onnx" or kind in GRAPHS:
        origin = replace(origin, file=str(expand_home(request.spec).resolve()))
        if kind == "onnx":
            return open_onnx(origin, request.head, request.wanted, request.drop_head)
        return open_graph(origin, request.head, request.wanted)
    if kind == "huggingface":
        return _wrap(request, *_transformers.load(origin))
    return _wrap(request, *_load_layers(request, origin))


def _load_layers(request: _Request, origin: Origin) -> tuple[nn.Module, Preprocessing, Origin]:
    """A module of timm, torchvision or a function, with its weights; its preprocessing; and how to build it again."""
    state = None if request.weights is None else read_state(request.weights)
    if origin.kind != "python":
        origin = replace(origin, n_classes=request.n_classes, image_size=request.wanted.size)
        if origin.n_classes is None and state is not None:
            origin = replace(origin, n_classes=_infer_classes(origin, state))
        _require_classes(origin.n_classes, request.spec)
    module = _MAKERS[origin.kind](origin)
    if state is not None:
        state = _modules.resample_positions(module, state)
        load_state(module, state, Path(str(request.weights)), request.spec)
    if origin.kind == "torchvision":
        return module, _modules.torchvision_preprocessing(origin), origin
    return module, timm_preprocessing(module), origin  # the function may return a timm model


def _wrap(request: _Request, module: nn.Module, own: Preprocessing, origin: Origin) -> Backbone:
    """The backbone around a module; the requested preprocessing takes precedence over the network's ``own``."""
    wanted = request.wanted.over(own)
    backbone = wrap_module(module, wanted, request.head, request.shallow)
    backbone.size = wanted.size or backbone.size
    if (found := backbone.origin) is not None:  # a Backbone from a function may have been opened itself
        origin = found if found.kind is not None else replace(origin, head=found.head, path=found.path)
    backbone.origin = replace(
        origin, embedding_size=backbone.embedding_size, size=backbone.size, shallow=backbone.shallow, fit=own.fit
    )
    return use_channels_last(backbone) if origin.kind in _CHANNELS_LAST else backbone


def _infer_classes(origin: Origin, state: Mapping[str, Tensor]) -> int:
    """The number of classes of a weights file: the size of the dimension that grows with that number.

    Layers for two and for three classes are made, without memory, and compared.
    """
    with torch.device("meta"):
        two, three = (_MAKERS[origin.kind](replace(origin, n_classes=n)).state_dict() for n in (2, 3))
    for name, tensor in two.items():
        for axis, (before, after) in enumerate(zip(tensor.shape, three[name].shape)):
            if before != after and name in state and state[name].ndim == tensor.ndim:
                return state[name].shape[axis]
    raise UsageError(f"the weights do not tell the classes of '{origin.spec}': check the file or give --classes")
