"""Networks that someone else trained, opened by name, file, folder or function: ``open_model``.

What a network is made of is written down as plain JSON, ``Backbone.origin``, from which ``rebuild_model`` makes the
same layers again, without a download and without the file that the weights came from: a run holds all tensors itself.

Nothing that runs code is opened unless the caller says ``trust=True`` (``--trust``): a TorchScript or
``torch.export`` file is a program, and ``python:`` imports a module.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maple.data.decode import Fit
from maple.errors import UsageError, naming_extras, suggest
from maple.networks._torchvision import import_torchvision
from maple.networks.architectures import NETWORKS
from maple.networks.backbone import (
    Backbone,
    Pick,
    check_dtype,
    create_backbone,
    evaluating,
    leaves,
    load_state,
    load_weights,
    normalise,
    read_state,
    rename_state,
    run_example,
    same_values,
    split_head,
    use_channels_last,
    wrap_backbone,
)

Kind = Literal["own", "timm", "torchvision", "huggingface", "torchscript", "export", "onnx", "python"]
Origin = dict[str, Any]

RUNS_CODE = {  # why some kinds need trust
    "torchscript": "a TorchScript file is a program",
    "export": "a torch.export file is a program",
    "python": "the module is imported, which runs its code",
}
ARCHITECTURES = ("own", "timm", "torchvision")  # layers without weights
GRAPHS = ("torchscript", "export")
CHANNELS_LAST = ("timm", "torchvision")  # kinds whose networks are known to compute in that memory
EMBEDDING_OUTPUTS = ("embedding", "embeddings")  # what the output of an ONNX graph is called, where it has one
MAX_CONFIG_BYTES = 10**6
FOREIGN_KEYS = {  # of a Hugging Face configuration: they name code to be loaded, or files elsewhere
    "_name_or_path",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "auto_map",
    "experts_implementation",
    "_experts_implementation",
    "quantization_config",
}


class Preprocessing(NamedTuple):
    """What a network's own configuration says about its images; ``None`` where it says nothing."""

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    size: int | None = None  # side of the square, in pixels
    fit: Fit | None = None  # how images that are not square become square


def open_model(
    spec: str,
    *,
    weights: str | Path | None = None,
    n_classes: int | None = None,
    head: str | None = None,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    shallow: str | None = None,
    drop_head: bool = False,
    trust: bool = False,
) -> Backbone:
    """A trained classifier as a backbone that can be saved in a run.

    ``spec`` is one of

    - ``timm/NAME`` or ``torchvision/NAME`` with ``weights``, a file of your own (safetensors, or what
      ``torch.load(weights_only=True)`` reads); the number of classes follows from the file. Without ``weights`` they
      are random, and ``n_classes`` is needed,
    - the name of a network of ours (``resnet20``), likewise,
    - a folder that Hugging Face's ``save_pretrained`` wrote: image classification, safetensors,
    - a TorchScript file, or a ``.pt2`` file of ``torch.export``, for any number of images,
    - an ``.onnx`` file: the embedding is its output called ``embedding``, or else what its last linear layer sees,
      or the tensor that ``head`` names; of its other outputs, the only one or the one called ``logits`` holds the
      logits,
    - ``python:package.module:function``, a function without arguments that returns a module or a ``Backbone``.

    The head is found as in :func:`~maple.networks.backbone.wrap_backbone`, or named by ``head``; ``drop_head``
    leaves it out
    where only the embedding is wanted, for classes that the network does not know. ``size``, ``mean`` and ``std``
    default to the network's own configuration where it has one; ``shallow`` is that of ``wrap_backbone``. ``trust``
    allows what runs code.

    >>> open_model("resnet9", n_classes=3).embedding_size
    128
    >>> open_model("python:zoo:make_network")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: 'python:zoo:make_network' is not opened, since the module is imported, which runs its code:
    add --trust (in Python trust=True) if you know where it comes from
    """
    kind = find_kind(spec)
    check_trust(kind, spec, trust)
    if weights is not None and kind not in (*ARCHITECTURES, "python"):
        raise UsageError(f"'{spec}' holds its own weights: leave out --weights")
    if shallow is not None and kind in ("own", *GRAPHS, "onnx"):
        raise UsageError(f"a shallow layer cannot be chosen in '{spec}': leave it out, or open the network by python:")
    wanted = Preprocessing(mean, std, size)
    if kind == "own":
        if head is not None:
            raise UsageError(f"'{spec}' has one head, called 'head': leave out --head")
        backbone = _open_own(spec, weights, n_classes, wanted)
    elif kind == "onnx":
        backbone = _open_onnx(_file_origin(spec, kind), head, wanted, drop_head)
    elif kind in GRAPHS:
        backbone = _open_graph(_file_origin(spec, kind), head, wanted)
    else:
        backbone = _open_layers(spec, kind, weights, n_classes, head, wanted, shallow)
    n_outputs = getattr(backbone.head, "out_features", None)
    if n_classes is not None and n_outputs not in (None, n_classes):
        raise UsageError(f"'{spec}' gives {n_outputs} logits, not {n_classes}: check --classes, or leave it out")
    if drop_head:
        backbone.head = None
    backbone.name = spec
    return backbone.eval()


