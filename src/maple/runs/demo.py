"""``maple demo``: the whole method on simulated diatoms."""

from __future__ import annotations

from pathlib import Path

from maple.errors import UsageError
from maple.evaluation.results import Results
from maple.runs.folder import RunFolder
from maple.runs.train import TrainRequest, train_run

_COMMAND = "maple demo"
_SOURCE = "simulated-diatoms?n=7000&size=32"
_EPOCHS = 14
_OOD = {"near": "simulated-diatoms/near?n=1000&size=32", "far": "simulated-diatoms/far?n=1000&size=32"}


def run_demo(out: Path, seed: int = 0) -> Results:
    """Train, fit, evaluate and report on simulated diatoms, with unknown taxa near the known ones and with debris."""
    folder = RunFolder(out)
    again = folder.holds_run()
    if again and not (folder.read_config(oldest=1).origin.command or "").startswith(_COMMAND):
        raise UsageError(f"'{out}' holds a run that is not a demo: choose another --out")
    results = train_run(
        TrainRequest(
            source=_SOURCE,
            out=out,
            ood=_OOD,
            flags={"epochs": _EPOCHS, "batch_size": 64, "relabel_every": 8, "hard_class_error": 0.1, "seed": seed},
            overwrite=again,
            command=_COMMAND,
        )
    )
    assert results is not None  # the demo has test images and one process
    return results
