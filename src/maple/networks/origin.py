"""Records of how a backbone was made, stored with its weights, from which the same layers are built again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from maple.data.decode import Fit

Kind = Literal["timm", "torchvision", "huggingface", "torchscript", "export", "onnx", "python"]

_FOUND = ("head", "path")
_LAYERS = (*_FOUND, "embedding_size", "size", "shallow", "fit")
_KEYS: dict[Kind | None, tuple[str, ...]] = {  # fields that each kind stores, in order
    None: _FOUND,
    "timm": ("kind", "spec", "n_classes", "image_size", *_LAYERS),
    "torchvision": ("kind", "spec", "n_classes", "image_size", *_LAYERS),
    "huggingface": ("kind", "spec", "config", "class_names", *_LAYERS),
    "python": ("kind", "spec", *_LAYERS),
    "torchscript": ("kind", "spec", "file", *_LAYERS),
    "export": ("kind", "spec", "file", *_LAYERS),
    "onnx": ("kind", "spec", "file", "embedding", "logits", "size", "fit"),
}


@dataclass(frozen=True)
class Origin:
    """Where the layers of a network opened by ``open_model`` or wrapped by ``wrap_backbone`` come from.

    >>> origin = Origin(head="fc", path=("logits",))
    >>> origin.to_dict()
    {'head': 'fc', 'path': ['logits']}
    >>> Origin.from_dict(origin.to_dict()) == origin
    True
    """

    kind: Kind | None = None  # None: wrapped in Python, which only Python can build again
    spec: str = ""  # as given to open_model
    file: str | None = None  # of TorchScript, torch.export and ONNX networks
    n_classes: int | None = None
    image_size: int | None = None  # requested, for architectures whose layers depend on it
    config: Mapping[str, Any] = field(default_factory=dict)  # of Hugging Face
    class_names: tuple[str, ...] = ()
    head: str | None = None  # name of the linear layer that gives the logits; None in a Backbone made in Python
    path: tuple[Any, ...] = ()  # keys that lead to the logits in the output of the module
    embedding: str | None = None  # tensors of an ONNX graph
    logits: str | None = None
    embedding_size: int = 0
    size: int | None = None  # side of its images in pixels
    shallow: str | None = None
    fit: Fit | None = None  # how its images are made square

    def to_dict(self) -> dict[str, Any]:
        """The fields of this kind as plain JSON."""
        values = {key: getattr(self, key) for key in _KEYS[self.kind]}
        if self.head is None:  # a Backbone, whose head was not searched for
            values = {key: value for key, value in values.items() if key not in _FOUND}
        return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Origin:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in stored.items()}
        return cls(**values)


@dataclass(frozen=True)
class MadeBy:
    """The recipe that made the head of a network, where it is not the linear one of ``create_backbone``."""

    recipe: str
    options: Mapping[str, Any]
    n_outputs: int
    embedding_size: int | None = None  # of a linear embedding layer inside each member of an ensemble
    plugin: str = ""  # module that registered the recipe: a record, never imported from here

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON.

        >>> MadeBy("duq", {"length_scale": 0.1}, n_outputs=10).to_dict()
        {'recipe': 'duq', 'options': {'length_scale': 0.1}, 'n_outputs': 10}
        """
        return {key: value for key, value in asdict(self).items() if value is not None and value != ""}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> MadeBy:
        return cls(**stored)
