"""MAPLE: class, probability, uncertainty and an out-of-distribution decision from one forward pass.

Public names are imported on first use, so that ``import maple`` stays light and needs torch only where torch is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Backbone": "maple.networks",
    "create_backbone": "maple.networks",
    "embed": "maple.networks",
    "list_backbones": "maple.networks",
    "wrap_backbone": "maple.networks",
    "evaluate": "maple.evaluation.evaluate",
    "Calibration": "maple.decisions.calibration",
    "benjamini_hochberg": "maple.decisions.conformal",
    "MapleCallback": "maple.prediction.callback",
    "GMeans": "maple.stats.gmeans",
    "TMeans": "maple.stats.tmeans",
    "XMeans": "maple.stats.xmeans",
    "open_images": "maple.data.sources",
    "MapleDetector": "maple.detectors.maple",
    "create_detector": "maple.detectors.registry",
    "list_detectors": "maple.detectors.registry",
    "MapleError": "maple.errors",
    "MahalanobisClassifier": "maple.detectors.estimator",
    "explain_outputs": "maple.prediction.explain",
    "export_onnx": "maple.deploy.export",
    "Moments": "maple.stats.moments",
    "ImageSet": "maple.data.image_set",
    "open_model": "maple.networks",
    "StreamMonitor": "maple.decisions.drift",
    "compare_scores": "maple.decisions.drift",
    "OnnxPredictor": "maple.prediction.onnx",
    "Indexed": "maple.prediction.own_loop",
    "Relabeller": "maple.prediction.own_loop",
    "Predictor": "maple.prediction.predictor",
    "fit_predictor": "maple.prediction.fit",
    "load_predictor": "maple.prediction.store",
    "MapleRecipe": "maple.training.maple",
    "write_report": "maple.reporting.report",
    "load_splits": "maple.data.splits",
    "train_backbone": "maple.training.loop",
    "TuneRequest": "maple.runs.tune.plan",
    "tune_recipe": "maple.runs.tune.search",
    "Outputs": "maple.types",
    "Prediction": "maple.types",
    "Relabelling": "maple.types",
    "update_predictor": "maple.prediction.update",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'maple' has no attribute '{name}'")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
