"""Options of MAPLE's detector; light, for the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from maple.options import option

ScoreBy = Literal["auto", "distance", "relative", "normalised", "residual", "spread", "energy", "shallow", "fused"]


@dataclass(frozen=True, kw_only=True)
class DetectorOptions:
    """The Gaussians over the embeddings."""

    explained_variance: Annotated[float, Interval(gt=0, le=1)] = option(
        0.95, "share of variance that PCA keeps", rare=True
    )
    pca: bool = option(True, "reduce the embeddings by PCA first", rare=True)
    standardise: bool = option(
        True, "divide each feature by its standard deviation before PCA; features are centred in any case", rare=True
    )
    covariance: Literal["tied", "global", "full"] = option(
        "tied", "pooled within clusters (the paper), over all images, or one per cluster"
    )
    distance: Literal["mahalanobis", "euclidean"] = option("mahalanobis", "distance to the cluster means", rare=True)
    norm_exponent: Literal["auto"] | Annotated[float, Interval(ge=0, le=2)] = option(
        "auto",
        "power of the norm by which embeddings are divided: 0 is the paper, 1 the unit sphere; 'auto' takes the one "
        "whose distance best separates wrong from right validation images",
        rare=True,
    )
    score_by: ScoreBy = option("auto", "OOD score; 'auto' is fused, or normalised if there are few validation images")
