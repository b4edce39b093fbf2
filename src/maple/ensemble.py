"""Deep ensembles: members are trained one after the other by the one loop, then joined to one backbone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning_fabric import Fabric
from torch import nn

from maple.backbone import Backbone
from maple.baselines.sampling import EnsembleRecipe, join_members
from maple.checkpoint import write_atomic
from maple.config import TrainOptions
from maple.images import ImageSet
from maple.progress import say
from maple.train import CHECKPOINT, Run, describe_maker, history_csv, train_backbone

MEMBERS = "members"  # folder of the members' checkpoints inside a run


def train_ensemble(
    make_backbone: Callable[[int], Backbone],
    recipe: EnsembleRecipe,
    train: ImageSet,
    validation: ImageSet,
    *,
    options: TrainOptions,
    folder: str | Path | None = None,
    resume: bool = False,
    fabric: Fabric | None = None,
    show_progress: bool = True,
) -> Run:
    """Train ``recipe.members`` networks, ``make_backbone(seed)`` each, with seeds ``options.seed``, + 1, + 2, ...

    With a ``folder`` each member has its own inside; ``resume=True`` goes on with the member, and the epoch, at which
    the training stopped.
    """
    runs = []
    for member in range(recipe.members):
        own = None if folder is None else Path(folder) / MEMBERS / str(member)
        if show_progress:
            say(f"member {member + 1} of {recipe.members}")
        runs.append(
            train_backbone(
                make_backbone(options.seed + member),
                recipe,
                train,
                validation,
                folder=own,
                resume=resume,
                options=replace(options, seed=options.seed + member),
                fabric=fabric,
                show_progress=show_progress,
            )
        )
    return join_runs(runs, recipe, None if folder is None else Path(folder))


def join_runs(runs: list[Run], recipe: EnsembleRecipe, folder: Path | None = None) -> Run:
    """The members' runs as one: their networks side by side, their histories averaged."""
    first = runs[0]
    backbone = join_members([run.backbone for run in runs])
    layer = first.backbone.embedding_layer
    asked = None if isinstance(layer, nn.Identity) else first.backbone.embedding_size
    maker = describe_maker(recipe, len(first.class_names))
    assert maker is not None
    backbone.made_by = {**maker, "embedding_size": asked}
    history = [_mean_row(list(rows)) for rows in zip(*(run.history for run in runs))]
    if folder is not None:
        write_atomic(folder / "history.csv", history_csv(history))
    return replace(
        first,
        backbone=backbone.eval(),
        history=history,
        snapshots={name: np.hstack([run.snapshots[name] for run in runs]) for name in first.snapshots},
    )


def remove_checkpoints(folder: Path) -> None:
    """What only a training that goes on needs."""
    for path in (folder / MEMBERS).glob(f"*/{CHECKPOINT}"):
        path.unlink()


def _mean_row(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One row of the history: means over the members; the seconds are those of all."""
    row = {
        key: float(np.mean([other[key] for other in rows])) if isinstance(value, float) else value
        for key, value in rows[0].items()
    }
    return row | {"seconds": sum(other["seconds"] for other in rows)}
