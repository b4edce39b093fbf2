"""Options: declared once, here, and read from Python keywords, TOML files and command-line flags alike.

Each group of options is a frozen dataclass. The classes that use a group inherit from it, so that a constructor
keyword, a key in ``config.toml`` and a flag of ``maple train`` are the same name with the same default. Precedence is
flag, file, preset, default.
"""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tomli_w
from annotated_types import Interval

from maple.errors import ConfigError, UsageError, suggest

if TYPE_CHECKING:  # loaded where options are checked: the command line declares all of them for its --help
    from pydantic import TypeAdapter

Options = TypeVar("Options")
Positive = Annotated[int, Interval(ge=1)]
Share = Annotated[float, Interval(ge=0, le=1)]
NonNegative = Annotated[float, Interval(ge=0)]
AboveZero = Annotated[float, Interval(gt=0)]
N_SEEDS = 2**32
Seed = Annotated[int, Interval(ge=0, lt=N_SEEDS)]
MAX_MEMBERS = 100  # of an ensemble: the seed of a member is that of the ensemble times this, plus its number
ScoreBy = Literal["auto", "distance", "relative", "normalised", "residual", "spread", "energy", "shallow", "fused"]


class NoneByName:
    """Marks an option that may be missing, for which 'none' stands in files and flags; pydantic asks it how."""

    @staticmethod
    def __get_pydantic_core_schema__(source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(lambda value: None if value == "none" else value, handler(source))


def option(default: Any, help: str, flag: bool = True) -> Any:
    """A field with a default and the sentence that ``--help`` shows; ``flag=False`` keeps it off the command line."""
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How images are read and split."""

    size: Literal["auto"] | Positive = option("auto", "side of the square images in pixels, or 'auto'")
    fit: Literal["pad", "stretch", "crop"] = option("pad", "how images that are not square become square")
    splits: tuple[Share, Share, Share, Share] = option(
        (0.7, 0.1, 0.1, 0.1), "shares of train, validation, calibration and test; test is 0 where a test file exists"
    )
    min_images: Annotated[int, Interval(ge=0)] = option(0, "leave out classes with fewer images than this")
    leave_out: tuple[str, ...] = option((), "classes to leave out, or @FILE with one per line; see --ood NAME=left-out")
    split_seed: Seed = option(0, "seed of the split")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What is trained."""

    backbone: str = option(
        "resnet9", "network: resnet9, resnet18, resnet20/32/44/56, wrn-D-W such as wrn-28-10, efficientnet-b0"
    )
    embedding_size: Positive | None = option(None, "size of a linear embedding in front of the head (default: none)")
    recipe: str = option("maple", "how it learns: maple, cross-entropy or another that maple methods lists")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a network is trained, whatever the recipe."""

    epochs: Positive = option(16, "passes over the training images")
    batch_size: Positive = option(128, "images per step, over all devices")
    optimizer: Literal["sgd", "adam"] = option("sgd", "optimiser")
    learning_rate: Annotated[float, Interval(gt=0)] = option(0.1, "learning rate; the peak of the schedule")
    momentum: Share = option(0.9, "momentum of SGD")
    nesterov: bool = option(True, "Nesterov momentum")
    weight_decay: NonNegative = option(5e-4, "weight decay")
    schedule: Literal["triangular", "cosine", "constant"] = option("triangular", "learning rate over the epochs")
    augment: str = option("auto", "'auto', 'none', or a list of crop, flip, flip-both")
    sampler: Literal["auto", "shuffle", "balanced"] = option(
        "auto", "'balanced' draws several images of each of several classes; 'auto' does so where triplets need it"
    )
    seed: Seed = option(0, "seed of weights, order and augmentation")
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = option(
        "auto", "'auto' takes bfloat16 where the hardware has it"
    )
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "where to train")
    devices: Positive = option(1, "processes on this machine; gradients are averaged")
    nodes: Positive = option(1, "machines; start the same command on each with torchrun or SLURM")
    workers: Annotated[int, Interval(ge=0)] = option(2, "processes that decode images too many to hold in memory")
    allocator: bool = option(True, "keep freed memory for the next step (Linux, CPU)")
    checkpoint_every: Positive = option(1, "epochs between checkpoints")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Cross-entropy, triplet loss and relabelling: the two switches and their settings."""

    triplet: bool = option(True, "add the triplet loss", flag=False)
    clustering: bool = option(True, "split hard classes into clusters", flag=False)
    metric_loss: Literal["triplet", "contrastive"] = option(
        "triplet", "which loss of pairs of embeddings goes by the name of triplet loss here"
    )
    cross_entropy_norm: NonNegative = option(
        0.0, "length that embeddings have in the cross-entropy while learning; 0 leaves each its own"
    )
    margin: NonNegative = option(0.5, "margin of the triplet loss")
    triplet_weight: NonNegative = option(1.0, "weight of the triplet loss")
    triplet_warmup: Share = option(0.25, "share of the training over which that weight grows from 0")
    triplet_softness: NonNegative = option(
        0.2, "0 compares the hardest positive and negative in the batch, larger values weighted means"
    )
    triplet_space: Literal["normalised", "raw"] = option("normalised", "embeddings the triplet loss compares")
    prototype_weight: NonNegative = option(
        1.0, "weight of a second cross-entropy, of cosines to the head's rows; it goes with the triplet loss"
    )
    prototype_scale: Annotated[float, Interval(gt=0)] = option(10.0, "factor of those cosines")
    relabel_every: Positive = option(10, "epochs between relabelling events (the paper's p)")
    hard_class_error: Share = option(0.3, "false-negative ratio above which a class is split (the paper's t)")
    max_clusters: Positive = option(5, "clusters per class at most")
    min_cluster_size: Positive = option(20, "images per cluster at least")
    cluster_method: Literal["xmeans", "gmeans", "tmeans", "kmeans"] = option(
        "tmeans", "how a hard class is split; 'tmeans' only where held-out images gain by it, 'xmeans' as in the paper"
    )
    cluster_space: Literal["raw", "normalised", "projected", "whitened"] = option(
        "normalised", "what the clustering sees: embeddings, on the sphere, there in each class's leading components"
    )
    cluster_components: Positive = option(5, "how many components of a class cluster_space 'projected' keeps")
    head_growth: Literal["keep", "fresh"] = option(
        "keep", "'keep' grows the head without changing any class probability; 'fresh' starts a new head"
    )
    cluster_scope: Literal["cluster", "class"] = option(
        "cluster", "'cluster' splits the clusters there are; 'class' clusters the whole class anew at each event"
    )
    class_rule: Literal["sum", "max"] = option("sum", "class probability from its clusters: their sum or the largest")


@dataclass(frozen=True, kw_only=True)
class DropoutOptions:
    """MC-Dropout: averages over networks with units left out at random."""

    dropout: Annotated[float, Interval(gt=0, lt=1)] = option(0.1, "share of the units left out")
    dropout_samples: Annotated[int, Interval(ge=1, le=1000)] = option(10, "passes per image at test time")


@dataclass(frozen=True, kw_only=True)
class EnsembleOptions:
    """Deep ensemble: averages over networks trained from different seeds."""

    members: Annotated[int, Interval(ge=1, le=MAX_MEMBERS)] = option(
        5, "networks in the ensemble (the paper has 10, 3 for ImageNet)"
    )


@dataclass(frozen=True, kw_only=True)
class DuqOptions:
    """DUQ: distances to one centroid per class, and a gradient penalty."""

    duq_length_scale: AboveZero = option(0.1, "length scale of the kernel")
    duq_gradient_penalty: NonNegative = option(0.5, "weight of the two-sided gradient penalty")
    duq_centroid_momentum: Share = option(0.999, "momentum of the moving averages of the centroids")
    duq_centroid_size: Positive = option(128, "size of the space of each class, where its centroid is")


@dataclass(frozen=True, kw_only=True)
class SngpOptions:
    """SNGP: spectral normalisation and a Gaussian process of random features as head."""

    sngp_spectral_bound: AboveZero = option(6.0, "largest factor by which a layer may stretch its input")
    sngp_power_iterations: Positive = option(1, "power iterations per step")
    sngp_features: Annotated[int, Interval(ge=1, le=2**15)] = option(1024, "random features of the Gaussian process")
    sngp_space: Literal["normalised", "raw"] = option("normalised", "embeddings that its kernel compares")
    sngp_kernel_scale: AboveZero = option(1.0, "length scale of its kernel")
    sngp_amplitude: AboveZero = option(20.0, "amplitude of its kernel: how large logits are expected to be")
    sngp_likelihood: Literal["gaussian", "multinomial"] = option(
        "gaussian", "how images count in its variance: all alike (the authors' code), or by p (1 - p) (their paper)"
    )
    sngp_ridge: AboveZero = option(1.0, "prior precision of its weights")
    sngp_mean_field: NonNegative = option(
        25.0, "factor of the variance in the mean-field logits; 25 suits some 50,000 images, few images want less"
    )


@dataclass(frozen=True, kw_only=True)
class DueOptions:
    """DUE: spectral normalisation, also of batch normalisation, and a sparse variational Gaussian process as head."""

    due_spectral_bound: AboveZero = option(3.0, "largest factor by which a layer may stretch its input")
    due_power_iterations: Positive = option(1, "power iterations per step")
    due_inducing_points: Literal["auto"] | Annotated[int, Interval(ge=1, le=1000)] = option(
        "auto", "inducing points of the Gaussian process, at most 1000; 'auto' takes one per class, but at least 20"
    )
    due_kernel: Literal["rbf", "matern12", "matern32", "matern52"] = option("rbf", "its kernel")


@dataclass(frozen=True, kw_only=True)
class VmdlsOptions:
    """VMDLS: a latent space with one isotropic Gaussian per class."""

    vmdls_latent_size: Positive = option(128, "size of the latent space")
    vmdls_kl_weight: NonNegative = option(0.1, "weight of the Kullback-Leibler divergence")
    vmdls_prior_scale: AboveZero = option(0.2, "standard deviation of a class, whose mean has length 1")


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """The Gaussians over the embeddings."""

    explained_variance: Annotated[float, Interval(gt=0, le=1)] = option(0.95, "share of variance that PCA keeps")
    pca: bool = option(True, "reduce the embeddings by PCA first")
    covariance: Literal["tied", "global", "full"] = option(
        "tied", "shared within clusters (the paper), over everything, or one per cluster"
    )
    distance: Literal["mahalanobis", "euclidean"] = option("mahalanobis", "distance to the cluster means")
    norm_exponent: Literal["auto"] | Annotated[float, Interval(ge=0, le=2)] = option(
        "auto",
        "embeddings are divided by their norm to this power: 0 is the paper, 1 the unit sphere; 'auto' takes the one "
        "whose distance tells wrong from right validation images best",
    )
    score_by: ScoreBy = option(
        "auto",
        "what ranks images as out-of-distribution; 'auto' is fused, or normalised where validation images are few",
    )


@dataclass(frozen=True, kw_only=True)
class DecisionOptions:
    """When an image is called out-of-distribution."""

    false_alarm: Annotated[float, Interval(ge=1e-9, lt=1)] = option(
        0.05, "share of in-distribution images flagged at most, on average"
    )
    confidence: Annotated[Annotated[float, Interval(gt=0, lt=1)] | None, NoneByName] = option(
        None, "hold that share for these very calibration images with this confidence, such as 0.95, or 'none'"
    )
    per_class: bool = option(False, "one threshold per predicted class, where it has enough calibration images")


_PAPER_RECIPE: dict[str, Any] = {
    "cross_entropy_norm": 0.0,
    "margin": 0.7,
    "triplet_weight": 1.0,
    "triplet_warmup": 0.0,
    "triplet_softness": 0.0,
    "triplet_space": "raw",
    "prototype_weight": 0.0,
    "relabel_every": 10,
    "hard_class_error": 0.3,
    "max_clusters": 5,
    "min_cluster_size": 1,
    "cluster_method": "xmeans",
    "cluster_space": "raw",
    "head_growth": "fresh",
    "cluster_scope": "class",
    "class_rule": "max",
}
_PAPER_DETECTOR: dict[str, Any] = {
    "explained_variance": 0.95,
    "covariance": "tied",
    "norm_exponent": 0.0,
    "score_by": "distance",
}

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "backbone": "wrn-28-10",
        "epochs": 200,
        "batch_size": 64,
        "optimizer": "sgd",
        "learning_rate": 0.05,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 1e-4,
        "schedule": "constant",
        "sampler": "shuffle",
        **_PAPER_RECIPE,
        **_PAPER_DETECTOR,
        "members": 10,
    },
    "paper-diatoms": {
        "backbone": "wrn-28-10",
        "epochs": 100,
        "batch_size": 4,
        "optimizer": "adam",
        "learning_rate": 2e-4,
        "weight_decay": 0.0,
        "schedule": "constant",
        "augment": "flip-both",
        "sampler": "shuffle",
        **_PAPER_RECIPE,
        **_PAPER_DETECTOR,
        "members": 10,
    },
    "paper-imagenet": {  # the paper's ResNet-50 is not among our networks: name another with --backbone
        "backbone": "resnet18",
        "embedding_size": 640,
        "epochs": 300,
        "batch_size": 64,
        "optimizer": "adam",
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "schedule": "constant",
        "sampler": "shuffle",
        **_PAPER_RECIPE,
        "relabel_every": 20,
        "hard_class_error": 0.2,
        **_PAPER_DETECTOR,
        "members": 3,
    },
    "finetune": {  # for --init: a tenth of the usual learning rate, which rises over the first quarter of the steps
        "epochs": 10,
        "batch_size": 64,
        "optimizer": "sgd",
        "learning_rate": 0.01,
        "weight_decay": 1e-4,
        "schedule": "triangular",
        "relabel_every": 4,
    },
}