def rebuild_model(origin: Origin, shapes: Mapping[str, Sequence[int]], *, trust: bool = False) -> Backbone:
    """The layers that ``origin`` tells of, with arbitrary weights; its tensors have the ``shapes`` given by name.

    Head and embedding layer are as large as their tensors, since training may have changed them. Mean and deviation
    are among the tensors.
    """
    if origin.get("kind") not in (*_MAKERS, *GRAPHS, "onnx"):
        raise UsageError("the network was wrapped in Python: only networks of open_model can be built again")
    kind, spec = origin["kind"], origin["spec"]
    check_trust(kind, spec, trust)
    if kind == "onnx":
        return _open_onnx(origin, origin["embedding"], Preprocessing(size=origin["size"]), origin["logits"] is None)
    module = _load_graph(origin) if kind in GRAPHS else _MAKERS[kind](origin)
    if isinstance(module, Backbone):
        backbone = module
    else:
        cut = origin["head"], origin["path"]
        body, head = _split_graph(module, *cut) if isinstance(module, Graph) else split_head(module, *cut)
        backbone = Backbone(body, head, embedding_size=origin["embedding_size"], shallow=origin["shallow"])
    if (layer := _linear_like(shapes, "embedding_layer")) is not None:
        backbone.embedding_layer, backbone.embedding_size = layer, layer.out_features
    if not any(name.startswith("head.") for name in shapes):
        backbone.head = None
    elif (layer := _linear_like(shapes, "head")) is not None:
        backbone.head = layer
    backbone.name, backbone.size, backbone.origin = spec, origin["size"], origin
    return use_channels_last(backbone) if kind in CHANNELS_LAST else backbone


def _linear_like(shapes: Mapping[str, Sequence[int]], name: str) -> nn.Linear | None:
    """A linear layer for the tensors called ``name``; ``None`` where they are not those of one."""
    parts = {key.removeprefix(f"{name}."): shape for key, shape in shapes.items() if key.startswith(f"{name}.")}
    weight = parts.pop("weight", ())
    if len(weight) != 2 or parts.keys() - {"bias"}:
        return None
    return nn.Linear(weight[1], weight[0], bias="bias" in parts)


# --- kinds ------------------------------------------------------------------------------------------------------------


