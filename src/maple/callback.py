"""A callback for Lightning: a :class:`~maple.own_loop.Relabeller` that the Trainer calls.

``MapleCallback`` is made when it is first asked for, of :class:`MapleHooks` and the ``Callback`` of whichever of the
packages ``pytorch_lightning`` and ``lightning`` there is, so that this module can be imported without them.
``examples/lightning_callback.py`` is a whole program.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from maple.backbone import Backbone
from maple.compat import import_torchvision
from maple.errors import UsageError
from maple.growth import knows_head
from maple.images import ImageSet
from maple.own_loop import EpochEnd, Relabeller, assert_head, resize_head
from maple.predictor import Predictor
from maple.recipe import Recipe

PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}  # and where Callback is


class MapleHooks:
    """What happens in a training by Lightning: labels of batches, splits between epochs, and the fit in the end.

    The ``LightningModule`` has a :class:`~maple.backbone.Backbone` in its attribute ``backbone`` (or as named), and its
    batches are (x, label, index), as :class:`~maple.own_loop.Indexed` makes them. Whatever its ``training_step`` does
    with labels, it now does with pseudo-labels; ``callback.session.loss(backbone, x, label)`` is the recipe's loss.

    ``train`` are the training images without augmentation, in the order of the indices. ``history`` has one entry per
    epoch, and after the training ``predictor`` is there, fitted on ``train``, ``validation`` and ``calibration``.
    Checkpoints of Lightning hold the clusters, and a training goes on from them with the head of its size.
    """

    session: Relabeller
    predictor: Predictor

    def __init__(
        self,
        recipe: Recipe,
        train: ImageSet,
        validation: ImageSet,
        calibration: ImageSet | None = None,
        *,
        backbone: str = "backbone",
        seed: int = 0,
        workers: int = 0,
    ) -> None:
        super().__init__()
        self.recipe, self.seed, self.workers = recipe, seed, workers
        self.train, self.validation, self.calibration = train, validation, calibration
        self.backbone = backbone
        self.history: list[EpochEnd] = []
        self._restored: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.world_size > 1:
            raise UsageError("MapleCallback works in one process: give the Trainer devices=1, or use train_backbone")
        if not trainer.max_epochs or trainer.max_epochs < 1:
            raise UsageError("MapleCallback has to know how long the training takes: give the Trainer max_epochs")
        backbone = self._find_backbone(pl_module)
        names = self.train.class_names
        self.session = Relabeller(
            self.recipe, self.train.labels, len(names), epochs=trainer.max_epochs, seed=self.seed, class_names=names
        )
        backbone.register_load_state_dict_pre_hook(_fit_head_to_state)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self._restored is not None:  # by now the weights, with a head of their size, are in the network
            self.session.load_state_dict(self._restored, self._find_backbone(pl_module))
            self._restored = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Put the pseudo-labels in the place of the labels of a batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 3 or not isinstance(batch[1], torch.Tensor):
            raise UsageError(
                "batches must be (x, label, index): wrap the training data, DataLoader(maple.Indexed(...))"
            )
        _, labels, index = batch
        labels.copy_(self.session.labels[index.cpu()])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        backbone = self._find_backbone(pl_module)
        assert backbone.head is not None
        known = [optimizer for optimizer in trainer.optimizers if knows_head(optimizer, backbone.head)]
        found = self.session.end_epoch(
            trainer.current_epoch + 1,
            backbone,
            self.train,
            self.validation,
            (known or trainer.optimizers)[0],
            workers=self.workers,
        )
        self.history.append(found)
        pl_module.log("maple_validation_accuracy", found.validation_accuracy)
        pl_module.log("maple_clusters", float(found.n_clusters))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        backbone = self._find_backbone(pl_module)
        images = (self.train, self.validation, self.calibration)
        self.predictor = self.session.fit(backbone, *images, workers=self.workers)

    def state_dict(self) -> dict[str, Any]:
        return self.session.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def _find_backbone(self, pl_module: Any) -> Backbone:
        backbone = getattr(pl_module, self.backbone, None)
        if not isinstance(backbone, Backbone):
            raise UsageError(
                f"the LightningModule has no backbone in its attribute '{self.backbone}': set it to "
                "maple.wrap_backbone(model), or name another with MapleCallback(..., backbone=NAME)"
            )
        assert_head(backbone)
        return backbone


def _fit_head_to_state(backbone: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before weights are loaded, give the backbone a head of the size they have."""
    weight = state_dict.get(f"{prefix}head.weight")
    if weight is not None:
        resize_head(backbone, len(weight))


@cache
def _make_callback() -> type:
    """The class of Lightning's own with these hooks; of the package that is in use, where there are two."""
    there = [name for name in PACKAGES if name in sys.modules] or [name for name in PACKAGES if find_spec(name)]
    if not there:
        raise UsageError(
            "MapleCallback needs Lightning, which is not installed: pip install 'maple-uncertainty[lightning]'"
        )
    if find_spec("torchvision") is not None:
        import_torchvision()  # which Lightning's metrics import
    base = import_module(PACKAGES[there[0]]).Callback
    return type("MapleCallback", (MapleHooks, base), {"__doc__": MapleHooks.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "MapleCallback":
        return _make_callback()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
