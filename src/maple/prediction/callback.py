"""A callback for Lightning: a :class:`~maple.prediction.own_loop.Relabeller` that the Trainer calls.

``MapleCallback`` is created on first use from :class:`MapleHooks` and the ``Callback`` of ``pytorch_lightning`` or
``lightning``, so this module can be imported without them.
``examples/lightning_callback.py`` is a complete program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import numpy as np
import torch

from maple.data.image_set import ImageSet
from maple.errors import UsageError
from maple.networks import Backbone
from maple.networks._torchvision import import_torchvision
from maple.prediction.own_loop import EpochEnd, Relabeller, check_cluster_head, require_head, resize_head
from maple.prediction.predictor import Predictor
from maple.training.head import optimizes
from maple.training.recipe import Recipe

PACKAGES = {"pytorch_lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}  # module with Callback


class MapleHooks:
    """Hooks of ``maple.MapleCallback`` for Lightning: pseudo-labels, splits between epochs, and the fit.

    The ``LightningModule`` has a :class:`~maple.networks.Backbone` in its attribute ``backbone`` (or another name that
    is given), and its batches are (x, label, index), as :class:`~maple.prediction.own_loop.Indexed` makes them. Its
    ``training_step`` gets batches with pseudo-labels in place of labels; the batches of the loader are not changed.
    ``callback.session.loss(backbone, x, label)`` is the loss of the recipe.

    ``train`` are the training images without augmentation, in the order of the indices. ``history`` has one entry per
    epoch; after the training ``predictor`` is fitted on ``train``, ``validation`` and ``calibration``. Checkpoints of
    Lightning contain the clusters: a training resumes from them with a head of the right size. A second ``trainer.fit``
    with the same module continues as well; another module starts a new training.
    """

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
        self._hooked: WeakSet[Backbone] = WeakSet()  # those whose head is resized before weights are loaded
        self._network: Backbone | None = None  # the network of the session
        self._session: Relabeller | None = None
        self._predictor: Predictor | None = None
        self._restored: dict[str, Any] | None = None
        self._earlier: int | None = None  # epochs of earlier Trainers; None if not known yet
        self._replaced = ExitStack()  # restores the training_step of the module

    @property
    def session(self) -> Relabeller:
        """The relabelling of the trained network."""
        if self._session is None:
            raise UsageError("MapleCallback has no session before the training: call trainer.fit first")
        return self._session

    @property
    def predictor(self) -> Predictor:
        """The predictor of the network; fitted on first use if the training did not end normally."""
        if self._predictor is None:
            session = self.session
            assert self._network is not None
            images = (self.train, self.validation, self.calibration)
            self._predictor = session.fit(self._network, *images, workers=self.workers)
        return self._predictor

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._restored = None
        if stage == "fit":
            if trainer.world_size > 1:
                raise UsageError("MapleCallback needs one process: give the Trainer devices=1, or use train_backbone")
            if not trainer.max_epochs or trainer.max_epochs < 1:
                raise UsageError("MapleCallback needs the length of the training: give the Trainer max_epochs")
        backbone = self._find_backbone(pl_module)
        if backbone not in self._hooked:
            backbone.register_load_state_dict_pre_hook(_fit_head_to_state)
            self._hooked.add(backbone)
        if stage == "fit":
            self._turn_to(backbone)
            if self._session is None:
                self._session, self._earlier = self._make_session(trainer.max_epochs), 0
            elif not np.array_equal(self._session.class_labels, self.train.labels):
                remedy = "create a new MapleCallback, and a module with one output per class"
                raise UsageError(f"this network was trained on other images before: {remedy}")
            else:
                self._earlier = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._restore(pl_module)
        check_cluster_head(self._network, self.session.n_clusters)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._restore(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Continue the count of epochs in a second ``trainer.fit``, and replace labels by pseudo-labels."""
        session, self._predictor = self.session, None
        if self._earlier is None:
            self._earlier = session.epoch - trainer.current_epoch
        session.epochs = self._earlier + trainer.max_epochs
        self._replaced.enter_context(_changing_batches(pl_module, self._relabel_batch))

    def _relabel_batch(self, batch: Any) -> Any:
        """A batch with pseudo-labels in place of labels; the tensors of the given batch are not changed."""
        if not isinstance(batch, tuple | list) or len(batch) != 3 or not isinstance(batch[1], torch.Tensor):
            raise UsageError("batches must be (x, label, index): give DataLoader maple.Indexed(images)")
        x, labels, index = batch
        parts = (x, self.session.labels[index.cpu()].to(labels.device), index)
        make: Callable[[Any], Any] = getattr(batch, "_make", type(batch))  # a named tuple, a tuple or a list
        return make(parts)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        backbone = self._find_backbone(pl_module)
        assert backbone.head is not None and self._earlier is not None
        known = [optimizer for optimizer in trainer.optimizers if optimizes(optimizer, backbone.head)]
        epoch, optimizer = self._earlier + trainer.current_epoch + 1, (known or trainer.optimizers)[0]
        images = (self.train, self.validation)
        found = self.session.end_epoch(epoch, backbone, *images, optimizer, workers=self.workers)
        self.history.append(found)
        pl_module.log("maple_validation_accuracy", found.validation_accuracy)
        pl_module.log("maple_clusters", float(found.n_clusters))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._replaced.close()
        self._predictor = None
        self._predictor = self.predictor

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._replaced.close()

    def state_dict(self) -> dict[str, Any]:
        if self._session is None:
            return {}
        return {**self._session.state_dict(), "epochs": self._session.epochs, "earlier": self._earlier or 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict)

    def _turn_to(self, backbone: Backbone) -> None:
        """Start a new history if the network is another one."""
        if backbone is not self._network:
            self._network, self._session, self._predictor, self.history = backbone, None, None, []

    def _restore(self, pl_module: Any) -> None:
        """Load the clusters of a checkpoint; its weights are already in the network, with a head of their size."""
        if self._restored is None:
            return
        backbone = self._find_backbone(pl_module)
        self._turn_to(backbone)
        state, self._restored = self._restored, None
        epochs, self._earlier = state.pop("epochs", 1), state.pop("earlier", 0)
        session = self._session or self._make_session(epochs)
        session.load_state_dict(state, backbone)
        self._session, self._predictor = session, None

    def _make_session(self, epochs: int) -> Relabeller:
        names = self.train.class_names
        return Relabeller(self.recipe, self.train.labels, len(names), epochs=epochs, seed=self.seed, class_names=names)

    def _find_backbone(self, pl_module: Any) -> Backbone:
        backbone = getattr(pl_module, self.backbone, None)
        if not isinstance(backbone, Backbone):
            remedy = "set it to maple.wrap_backbone(model), or give MapleCallback backbone=NAME"
            raise UsageError(f"the LightningModule has no Backbone in its attribute '{self.backbone}': {remedy}")
        require_head(backbone)
        return backbone


