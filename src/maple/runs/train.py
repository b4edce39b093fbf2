"""``maple train``: train a network, fit its detector, evaluate and report."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from maple.baselines.ensemble import EnsembleRecipe
from maple.baselines.ensemble_training import train_ensemble
from maple.data.augment import parse_augment
from maple.data.image_set import channel_statistics
from maple.data.splits import Splits
from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.files import RunFile, expand_home
from maple.networks import Backbone, create_backbone
from maple.networks.options import ModelOptions
from maple.options import flag_name
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_backbone
from maple.progress import is_first_process, say, warn
from maple.runs.fit import Fitted, finish_run, fit_as, prepare_folder
from maple.runs.folder import RunFolder
from maple.runs.requests import TrainRequest
from maple.runs.setup.auto import SIZE, advertise_auto, choose_pretrained, require_pretrained
from maple.runs.setup.config import RunConfig, given_options, preset_options_unused, resolve_config
from maple.runs.setup.init import (
    Start,
    describe_network,
    follow_network,
    leave_out_unused,
    open_start,
    try_image,
    try_recipe,
    why_new_head,
)
from maple.runs.setup.presets import read_preset
from maple.runs.setup.request import AUTO, absolute_source, check_start, check_unknown, describe_request
from maple.runs.setup.splits import announce_images, describe_classes, open_splits, order_like_head
from maple.training.head import prepare_backbone
from maple.training.loop import Run, train_backbone
from maple.training.optimizers import check_schedule
from maple.training.options import TrainOptions
from maple.training.processes import check_processes, make_fabric, naming_lost_processes, together
from maple.training.recipe import RECIPES, find_recipe
from maple.training.resume import FREE_OPTIONS, snapshot_rows, started_otherwise
from maple.types import Outputs

if TYPE_CHECKING:
    from lightning_fabric import Fabric

Statistics = tuple[list[float], list[float]]  # mean and deviation of each channel


def train_run(request: TrainRequest) -> Results | None:
    """Train, fit, calibrate, evaluate and report.

    Returns the results; ``None`` without test images, and in all processes but the first. The request is checked
    before the run folder is touched; the folder is locked while it is written.
    """
    if request.resume and request.overwrite:
        raise UsageError("--resume continues a run and --overwrite replaces it: give one of them")
    run = RunFolder(request.folder)
    if request.resume == AUTO:
        if _is_over(run):
            say(f"'{run.path}' is a finished run: nothing is left to do")
            return _read_results(run)
        # All processes decide alike: the first writes only after the others have joined it.
        request = dataclasses.replace(request, resume=run.holds_run())
    if is_first_process():
        run.check_unlocked()
        _check_folder(request)
    plan = _make_plan(request)
    backbone = plan.make_backbone(plan.config.train.seed)
    fabric = make_fabric(plan.config.train)
    plan.check_recipe(fabric)
    with naming_lost_processes(fabric), ExitStack() as held:
        with together(fabric):
            if fabric.is_global_zero:
                held.enter_context(run.lock(request.command))
                _check_folder(request)  # again: another process may have written it meanwhile
                plan.write_start()
        trained = plan.train(backbone, fabric)
        predictor = plan.fit(trained, fabric)
        if not fabric.is_global_zero:
            return None
        validation = plan.splits.validation
        labels = validation.labels[snapshot_rows(len(validation))]
        snapshots = {name: Outputs(embeddings, labels=labels) for name, embeddings in trained.snapshots.items()}
        fitted = Fitted(predictor, trained.relabelling, snapshots, trained.snapshot_epochs)
        results = finish_run(plan.request, plan.config, plan.splits, fitted)
        run.remove_training_state()
        return results


def new_network(model: ModelOptions, n_classes: int, seed: int, statistics: Statistics | None = None) -> Backbone:
    """The network that the options describe, with random weights drawn from ``seed``."""
    torch.manual_seed(seed)
    mean, std = statistics or (None, None)
    return create_backbone(
        model.backbone,
        n_classes,
        embedding_size=model.embedding_size,
        branch=model.embedding_branch,
        mean=mean,
        std=std,
    )


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Plan:
    """A request that was checked, with everything that its training needs."""

    request: TrainRequest
    config: RunConfig
    start: Start | None
    splits: Splits

    @property
    def n_classes(self) -> int:
        return len(self.splits.class_names)

    @cached_property
    def statistics(self) -> Statistics:
        return channel_statistics(self.splits.train)

    def make_backbone(self, seed: int) -> Backbone:
        """A new network, or a copy of the one that the training starts from."""
        if self.start is None:
            return new_network(self.config.model, self.n_classes, seed, self.statistics)
        torch.manual_seed(seed)
        return copy.deepcopy(self.start.backbone)

    def check_recipe(self, fabric: Fabric) -> None:
        """Refuse a recipe that cannot train the network."""
        if self.start is None:
            trial = self.make_backbone(self.config.train.seed)
            prepare_backbone(trial, self.config.recipe, self.n_classes, fabric)
        else:
            try_recipe(self.config.recipe, self.start.backbone, self.n_classes, fabric, self.splits.train)

    def write_start(self) -> None:
        """Print what will be done, and write what is known before training into the run folder."""
        request, config, run = self.request, self.config, RunFolder(self.request.folder)
        augment = self.splits.train.augment if config.train.augment == "auto" else config.train.augment
        is_asked = request.command.startswith("maple train") and request.init is None and not request.resume
        hint = advertise_auto() if is_asked else ""
        announce_images(request, self.splits, config.data, f"; augmentation {augment}" + (hint and f"\n{hint}"))
        if request.resume and not run.has_checkpoint():
            warn(f"'{request.folder}' has no checkpoint yet: the training starts from the beginning")
        if not request.resume:
            prepare_folder(request, config.sections(), None if self.start is None else self.start.backbone)
        run.write_classes(describe_classes(self.splits))

    def train(self, backbone: Backbone, fabric: Fabric) -> Run:
        """Train the network, or all members of an ensemble."""
        request, splits = self.request, self.splits
        train: Callable[..., Run] = partial(train_backbone, backbone)
        if isinstance(self.config.recipe, EnsembleRecipe):
            train = partial(train_ensemble, self.make_backbone)
        return train(
            self.config.recipe,
            splits.train,
            splits.validation,
            folder=request.folder,
            resume=request.resume,
            options=self.config.train,
            fabric=fabric,
        )

    def fit(self, trained: Run, fabric: Fabric) -> Predictor:
        """Fit the detector of the trained network."""
        splits = self.splits
        validation = splits.validation if trained.validation is None else trained.validation
        fit = partial(fit_as, self.config, trained.backbone, splits.train, validation, splits.calibration)
        return fit(relabelling=trained.relabelling, fabric=fabric)


def _make_plan(request: TrainRequest) -> _Plan:
    """Check the request, open the network to start from and the images."""
    request = _with_preset(request)
    config = resolve_config(request.flags, request.file, request.preset)
    _say_unused(request, config)
    if request.resume:
        chosen = None if request.init == AUTO else request.init  # the run knows which network it was
        request, config = _as_started(dataclasses.replace(request, init=chosen), config)
    check_options(config.train)
    check_unknown(request)
    check_start(request)
    if request.init == AUTO:
        return _make_auto_plan(request, config)
    start = None if request.init is None else _open_start(request, config)
    if start is not None and request.init is not None and not request.resume:
        given = {*given_options(request.flags, config.model.recipe), *request.file.get("data", {})}
        config = follow_network(config, start.backbone.size, start.fit, given)
        model = ModelOptions(backbone=request.init, recipe=config.model.recipe)  # with the embedding that it has
        config = dataclasses.replace(config, model=model)
    splits = open_splits(request, config.data)
    if start is not None:
        request, splits = _settle_start(request, start, splits)
    return _Plan(request, config, start, splits)


def _make_auto_plan(request: TrainRequest, config: RunConfig) -> _Plan:
    """The plan of ``--init auto``: the images are opened first, for the probe that chooses the network."""
    require_pretrained()
    _check_new_options(request, config)
    if config.data.size == "auto":
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, size=SIZE))
    splits = open_splits(request, config.data)
    found = choose_pretrained(splits)
    spec = found.network.spec
    request = dataclasses.replace(request, init=spec, weights=found.network.weights)
    config = dataclasses.replace(config, model=ModelOptions(backbone=spec, recipe=config.model.recipe))
    start = Start(found.backbone)
    request, splits = _settle_start(request, start, splits)
    return _Plan(request, config, start, splits)


# --- options ----------------------------------------------------------------------------------------------------------


def check_options(options: TrainOptions) -> None:
    """Refuse options that do not work together or on this machine, before images are read."""
    if options.augment != "auto":
        parse_augment(options.augment)
    check_schedule(options)
    check_processes(options)
    if options.precision == "16-mixed" and (options.accelerator == "cpu" or not torch.cuda.is_available()):
        raise UsageError("--precision 16-mixed needs a CUDA device: use auto, bf16-mixed or 32-true")


# --- the network to start from ----------------------------------------------------------------------------------------


def _with_preset(request: TrainRequest) -> TrainRequest:
    """With ``--init``, the preset finetune unless another is named."""
    if request.init is None or request.preset is not None or request.resume:
        return request
    say("--init: other options are those of --preset finetune, such as a low learning rate")
    return dataclasses.replace(request, preset="finetune")


def _say_unused(request: TrainRequest, config: RunConfig) -> None:
    """Name the options of the preset that the recipe cannot use, and that were left out."""
    if request.preset is None or request.resume:
        return
    method = find_recipe(config.model.recipe)
    if unused := preset_options_unused(read_preset(request.preset), method):
        named = " and ".join(map(flag_name, unused))
        say(f"--preset {request.preset}: {named} are left out, which recipe '{method.name}' cannot use")


def _open_start(request: TrainRequest, config: RunConfig) -> Start:
    """The network that the training starts from; when resuming, its copy in the run folder."""
    assert request.init is not None
    if request.resume:
        return Start(load_backbone(request.folder / RunFile.START, trust=request.trust))
    _check_new_options(request, config)
    if absolute_source(request.init) == str(expand_home(request.folder).resolve()):
        raise UsageError(f"'{request.folder}' is the run to start from: choose another --out")
    for path in (Path(request.init), request.weights):
        if path is not None and RunFolder(request.folder).owns(path):
            raise UsageError(f"'{path}' is in the run folder and would be replaced: choose another --out, or move it")
    size = None if config.data.size == "auto" else config.data.size
    return open_start(request.init, weights=request.weights, head=request.head, size=size, trust=request.trust)


def _check_new_options(request: TrainRequest, config: RunConfig) -> None:
    """Refuse options of new networks beside ``--init``."""
    given = given_options(request.flags, config.model.recipe)
    for name in ("backbone", "embedding_size", "embedding_branch"):
        if name in given or name in request.file.get("model", {}):
            raise UsageError(f"{flag_name(name)} is for new networks, and --init names a trained one: leave it out")


def _settle_start(request: TrainRequest, start: Start, splits: Splits) -> tuple[TrainRequest, Splits]:
    """Keep or remove the head of the network, in place; put the classes in the order of a head that names them."""
    backbone = start.backbone
    backbone.size = splits.train.size
    if backbone.origin is not None:
        backbone.origin = dataclasses.replace(backbone.origin, size=splits.train.size)
    if not request.resume:
        say(describe_network(backbone))
        reason = why_new_head(start, splits.class_names)
        if reason is None:
            say(f"its head is kept: {len(splits.class_names)} outputs")
            request, splits = order_like_head(request, splits, start.class_names)
        else:
            say(f"a new head for {len(splits.class_names)} classes: {reason}")
            backbone.head = None
    try_image(backbone, splits.train)
    leave_out_unused(backbone, splits.train)
    return request, splits


# --- resuming ---------------------------------------------------------------------------------------------------------


def _check_folder(request: TrainRequest) -> None:
    """Refuse a request that would lose a run, or resume none."""
    run = RunFolder(request.folder)
    started = run.holds_run()
    over = _is_over(run)
    if started and not request.resume and not request.overwrite:
        if over:
            raise UsageError(f"'{run.path}' holds a finished run: choose another --out, or --overwrite to replace it")
        raise UsageError(f"'{run.path}' already holds a run: add --resume to continue it, --overwrite to replace it")
    if not request.resume:
        return
    if not started:
        raise UsageError(f"there is no run in '{run.path}' to resume: check --out, or leave out --resume to start one")
    if over:
        raise UsageError(
            f"'{run.path}' is a finished run, there is nothing to resume: choose another --out, or give --overwrite "
            "instead of --resume to replace it"
        )


def _is_over(run: RunFolder) -> bool:
    """Whether nothing is left to train."""
    return run.is_finished() and not run.has_checkpoint()


def _read_results(run: RunFolder) -> Results | None:
    """The results of a finished run, in the first process and where there were test images."""
    path = run / RunFile.RESULTS
    return Results.load(path) if is_first_process() and path.is_file() else None


def _as_started(request: TrainRequest, config: RunConfig) -> tuple[TrainRequest, RunConfig]:
    """Request and options of the run to resume; what is asked now may differ only in options that change no result."""
    settings = RunFolder(request.folder).read_config()
    origin = settings.origin
    for key, value in dataclasses.asdict(describe_request(request)).items():
        if value is not None and not _same_source(value, getattr(origin, key)):
            flag = "DATA" if key == "source" else flag_name(key)
            raise started_otherwise(request.folder, flag, getattr(origin, key), value)
    then = RECIPES.present_name(settings.sections.get("model", {}).get("recipe", "maple"))
    if {"recipe", "model.recipe"} & request.flags.keys() and config.model.recipe != then:
        raise started_otherwise(request.folder, "--recipe", then, config.model.recipe)
    started = settings.resolve()
    asked = {name: values | request.file.get(name, {}) for name, values in settings.sections.items()}
    now = resolve_config(request.flags, {**request.file, **asked})
    for name, values in started.sections().items():
        for key, value in values.items():
            if key not in FREE_OPTIONS and (other := now.sections()[name][key]) != value:
                raise started_otherwise(request.folder, flag_name(key), value, other)
    same = {name: getattr(origin, name) for name in ("source", "validation", "calibration", "test", "init", "head")}
    weights = Path(origin.weights) if origin.weights else None
    asked_then = dataclasses.replace(
        request, **same, weights=weights, data_root=origin.root, class_names=origin.classes or ()
    )
    return asked_then, now


def _same_source(now: Any, then: Any) -> bool:
    """Whether two sources are the same; paths are compared in full, whether or not they exist."""
    if not isinstance(now, str) or not isinstance(then, str):
        return now == then
    return now == then or expand_home(now).resolve() == expand_home(then).resolve()