def find_kind(spec: str) -> Kind:
    """What a specification of a network stands for.

    >>> find_kind("timm/resnet18"), find_kind("wrn-28-10"), find_kind("python:zoo:make")
    ('timm', 'own', 'python')
    >>> find_kind("resnet81")
    Traceback (most recent call last):
    ...
    maple.errors.UsageError: unknown network 'resnet81': did you mean 'resnet18'? (those of others are written
    timm/NAME, torchvision/NAME, python:MODULE:FUNCTION, or are files or folders)
    """
    prefix = spec.partition("/")[0]
    if prefix in ("timm", "torchvision"):
        return "timm" if prefix == "timm" else "torchvision"
    if spec.startswith("python:"):
        return "python"
    if spec in NETWORKS or re.fullmatch(r"wrn-\d+-\d+", spec):
        return "own"
    path = Path(spec).expanduser()
    if path.is_dir():
        return "huggingface"
    if path.is_file():
        return _kind_of_file(path)
    if path.suffix or "/" in spec:
        raise UsageError(f"there is no network '{spec}': no such file or folder")
    raise UsageError(
        f"unknown network '{spec}': {suggest(spec, NETWORKS)} (those of others are written timm/NAME, "
        "torchvision/NAME, python:MODULE:FUNCTION, or are files or folders)"
    )


def _kind_of_file(path: Path) -> Kind:
    """Which kind of network a file holds, by its suffix or by what is inside; nothing is loaded."""
    if path.suffix.lower() == ".onnx":
        return "onnx"
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            inside = {name.partition("/")[2] for name in archive.namelist()}  # below a folder of the file's own name
        if "archive_format" in inside:
            return "export"
        if "constants.pkl" in inside and any(name.startswith("code/") for name in inside):
            return "torchscript"
    raise UsageError(
        f"'{path}' holds no network: a file of weights needs the name of its network, such as timm/NAME --weights "
        f"'{path}'"
    )


def check_trust(kind: str, spec: str, trust: bool) -> None:
    """Refuse to run code that nobody vouched for."""
    if kind in RUNS_CODE and not trust:
        raise UsageError(
            f"'{spec}' is not opened, since {RUNS_CODE[kind]}: add --trust (in Python trust=True) if you know where it "
            "comes from"
        )


def needs_weights(spec: str) -> bool:
    """Whether a specification names an architecture alone."""
    return find_kind(spec) in ARCHITECTURES


def _file_origin(spec: str, kind: Kind) -> Origin:
    return {"kind": kind, "spec": spec, "file": str(Path(spec).expanduser().resolve())}


def _import(package: str) -> ModuleType:
    """A package that an extra installs."""
    if package in ("timm", "transformers") and find_spec("torchvision") is not None:
        import_torchvision()
    with naming_extras():
        return import_module(package)


# --- networks of ours -------------------------------------------------------------------------------------------------


def _open_own(name: str, weights: str | Path | None, n_classes: int | None, wanted: Preprocessing) -> Backbone:
    """One of our networks; it needs no origin to be built again."""

    def create(n: int) -> Backbone:
        return create_backbone(name, n, mean=wanted.mean, std=wanted.std)

    if weights is None:
        backbone = create(_given(n_classes, name))
    else:
        if n_classes is None:
            named = rename_state(read_state(Path(weights)), create(1), Path(weights))
            n_classes = len(named["head.weight"]) if "head.weight" in named else 1  # else loading says what is missing
        backbone = load_weights(create(n_classes), weights)
    backbone.size = wanted.size
    return backbone


def _given(n_classes: int | None, spec: str) -> int:
    if n_classes is None:
        raise UsageError(f"'{spec}' is an architecture: give a file of weights, or the number of classes")
    return n_classes


# --- networks of layers -----------------------------------------------------------------------------------------------


