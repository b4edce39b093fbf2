"""``maple evaluate``: figures of a run on test images and unknown images, with its gallery and report."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maple.data.batches import to_input
from maple.data.image_set import ImageSet
from maple.data.sources.folders import LOOSE
from maple.data.splits import Splits
from maple.decisions.labels import GIVEN, judge_labels, labels_csv
from maple.detectors.base import Detector
from maple.detectors.gradients.base import ImageDetector
from maple.detectors.learned import nearest_of_class
from maple.detectors.registry import DETECTORS, create_detector
from maple.errors import MapleError, UsageError, suggest
from maple.evaluation.cases import Case, Context, Own, Scored, evaluate_case
from maple.evaluation.latency import measure_latency
from maple.evaluation.results import Results
from maple.evaluation.table import check_table, write_table
from maple.files import RunFile, write_atomic
from maple.networks import Backbone, evaluating, linear_head
from maple.options import Values, flag_name
from maple.prediction.engine import LOCAL, Engine
from maple.prediction.predictor import Predictor
from maple.progress import counting, say, track, warn
from maple.reporting.gallery import write_evaluation_gallery
from maple.reporting.report import write_report
from maple.runs.folder import RunFolder
from maple.runs.loading import open_like, ready_predictor, warn_of_skipped
from maple.runs.requests import EvaluateRequest
from maple.runs.setup.config import SECTIONS, RunConfig
from maple.runs.setup.request import LEFT_OUT
from maple.runs.setup.splits import RESTORE, left_out_images, reopen_splits
from maple.text import plural
from maple.training.recipe import RECIPES, find_recipe
from maple.types import Outputs


@dataclass(frozen=True, eq=False)
class EvaluationSets:
    """The images of an evaluation."""

    test: ImageSet
    ood: dict[str, ImageSet]
    split: str = "test"  # of the run that the test images are
    groups: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)  # names of ``ood``: near, far


def evaluate_runs(request: EvaluateRequest, engine: Engine = LOCAL) -> list[Results]:
    """The results of the run and of its ``others``, each as by :func:`evaluate_run`; then the tables are written."""
    for path in request.tables:
        check_table(path)
    found = [evaluate_run(dataclasses.replace(request, run=run), engine) for run in (request.run, *request.others)]
    for path in request.tables:
        write_table(path, found)
        say(f"table: {path}")
    return found


def evaluate_run(request: EvaluateRequest, engine: Engine = LOCAL) -> Results:
    """Evaluate a run against named sources of unknown images; write results, gallery and report into its folder.

    ``engine`` runs the network, except for detectors that read images.
    """
    detectors = _compared_detectors(request)
    run = RunFolder(request.run)
    with run.changing(request.command) as settings:
        config = settings.resolve({"workers": request.workers})
        decision = {key: value for key, value in request.flags.items() if "." not in key}
        predictor = ready_predictor(request.run, decision, trust=request.trust)
        if detectors and predictor.detector.learned_.appended:
            raise UsageError(
                "--detector needs all training images, and a run does not keep those that maple update added: leave "
                "out --detector"
            )
        root = request.data_root or settings.origin.root
        sources = _unknown_sources(request)
        needs_more = request.on_training or detectors or LEFT_OUT in sources.values()  # than test images
        remedy = RESTORE if needs_more else "give test images with --ind"
        needs_splits = request.ind is None or needs_more
        splits = reopen_splits(run, predictor.size, root, remedy) if needs_splits else None
        test = _open_test(request, predictor, root, splits)
        warn_of_skipped(test.skipped, of=f" of '{test.name}'")
        unknown = open_unknown(predictor, sources, root, splits)
        sets = EvaluationSets(test, unknown, "test" if request.ind is None else GIVEN, _groups(request))
        if detectors:
            tuning = open_like(predictor, request.ood_validation, root) if request.ood_validation else None
            fit_detectors(detectors, predictor, splits, tuning, workers=config.train.workers, engine=engine)
        results = measure_run(run, predictor, sets, config, request.command, detectors, request.keep, engine)
        if request.keep and request.report:
            say(f"report: {write_report(request.run)}")
    return results


def _compared_detectors(request: EvaluateRequest) -> list[Detector]:
    """The detectors to compare with beside the default ones, each once."""
    settings = {key: value for key, value in request.flags.items() if "." in key}
    asked = create_detectors(request.detectors or (), settings)
    by_name = {each.name: each for each in asked if each.name != "maple"}
    tuned = [name for name, each in by_name.items() if getattr(each, "learns_from_ood", False)]
    if tuned and request.ood_validation is None:
        raise UsageError(f"'{tuned[0]}' is tuned on unknown images: give some with --ood-validation")
    if request.ood_validation is not None and not tuned:
        raise UsageError("--ood-validation is for detectors tuned on unknown images: add --detector lee-md-ood")
    return list(by_name.values())


# --- images -----------------------------------------------------------------------------------------------------------


def _unknown_sources(request: EvaluateRequest) -> dict[str, str]:
    """All sources of unknown images: those of ``--ood``, and members of groups that are sources themselves.

    >>> request = EvaluateRequest(run=Path("r"), ood={"svhn": "svhn/test"}, near=("cifar100/test",), far=("svhn",))
    >>> _unknown_sources(request)
    {'svhn': 'svhn/test', 'cifar100/test': 'cifar100/test'}
    """
    if both := set(request.near) & set(request.far):
        raise UsageError(f"'{min(both)}' is both in --near and in --far: name it once")
    grouped = (*request.near, *request.far)
    return {**request.ood, **{name: name for name in grouped if name not in request.ood}}


def _groups(request: EvaluateRequest) -> dict[str, tuple[str, ...]]:
    """The groups of unknown images that have members."""
    return {name: sets for name, sets in (("near", request.near), ("far", request.far)) if sets}


def _open_test(
    request: EvaluateRequest, predictor: Predictor, data_root: Path | None, splits: Splits | None
) -> ImageSet:
    if request.ind is not None:
        return open_like(predictor, request.ind, data_root, labelled=True).with_class_names(predictor.class_names)
    assert splits is not None
    if request.on_training:
        return splits.train
    if not len(splits.test):
        raise UsageError(f"'{request.run}' was trained without test images: give some with --ind")
    if added := [name for name in predictor.class_names if name not in splits.test.class_names]:
        warn(
            f"the test images of the run have none of class '{added[0]}', which maple update added: give test images "
            "of all classes with --ind"
        )
    return splits.test


def open_unknown(
    predictor: Predictor, sources: Mapping[str, str], data_root: Path | None, splits: Splits | None
) -> dict[str, ImageSet]:
    """The images of named sources of unknown images; ``left-out`` stands for the classes that the run left out."""
    unknown = {
        name: left_out_images(splits, predictor.class_names)
        if source == LEFT_OUT
        else _open_ood(predictor, source, data_root)
        for name, source in sources.items()
    }
    for images in unknown.values():
        warn_of_skipped(images.skipped, of=f" of '{images.name}'")
    return unknown


def _open_ood(predictor: Predictor, source: str, data_root: Path | None) -> ImageSet:
    """All images of a source, with class names if it has classes."""
    try:
        images = open_like(predictor, source, data_root, labelled=True)
    except MapleError:
        return open_like(predictor, source, data_root)
    some_are_loose = any(skipped.reason == LOOSE for skipped in images.skipped)
    return open_like(predictor, source, data_root) if some_are_loose else images


# --- detectors --------------------------------------------------------------------------------------------------------


def create_detectors(names: Sequence[str], settings: Mapping[str, Any]) -> list[Detector]:
    """Detectors by name, each once, with options from ``settings`` by ``name.option``.

    >>> create_detectors(["energy", "knn"], {"knn.k": "10"})[1].k
    10
    """
    options: dict[str, Values] = {name: {} for name in names}
    for key, value in settings.items():
        name, _, option = key.rpartition(".")
        if name == "decision":
            raise UsageError(f"--set {key}: a decision is not an option of a detector, give {flag_name(option)}")
        if name not in DETECTORS and (name in SECTIONS or name.replace("_", "-") in RECIPES):
            raise UsageError(f"--set {key}: '{name}' belongs to maple train, name a compared detector, such as knn.k")
        if name not in DETECTORS:
            raise UsageError(f"--set {key}: unknown detector '{name}', {suggest(name, DETECTORS.names())}")
        DETECTORS.find(name).create({option: value}, where=None)  # an error names the option
        if name not in options:
            raise UsageError(f"--set {key}: '{name}' is not compared here, add --detector {name}")
        options[name][option] = value
    return [create_detector(name, **own) for name, own in options.items()]


def fit_detectors(
    detectors: Sequence[Detector],
    predictor: Predictor,
    splits: Splits | None,
    tuning: ImageSet | None = None,
    workers: int = 0,
    engine: Engine = LOCAL,
) -> None:
    """Fit detectors on the training images of a run in one pass of the network.

    A training image belongs to the nearest cluster of its own class. Detectors that read images go through them on
    their own; ``tuning`` holds unknown images for the one that is tuned on them.
    """
    if not detectors:
        return
    assert splits is not None
    backbone, cluster_to_class = predictor.backbone, predictor.cluster_to_class
    on_outputs = [detector for detector in detectors if not isinstance(detector, ImageDetector)]
    if on_outputs:
        head = linear_head(backbone) if any(detector.needs_head for detector in on_outputs) else None
        unseen = engine.embed(backbone, splits.validation, cluster_to_class=cluster_to_class, workers=workers)
        needs_train = any(detector.needs_training_images for detector in on_outputs)
        known = _embed_known(predictor, splits.train, workers, engine) if needs_train else unseen
        for detector in on_outputs:
            detector.fit(known if detector.needs_training_images else unseen, unseen, head=head)
    for reader in _reading_images(detectors):
        fit = partial(reader.fit_images, backbone, splits.train, splits.validation, ood=tuning)
        with counting(f"fitting {reader.name}") as progress:
            fit(cluster_to_class=cluster_to_class, workers=workers, progress=progress)


def _reading_images(detectors: Sequence[Detector]) -> list[ImageDetector]:
    return [detector for detector in detectors if isinstance(detector, ImageDetector)]


def _embed_known(predictor: Predictor, train: ImageSet, workers: int, engine: Engine) -> Outputs:
    """Outputs of the training images, each in the nearest cluster of its class.

    There are no logits: what detectors learn from logits, they learn from images that the network was not trained on.
    """
    cluster_to_class = predictor.cluster_to_class
    run_network = partial(engine.embed, predictor.backbone, train, cluster_to_class=cluster_to_class, logits=False)
    with counting("embedding") as progress:
        known = run_network(workers=workers, progress=progress)
    assert known.labels is not None
    own = nearest_of_class(predictor.detector.gaussians_, known.embeddings, known.labels, cluster_to_class)
    return dataclasses.replace(known, cluster_ids=own)


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_run(
    run: RunFolder,
    predictor: Predictor,
    sets: EvaluationSets,
    config: RunConfig,
    command: str,
    detectors: Sequence[Detector] = (),
    keep: bool = True,
    engine: Engine = LOCAL,
) -> Results:
    """Run the network over all sets once; with ``keep`` write results, labels and gallery.

    ``detectors`` are fitted, and compared beside those of the network alone.
    """
    backbone, workers, seed = predictor.backbone, config.train.workers, config.train.seed
    images = [sets.test, *sets.ood.values()]
    test, *others = [
        engine.embed(backbone, each, cluster_to_class=predictor.cluster_to_class, workers=workers)
        for each in track(images, "evaluating", total=len(images))
    ]
    one = to_input(torch.from_numpy(sets.test.read(0)[None]))  # (1, 3, S, S)
    with evaluating(backbone):
        network_latency = measure_latency(backbone if backbone.head is not None else backbone.embed, one, repeats=20)
    case = Case.check(predictor, test, dict(zip(sets.ood, others)))
    context = Context(
        further=[each for each in detectors if not isinstance(each, ImageDetector)],
        own=_own_method(backbone),
        scored=[_score_images(each, backbone, sets, workers) for each in _reading_images(detectors)],
        ood_classes={name: each.class_names for name, each in sets.ood.items()},
        groups=sets.groups,
        latency_ms=measure_latency(predictor, one, repeats=20).median_ms,
        network_latency_ms=network_latency.median_ms,
        seed=seed,
        provenance=describe_origin(config, run.read_config().sections, predictor, command),
    )
    results = evaluate_case(case, context)
    if not keep:
        return results
    write_atomic(run / RunFile.RESULTS, results.to_json())
    files = [(sets.split, file) for file in sets.test.files]
    judged = judge_labels(case.prediction.probabilities, case.labels, predictor.class_names, files)
    write_atomic(run / RunFile.LABELS, labels_csv(judged))
    write_evaluation_gallery(
        run / RunFile.GALLERY,
        test=(sets.test, case.prediction),
        ood={name: (sets.ood[name], said) for name, said in case.ood_predictions.items()},
    )
    return results


def _score_images(detector: ImageDetector, backbone: Backbone, sets: EvaluationSets, workers: int) -> Scored:
    """The scores of a detector that reads images."""

    def score(images: ImageSet) -> np.ndarray:
        with counting(f"scoring by {detector.name}") as progress:
            return detector.score_images(backbone, images, workers=workers, progress=progress)

    return Scored(detector.name, score(sets.test), {name: score(each) for name, each in sets.ood.items()})


def _own_method(backbone: Backbone) -> Own | None:
    """The method of the recipe that trained the network, if that is not MAPLE."""
    if backbone.made_by is None:
        return None
    recipe = find_recipe(backbone.made_by.recipe)
    return Own(recipe.name, recipe.kind.own_detector)


# --- provenance -------------------------------------------------------------------------------------------------------


def describe_origin(
    config: RunConfig, sections: Mapping[str, Any], predictor: Predictor, command: str
) -> dict[str, Any]:
    """The provenance of results; of the options, those of the ``sections`` that the run's ``config.toml`` has.

    :func:`maple.evaluation.cases.evaluate` adds the seed and the versions of the packages.
    """
    return {
        "command": command,
        "config": {name: values for name, values in config.sections().items() if name in sections},
        "commit": find_commit(),
        "false_alarm": predictor.false_alarm,
        "calibration_images": len(predictor.calibration),
        "decision": predictor.decision.describe(),
        "promise": predictor.decision.sentence(),
        "score": predictor.detector.score_,
        "norm_exponent": predictor.detector.exponent_,
        "temperature": predictor.probability.temperature,
        "gaussian_weight": predictor.probability.gaussian_weight,
        "network_weight": predictor.probability.network_weight,
        "prior_weight": predictor.probability.prior_weight,
        "odds_exponent": predictor.probability.odds_exponent,
        "hardware": f"{describe_hardware()}, {plural(torch.get_num_threads(), 'thread')}",
    }


def find_commit(source: Path = Path(__file__)) -> str | None:
    """The commit of the checkout that tracks the file ``source``; ``None`` where there is none, or no git."""
    folder = source.resolve().parent
    tracked = _git(folder, "ls-files", source.name)  # not so in an environment that lies inside another checkout
    return _git(folder, "rev-parse", "--short", "HEAD") if tracked else None


def describe_hardware() -> str:
    """Processor architecture and number of cores."""
    return f"{platform.machine()}, {os.cpu_count()} cores"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        asked = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout.strip() or None if asked.returncode == 0 else None
