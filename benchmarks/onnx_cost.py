"""Time the exported graph of MAPLE relative to the plain softmax graph of the same network, in ONNX Runtime.

    python benchmarks/onnx_cost.py [--networks wrn-28-10,resnet18,resnet9] [--batches 1,64] [--seconds 60]
        [--threads 1] [--json results/onnx_cost.json]

Both graphs take the same images (N, 3, 32, 32) and share their weights, which are random: the time does not depend on
them. The detector has the size of a trained one: 10 classes, two of them split, 12 clusters, components that explain
95 % of the variance of embeddings with a decaying spectrum, 5,000 calibration scores, the fused score, probabilities
pooled with those of the network. Each repeat times both graphs one after the other, in alternating order, and gives one
ratio; there are as many repeats as ``--seconds`` allow, at least twelve. The place of a session's weights in memory
changes the time of one image by about a per cent: each graph is opened six times. Where the time of convolutions varies
by a tenth between calls, even the median is not accurate to a per cent. ``added`` is an upper bound that does not
depend on them: the time that ONNX Runtime's profile attributes to nodes other than convolutions, minus that of the
plain graph, relative to the whole plain graph. It overestimates, since profiling a node takes time as well, most of all
for small networks and one image. Target: a median ratio of at most 1.03 for WRN-28-10 and ResNet-18 (the paper: 1.24
for a WRN).
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import maple
from maple.decisions.probability import Probability
from maple.deploy.graph import OUTPUTS, PredictorGraph
from maple.deploy.trace import drop_idle_abs
from maple.detectors.maple import MapleDetector
from maple.networks import Backbone, create_backbone, embed, evaluating
from maple.prediction.onnx import start_session
from maple.prediction.predictor import Predictor
from maple.types import Outputs

SIZE, N_CLASSES, N_CALIBRATION = 32, 10, 5000
SESSIONS, FEWEST_REPEATS, PROFILED_CALLS = 6, 12, 5
CLUSTER_TO_CLASS = np.array([*range(N_CLASSES), 3, 5])


class PlainSoftmax(nn.Module):
    """What a classifier is usually exported as."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, images: Tensor) -> Tensor:
        return self.backbone(images)[1].softmax(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="wrn-28-10,resnet18,resnet9")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--seconds", type=float, default=60, help="of repeats for each network and batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    arguments = parser.parse_args()

    rows = []
    for network in arguments.networks.split(","):
        predictor = make_predictor(network)
        ours = export(PredictorGraph(predictor), OUTPUTS)
        plain = export(PlainSoftmax(predictor.backbone), ("probabilities",))
        about = {
            "network": network,
            "components": predictor.detector.gaussians_.n_components,
            "nodes": count_nodes(ours),
            "nodes_plain": count_nodes(plain),
        }
        for batch in map(int, arguments.batches.split(",")):
            rows.append(about | time_both(ours, plain, batch, arguments.seconds, arguments.threads))
            print(describe(rows[-1]), flush=True)
    if arguments.json:
        results = {
            "versions": {
                "maple": maple.__version__,
                "onnxruntime": onnxruntime.__version__,
                "torch": torch.__version__,
            },
            "hardware": f"{platform.machine()}, {arguments.threads} threads",
            "clusters": len(CLUSTER_TO_CLASS),
            "calibration_scores": N_CALIBRATION,
            "latency": rows,
        }
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def make_predictor(network: str) -> Predictor:
    """A network with random weights, and a detector as of a trained one."""
    torch.manual_seed(0)
    backbone = create_backbone(network, len(CLUSTER_TO_CLASS)).eval()
    n_responses = count_responses(backbone)
    train, validation, calibration = (
        simulated_outputs(n, backbone.embedding_size, n_responses, seed)
        for seed, n in enumerate((20_000, 2000, N_CALIBRATION))
    )
    detector = MapleDetector(norm_exponent=1).fit(train, validation)
    predictor = Predictor(backbone, detector, size=SIZE, probability=Probability(3.0, 0.5, 0.7))
    predictor.calibrate(calibration)
    assert predictor.score_name == "fused" and len(predictor.calibration) == N_CALIBRATION
    return predictor


def count_responses(backbone: Backbone) -> int:
    """Channels of the shallow layer."""
    responses = embed(backbone, np.zeros((1, SIZE, SIZE, 3), np.uint8)).shallow
    assert responses is not None
    return responses.shape[1]


