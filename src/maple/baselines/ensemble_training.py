"""Training an ensemble: the members one after another, then joined to one backbone.

Apart from the recipe, since Fabric takes seconds to import and listings of methods need only the recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from maple.baselines.ensemble import MAX_MEMBERS, EnsembleRecipe, join_members
from maple.data.image_set import ImageSet
from maple.errors import UsageError
from maple.files import RunFile, write_atomic
from maple.networks import Backbone
from maple.options import N_SEEDS
from maple.progress import say
from maple.text import duration
from maple.training.head import describe_maker
from maple.training.loop import Run, train_backbone
from maple.training.options import TrainOptions
from maple.training.recipe import History, Row
from maple.training.resume import history_csv


def train_ensemble(
    make_backbone: Callable[[int], Backbone],
    recipe: EnsembleRecipe,
    train: ImageSet,
    validation: ImageSet,
    *,
    options: TrainOptions,
    folder: str | Path | None = None,
    show_progress: bool = True,
    **keywords: Any,
) -> Run:
    """Train ``recipe.members`` networks, ``make_backbone(seed)`` each, with the seeds of :func:`member_seeds`.

    With a ``folder`` each member has a subfolder; ``resume=True`` continues with the member and epoch at which the
    training stopped. Further keywords are those of :func:`~maple.training.loop.train_backbone`.
    """
    folder = None if folder is None else Path(folder)
    limit = None if options.time_limit is None else options.time_limit / recipe.members  # of each
    runs = []
    for member, seed in enumerate(member_seeds(options.seed, recipe.members)):
        if show_progress:
            share = "" if limit is None else f", with its share of --time-limit, {duration(limit)}"
            say(f"member {member + 1} of {recipe.members}{share}")
        keywords["folder"] = None if folder is None else folder / RunFile.MEMBERS / str(member)
        keywords["options"] = replace(options, seed=seed, time_limit=limit)
        backbone = make_backbone(seed)
        runs.append(train_backbone(backbone, recipe, train, validation, show_progress=show_progress, **keywords))
    return join_runs(runs, recipe, folder)


def member_seeds(seed: int, n_members: int) -> list[int]:
    """A seed per member, ``seed`` * 100 + 0, 1, 2, ...: ensembles of different seeds share no member.

    >>> member_seeds(0, 3), member_seeds(1, 3)
    ([0, 1, 2], [100, 101, 102])
    """
    if seed >= (limit := N_SEEDS // MAX_MEMBERS):
        raise UsageError(f"--seed {seed} is too large for an ensemble: give one below {limit}")
    return [seed * MAX_MEMBERS + member for member in range(n_members)]


def join_runs(runs: list[Run], recipe: EnsembleRecipe, folder: Path | None = None) -> Run:
    """Join the runs of the members: their networks side by side, their histories averaged."""
    first = runs[0]
    backbone = join_members([run.backbone for run in runs])
    layer = first.backbone.embedding_layer
    asked = None if isinstance(layer, nn.Identity) else first.backbone.embedding_size
    maker = describe_maker(recipe, len(first.class_names))
    assert maker is not None
    backbone.made_by = replace(maker, embedding_size=asked)
    backbone.origin = first.backbone.origin
    history = [_mean_row(list(rows)) for rows in zip(*(run.history for run in runs))]
    if folder is not None:
        write_atomic(folder / RunFile.HISTORY, history_csv(history))
    return replace(
        first,
        backbone=backbone.eval(),
        history=history,
        snapshots={name: np.hstack([run.snapshots[name] for run in runs]) for name in first.snapshots},
        validation=None,
    )


def _mean_row(rows: History) -> Row:
    """One row of the history: means over the members, sums of their seconds."""
    row = {
        key: float(np.mean([other[key] for other in rows])) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }
    return row | {key: sum(other[key] for other in rows) for key in ("cpu_seconds", "seconds")}