@contextmanager
def _changing_batches(module: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Pass changed batches to the ``training_step`` of a module; restores it on exit."""
    own = module.training_step
    replaced = vars(module).get("training_step")  # set if it is wrapped already, as in compiled modules

    @wraps(own)  # Lightning reads its signature
    def training_step(batch: Any, *arguments: Any, **named: Any) -> Any:
        return own(change(batch), *arguments, **named)

    module.training_step = training_step
    try:
        yield
    finally:
        if replaced is None:
            del module.training_step
        else:
            module.training_step = replaced


def _fit_head_to_state(backbone: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before weights are loaded, resize the head of the backbone to them."""
    weight = state_dict.get(f"{prefix}head.weight")
    if weight is not None:
        resize_head(backbone, len(weight))


@cache
def _make_callback() -> type:
    """A subclass of Lightning's ``Callback`` with these hooks; of the imported package if two are installed."""
    there = [name for name in PACKAGES if name in sys.modules] or [name for name in PACKAGES if find_spec(name)]
    if not there:
        raise UsageError("MapleCallback needs Lightning: pip install 'maple-uncertainty[lightning]'")
    if find_spec("torchvision") is not None:
        import_torchvision()  # Lightning's metrics import it
    base = import_module(PACKAGES[there[0]]).Callback
    return type("MapleCallback", (MapleHooks, base), {"__doc__": MapleHooks.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    if name == "MapleCallback":
        return _make_callback()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
