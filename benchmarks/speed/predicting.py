"""Whole predictions from files: ``maple predict`` against a loop by hand, ``--engine ray`` against ``maple predict``.

Every run is a process of its own. Rates are those between N and several N images, (n2 - n1) / (t2 - t1): starting
Python, a model or Ray is not part of them, and is given beside them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from speed.measure import Effort, compare

FEW, MANY = 1000, 5000
BATCH, DECODERS = 256, 2


def run(effort: Effort) -> dict[str, Any]:
    from predict_stream import make_run, write_files

    few, many = effort.scale(FEW, 300), effort.scale(MANY, 900)
    repeats = effort.few
    engines = ("by hand", "local", "ray") if _has_ray() else ("by hand", "local")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_run(folder / "run")
        places = {n: write_files(folder / str(n), n) for n in (few, many)}
        seconds: dict[tuple[str, int], list[float]] = {(engine, n): [] for engine in engines for n in places}
        for repeat in range(repeats):
            for engine in engines[:: 1 if repeat % 2 else -1]:
                for n, place in places.items():
                    seconds[engine, n].append(_run_alone(engine, model, place, folder / f"{engine}.parquet"))
    marginal = {engine: list(np.subtract(seconds[engine, many], seconds[engine, few])) for engine in engines}
    note = f"ResNet-9, {few:,} to {many:,} PNG files of 64 x 64 pixels, {DECODERS} decoding processes each"
    rows = [
        compare(
            "maple predict",
            "decoding and network alone, by hand",
            marginal["local"],
            marginal["by hand"],
            target=0.9,
            note=note,
        )
    ]
    if "ray" in engines:
        work = "maple predict --engine ray --workers 2"
        rows.append(compare(work, "maple predict", marginal["ray"], marginal["local"], target=0.8))
    rates = {engine: round((many - few) / float(np.median(marginal[engine])), 1) for engine in engines}
    starts = {engine: round(float(np.median(seconds[engine, few])) - few / rates[engine], 1) for engine in engines}
    return {
        "rows": [row.to_dict() for row in rows],
        "facts": {"images/s": rates, "seconds before the first image": starts},
    }


def _has_ray() -> bool:
    from importlib.util import find_spec

    return find_spec("ray") is not None


def _run_alone(engine: str, model: Path, source: Path, out: Path) -> float:
    out.unlink(missing_ok=True)
    folders = [str(Path(__file__).parents[1]), *sys.path]
    code = (
        f"import sys; sys.path[:0] = {folders!r}; from speed import predicting; "
        f"predicting.time_one({engine!r}, {str(model)!r}, {str(source)!r}, {str(out)!r})"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"'{engine}' failed:\n{said.stderr}")
    return float(said.stdout.splitlines()[-1])


def time_one(engine: str, model: str, source: str, out: str) -> None:
    """Run an engine and print its seconds."""
    import torch  # noqa: F401  its import is not timed

    from maple.runs.predicting.predict import predict_images
    from maple.runs.requests import PredictRequest

    request = PredictRequest(Path(model), [source], out, workers=DECODERS, batch_size=BATCH)
    if engine == "by hand":
        start = time.perf_counter()
        predict_by_hand(Path(model), Path(source))
    elif engine == "local":
        start = time.perf_counter()
        predict_images(request)
    else:
        from maple.deploy.ray.predict import predict_on_ray

        start = time.perf_counter()
        predict_on_ray(request)
    print(time.perf_counter() - start)


class Pictures:
    """The pictures of a folder as a torch data set, (3, S, S) uint8."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import Image

        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def predict_by_hand(model: Path, source: Path) -> int:
    """Decode all files in a DataLoader and run the network on them: no distances, no decision, no file."""
    import torch
    from torch.utils.data import DataLoader

    from maple.networks import evaluating, use_fast_allocator
    from maple.prediction.store import load_predictor

    use_fast_allocator()
    torch.multiprocessing.set_sharing_strategy("file_system")
    backbone = load_predictor(model).backbone
    loader = DataLoader(Pictures(sorted(source.rglob("*.png"))), BATCH, num_workers=DECODERS)  # type: ignore[arg-type]
    n = 0
    with evaluating(backbone):
        for images in loader:
            _, logits = backbone(images.float().div_(255))
            n += int(logits.argmax(1).shape[0])
    return n