def _open_layers(
    spec: str,
    kind: Kind,
    weights: str | Path | None,
    n_classes: int | None,
    head: str | None,
    wanted: Preprocessing,
    shallow: str | None,
) -> Backbone:
    """A network whose layers torch sees."""
    origin: Origin = {"kind": kind, "spec": spec}
    if kind == "huggingface":
        module, own, more = _load_huggingface(Path(spec).expanduser())
        origin |= more
    else:
        state = None if weights is None else read_state(Path(weights))
        if kind != "python":
            origin |= {"n_classes": n_classes, "image_size": wanted.size}
            if n_classes is None and state is not None:
                origin["n_classes"] = _infer_classes(origin, state)
            _given(origin["n_classes"], spec)
        module = _MAKERS[kind](origin)
        if state is not None:
            load_state(module, state, Path(str(weights)), spec)
        own = _READERS[kind](spec, module)
    size = wanted.size or own.size
    backbone = wrap_backbone(
        module,
        head=head,
        mean=own.mean if wanted.mean is None else wanted.mean,
        std=own.std if wanted.std is None else wanted.std,
        example=None if size is None else _example(size),
        shallow=shallow,
    )
    backbone.size = size or backbone.size
    found = {"embedding_size": backbone.embedding_size, "size": backbone.size, "shallow": backbone.shallow}
    backbone.origin = origin | (backbone.origin or {}) | found | {"fit": own.fit}
    return use_channels_last(backbone) if kind in CHANNELS_LAST else backbone


def _example(size: int) -> Tensor:
    return torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def _infer_classes(origin: Origin, state: Mapping[str, Tensor]) -> int:
    """The number of classes that a weights file was made for: the size of what grows with that number.

    Layers are made for two and for three classes, without memory, and compared.
    """
    with torch.device("meta"):
        two, three = (_MAKERS[origin["kind"]](origin | {"n_classes": n}).state_dict() for n in (2, 3))
    for name, tensor in two.items():
        for axis, (before, after) in enumerate(zip(tensor.shape, three[name].shape)):
            if before != after and name in state and state[name].ndim == tensor.ndim:
                return state[name].shape[axis]
    raise UsageError(
        f"the weights do not tell how many classes '{origin['spec']}' has: they hold another network, or need --classes"
    )


def _check_name(name: str, known: Sequence[str], package: str) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean '{package}/{nearest[0]}'?" if nearest else f"{package} lists its own by list_models()"
        raise UsageError(f"unknown network '{package}/{name}': {hint}")


def _make_timm(origin: Origin) -> nn.Module:
    timm = _import("timm")
    name = origin["spec"].removeprefix("timm/")
    if not timm.is_model(name):
        _check_name(name, timm.list_models(), "timm")
    fixed = getattr(timm.get_pretrained_cfg(name), "fixed_input_size", False)
    options = {"img_size": origin["image_size"]} if fixed and origin["image_size"] else {}
    return timm.create_model(name, pretrained=False, num_classes=origin["n_classes"], **options)


def _read_timm(spec: str, module: nn.Module) -> Preprocessing:
    settings: Mapping[str, Any] = dict(getattr(module, "pretrained_cfg", None) or {})
    fits: dict[str, Fit] = {"center": "crop", "squash": "stretch", "border": "pad"}
    size = settings["input_size"][-1] if "input_size" in settings else None
    return Preprocessing(settings.get("mean"), settings.get("std"), size, fits.get(settings.get("crop_mode", "")))


def _make_torchvision(origin: Origin) -> nn.Module:
    models = import_torchvision().models
    name = origin["spec"].removeprefix("torchvision/")
    _check_name(name, models.list_models(module=models), "torchvision")
    options: dict[str, Any] = {}
    if name.startswith("vit_") and origin["image_size"]:
        options["image_size"] = origin["image_size"]
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # their own takes minutes, and weights follow
    return models.get_model(name, weights=None, num_classes=origin["n_classes"], **options)


def _read_torchvision(spec: str, module: nn.Module) -> Preprocessing:
    models = import_torchvision().models
    settings = models.get_model_weights(spec.removeprefix("torchvision/")).DEFAULT.transforms()
    return Preprocessing(settings.mean, settings.std, settings.crop_size[0], "crop")


