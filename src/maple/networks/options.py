"""Options of the network; light, for the command line."""

from __future__ import annotations

from dataclasses import dataclass

from maple.options import Positive, option


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The network and its recipe."""

    backbone: str = option(
        "airbench-32",
        "network: airbench[-W], resnet9, resnet18[-W], resnet20/32/44/56, resnet50, wrn-D-W, efficientnet-b0",
    )
    embedding_size: Positive | None = option(
        None, "size of a linear embedding in front of the head (default: none)", rare=True
    )
    embedding_branch: bool = option(
        False, "let the head read the output of the network beside that embedding, as in the published code", rare=True
    )
    recipe: str = option("maple", "training method: maple, cross-entropy or another name in maple methods")