def simulated_outputs(n_images: int, dim: int, n_responses: int, seed: int) -> Outputs:
    """Outputs whose embeddings have a decaying spectrum, as those of a trained network."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(99)
    ids = rng.integers(0, len(CLUSTER_TO_CLASS), size=n_images)
    scales = (1 + np.arange(dim)) ** -0.8
    rotation = np.linalg.qr(fixed.normal(size=(dim, dim)))[0] * scales[:, None]
    centres = fixed.normal(size=(len(CLUSTER_TO_CLASS), dim)) @ rotation
    embeddings = rng.standard_normal((n_images, dim)) @ rotation + centres[ids]
    logits = rng.normal(size=(n_images, len(CLUSTER_TO_CLASS))) + 6 * np.eye(len(CLUSTER_TO_CLASS))[ids]
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        labels=CLUSTER_TO_CLASS[ids],
        cluster_ids=ids,
        cluster_to_class=CLUSTER_TO_CLASS,
        shallow=rng.standard_normal((n_images, n_responses)).astype(np.float32),
    )


def export(module: nn.Module, outputs: tuple[str, ...]) -> bytes:
    """The ONNX model of a module, as ``maple export`` makes it."""
    file = io.BytesIO()
    with evaluating(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (torch.rand(2, 3, SIZE, SIZE),),
            file,
            dynamo=False,
            input_names=["images"],
            output_names=list(outputs),
            dynamic_axes={name: {0: "n"} for name in ("images", *outputs)},
            opset_version=18,
        )
    model = onnx.load_from_string(file.getvalue())
    drop_idle_abs(model.graph)
    return model.SerializeToString()


def count_nodes(model: bytes) -> int:
    """Nodes that are left once ONNX Runtime has optimised the graph."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return len(onnx.load(options.optimized_model_filepath).graph.node)


def time_both(ours: bytes, plain: bytes, batch: int, seconds: float, threads: int) -> dict[str, Any]:
    images = np.random.default_rng(0).random((batch, 3, SIZE, SIZE), dtype=np.float32)
    times = np.concatenate([time_sessions((ours, plain), images, seconds / SESSIONS, threads) for _ in range(SESSIONS)])
    ratios = times[:, 0] / times[:, 1]
    median = np.median(times, axis=0) * 1000
    return {
        "batch": batch,
        "repeats": len(times),
        "median_ms": round(float(median[0]), 3),
        "median_ms_plain": round(float(median[1]), 3),
        "ratio": round(float(np.median(ratios)), 4),
        "ratio_of_best": round(float(times[:, 0].min() / times[:, 1].min()), 4),
        "quartiles": [round(float(q), 4) for q in np.quantile(ratios, (0.25, 0.75))],
        "added": round(added_share(ours, plain, images, threads), 5),
    }


def time_sessions(models: tuple[bytes, bytes], images: np.ndarray, seconds: float, threads: int) -> np.ndarray:
    """Seconds that each of two graphs takes, in turns (repeats, 2)."""
    sessions = [start_session(model, "the graph", threads) for model in models]
    pairs: list[list[float]] = []
    end = time.monotonic() + seconds
    while len(pairs) < 1 + FEWEST_REPEATS // SESSIONS or time.monotonic() < end:
        pair = [0.0, 0.0]
        for which in (0, 1) if len(pairs) % 2 else (1, 0):
            start = time.perf_counter()
            sessions[which].run(None, {"images": images})
            pair[which] = time.perf_counter() - start
        pairs.append(pair)
    return np.array(pairs[1:])  # the first one warms up


def added_share(ours: bytes, plain: bytes, images: np.ndarray, threads: int) -> float:
    """What nodes other than convolutions take more than in the plain graph, relative to all of the plain graph."""
    (convolutions, others), (_, more) = (profile(model, images, threads) for model in (plain, ours))
    return (more - others) / (convolutions + others)


def profile(model: bytes, images: np.ndarray, threads: int) -> tuple[float, float]:
    """The time of convolutions and of all other nodes, the median of each over some calls."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.enable_profiling, options.log_severity_level = threads, True, 4
    took: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        for _ in range(PROFILED_CALLS):
            session.run(None, {"images": images})
        events = json.loads(Path(session.end_profiling()).read_text())
    for event in events:
        if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
            took.setdefault((event["args"]["op_name"], event["name"]), []).append(event["dur"])
    total = {True: 0.0, False: 0.0}
    for (kind, _), each in took.items():
        total[kind in ("Conv", "FusedConv")] += float(np.median(each))
    return total[True], total[False]


def describe(row: dict[str, Any]) -> str:
    low, high = row["quartiles"]
    return (
        f"{row['network']:10} batch {row['batch']:3}  K {row['components']:3}  nodes {row['nodes_plain']} to "
        f"{row['nodes']}  {row['median_ms_plain']:.2f} to {row['median_ms']:.2f} ms  ratio {row['ratio']:.3f} "
        f"({low:.3f} to {high:.3f}) of {row['repeats']}, of the best {row['ratio_of_best']:.3f}, "
        f"added {row['added']:.4f}"
    )


if __name__ == "__main__":
    main()