def _make_python(origin: Origin) -> nn.Module:
    spec = origin["spec"]
    name, _, function = spec.removeprefix("python:").partition(":")
    if not name or not function:
        raise UsageError(f"'{spec}' names no function: write python:package.module:function")
    with _current_folder_importable():
        try:
            make = getattr(import_module(name), function)
        except ImportError as error:
            raise UsageError(
                f"'{spec}' cannot be imported ({error}): start the command in the folder of the module, or install it"
            ) from None
        except AttributeError:
            raise UsageError(f"the module '{name}' has no function '{function}': check '{spec}'") from None
        try:
            module = make()
        except Exception as error:  # whatever a stranger's function raises
            raise UsageError(f"'{spec}' failed ({type(error).__name__}: {error}): call it in Python first") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"'{spec}' returned {type(module).__name__}: let it return a torch.nn.Module")
    return module


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """While it lasts, modules in the current folder can be imported, after all others."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _load_huggingface(folder: Path) -> tuple[nn.Module, Preprocessing, Origin]:
    """The network of a folder, what it says about images, and what it takes to build it again."""
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"'{folder}' holds no network: expected config.json and safetensors, as save_pretrained writes"
        )
    transformers = _import("transformers")
    config = _without_code(_read_json(folder / "config.json"))
    with _silent():
        try:
            module, found = transformers.AutoModelForImageClassification.from_pretrained(
                str(folder),
                config=_huggingface_config(config),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"'{folder}' cannot be opened as an image classifier ({reason})") from None
    missing = sorted(str(key) for part in ("missing_keys", "mismatched_keys") for key in found[part])
    if missing:
        raise UsageError(f"'{folder}' lacks {missing[0]}: train its classifier first, then save it again")
    names = [str(module.config.id2label[i]) for i in range(module.config.num_labels)]
    return module.float(), _read_huggingface(folder, config), {"config": config, "class_names": names}


def _make_huggingface(origin: Origin) -> nn.Module:
    config = _huggingface_config(origin["config"])
    return _import("transformers").AutoModelForImageClassification.from_config(config, trust_remote_code=False).float()


def _huggingface_config(settings: Mapping[str, Any]) -> Any:
    plain = _without_code(settings)
    if "model_type" not in plain:
        raise ValueError("its config.json names no model_type")
    return _import("transformers").AutoConfig.for_model(plain.pop("model_type"), **plain)


def _without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, and those inside it, without what could fetch or run code: modules and kernels of others.

    >>> _without_code({"model_type": "vit", "auto_map": {"AutoModel": "theirs.Net"}, "inner": {"auto_map": {}}})
    {'model_type': 'vit', 'inner': {}}
    """
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in FOREIGN_KEYS
    }


def _read_huggingface(folder: Path, config: Mapping[str, Any]) -> Preprocessing:
    """Mean, deviation and size of the image processor, where there is one; sizes also of the network itself."""
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return Preprocessing(size=_side(config.get("image_size")))
    settings = _read_json(path)
    wanted, cropped = settings.get("size"), settings.get("do_center_crop", False) and "crop_size" in settings
    keeps_shape = cropped or (isinstance(wanted, Mapping) and "shortest_edge" in wanted)
    mean, std = (0.0,) * 3, (1.0,) * 3
    if settings.get("do_normalize", True) and "image_mean" in settings and "image_std" in settings:
        mean, std = settings["image_mean"], settings["image_std"]
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    scale = 255 * factor  # of images in [0, 1], before mean and deviation
    return Preprocessing(
        [value / scale for value in mean],
        [value / scale for value in std],
        _side(settings["crop_size"] if cropped else wanted) or _side(config.get("image_size")),
        "crop" if keeps_shape else "stretch",
    )


def _side(size: Any) -> int | None:
    """One side of an image size in any of the forms that Hugging Face writes.

    >>> _side(224), _side({"height": 96, "width": 96}), _side({"shortest_edge": 256}), _side(None)
    (224, 96, 256, None)
    """
    if isinstance(size, Mapping):
        size = size.get("height", size.get("shortest_edge"))
    if isinstance(size, list | tuple) and size:
        size = size[0]
    return size if isinstance(size, int) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"larger than {MAX_CONFIG_BYTES // 10**6} MB")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read '{path}' ({error}): save the model again with save_pretrained") from None
    return value if isinstance(value, dict) else {}


