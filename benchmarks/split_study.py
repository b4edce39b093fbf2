"""Measure when clusters within classes improve a detector, by method and geometry of the clustering.

    python benchmarks/split_study.py --data cifar10 --part posthoc --seeds 0 1 --epochs 16 --json FILE
    python benchmarks/split_study.py --data cifar10-pairs --part training --geometry none normalised true --json FILE

Data, each with out-of-distribution (OOD) sets, and with hidden classes within its classes if these are known:

- cifar10: none hidden; OOD are CIFAR-100, Tiny ImageNet and SVHN.
- cifar10-pairs: the same images in five classes of two; hidden are the ten.
- plankton: the taxa with at least 100 images except every fifth of them, which is held out; OOD are the held-out taxa
  and the rare ones.
- simulated-diatoms: hidden are the views (valve, girdle, ...); OOD are near and far.

Parts:

- public: the public CIFAR-10 ResNet-20, CIFAR-10 and its pairs only; then as posthoc.
- posthoc: one network is trained with cross-entropy, then every class of its embeddings is clustered.
- training: all classes with a validation error are split half-way through the training, which continues with the
  clusters as pseudo-classes. ``unsplit`` evaluates the same network with one Gaussian per class.

Geometries are those of ``cluster_space``, methods those of ``cluster_method``, in all combinations. Geometry none is
cross-entropy with one Gaussian per class; true uses the hidden classes as clusters, the ideal clustering.

Each row of the result has the number of clusters, the adjusted Rand index (ARI) with the hidden classes (mean over
classes), the accuracy of the nearest cluster, the negative log-likelihood of the posterior with a temperature from the
validation images, and AUROCs of three scores: distance and spread (nearest over mean, by class) of normalised
embeddings, and energy. Rows are written to the JSON file one by one, and existing rows are not computed again: rerun
an interrupted study to resume it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

from maple.data.image_set import ImageSet, channel_statistics
from maple.data.options import DataOptions
from maple.data.simulate.diatoms import simulated_diatoms
from maple.data.sources import open_images
from maple.data.splits import Splits, load_splits
from maple.decisions.pool import class_probabilities
from maple.decisions.pool_fit import fit_temperature
from maple.detectors.scores import energy_score, spread_score
from maple.files import load_json, save_json
from maple.networks import Backbone, create_backbone, embed
from maple.stats.clustering.splitting import Clustering, ClusterMethod, ClusterSpace, split_clusters
from maple.stats.gaussians import class_maximum, fit_gaussians, log_posterior
from maple.stats.metrics import accuracy, auroc, format_spread, negative_log_likelihood
from maple.stats.moments import Moments
from maple.training.loop import Run, train_backbone
from maple.training.maple import MapleRecipe
from maple.training.recipe import Recipe, create_recipe
from maple.types import Outputs, Relabelling
from resnet20 import public_resnet20

CIFAR_OOD = {"cifar100": "cifar100/test", "tiny_imagenet": "tiny_imagenet/val", "svhn": "svhn/test"}
PAIRS = ("airplane+ship", "automobile+truck", "bird+frog", "cat+dog", "deer+horse")
COMMON_TAXON = 100  # training images from which on a plankton taxon may be known
N_DIATOMS = 10_000
GEOMETRIES = ("none", *get_args(ClusterSpace), "true")


class Way(NamedTuple):
    """A way to cluster; geometries none and true need no method."""

    geometry: str
    method: str = ""


def list_ways(geometries: list[str], methods: list[str]) -> list[Way]:
    """Every geometry with every method that it needs."""
    clustered = get_args(ClusterSpace)
    return [Way(name, method) for name in geometries for method in (methods if name in clustered else [""])]


# --- data -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Study:
    """Images to learn from and to be tested on."""

    train: ImageSet
    validation: ImageSet
    test: ImageSet
    ood: dict[str, ImageSet]
    hidden: np.ndarray | None = None  # (N,) hidden class of each training image, where known

    def limited(self, n: int | None) -> Study:
        """At most ``n`` images of each set, drawn at random."""
        if n is None:
            return self
        rows = np.random.default_rng(0).permutation(len(self.train))[:n]
        return Study(
            self.train.subset(rows),
            _some(self.validation, n),
            _some(self.test, n),
            {name: _some(images, n) for name, images in self.ood.items()},
            None if self.hidden is None else self.hidden[rows],
        )


def _some(images: ImageSet, n: int) -> ImageSet:
    return images.subset(np.random.default_rng(0).permutation(len(images))[:n])


def _study(splits: Splits, ood: dict[str, ImageSet], hidden: np.ndarray | None = None) -> Study:
    return Study(splits.train, splits.validation, splits.test, ood, hidden)


def load_cifar10(data_root: Path) -> Study:
    ood = {name: open_images(source, size=32, data_root=data_root) for name, source in CIFAR_OOD.items()}
    return _study(load_splits("cifar10", DataOptions(size=32), data_root), ood)


def load_cifar10_pairs(data_root: Path) -> Study:
    """CIFAR-10 in five classes of two."""
    whole = load_cifar10(data_root)
    pair_of = {name: pair for pair, names in enumerate(PAIRS) for name in names.split("+")}
    pairs = np.array([pair_of[name] for name in whole.train.class_names])

    def merge(images: ImageSet) -> ImageSet:
        return replace(images, labels=pairs[images.labels], class_names=PAIRS)

    return Study(merge(whole.train), merge(whole.validation), merge(whole.test), whole.ood, whole.train.labels)


def load_plankton(data_root: Path) -> Study:
    """Common taxa, every fifth of them held out."""
    train, test = (open_images(f"plankton_ndsb/{part}", size=32, data_root=data_root) for part in ("train", "test"))
    counts = dict(zip(train.class_names, np.bincount(train.labels, minlength=len(train.class_names))))
    common = sorted(name for name, count in counts.items() if count >= COMMON_TAXON)
    held_out = common[4::5]
    known = [name for name in common if name not in held_out]
    rare = [name for name in counts if name not in common]
    splits = load_splits(_taxa(train, known), DataOptions(size=32), test=_taxa(test, known))
    return _study(splits, {"held_out": _taxa(test, held_out), "rare": _taxa(test, rare)})


def _taxa(images: ImageSet, names: list[str]) -> ImageSet:
    """The images of some classes."""
    chosen = np.isin(images.class_names, names)
    return images.subset(chosen[images.labels]).with_class_names(names)


def load_simulated_diatoms(data_root: Path) -> Study:
    """Simulated diatoms; splits follow the content of an image, and so does its view."""
    images, labels, names, views = simulated_diatoms(N_DIATOMS)
    whole = ImageSet.from_arrays(images, labels, names, name="simulated-diatoms")
    splits = load_splits(whole)
    order = np.argsort(whole.keys)
    rows = order[np.searchsorted(whole.keys, splits.train.keys, sorter=order)]
    ood = {kind: open_images(f"simulated-diatoms/{kind}?n=2000", size=whole.size) for kind in ("near", "far")}
    return _study(splits, ood, hidden=views[rows])


DATA: dict[str, Callable[[Path], Study]] = {
    "cifar10": load_cifar10,
    "cifar10-pairs": load_cifar10_pairs,
    "plankton": load_plankton,
    "simulated-diatoms": load_simulated_diatoms,
}


# --- clusters -------------------------------------------------------------------------------------------------------


def known_clusters(labels: np.ndarray, hidden: np.ndarray) -> Relabelling:
    """One cluster per class and hidden class, as a split of the classes."""
    width = int(hidden.max()) + 1
    pairs, cluster_ids, counts = np.unique(labels * width + hidden, return_inverse=True, return_counts=True)
    classes = pairs // width
    return Relabelling(cluster_ids, classes, classes, counts / np.bincount(labels)[classes])


@dataclass(frozen=True, kw_only=True)
class KnownClusters(MapleRecipe):
    """Clustering that is told the hidden classes when it is due."""

    hidden: np.ndarray

    def relabel(self, epoch: int, probabilities: Any, labels: Any, current: Relabelling, *others: Any) -> Any:
        return known_clusters(current.cluster_ids, self.hidden) if epoch == self.relabel_every else None


def hidden_agreement(clusters: Relabelling, hidden: np.ndarray | None) -> float | None:
    """Adjusted Rand index of clusters and hidden classes, mean over classes; ``None`` where nothing is hidden."""
    if hidden is None:
        return None
    classes = clusters.cluster_to_class[clusters.cluster_ids]
    each = [classes == class_id for class_id in np.unique(classes)]
    return float(np.mean([adjusted_rand_score(hidden[rows], clusters.cluster_ids[rows]) for rows in each]))


# --- measures -------------------------------------------------------------------------------------------------------


def measure(outputs: dict[str, Outputs], clusters: Relabelling) -> dict[str, Any]:
    """What one Gaussian per cluster is worth; ``outputs`` has train, validation and test, the others are OOD sets."""
    cluster_to_class = clusters.cluster_to_class
    embeddings = outputs["train"].embeddings
    moments = Moments(clusters.n_clusters, embeddings.shape[1], norm_exponent=1.0)
    gaussians = fit_gaussians(moments.update(embeddings, clusters.cluster_ids))
    distances = {name: gaussians.squared_distances(part.embeddings) for name, part in outputs.items()}  # (N, M) each
    labels = {name: outputs[name].labels for name in ("validation", "test")}
    weights = gaussians.log_weights
    temperature = fit_temperature(distances["validation"], labels["validation"], weights, cluster_to_class)
    log_posteriors = {
        name: log_posterior(distances[name], weights, cluster_to_class, temperature) for name in labels
    }  # (N, C) each
    by_class = {name: -class_maximum(-squared, cluster_to_class) for name, squared in distances.items()}  # (N, C) each
    return {
        "clusters": clusters.n_clusters,
        "md_accuracy": accuracy(by_class["test"].argmin(1), labels["test"]),
        "accuracy": accuracy(log_posteriors["test"].argmax(1), labels["test"]),
        "temperature": temperature,
        **{f"{name}_nll": negative_log_likelihood(log_posteriors[name], labels[name], log=True) for name in labels},
        "distance": _aurocs({name: nearest.min(1) for name, nearest in by_class.items()}),
        "spread": _aurocs(
            {name: spread_score(nearest.min(axis=1), nearest.mean(axis=1)) for name, nearest in by_class.items()}
        ),
    }


def measure_head(outputs: dict[str, Outputs], cluster_to_class: np.ndarray) -> dict[str, Any]:
    """What the logits of the same network are worth."""
    test = outputs["test"]
    assert test.logits is not None
    same_classes = test.logits.shape[1] == len(cluster_to_class)
    return {
        "softmax_accuracy": accuracy(class_probabilities(test.logits, cluster_to_class).argmax(1), test.labels)
        if same_classes
        else None,
        "energy": _aurocs({name: energy_score(part.logits) for name, part in outputs.items()}),
    }


def _aurocs(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """AUROC by OOD set, and their mean."""
    ood = [name for name in scores if name not in ("train", "validation", "test")]
    values = {name: auroc(scores["test"], scores[name]) for name in ood}
    return {**values, "mean": float(np.mean(list(values.values())))}


# --- parts ----------------------------------------------------------------------------------------------------------


def train_network(study: Study, recipe: Recipe, seed: int, options: argparse.Namespace) -> Run:
    torch.manual_seed(seed)
    mean, std = channel_statistics(study.train)
    backbone = create_backbone(options.backbone, len(study.train.class_names), mean=mean, std=std)
    return train_backbone(
        backbone,
        recipe,
        study.train,
        study.validation,
        epochs=options.epochs,
        batch_size=options.batch_size,
        precision=options.precision,
        seed=seed,
    )


def embed_all(backbone: Backbone, study: Study) -> dict[str, Outputs]:
    sets = {"train": study.train, "validation": study.validation, "test": study.test, **study.ood}
    return {name: embed(backbone, images) for name, images in sets.items()}


def study_posthoc(study: Study, ways: list[Way], seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One network, clustered in each way."""
    run = train_network(study, create_recipe("cross-entropy"), seed, options)
    return cluster_outputs(study, embed_all(run.backbone, study), ways, seed, options)


