"""``maple demo``: the whole method on simulated diatoms, in less than three minutes on two cores.

The options were compared by ``benchmarks/demo.py`` on other images and other unknown taxa than the demo shows.
"""

from __future__ import annotations

from pathlib import Path

from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.options import Values
from maple.runs.folder import RunFolder
from maple.runs.requests import TrainRequest
from maple.runs.train import train_run

COMMAND = "maple demo"
SOURCE = "simulated-diatoms?n=6304&size=32"
SPLITS = (0.778, 0.112, 0.11, 0.0)  # 4,904 images to train on, 704 for validation, 696 for calibration
TEST = "simulated-diatoms?n=3000&size=32&seed=1"  # with fewer, most differences are within noise
OOD = {"near": "simulated-diatoms/near?n=1000&size=32", "far": "simulated-diatoms/far?n=1000&size=32"}
TRAINING: Values = {  # with any recipe
    "backbone": "airbench-24",
    "epochs": 28,
    "optimizer": "muon",
    "learning_rate": 0.24,
    "momentum": 0.6,
    "weight_decay": 1e-3,
    "schedule": "linear",
    "batch_size": 128,
    "augment": "crop,flip-both,turn",  # diatoms lie in any direction
}
# Clusters in hard classes, at a low learning rate: before, nearly every class looks hard.
MAPLE: Values = {"relabel_every": 21, "hard_class_error": 0.3}


def run_demo(out: Path, seed: int = 0) -> Results:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa near the known ones and with debris."""
    folder = RunFolder(out)
    again = folder.holds_run()
    if again and not (folder.read_config().origin.command or "").startswith(COMMAND):
        raise UsageError(f"'{out}' holds a run that is not a demo: choose another --out")
    flags = {**TRAINING, **MAPLE, "splits": SPLITS, "seed": seed}
    request = TrainRequest(source=SOURCE, test=TEST, out=out, ood=OOD, flags=flags, overwrite=again, command=COMMAND)
    results = train_run(request)
    assert results is not None  # the demo has test images and one process
    return results