@contextmanager
def _silent() -> Iterator[None]:
    """Without the bars and remarks of transformers; what matters in them is an error here."""
    log = import_module("transformers.utils.logging")
    level, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bar:
            log.enable_progress_bar()


_MAKERS: dict[str, Callable[[Origin], nn.Module]] = {
    "timm": _make_timm,
    "torchvision": _make_torchvision,
    "python": _make_python,
    "huggingface": _make_huggingface,
}
_READERS: dict[str, Callable[[str, nn.Module], Preprocessing]] = {
    "timm": _read_timm,
    "torchvision": _read_torchvision,
    "python": _read_timm,  # which it may well be
}


# --- graphs: TorchScript and torch.export -----------------------------------------------------------------------------


class Graph(nn.Module):
    """A network that was compiled: its parameters can be seen, its layers cannot, and it has no modes.

    It stays in evaluation mode, in which exported graphs were made.
    """

    def __init__(self, graph: nn.Module) -> None:
        super().__init__()
        self.graph = graph

    def train(self, mode: bool = True) -> Graph:
        self.training = mode
        return self

    def forward(self, x: Tensor) -> Any:
        return self.graph(x)


def _load_graph(origin: Origin) -> Graph:
    path = Path(origin["file"])
    if not path.is_file():
        raise UsageError(f"there is no file '{path}', which holds the network: put it back")
    try:
        if origin["kind"] == "export":
            return Graph(torch.export.load(path).module())
        return Graph(torch.jit.load(path, map_location="cpu").eval())
    except Exception as error:  # of a parser, a compiler or an older format
        reason = " ".join(str(error).split())
        raise UsageError(f"cannot read the network '{path}' ({reason}): save it again with this torch") from None


def _open_graph(origin: Origin, head: str | None, wanted: Preprocessing) -> Backbone:
    """A compiled network as a backbone.

    Hooks do not reach into a graph. But what a linear layer sees comes out of it once its weight is the identity and
    its bias 0: the head is the layer for which head(what comes out then) is what came out before.
    """
    graph = _load_graph(origin)
    check_dtype(graph)
    mean, std = wanted.mean or (0.0,) * 3, wanted.std or (1.0,) * 3
    size = wanted.size or _static_size(graph, origin["spec"])
    with evaluating(graph):
        x, _, output = run_example(graph, {}, None, size, mean, std)
    name, path = _find_graph_head(graph, origin["spec"], head, x, dict(leaves(output)))
    body, layer = _split_graph(graph, name, path)
    backbone = Backbone(body, layer, embedding_size=layer.in_features, mean=mean, std=std, size=size)
    found = {"head": name, "path": list(path), "embedding_size": layer.in_features, "size": size, "shallow": None}
    backbone.origin = origin | found | {"fit": None}
    return backbone


def _static_size(graph: Graph, spec: str) -> int | None:
    """The side of the images that an exported graph was made for, where that is fixed."""
    if not isinstance(graph.graph, torch.fx.GraphModule):
        return None
    image = next(node for node in graph.graph.graph.nodes if node.op == "placeholder")
    shape: Sequence[Any] = image.meta["val"].shape
    if shape and isinstance(shape[0], int):
        raise UsageError(
            f"'{spec}' was exported for {shape[0]} images at a time: export it for any number, with "
            "dynamic_shapes=({0: torch.export.Dim('n')},)"
        )
    return shape[2] if len(shape) == 4 and isinstance(shape[2], int) else None


def _find_graph_head(
    graph: Graph, spec: str, head: str | None, x: Tensor, logits: Mapping[tuple[Any, ...], Tensor]
) -> tuple[str, tuple[Any, ...]]:
    """The name of the linear layer that gives an entry of the output, and the way to that entry."""
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
        raise UsageError(
            f"no linear layer gives the output of '{spec}': save it before it is frozen, with logits as its output (no "
            "softmax), or open the module by python:"
        )
    return next(iter(found.items()))