def study_public(study: Study, ways: list[Way], seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The public CIFAR-10 ResNet-20, which knows ten classes also where they are merged in pairs."""
    return cluster_outputs(study, embed_all(public_resnet20(options.shared), study), ways, seed, options)


def cluster_outputs(
    study: Study, outputs: dict[str, Outputs], ways: list[Way], seed: int, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    start = Relabelling.initial(study.train.labels, len(study.train.class_names))
    for way in ways:
        clusters = find_clusters(outputs["train"].embeddings, start, way, study.hidden, seed, options)
        yield {
            **measure(outputs, clusters),
            "ari": hidden_agreement(clusters, study.hidden),
            **measure_head(outputs, start.cluster_to_class),
        }


def find_clusters(
    embeddings: np.ndarray,
    start: Relabelling,
    way: Way,
    hidden: np.ndarray | None,
    seed: int,
    options: argparse.Namespace,
) -> Relabelling:
    """The clusters of all classes, from one each."""
    if way.geometry == "none":
        return start
    if way.geometry == "true":
        return known_clusters(start.cluster_ids, hidden)
    how = Clustering(
        method=way.method,
        space=way.geometry,
        n_components=options.components,
        max_clusters=options.max_clusters,
        min_cluster_size=options.min_cluster_size,
        seed=seed,
    )
    return split_clusters(embeddings, np.arange(len(embeddings)), start, start.cluster_to_class, how)


def study_training(study: Study, ways: list[Way], seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One network for each way."""
    unsplit = Relabelling.initial(study.train.labels, len(study.train.class_names))
    for way in ways:
        run = train_network(study, half_time_recipe(study, way, options), seed, options)
        outputs = embed_all(run.backbone, study)
        yield {
            **measure(outputs, run.relabelling),
            "ari": hidden_agreement(run.relabelling, study.hidden),
            **measure_head(outputs, run.cluster_to_class),
            "unsplit": measure(outputs, unsplit),
        }


def half_time_recipe(study: Study, way: Way, options: argparse.Namespace) -> Recipe:
    """Cross-entropy, with clusters from half-time on."""
    if way.geometry == "none":
        return create_recipe("cross-entropy")
    half = (options.epochs + 1) // 2
    if way.geometry == "true":
        return KnownClusters(triplet=False, relabel_every=half, hidden=study.hidden)
    return create_recipe(
        "clustering",
        relabel_every=half,
        hard_class_error=0.0,
        cluster_space=way.geometry,
        cluster_method=way.method,
        cluster_components=options.components,
        max_clusters=options.max_clusters,
        min_cluster_size=options.min_cluster_size,
    )


PARTS = {"public": study_public, "posthoc": study_posthoc, "training": study_training}


# --- results --------------------------------------------------------------------------------------------------------


def settings_of(way: Way, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """What tells a row from others; a geometry that clusters nothing has no settings for it."""
    row = {name: getattr(options, name) for name in ("data", "part", "backbone", "epochs", "batch_size", "images")}
    row |= {"geometry": way.geometry, "method": way.method, "seed": seed}
    if way.method:
        row |= {name: getattr(options, name) for name in ("max_clusters", "min_cluster_size")}
    return row | ({"components": options.components} if way.geometry == "projected" else {})


def is_same(row: dict[str, Any], settings: dict[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in settings.items())


def print_table(rows: list[dict[str, Any]]) -> None:
    """Mean and deviation over seeds."""

    def kind(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["epochs"], row["method"], GEOMETRIES.index(row["geometry"])

    titles = ("clusters", "ARI", "MD accuracy", "validation NLL", "distance", "spread", "energy")
    print(f"{'epochs, method, geometry':30}" + "".join(f"{title:17}" for title in titles))
    for (epochs, method, geometry), group in groupby(sorted(rows, key=kind), key=kind):
        same = list(group)
        columns = [
            [row["clusters"] for row in same],
            [row["ari"] for row in same if row["ari"] is not None],
            *([row[key] for row in same] for key in ("md_accuracy", "validation_nll")),
            *([row[key]["mean"] for row in same] for key in ("distance", "spread", "energy")),
        ]
        cells = (format_spread(values) if values else "" for values in columns)
        print(f"{epochs:4}  {method:8}{GEOMETRIES[geometry]:16}" + "".join(f"{cell:17}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=DATA, required=True)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--geometry", choices=GEOMETRIES, nargs="+", default=list(GEOMETRIES))
    parser.add_argument("--method", choices=get_args(ClusterMethod), nargs="+", default=["xmeans", "tmeans"])
    parser.add_argument("--components", type=int, default=5, help="of each class, for the geometry projected")
    parser.add_argument("--max-clusters", type=int, default=5)
    parser.add_argument("--min-cluster-size", type=int, default=20)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--backbone", default="resnet9")
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--images", type=int, help="of each set at most, for a trial")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="folder with data/")
    parser.add_argument(
        "--json", type=Path, required=True, help="file for the rows; those in it are not computed again"
    )
    options = parser.parse_args()

    rows = load_json(options.json)["rows"] if options.json.exists() else []
    study = DATA[options.data](options.shared / "data").limited(options.images)
    geometries = [name for name in options.geometry if name != "true" or study.hidden is not None]
    for seed in options.seeds:
        wanted = {way: settings_of(way, seed, options) for way in list_ways(geometries, options.method)}
        missing = [way for way, settings in wanted.items() if not any(is_same(row, settings) for row in rows)]
        if not missing:
            continue
        for way, found in zip(missing, PARTS[options.part](study, missing, seed, options)):
            rows.append(wanted[way] | found)
            save_json(options.json, {"torch": torch.__version__, "numpy": np.__version__, "rows": rows})
    print_table([row for row in rows if row["data"] == options.data and row["part"] == options.part])


if __name__ == "__main__":
    main()
