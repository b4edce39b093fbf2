"""Options of training and of MAPLE's recipe; without torch, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from annotated_types import Interval

from maple.options import DurationByName, NonNegative, Positive, Range, Seed, Share, Values, option

# Options whose defaults follow the optimiser; Muon's are airbench's, and Adam would scale a decay with its steps.
BY_OPTIMIZER: dict[str, Values] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 5e-4, "schedule": "triangular"},
    "adam": {"learning_rate": 0.001, "momentum": 0.9, "weight_decay": 0.0, "schedule": "triangular"},
    "muon": {"learning_rate": 0.24, "momentum": 0.6, "weight_decay": 0.001, "schedule": "linear"},
}


def default_optimizer(backbone: str) -> str:
    """The optimiser that suits a network by name.

    >>> default_optimizer("airbench-32"), default_optimizer("resnet18")
    ('muon', 'sgd')
    """
    return "muon" if backbone.startswith("airbench") else "sgd"


def _following(name: str, help: str, **about: Any) -> Any:
    """An option whose default follows the optimiser."""
    values = {optimizer: own[name] for optimizer, own in BY_OPTIMIZER.items()}
    shown = ", ".join(f"{value} with {optimizer}" for optimizer, value in values.items())
    return option(None, help, shown=shown, **about)


_rare = partial(option, rare=True)  # not listed by --help, which names the common options only
_rare_metric = partial(_rare, needs="triplet")
_rare_clustering = partial(_rare, needs="clustering")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a network is trained, with any recipe; the defaults of some options follow the optimiser.

    >>> options = TrainOptions(optimizer="muon", momentum=0.7)
    >>> options.learning_rate, options.momentum, options.schedule
    (0.24, 0.7, 'linear')
    """

    epochs: Positive = option(16, "passes over the training images")
    time_limit: Annotated[Annotated[float, Interval(gt=0)] | None, DurationByName] = option(
        None,
        "time for the epochs, such as 20m, 90s or 1h30m; those that do not fit are left out, the schedule ends in time",
    )
    batch_size: Positive = option(128, "images per step over all processes, divided evenly among them")
    optimizer: Literal["sgd", "adam", "muon"] = option(
        "sgd",
        "optimiser; 'muon' orthogonalises the steps of convolutions and trains the rest by SGD",
        shown="muon for airbench, sgd for other networks",
    )
    learning_rate: Annotated[float, Interval(gt=0)] = _following(
        "learning_rate",
        "learning rate; the peak of the schedule",
        search=Range((0.3, 1.0, 3.0), (0.1, 3.0), log=True, relative=True),
    )
    momentum: Share = _following("momentum", "momentum of SGD or Muon", rare=True)
    nesterov: bool = _rare(True, "Nesterov momentum")
    weight_decay: NonNegative = _following(
        "weight_decay", "weight decay", search=Range((1e-4, 5e-4, 2e-3), (1e-5, 1e-2), log=True)
    )
    schedule: Literal["triangular", "linear", "cosine", "step", "constant"] = _following(
        "schedule", "learning rate over the epochs", rare=True
    )
    milestones: tuple[Positive, ...] = _rare((), "epochs after which schedule 'step' lowers the learning rate")
    step_factor: Annotated[float, Interval(gt=0, lt=1)] = _rare(0.2, "factor of the learning rate at each milestone")
    augment: str = _rare(
        "auto",
        "'auto', 'none', or a list of crop or translate (half as far), flip, alternate-flip or flip-both, turn (by a "
        "right angle), cutout, mix",
    )
    sampler: Literal["auto", "shuffle", "balanced"] = _rare(
        "auto", "'balanced' draws several images of each of several classes; 'auto': if triplets need it"
    )
    seed: Seed = option(0, "seed of weights, order and augmentation")
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = _rare(
        "auto", "'auto' takes bfloat16 where the hardware has it"
    )
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "device to train on")
    devices: Positive = option(1, "processes on this machine; gradients are averaged")
    nodes: Positive = _rare(1, "machines; start the same command on each with torchrun or SLURM")
    strategy: Literal["ddp", "fsdp"] = _rare(
        "ddp",
        "several processes: 'ddp' keeps gradients and optimiser state in each, 'fsdp' divides them among all",
    )
    workers: Annotated[int, Interval(ge=0)] = _rare(2, "processes that decode images which do not fit in memory")
    allocator: bool = _rare(True, "keep freed memory for the next step (Linux, CPU)")
    checkpoint_every: Positive = _rare(1, "epochs between checkpoints")
    on_collapse: Literal["warn", "stop"] = _rare(
        "warn", "what to do if all embeddings become one point; presets of the paper stop"
    )

    def __post_init__(self) -> None:
        for name, value in BY_OPTIMIZER[self.optimizer].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class MapleOptions:
    """Cross-entropy, triplet loss and relabelling: two switches and their settings."""

    triplet: bool = option(True, "add the triplet loss", flag=False)
    clustering: bool = option(True, "split hard classes into clusters", flag=False)
    metric_loss: Literal["triplet", "contrastive"] = _rare_metric("triplet", "metric loss of pairs of embeddings")
    cross_entropy_norm: NonNegative = _rare_metric(
        0.0,
        "norm of embeddings in the cross-entropy during training; 0 keeps their own norm",
        search=Range((0.0, 5.0, 10.0, 20.0)),
    )
    logit_norm: Literal["none", "length", "boundary"] = _rare(
        "none",
        "divide logits in the cross-entropy by their length (LogitNorm) or by the mean distance to the decision "
        "boundaries (ELogitNorm)",
    )
    logit_temperature: Annotated[float, Interval(gt=0)] = _rare(
        0.04, "factor of the length that logit_norm 'length' divides by"
    )
    label_smoothing: Annotated[float, Interval(ge=0, lt=1)] = _rare(
        0.0, "share of each target that the cross-entropy spreads evenly over all classes"
    )
    outlier_share: Share = _rare(
        0.0, "outliers per training image: copies with shuffled patches, trained to a uniform distribution"
    )
    outlier_weight: NonNegative = _rare(0.5, "weight of the cross-entropy of outliers")
    rotation_share: Share = _rare(
        0.0, "rotated copies per training image, whose rotation an extra head learns to tell during training"
    )
    rotation_weight: NonNegative = _rare(0.5, "weight of the cross-entropy of rotations")
    margin: NonNegative = option(
        0.5, "margin of the triplet loss", needs="triplet", search=Range((0.3, 0.5, 0.7), (0.1, 1.5))
    )
    triplet_weight: NonNegative = _rare_metric(
        1.0, "weight of the triplet loss", search=Range((0.3, 1.0, 3.0), (0.03, 3.0), log=True)
    )
    triplet_warmup: Share = _rare_metric(0.25, "share of the training over which that weight grows from 0")
    triplet_mining: Literal["hard", "all"] = _rare_metric(
        "hard", "'hard' compares one positive and one negative distance per image, 'all' averages over all triplets"
    )
    triplet_softness: NonNegative = _rare_metric(
        0.2,
        "0 compares the hardest positive and negative in the batch, larger values weighted means",
        search=Range((0.0, 0.2, 0.5), (0.0, 1.0)),
    )
    triplet_lone: Literal["skip", "self"] = _rare_metric(
        "skip", "images without another of their target in the batch: left out, or their own positive at distance 0"
    )
    triplet_space: Literal["normalised", "raw"] = _rare_metric(
        "normalised", "embeddings that the triplet loss compares"
    )
    prototype_weight: NonNegative = _rare_metric(
        1.0,
        "weight of the prototype loss, a cross-entropy of cosines to the rows of the head",
        search=Range((0.3, 1.0, 3.0), (0.03, 3.0), log=True),
    )
    prototype_scale: Annotated[float, Interval(gt=0)] = _rare_metric(
        10.0, "factor of the cosines in the prototype loss", search=Range((5.0, 10.0, 20.0), (3.0, 40.0), log=True)
    )
    relabel_every: Positive = option(
        10,
        "epochs between relabelling events (the paper's p)",
        needs="clustering",
        search=Range((5, 10, 15, 20), (1, 20)),
    )
    hard_class_error: Share = option(
        0.3,
        "false-negative ratio above which a class is split (the paper's t)",
        needs="clustering",
        search=Range((0.1, 0.3, 0.5), (0.0, 0.9)),
    )
    max_clusters: Annotated[int, Interval(ge=0)] = option(
        5, "clusters per class at most; 0 sets no limit", needs="clustering", search=Range((3, 5, 7, 10), (2, 10))
    )
    min_cluster_size: Positive = _rare_clustering(
        20, "images per cluster at least", search=Range((10, 20, 50), (5, 100), log=True)
    )
    cluster_method: Literal["xmeans", "gmeans", "tmeans", "kmeans"] = _rare_clustering(
        "tmeans",
        "clustering of a hard class; 'tmeans' splits only if held-out images gain, 'xmeans' is the paper's",
        search=Range(("xmeans", "gmeans", "tmeans", "kmeans")),
    )
    cluster_space: Literal["raw", "normalised", "projected", "whitened"] = _rare_clustering(
        "normalised",
        "space of the clustering: raw embeddings, normalised, in the leading components of each class, or whitened",
        search=Range(("raw", "normalised", "projected", "whitened")),
    )
    cluster_components: Positive = _rare_clustering(
        5, "leading components of a class that cluster_space 'projected' keeps"
    )
    head_growth: Literal["keep", "fresh"] = _rare_clustering(
        "keep", "'keep' grows the head without changing any class probability; 'fresh' starts a new head"
    )
    cluster_scope: Literal["cluster", "class"] = _rare_clustering(
        "cluster", "'cluster' splits existing clusters; 'class' clusters the whole class again at each event"
    )
    class_rule: Literal["sum", "max"] = _rare("sum", "class probability from its clusters: their sum or the largest")