def _see_through(graph: Graph, name: str, x: Tensor) -> tuple[nn.Linear, dict[tuple[Any, ...], Tensor]]:
    """A linear layer, and what the graph gives while that layer is the identity; nothing where others refuse that."""
    before = {key: parameter.data for key, parameter in _parameters_of(graph, name).items()}
    layer = _make_identity(graph, name)
    try:
        with evaluating(graph):
            return layer, dict(leaves(graph(x)))
    except Exception:  # the layer is no head: those behind it do not take what it saw
        return layer, {}
    finally:
        for key, parameter in _parameters_of(graph, name).items():
            parameter.data = before[key]


def _parameters_of(graph: Graph, name: str) -> dict[str, nn.Parameter]:
    """Weight and, where it has one, bias of a linear layer."""
    wanted = {f"{name}.weight": "weight", f"{name}.bias": "bias"}
    return {wanted[key]: parameter for key, parameter in graph.graph.named_parameters() if key in wanted}


def _make_identity(graph: Graph, name: str) -> nn.Linear:
    """Let a linear layer of the graph pass on what it sees; returns the layer as it was."""
    parameters = _parameters_of(graph, name)
    n_out, n_in = parameters["weight"].shape
    layer = nn.Linear(n_in, n_out, bias="bias" in parameters)
    layer.load_state_dict({key: parameter.data for key, parameter in parameters.items()})
    for key, parameter in parameters.items():
        parameter.data = torch.eye(n_in) if key == "weight" else torch.zeros(n_in)
    return layer


def _split_graph(graph: Graph, head: str, path: Sequence[Any]) -> tuple[nn.Module, nn.Linear]:
    """The graph with its head turned into the identity, which is not to be trained, and the head."""
    layer = _make_identity(graph, head)
    for parameter in _parameters_of(graph, head).values():
        parameter.requires_grad_(False)
    return (Pick(graph, tuple(path)) if path else graph), layer


# --- ONNX -------------------------------------------------------------------------------------------------------------


class OnnxGraph(nn.Module):
    """Some outputs of an ONNX graph, computed by onnxruntime on the CPU."""

    def __init__(self, session: Any, outputs: Sequence[str]) -> None:
        super().__init__()
        self.session, self.outputs = session, list(outputs)
        self.input = session.get_inputs()[0]
        self.batch = self.input.shape[0] if isinstance(self.input.shape[0], int) else None  # images that it takes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        images = x.detach().cpu().numpy().astype(np.float32)
        step = self.batch or max(len(images), 1)
        parts = [
            self.session.run(self.outputs, {self.input.name: images[start : start + step]})
            for start in range(0, len(images), step)
        ]
        return tuple(torch.from_numpy(np.concatenate(column)) for column in zip(*parts))