GROUPS: dict[str, type] = {
    "data": DataOptions,
    "model": ModelOptions,
    "train": TrainOptions,
    "recipe": RecipeOptions,
    "mc_dropout": DropoutOptions,
    "ensemble": EnsembleOptions,
    "duq": DuqOptions,
    "sngp": SngpOptions,
    "due": DueOptions,
    "vmdls": VmdlsOptions,
    "detector": DetectorOptions,
    "decision": DecisionOptions,
}
RECIPE_SECTIONS = ("recipe", "mc_dropout", "ensemble", "duq", "sngp", "due", "vmdls")  # of which a run needs one
SWITCHES = tuple(f.name for f in fields(RecipeOptions) if not f.metadata["flag"])  # what a recipe's name stands for


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All options of a run, one attribute per section of ``config.toml``."""

    data: DataOptions
    model: ModelOptions
    train: TrainOptions
    recipe: RecipeOptions
    mc_dropout: DropoutOptions
    ensemble: EnsembleOptions
    duq: DuqOptions
    sngp: SngpOptions
    due: DueOptions
    vmdls: VmdlsOptions
    detector: DetectorOptions
    decision: DecisionOptions

    def section(self, name: str) -> dict[str, Any]:
        """The options of one section. The two switches are left out, since [model] ``recipe`` stands for them."""
        return {key: value for key, value in as_dict(getattr(self, name)).items() if key not in SWITCHES}

    def sections(self) -> dict[str, dict[str, Any]]:
        """What ``config.toml`` holds: of the sections of recipes only the one of the recipe in use."""
        others = set(RECIPE_SECTIONS) - {recipe_section(self.model.recipe)}
        return {name: self.section(name) for name in GROUPS if name not in others}


def recipe_section(recipe: str) -> str:
    """The section with the options of a recipe.

    >>> recipe_section("mc-dropout"), recipe_section("triplet")
    ('mc_dropout', 'recipe')
    """
    own = recipe.replace("-", "_")
    return own if own in RECIPE_SECTIONS else "recipe"


def resolve_config(
    flags: dict[str, Any] | None = None, file: dict[str, Any] | None = None, preset: str | None = None
) -> RunConfig:
    """Merge flags over a file's sections over a preset over the defaults.

    >>> config = resolve_config({"epochs": 3}, {"train": {"epochs": 5, "seed": 7}}, preset="paper")
    >>> config.train.epochs, config.train.seed, config.train.batch_size, config.recipe.head_growth
    (3, 7, 64, 'fresh')
    """
    if preset is not None and preset not in PRESETS:
        raise ConfigError(f"unknown preset '{preset}': {suggest(preset, PRESETS)}")
    flags, file = flags or {}, file or {}
    _check_sections(file)
    base = PRESETS[preset] if preset else {}
    built: dict[str, Any] = {}
    for section, group in GROUPS.items():
        known = {f.name for f in fields(group)}
        own_flags = {key: value for key, value in flags.items() if key in known}
        build_options(group, own_flags, where=None)  # so that a wrong flag is called a flag
        values = {key: value for key, value in base.items() if key in known} | file.get(section, {}) | own_flags
        built[section] = build_options(group, values, f"section [{section}]")
    return RunConfig(**built)


def _check_sections(file: dict[str, Any]) -> None:
    for section, values in file.items():
        if section not in GROUPS:
            raise ConfigError(f"unknown section '{section}' in the configuration file: {suggest(section, GROUPS)}")
        if not isinstance(values, dict):
            raise ConfigError(f"'{section}' in the configuration file is {values!r}: write it as a section [{section}]")
    for key in SWITCHES:
        if key in file.get("recipe", {}):
            raise ConfigError(f"'{key}' in section [recipe] cannot be set in a file: use recipe in section [model]")


def build_options(group: type[Options], values: dict[str, Any], where: str | None = "configuration") -> Options:
    """Validate ``values`` and make the options of ``group``; an unknown key fails with a suggestion.

    Errors say ``where`` the values come from; ``None`` stands for flags of the command line.

    >>> build_options(TrainOptions, {"epochs": "3"}).epochs
    3
    >>> build_options(TrainOptions, {"epoch": 3})
    Traceback (most recent call last):
    ...
    maple.errors.ConfigError: unknown key 'epoch' in configuration: did you mean 'epochs'?
    """
    from pydantic import ValidationError

    helps = {f.name: f.metadata.get("help", "another value") for f in fields(group)}  # type: ignore[arg-type]
    for key in values:
        if key not in helps:
            raise ConfigError(f"unknown key '{key}' in {where}: {suggest(key, helps)}")
    try:
        return _validator(group).validate_python(values)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        key, *inside = (str(part) for part in first["loc"])
        # A message about one branch of a union or one item of a tuple says less than the help of the option.
        reason = f"expected {helps[key]}" if inside else f"{first['msg'].lower()} ({helps[key]})"
        raise ConfigError(f"{_said(key, values[key], where)}: {reason}") from None


@cache
def _validator(group: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(group)


def flag_name(key: str) -> str:
    """The flag of an option.

    >>> flag_name("batch_size")
    '--batch-size'
    """
    return "--" + key.replace("_", "-")


def _said(key: str, value: Any, where: str | None) -> str:
    if where is not None:
        return f"'{key}' in {where} is {value!r}"
    return f"{flag_name(key)} {','.join(map(str, value)) if isinstance(value, list) else value}"


def as_dict(options: Any, group: type | None = None) -> dict[str, Any]:
    """The options as plain values; with ``group``, only those that the group declares."""
    values = asdict(options)
    if group is not None:
        values = {f.name: values[f.name] for f in fields(group)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file as a dictionary."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration '{path}': {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' is not valid TOML: {error}") from None


def read_names(text: str) -> list[str]:
    """Names separated by commas, or those in the file after an ``@``, one per line; lines with ``#`` are remarks.

    >>> read_names("detritus, fibre")
    ['detritus', 'fibre']
    """
    if not text.startswith("@"):
        return [name.strip() for name in text.split(",") if name.strip()]
    try:
        lines = Path(text[1:]).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the names in '{text[1:]}': {getattr(error, 'strerror', None) or error}"
        ) from None
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def to_toml(values: dict[str, Any]) -> str:
    """Nested dictionaries as TOML text; keys without a value (``None``) are left out."""
    return tomli_w.dumps(_drop_none(values))


def _drop_none(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _drop_none(value) if isinstance(value, dict) else value
        for key, value in values.items()
        if value is not None
    }
