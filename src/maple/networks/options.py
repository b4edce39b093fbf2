"""Options of the network; light, for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from maple.options import Positive, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The network and its recipe."""

    backbone: str = option(
        "resnet9", "network: resnet9, resnet18, resnet20/32/44/56, wrn-D-W such as wrn-28-10, efficientnet-b0"
    )
    embedding_size: Positive | None = option(
        None, "size of a linear embedding in front of the head (default: none)", rare=True
    )
    recipe: str = option("maple", "training method: maple, cross-entropy or another name in maple methods")