class OnnxHead(nn.Module):
    """Stands for the head of an ONNX graph, which cannot be computed apart from it."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.out_features = n_outputs

    def forward(self, embedding: Tensor) -> Tensor:
        if len(embedding):
            raise UsageError(
                "the head of an ONNX network cannot be computed alone: open the network in PyTorch for this"
            )
        return embedding.new_zeros(0, self.out_features)


class OnnxBackbone(Backbone):
    """A backbone whose embedding and logits come from one run of an ONNX graph."""

    def embed(self, x: Tensor) -> Tensor:
        return self.body(normalise(x, self.mean, self.std))[0].float()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.head is None:
            return super().forward(x)
        embedding, logits = self.body(normalise(x, self.mean, self.std))
        return embedding.float(), logits.float()


def _open_onnx(origin: Origin, embedding: str | None, wanted: Preprocessing, drop_head: bool) -> Backbone:
    """An ONNX classifier as a backbone; ``embedding`` names a tensor of the graph, ``None`` lets it be found."""
    runtime, spec = _import("onnxruntime"), origin["spec"]
    model = _read_onnx(Path(origin["file"]), spec)
    names = _onnx_outputs(model.graph, embedding, drop_head, spec)
    session = _start_session(runtime, model, Path(origin["file"]), names, spec)
    inputs = session.get_inputs()
    shape = inputs[0].shape if len(inputs) == 1 else []
    any_number_or_one = len(shape) == 4 and (not isinstance(shape[0], int) or shape[0] == 1)
    if not any_number_or_one or shape[1] != 3 or inputs[0].type != "tensor(float)":
        taken = ", ".join(f"{one.type} {one.shape}" for one in inputs) or "no input"
        raise UsageError(
            f"'{spec}' takes {taken}: export it for images (N, 3, H, W) in float32, with N any number or 1"
        )
    graph = OnnxGraph(session, names)
    size = wanted.size or (shape[2] if isinstance(shape[2], int) else None)
    mean, std = wanted.mean or (0.0,) * 3, wanted.std or (1.0,) * 3
    _, _, found = run_example(graph, {}, None, size, mean, std)
    if any(part.ndim != 2 for part in found):
        given = {name: tuple(part.shape) for name, part in zip(names, found)}
        raise UsageError(f"'{spec}' gives {given}: embedding and logits must be one vector per image")
    if len(names) == 2 and same_values(found[1].sum(1), torch.ones(len(found[1]))) and (found[1] >= 0).all():
        raise UsageError(
            f"'{names[1]}' of '{spec}' are probabilities: export it without its softmax, or add --drop-head"
        )
    head = OnnxHead(found[1].shape[1]) if len(names) == 2 else None
    backbone = OnnxBackbone(graph, head, embedding_size=found[0].shape[1], mean=mean, std=std, name=spec, size=size)
    outputs = {"embedding": names[0], "logits": names[1] if len(names) == 2 else None}
    backbone.origin = origin | outputs | {"size": size, "fit": None}
    return backbone


def _read_onnx(path: Path, spec: str) -> Any:
    """The graph in a file, without tensors that lie beside it: these must be where a run takes them along from."""
    onnx = _import("onnx")
    try:
        model = onnx.load(path, load_external_data=False)
    except Exception as error:  # of a parser
        raise UsageError(f"cannot read the network '{spec}' ({' '.join(str(error).split())})") from None
    if not model.graph.output:
        raise UsageError(f"'{spec}' has no outputs: it is empty, or holds no network; export it again")
    tensors = [tensor for tensor in _all_tensors(model) if tensor.data_location == onnx.TensorProto.EXTERNAL]
    beside = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    if strange := sorted(beside - {f"{path.name}.data"}):
        raise UsageError(
            f"'{spec}' has its tensors in '{strange[0]}': write them into the file itself, onnx.save(onnx.load(PATH), "
            f"PATH), or beside it, into '{path.name}.data'"
        )
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
    """A session of onnxruntime in which all ``names`` are outputs, also those that are not in the file."""
    onnx = _import("onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3  # errors alone
    hidden = [name for name in names if name not in {output.name for output in model.graph.output}]
    try:
        source: str | bytes = str(path)
        if hidden:
            onnx.load_external_data_for_model(model, str(path.parent))
            model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in hidden)
            source = model.SerializeToString()
        return runtime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime's own types
        raise UsageError(f"cannot read the network '{spec}' ({' '.join(str(error).split())})") from None


def _onnx_outputs(graph: Any, embedding: str | None, drop_head: bool, spec: str) -> list[str]:
    """The tensors with the embedding and, unless it is not wanted or not there, the logits."""
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
            f"no linear layer gives '{others[0]}' of '{spec}': export it with logits as its output (no softmax), or "
            "name the tensor with the embedding, --head NAME"
        )
    return [named, *([] if drop_head else others)]


def _head_input(made_by: Mapping[str, Any], logits: str) -> str | None:
    """What the linear layer sees that gives the logits: Gemm, or MatMul and the sum with a bias."""
    node = made_by.get(logits)
    if node is not None and node.op_type == "Add":
        node = next((made_by[name] for name in node.input if name in made_by), None)
    return node.input[0] if node is not None and node.op_type in ("Gemm", "MatMul") else None
