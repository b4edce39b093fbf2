"""How the suites are trained and on which images.

A *protocol* names the images of an experiment: known, unknown, corrupted. A *profile* says how networks are trained
(``paper``: as in the paper; ``cpu`` and ``resnet9``: on two cores in hours; ``tiny``: in tests), so that a suite is the
same experiment in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from maple.errors import UsageError, suggest
from maple.options import Values, read_names

# --- protocols -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """The images of a suite: known and unknown."""

    source: str
    ood: dict[str, str]  # sources by name
    test: str | None = None  # where the source has no test images of its own
    corrupted: str | None = None  # a second test set: the first, corrupted
    flags: Values = field(default_factory=dict)
    preset: str = "paper"  # how the paper trained on such images
    near: tuple[str, ...] = ()  # names of ``ood`` that form the near group
    far: tuple[str, ...] = ()


def _openood(known: str, near: str, far: str, preset: str = "openood", **about: Any) -> Protocol:
    """A protocol of OpenOOD 1.5: its lists of unknown images, by name."""
    named = {name: f"openood/{known}-{name}" for name in f"{near} {far}".split()}
    return Protocol(ood=named, near=tuple(near.split()), far=tuple(far.split()), preset=preset, **about)


UNKNOWN_PLANKTON = Path(__file__).with_name("taxa") / "plankton_unknown.txt"
CORRUPTED = "corrupted:{}?family=all&severity=all"

PROTOCOLS = {
    "cifar10": Protocol("cifar10", {"svhn": "svhn", "cifar100": "cifar100/test", "tiny_imagenet": "tiny_imagenet"}),
    "cifar100": Protocol(
        "cifar100",
        {"cifar10": "cifar10/test", "tiny_imagenet": "tiny_imagenet"},
        corrupted=CORRUPTED.format("cifar100/test"),
    ),
    "imagenet": Protocol(
        "imagenet/train",
        {"imagenet_o": "imagenet_o"},
        test="imagenet/val",
        flags={"size": 224, "fit": "crop"},
        preset="paper-imagenet",
    ),
    "openood-cifar10": _openood(
        "cifar10", "cifar100 tin", "mnist svhn texture places365", source="cifar10", test="openood/cifar10-test"
    ),
    "openood-cifar100": _openood(
        "cifar100", "cifar10 tin", "mnist svhn texture places365", source="cifar100", test="openood/cifar100-test"
    ),
    "openood-imagenet": _openood(
        "imagenet",
        "ssb_hard ninco",
        "inaturalist textures openimage_o",
        preset="paper-imagenet",
        source="imagenet/train",
        test="imagenet/val",
        flags={"size": 224, "fit": "crop"},
    ),
    "microorganisms": Protocol(
        "plankton_ndsb",
        {"unknown": "left-out"},
        flags={
            "leave_out": read_names(f"@{UNKNOWN_PLANKTON}"),
            "size": 32,
            "augment": "flip-both",
            "splits": [0.875, 0.0625, 0.0625, 0.0],  # 70 to 10, of the training file; the test file is the other 20
        },
        preset="paper-diatoms",
    ),
}
FULL_PLANKTON = replace(PROTOCOLS["microorganisms"], flags={**PROTOCOLS["microorganisms"].flags, "size": 96})
FEW_PLANKTON = replace(  # a third of the images of CIFAR-10: smaller batches, more epochs
    PROTOCOLS["microorganisms"], flags={**PROTOCOLS["microorganisms"].flags, "batch_size": 128, "epochs": 16}
)
_TINY = "simulated-diatoms?n=240&size=16"
_TINY_OOD = "simulated-diatoms/{}?n=40&size=16&seed={}"


def simulate(protocol: Protocol) -> Protocol:
    """The same experiment on simulated diatoms: the first unknown set is far, the others near, unless grouped."""
    is_near = [other in protocol.near if protocol.far else i > 0 for i, other in enumerate(protocol.ood)]
    return Protocol(
        _TINY,
        {other: _TINY_OOD.format("near" if is_near[i] else "far", i) for i, other in enumerate(protocol.ood)},
        corrupted=protocol.corrupted and CORRUPTED.format("simulated-diatoms?n=60&size=16&seed=7"),
        near=protocol.near,
        far=protocol.far,
    )


TINY_PROTOCOLS = {name: simulate(protocol) for name, protocol in PROTOCOLS.items()}


# --- profiles --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """How networks are trained."""

    name: str
    about: str
    seeds: tuple[int, ...]
    flags: Values
    protocols: dict[str, Protocol]
    simulated: bool = False  # the images are not those that the columns name
    as_paper: bool = False  # trained by the presets of the protocols, not by our defaults
    relabel_share: float = 1.0  # of the paper's epochs between relabellings, in shorter trainings
    members: int = 10  # of an ensemble
    clusters: Values = field(default_factory=dict)  # flags that cluster as the paper does

    def relabel_every(self, epochs: int) -> int:
        """Epochs between relabellings where the paper has ``epochs`` of 200.

        >>> [PROFILES["cpu"].relabel_every(p) for p in (5, 10, 15, 20)]
        [1, 2, 3, 4]
        """
        return max(1, round(self.relabel_share * epochs))


# The paper clusters each hard class from scratch on raw embeddings and starts a new head; a head that is kept needs the
# parent of each cluster.
PAPER_CLUSTERS = {"cluster_method": "xmeans", "cluster_space": "raw"}

PROFILES = {
    "paper": Profile(
        "paper",
        "networks, epochs and optimisers of the paper, ten seeds: for machines with accelerators",
        tuple(range(10)),
        {},
        {**PROTOCOLS, "microorganisms": FULL_PLANKTON},
        as_paper=True,
    ),
    "cpu": Profile(
        "cpu",
        "airbench, 8 epochs, one seed: 20 minutes per network on two cores, a third of that with bfloat16",
        (0,),
        {"backbone": "airbench", "epochs": 8, "batch_size": 500, "augment": "alternate-flip,translate"},
        {**PROTOCOLS, "microorganisms": FEW_PLANKTON},
        relabel_share=0.2,
        members=5,
        clusters=PAPER_CLUSTERS,
    ),
    "resnet9": Profile(
        "resnet9",
        "ResNet-9, 16 epochs, one seed: a weaker network than that of cpu, to compare with",
        (0,),
        {"backbone": "resnet9", "epochs": 16},
        PROTOCOLS,
        relabel_share=0.4,
        members=5,
        clusters=PAPER_CLUSTERS,
    ),
    "tiny": Profile(
        "tiny",
        "ResNet-9, 2 epochs on simulated diatoms, to check that everything runs",
        (0,),
        {"backbone": "resnet9", "epochs": 2, "batch_size": 32, "learning_rate": 0.02, "min_cluster_size": 5},
        TINY_PROTOCOLS,
        simulated=True,
        relabel_share=0.1,
        members=2,
        clusters=PAPER_CLUSTERS,
    ),
}


def find_profile(name: str) -> Profile:
    """A profile by name."""
    if name not in PROFILES:
        raise UsageError(f"unknown profile '{name}': {suggest(name, PROFILES)}")
    return PROFILES[name]
