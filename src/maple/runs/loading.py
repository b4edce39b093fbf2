"""Load the predictor of a run or of an exported graph, with the decision that flags ask for, and images for it.

Torch is imported only for a run: an exported graph is predicted without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.decisions.options import DecisionOptions
from maple.errors import UsageError
from maple.files import check_finished
from maple.options import Values, build_options, flag_name
from maple.prediction.base import BasePredictor
from maple.progress import counting, say, warn
from maple.text import plural
from maple.types import Skipped

if TYPE_CHECKING:
    from maple.prediction.predictor import Predictor

MORE_CALIBRATION = (  # the remedy for missing or too few calibration images
    "calibrate with maple update RUN --calibrate IMAGES, or train with more of them (--calibration, or the third share "
    "of --splits)"
)
_GRAPH_SUFFIX = ".onnx"


def open_predictor(source: Path, trust: bool = False, threads: int | None = None) -> BasePredictor:
    """The predictor of a run folder, or of a graph that ``maple export`` wrote, which needs no torch.

    ``threads`` is the number of computing threads, by default one per core.
    """
    if is_graph(source):
        from maple.prediction.onnx import OnnxPredictor

        return OnnxPredictor.open(source, threads=threads)
    check_finished(source)  # before torch is imported, which takes seconds
    from maple.networks import use_threads
    from maple.prediction.store import load_predictor

    use_threads(threads)
    return load_predictor(source, trust=trust)


def load(source: str | Path, *, trust: bool = False) -> BasePredictor:
    """The predictor of a run folder, of an exported ``.onnx`` file, or of a run on the Hugging Face Hub.

    The hub is asked only for ``hf://ORG/NAME``, or ``hf://ORG/NAME@REVISION`` for a branch, tag or commit; ``trust``
    allows a network that runs code.
    """
    if str(source).startswith("hf:"):
        from maple.runs.hub import fetch_run

        source = fetch_run(str(source), trust)
    return open_predictor(Path(source), trust)


def is_graph(source: Path) -> bool:
    """Whether a path names an exported graph rather than a run folder."""
    return source.suffix.lower() == _GRAPH_SUFFIX and not source.is_dir()


def ready_model(
    model: Path,
    decision: Values | None = None,
    *,
    fdr: float | None = None,
    check: Callable[[BasePredictor], None] | None = None,
    trust: bool = False,
) -> BasePredictor:
    """The predictor of a run or an exported graph; ``decision`` overrides options of its decision.

    With ``fdr``, images are flagged together later, from p-values of one shared calibration set. ``check`` may refuse
    the predictor before any warning is printed; ``trust`` allows a network that runs code.
    """
    decision = decision or {}
    build_options(DecisionOptions, decision, where=None)  # before the model is loaded: an error names the flag
    if fdr is not None and decision:
        flags = " and ".join(map(flag_name, decision))
        raise UsageError(f"--fdr decides over all images together: leave out {flags}, or leave out --fdr")
    predictor = open_predictor(model, trust)
    if check is not None:
        check(predictor)
    if fdr is not None:
        predictor.decide(per_class=False, confidence=None)
    else:
        predictor.decide(**decision)
        warn_if_nothing_is_flagged(predictor)
        if predictor.options.per_class and not predictor.decision.n_own_thresholds:
            no_class = "no class has enough calibration images for a threshold of its own"
            warn(f"--per-class changes nothing: {no_class}; {MORE_CALIBRATION}")
    if predictor.runtime == "torch":
        from maple.networks import use_fast_allocator

        use_fast_allocator()
    return predictor


def ready_predictor(folder: Path, decision: Values | None = None, *, trust: bool = False) -> Predictor:
    """As :func:`ready_model`, for commands that need the network itself: run folders only."""
    if is_graph(folder):
        raise UsageError(f"'{folder}' is an exported graph, and this needs the network: give the folder of its run")
    return cast("Predictor", ready_model(folder, decision, trust=trust))


def open_like(
    predictor: BasePredictor, source: Any, data_root: Path | None, labelled: bool = False, split: str | None = None
) -> ImageSet:
    """Open images at the size and fit of the predictor; ``split`` of a data set that has splits."""
    with counting("decoding") as progress:
        return open_images(
            source,
            size=predictor.size,
            fit=predictor.fit,
            data_root=data_root,
            labelled=labelled,
            split=split,
            progress=progress,
        )


def warn_if_nothing_is_flagged(predictor: BasePredictor) -> None:
    """Warn where there are too few calibration images for the false-alarm rate."""
    if predictor.decision.can_flag_any:
        return
    options, n = predictor.options, len(predictor.calibration)
    confidence = "" if options.confidence is None else f" with --confidence {options.confidence:g}"
    least = math.ceil(1000 / (n + 1)) / 1000
    other_rate = f", or use --false-alarm {least} or more" if n and options.confidence is None else ""
    flag = f"--false-alarm {options.false_alarm:g}{confidence}"
    warn(f"no image will be flagged: {too_few_images(flag, predictor.decision.min_images, n)}{other_rate}")


def say_conditioning(predictor: Predictor) -> None:
    """Say how well the training images determine the covariance, and warn where they do not."""
    found = predictor.detector.conditioning_
    say(f"covariance: {found.sentence()}")
    if found.is_ill:
        warn(
            f"the covariance has the condition {found.condition:.1g}: distances along its narrowest directions are "
            "mostly rounding; lower --explained-variance, or add images"
        )


def too_few_images(flag: str, needed: int, n: int, kind: str = "calibration images") -> str:
    """Why an option has no effect: it takes more calibration images than the run has."""
    return f"{flag} takes at least {needed} {kind}, and the run has {n}; {MORE_CALIBRATION}"


def warn_of_skipped(skipped: Sequence[Skipped], of: str = "", where: str = "") -> None:
    """Warn of files that could not be used, if there are any; ``where`` says where all are listed."""
    if skipped:
        warn(describe_skipped(skipped, of) + where)


def describe_skipped(skipped: Sequence[Skipped], of: str = "", count: int | None = None) -> str:
    """The number of skipped files and the first of them; ``count`` where ``skipped`` does not hold all.

    >>> describe_skipped([Skipped("a.png", "truncated")], count=3)
    "3 files could not be used, first 'a.png' (truncated)"
    """
    n, first = count or len(skipped), skipped[0]
    return f"{plural(n, 'file')}{of} could not be used, first '{first.file}' ({first.reason})"
