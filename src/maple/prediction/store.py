"""Predictors and networks in a run folder: ``weights.safetensors`` and ``detector.safetensors``, never pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from maple.data.decode import MAX_SIZE
from maple.decisions.calibration import Calibration
from maple.decisions.options import DecisionOptions
from maple.decisions.probability import Probability
from maple.detectors.base import pack_records
from maple.detectors.maple import MapleDetector
from maple.errors import RunError, UsageError, check_integer
from maple.files import (
    RunFile,
    check_finished,
    load_arrays,
    naming_damage,
    save_arrays,
    without_paths,
    write_atomic,
)
from maple.networks import Backbone, MadeBy, Origin, create_backbone, rebuild_model
from maple.networks.limit import WeightLimit
from maple.options import as_dict, build_options
from maple.prediction.manifest import check_digest, write_manifest
from maple.prediction.predictor import Predictor
from maple.stats.arrays import with_prefix
from maple.training.recipe import find_recipe

_SPARE, _MANY = 4, 10**7  # a network may be made with so many times the weights of its file, and so many beside them


def save_predictor(folder: Path, predictor: Predictor) -> None:
    """Write weights, detector and their manifest into a run folder; a kill in between leaves a run without manifest."""
    (folder / RunFile.MANIFEST).unlink(missing_ok=True)
    save_backbone(folder / RunFile.WEIGHTS, predictor.backbone)
    arrays, state = predictor.detector.get_state()
    metadata = {
        "detector": state,
        "class_names": list(predictor.class_names),
        "size": predictor.size,
        "fit": predictor.fit,
        **predictor.probability.to_dict(),
        "options": as_dict(predictor.options),
        "decision": predictor.decision.describe(),
    }
    save_arrays(folder / RunFile.DETECTOR, arrays | pack_records({"calibration": predictor.calibration}), metadata)
    write_manifest(folder)


def load_predictor(folder: str | Path, *, trust: bool = False) -> Predictor:
    """The predictor of a finished run.

    ``trust`` allows a network that runs code: see :mod:`maple.networks.hub`.
    """
    folder = Path(folder)
    check_finished(folder)
    check_digest(folder / RunFile.DETECTOR, folder)
    arrays, metadata = load_arrays(folder / RunFile.DETECTOR)
    backbone = load_backbone(folder / RunFile.WEIGHTS, trust=trust)
    with naming_damage(folder / RunFile.DETECTOR):
        detector = MapleDetector.from_state(arrays, metadata["detector"])
        _check_match(backbone, detector, folder)
        return Predictor(
            backbone,
            detector,
            tuple(metadata["class_names"]),
            size=check_integer("size", metadata["size"], 1, MAX_SIZE),
            fit=metadata["fit"],
            probability=Probability.from_dict(metadata),
            calibration=Calibration.from_arrays(with_prefix(arrays, "calibration.")),
            options=build_options(DecisionOptions, metadata["options"], f"'{folder / RunFile.DETECTOR}'"),
        )


def _check_match(backbone: Backbone, detector: MapleDetector, folder: Path) -> None:
    """Refuse weights of another run, of another shape: runs of earlier versions have no manifest."""
    learned = detector.learned_
    n_outputs = backbone.head.out_features if isinstance(backbone.head, nn.Linear) else learned.n_columns
    dim, n_clusters = learned.densities.gaussians.dim, len(detector.cluster_to_class_)
    if backbone.embedding_size != dim or n_outputs not in (learned.n_columns, n_clusters):
        weights = f"'{folder / RunFile.WEIGHTS}' ({backbone.embedding_size} dimensions, {n_outputs} outputs)"
        raise RunError(
            f"{weights} and '{folder / RunFile.DETECTOR}' ({dim} dimensions, {n_clusters} clusters) are not of the "
            "same run: restore both from a copy, or fit the network again with maple fit"
        )


def save_backbone(path: Path, backbone: Backbone) -> None:
    """Write the weights and a description that rebuilds the network; a network that is a file is copied beside them."""
    asked = None if isinstance(backbone.embedding_layer, nn.Identity) else backbone.embedding_size
    n_outputs = backbone.head.out_features if isinstance(backbone.head, nn.Linear) else 0
    metadata: dict[str, Any] = {
        "backbone": backbone.name,
        "n_outputs": n_outputs,
        "embedding_size": asked,
        "branch": backbone.branch,
        "made_by": None if backbone.made_by is None else backbone.made_by.to_dict(),
        "origin": None if backbone.origin is None else backbone.origin.to_dict(),
    }
    state = backbone.state_dict()
    if not _can_rebuild(state, metadata):
        raise RunError(
            f"a run cannot hold network '{backbone.name}', not made by create_backbone or open_model: open it with "
            "open_model('python:package.module:function'), or save its weights and call fit_predictor again"
        )
    if backbone.origin is not None and backbone.origin.file is not None:
        metadata["origin"]["file"] = _copy_network(Path(backbone.origin.file), path.parent)
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in state.items()}
    save_arrays(path, arrays, without_paths(metadata))


def _copy_network(file: Path, folder: Path) -> str:
    """Copy a network that is a file, and the tensors that ONNX may keep beside it, into a run; the name of the file."""
    for source in (file, file.with_name(f"{file.name}.data")):
        target = folder / RunFile.NETWORK / source.name
        if source.is_file() and source != target.resolve():
            write_atomic(target, source.read_bytes())
    return file.name


def _can_rebuild(state: dict[str, torch.Tensor], metadata: dict[str, Any]) -> bool:
    """Whether a network made anew from ``metadata`` has the same tensors."""
    shapes = {name: tensor.shape for name, tensor in state.items()}
    try:
        with torch.random.fork_rng(devices=[]):
            again = _new_backbone(metadata, shapes, trust=True).state_dict()  # this process has opened it before
    except UsageError:
        return False
    return shapes == {name: tensor.shape for name, tensor in again.items()}


def _new_backbone(metadata: dict[str, Any], shapes: Mapping[str, Sequence[int]], trust: bool) -> Backbone:
    """A network of the same layers, with random weights; ``shapes`` are those of its tensors."""
    maker = MadeBy.from_dict(metadata["made_by"]) if metadata.get("made_by") else None
    n_outputs, size, branch = metadata["n_outputs"], metadata["embedding_size"], metadata.get("branch", False)
    if maker is not None:
        n_outputs, size = maker.n_outputs, maker.embedding_size or size
    if metadata.get("origin"):
        backbone = rebuild_model(Origin.from_dict(metadata["origin"]), shapes, trust=trust)
    else:
        has_head = any(name.startswith("head.") for name in shapes)
        name, n_first = metadata["backbone"], n_outputs if has_head else 1
        backbone = create_backbone(name, n_first, embedding_size=size, branch=branch)
        backbone.head = backbone.head if has_head else None
    if maker is None:
        return backbone
    recipe = find_recipe(maker.recipe, maker.plugin).create(maker.options, f"options of recipe '{maker.recipe}'")
    if recipe.own_head or getattr(backbone.head, "out_features", None) != n_outputs:
        backbone.head = recipe.build_head(backbone.head_size, n_outputs)
    backbone.made_by = maker
    return recipe.rebuild(backbone)


def load_backbone(path: Path, *, trust: bool = False) -> Backbone:
    """The network that :func:`save_backbone` wrote; ``trust`` as for :func:`load_predictor`."""
    if path.name == RunFile.WEIGHTS:
        check_digest(path, path.parent)
    arrays, metadata = load_arrays(path)
    with naming_damage(path, let=UsageError):  # a plug-in or --trust is missing
        origin = metadata.get("origin") or {}
        if "file" in origin:
            network = path.parent / RunFile.NETWORK / Path(origin["file"]).name
            for file in (network, network.with_name(f"{network.name}.data")):
                check_digest(file, path.parent)
            origin["file"] = str(network.resolve())
        most = _SPARE * sum(array.size for array in arrays.values()) + _MANY
        with nullcontext() if trust else WeightLimit(most):  # a small file may describe a network that takes all memory
            backbone = _new_backbone(metadata, {name: array.shape for name, array in arrays.items()}, trust)
    try:
        backbone.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
    except RuntimeError as error:
        raise RunError(f"'{path}' does not fit the backbone '{metadata['backbone']}': {error}") from None
    return backbone.eval()
