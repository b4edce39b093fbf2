"""The cost model of docs/scale.md: what scoring, fitting and training take, from constants that scale.py measures.

All functions are pure. Time is processor time of one core; it grows with the number of images and divides by the number
of cores, up to the exchange that is counted beside it. Letters: N images, W workers, D embedding, K components, M
clusters, E exponents of the norm, P parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

MILLION = 1_000_000
FLOAT, DOUBLE = 4, 8  # bytes
EXPONENTS = 3  # of the norm, among which the detector chooses
PART_BYTES, PART_IMAGES = 2**27, 2**14  # as in maple.deploy.ray.predict
BUCKET = 25 * 2**20  # bytes of gradients that torch sends at a time
STEP_MESSAGES = 2  # further all-reduces of a step: whether all could read their images, and compute their loss
BLOCK_SHARE = 0.05  # of the bytes read: what the moments of a block may take

PRICE = 0.04  # dollars per core and hour: an assumption, about that of rented processors
BANDWIDTH = 1.25e9  # bytes per second between machines: 10 Gbit/s, an assumption
MEMORY = 64e9  # bytes of a process that holds the whole: an assumption
HOUR = 3600.0


@dataclass(frozen=True)
class Constants:
    """What one image takes, on one core of the machine that was measured."""

    name: str
    network: str
    size: int  # side of the images, in pixels
    file_bytes: float
    parameters: int
    dim: int
    components: int
    clusters: int
    classes: int
    flops: float  # of the forward pass, two per multiplication and addition
    read_seconds: float  # of an encoded image, from memory to decoded pixels
    network_seconds: float
    score_seconds: float
    moments_seconds: float
    write_seconds: float
    row_bytes: float  # of a row of predictions, as Parquet
    step_seconds: float  # of a training step

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Constants:
        return cls(**{field.name: values[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class Cost:
    """What a task takes for ``images`` images, once, however many workers share it; ``sent`` depends on them."""

    task: str
    images: float
    core_seconds: float
    flops: float
    read_bytes: float
    written_bytes: float
    sent_bytes: float  # by all workers together
    messages: float

    def hours(self, cores: int) -> float:
        """Hours on that many cores, computing and sending one after the other."""
        return (self.core_seconds / cores + self.sent_bytes / cores / BANDWIDTH) / HOUR

    @property
    def dollars(self) -> float:
        return self.core_seconds / HOUR * PRICE


# --- the three tasks --------------------------------------------------------------------------------------------------


def score_flops(c: Constants) -> float:
    """Projection to K components and squared distances to M centroids, of one image."""
    return 2.0 * c.dim * c.components + 2.0 * c.components * c.clusters


def moments_bytes(dim: int, clusters: int, exponents: int = EXPONENTS) -> float:
    """Sums of M clusters and a second moment for each exponent, counts once."""
    return DOUBLE * (exponents * (clusters * dim + dim * dim) + clusters)


def part_images(size: int) -> int:
    """Images of a part of an archive."""
    return min(PART_IMAGES, PART_BYTES // (3 * size * size))


def scoring(c: Constants, images: float = MILLION, workers: int = 1) -> Cost:
    """``maple predict --engine ray``: decoded pixels go to a worker, its rows into a part."""
    parts = math.ceil(images / part_images(c.size))
    seconds = c.read_seconds + c.network_seconds + c.score_seconds + c.write_seconds
    pixels = 3.0 * c.size * c.size if workers > 1 else 0.0
    return Cost(
        "score",
        images,
        images * seconds,
        images * (c.flops + score_flops(c)),
        images * c.file_bytes,
        images * c.row_bytes,
        images * pixels,
        3 * parts,  # decode, predict, answer
    )


def fitting(c: Constants, images: float = MILLION, workers: int = 1) -> Cost:
    """One pass over the training images; every block of images sends its moments."""
    own = moments_bytes(c.dim, c.clusters)
    block = max(own / (BLOCK_SHARE * c.file_bytes), part_images(c.size))
    blocks = math.ceil(images / block)
    seconds = c.read_seconds + c.network_seconds + EXPONENTS * c.moments_seconds
    flops = c.flops + EXPONENTS * 2.0 * c.dim * c.dim
    return Cost(
        "fit",
        images,
        images * seconds,
        images * flops,
        images * c.file_bytes,
        own,
        own * blocks if workers > 1 else 0.0,
        3 * blocks,
    )


def training(c: Constants, images: float = MILLION, workers: int = 1, batch: int = 128) -> Cost:
    """One epoch: a ring sends the gradients twice, in buckets; ``batch`` images per process and step."""
    steps = math.ceil(images / (batch * workers))
    gradients = FLOAT * c.parameters
    buckets = math.ceil(gradients / BUCKET)
    ring = 2 * (workers - 1)
    return Cost(
        "train, one epoch",
        images,
        images * (c.read_seconds + c.step_seconds),
        images * 3 * c.flops,
        images * c.file_bytes,
        FLOAT * 2 * c.parameters,
        steps * ring * gradients,
        steps * workers * ring * (buckets + STEP_MESSAGES),
    )


TASKS = (scoring, fitting, training)


# --- what breaks first ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """A quantity that grows, and what a process or a day has for it."""

    where: str
    what: str
    value: float
    limit: float
    unit: str

    @property
    def share(self) -> float:
        """How many times the limit."""
        return self.value / self.limit


def limits(
    c: Constants, per_file: dict[str, float], images: float = 1e9, classes: float = 1e5, workers: int = 1000
) -> list[Limit]:
    """What does not fit any more, the worst first; ``per_file`` are the constants of lists and messages."""
    parameters = c.parameters + (classes - c.classes) * c.dim
    moments = moments_bytes(c.dim, int(classes))
    held_out = 0.1 * images
    step = 128 * (c.read_seconds + c.step_seconds)
    parts = images / part_images(c.size)
    found = [
        Limit("score", "list of files, in the command", per_file["list_bytes"] * images, MEMORY, "bytes"),
        Limit("score", "listing the files", per_file["list_seconds"] * images, HOUR, "seconds"),
        Limit("score", "parts in one folder", parts, 1e6, "files"),
        Limit("score", "giving out parts", parts * per_file["task_seconds"], 24 * HOUR, "seconds"),
        Limit("score", "centroids in a worker", DOUBLE * c.components * classes, MEMORY, "bytes"),
        Limit("score", "distances, logits, posterior of a batch", 4 * DOUBLE * 128 * classes, MEMORY, "bytes"),
        Limit("fit", "moments in a worker", 2 * moments, MEMORY, "bytes"),
        Limit("fit", "merging in a tree", math.log2(workers) * moments / BANDWIDTH, HOUR, "seconds"),
        Limit("fit", "logits of a tenth of the images", FLOAT * held_out * classes, MEMORY, "bytes"),
        Limit("train", "labels, keys, order, clusters", per_file["image_bytes"] * images, MEMORY, "bytes"),
        Limit("train", "reading all images for their keys", per_file["open_seconds"] * images, 24 * HOUR, "seconds"),
        Limit("train", "logits of a tenth of the images", FLOAT * held_out * classes, MEMORY, "bytes"),
        Limit("train", "pseudo-labels sent by the first", DOUBLE * images * workers, 24 * HOUR * BANDWIDTH, "bytes"),
        Limit("train", "gradients, against a step of 128", 2 * FLOAT * parameters / BANDWIDTH, step, "seconds"),
        Limit("train", "network, gradients and SGD in a process", 3 * FLOAT * parameters, MEMORY, "bytes"),
    ]
    return sorted(found, key=lambda each: -each.share)


# --- tables -----------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A number with two digits and a prefix.

    >>> number(1234567), number(0.021), number(250e9), number(0)
    ('1.2 M', '0.021', '250 G', '0')
    """
    for factor, prefix in ((1e18, " E"), (1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= factor:
            return f"{_two_digits(value / factor)}{prefix}"
    return _two_digits(value)


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 9.95 or value == 0 else f"{value:.2g}"


def costs_table(constants: list[Constants], workers: int = 1000) -> str:
    """What a million images take."""
    lines = [
        "| | task | FLOPs | bytes read | bytes written | core-hours | dollars | hours on 1,000 cores "
        "| bytes sent then | messages then |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in constants:
        for task in TASKS:
            alone, many = task(c), task(c, workers=workers)
            values = (alone.flops, alone.read_bytes, alone.written_bytes, alone.core_seconds / HOUR, alone.dollars)
            cells = (*values, many.hours(workers), many.sent_bytes, many.messages)
            lines.append(f"| {c.name} | {alone.task} | {' | '.join(map(number, cells))} |")
    return "\n".join(lines)


def constants_table(constants: list[Constants]) -> str:
    """The measured constants, in milliseconds of one core per image."""
    names = ("read_seconds", "network_seconds", "score_seconds", "moments_seconds", "write_seconds", "step_seconds")
    lines = [
        "| | file | FLOPs | read and decode | network | decision | moments | write | training step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for c in constants:
        shape = f"{c.network}, {c.size} px, D={c.dim}, K={c.components}, M={c.clusters}"
        times = " | ".join(f"{_two_digits(1000 * getattr(c, name))} ms" for name in names)
        lines.append(f"| {c.name}: {shape} | {number(c.file_bytes)}B | {number(c.flops)} | {times} |")
    return "\n".join(lines)


def simulation_table(rows: list[dict[str, Any]]) -> str:
    """Predicted and measured seconds of sub-samples."""
    if not rows:
        return "Not part of this run."
    lines = ["| task | workers | images | predicted | measured | measured / predicted |", "|---|---|---|---|---|---|"]
    for row in rows:
        ratio = row["measured"] / row["predicted"]
        lines.append(
            f"| {row['task']} | {row['workers']} | {row['images']:,} | {row['predicted']:.1f} s | "
            f"{row['measured']:.1f} s | {ratio:.2f} |"
        )
    return "\n".join(lines)


def limits_table(found: list[Limit]) -> str:
    """What breaks, the worst first."""
    lines = ["| where | what | grows to | there is | times the limit |", "|---|---|---|---|---|"]
    for each in found:
        grown, there = f"{number(each.value)} {each.unit}", f"{number(each.limit)} {each.unit}"
        lines.append(f"| {each.where} | {each.what} | {grown} | {there} | {_two_digits(each.share)} |")
    return "\n".join(lines)
