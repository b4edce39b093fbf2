# isort: skip_file
from collections.abc import Callable
from typing import Any

from maple.data.image_set import ImageSet as ImageSet
from maple.data.sources import open_images as open_images
from maple.data.splits import load_splits as load_splits
from maple.decisions.calibration import Calibration as Calibration
from maple.decisions.conformal import benjamini_hochberg as benjamini_hochberg
from maple.decisions.drift import StreamMonitor as StreamMonitor, compare_scores as compare_scores
from maple.deploy import mlflow as mlflow
from maple.deploy.export import export_onnx as export_onnx
from maple.detectors.estimator import MahalanobisClassifier as MahalanobisClassifier
from maple.detectors.maple import MapleDetector as MapleDetector
from maple.detectors.registry import create_detector as create_detector, list_detectors as list_detectors
from maple.errors import MapleError as MapleError
from maple.evaluation.cases import evaluate as evaluate
from maple.networks import (
    Backbone as Backbone,
    create_backbone as create_backbone,
    embed as embed,
    list_backbones as list_backbones,
    open_model as open_model,
    wrap_backbone as wrap_backbone,
)
from maple.prediction.callback import MapleCallback as MapleCallback
from maple.prediction.explain import explain_outputs as explain_outputs
from maple.prediction.fit import fit_predictor as fit_predictor
from maple.prediction.onnx import OnnxPredictor as OnnxPredictor
from maple.prediction.own_loop import Indexed as Indexed, Relabeller as Relabeller
from maple.prediction.predictor import Predictor as Predictor
from maple.prediction.store import load_predictor as load_predictor
from maple.prediction.update import update_predictor as update_predictor
from maple.reporting.report import write_report as write_report
from maple.runs.hub import push_run as push_run
from maple.runs.loading import load as load
from maple.runs.requests import TuneRequest as TuneRequest
from maple.runs.tune.search import tune_recipe as tune_recipe
from maple.stats.clustering.gmeans import GMeans as GMeans
from maple.stats.moments import Moments as Moments
from maple.stats.clustering.tmeans import TMeans as TMeans
from maple.stats.clustering.xmeans import XMeans as XMeans
from maple.training.loop import train_backbone as train_backbone
from maple.training.maple import MapleRecipe as MapleRecipe
from maple.types import Outputs as Outputs, Prediction as Prediction, Relabelling as Relabelling

__version__: str

def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], dict[str, str]]: ...
