"""Folders that Hugging Face's ``save_pretrained`` wrote: image classification, safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import nn

from maple.errors import UsageError
from maple.files import RunFile, expand_home
from maple.networks._torchvision import import_extra
from maple.networks.backbone import Preprocessing
from maple.networks.origin import Origin

MAX_CONFIG_BYTES = 10**6
FOREIGN_KEYS = {  # of a configuration: they name code to load, or files elsewhere
    "_name_or_path",
    "attn_implementation",
    "_attn_implementation",
    "_attn_implementation_internal",
    "auto_map",
    "experts_implementation",
    "_experts_implementation",
    "quantization_config",
}


def load(origin: Origin) -> tuple[nn.Module, Preprocessing, Origin]:
    """The trained network, its preprocessing, and the origin with its configuration and class names."""
    folder = expand_home(origin.spec)
    if not (folder / "config.json").is_file():
        if (folder / RunFile.CONFIG).is_file():
            raise UsageError(f"'{folder}' is a run: train on from its network with maple train DATA --init '{folder}'")
        raise UsageError(f"'{folder}' lacks config.json and safetensors: write them with save_pretrained")
    transformers = import_extra("transformers")
    config = _without_code(_read_json(folder / "config.json"))
    with _silent():
        try:
            module, found = transformers.AutoModelForImageClassification.from_pretrained(
                str(folder),
                config=_make_config(config),
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
    names = tuple(str(module.config.id2label[i]) for i in range(module.config.num_labels))
    return module.float(), _read_preprocessing(folder, config), replace(origin, config=config, class_names=names)


def make(origin: Origin) -> nn.Module:
    """The architecture with random weights."""
    factory = import_extra("transformers").AutoModelForImageClassification
    return factory.from_config(_make_config(origin.config), trust_remote_code=False).float()


def _make_config(settings: Mapping[str, Any]) -> Any:
    plain = _without_code(settings)
    if "model_type" not in plain:
        raise ValueError("its config.json names no model_type")
    return import_extra("transformers").AutoConfig.for_model(plain.pop("model_type"), **plain)


def _without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration, also nested ones, without keys that could fetch or run code.

    >>> _without_code({"model_type": "vit", "auto_map": {"AutoModel": "theirs.Net"}, "inner": {"auto_map": {}}})
    {'model_type': 'vit', 'inner': {}}
    """
    return {
        key: _without_code(value) if isinstance(value, Mapping) else value
        for key, value in settings.items()
        if key not in FOREIGN_KEYS
    }


def _read_preprocessing(folder: Path, config: Mapping[str, Any]) -> Preprocessing:
    """From preprocessor_config.json if there is one; the size also from the configuration of the network."""
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
    scale = 255 * factor  # of images in [0, 1], before mean and std
    return Preprocessing(
        [value / scale for value in mean],
        [value / scale for value in std],
        _side(settings["crop_size"] if cropped else wanted) or _side(config.get("image_size")),
        "crop" if keeps_shape else "stretch",
    )


def _side(size: Any) -> int | None:
    """The side of an image size in any of the forms that Hugging Face writes.

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
    """Silence progress bars and log messages of transformers; problems that matter are raised as errors."""
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
