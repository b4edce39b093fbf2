"""Several processes: they are really started, they agree, and they end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from maple.data.options import DataOptions
from maple.data.splits import load_splits
from maple.errors import UsageError
from maple.networks import embed
from maple.prediction.fit import fit_predictor
from maple.prediction.store import load_predictor
from maple.training.distributed import count_processes, make_fabric
from maple.training.options import TrainOptions
from maple.types import Relabelling

TIMEOUT = 120
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone")

# Run by every process: train, interrupt and resume, fit; then write what this process holds.
DRIVER = """
import hashlib, json, os, sys
from pathlib import Path

import numpy as np
import torch

from maple.networks import create_backbone
from maple.data.options import DataOptions
from maple.training.options import TrainOptions
from maple.errors import DataError
from maple.prediction.fit import fit_predictor
from maple.training.distributed import make_fabric, together
from maple.training.maple import MapleRecipe
from maple.data.splits import load_splits
from maple.training.loop import train_backbone

folder = Path(sys.argv[1])
splits = load_splits("digits", DataOptions())
images = splits.train.subset(np.arange(640))
options = TrainOptions(epochs=2, batch_size=64, devices=2)
fabric = make_fabric(options)


class Interrupted(MapleRecipe):
    def class_probabilities(self, outputs):
        if (folder / "killed" / "resume.safetensors").exists():
            raise KeyboardInterrupt
        return super().class_probabilities(outputs)


def train(kind, name, resume=False):
    torch.manual_seed(fabric.global_rank)  # processes that start apart
    recipe = kind(relabel_every=1, hard_class_error=0.0, min_cluster_size=10, max_clusters=3)
    return train_backbone(
        create_backbone("resnet9", 10), recipe, images, splits.validation, folder=folder / name, resume=resume,
        show_progress=False, options=options, fabric=fabric,
    )


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


def describe(run):
    return {
        "weights": digest(tensor.numpy() for tensor in run.backbone.state_dict().values()),
        "cluster_ids": digest([run.relabelling.cluster_ids]),
        "history": [{k: v for k, v in row.items() if "seconds" not in k} for row in run.history],
    }


def error_when(rank):
    try:
        with together(fabric):
            if fabric.global_rank == rank:
                raise (DataError("bad image"), KeyError("bug"))[rank]
    except Exception as error:
        return [type(error).__name__, str(error)]


run = train(MapleRecipe, "whole")
try:
    train(Interrupted, "killed")
except KeyboardInterrupt:
    fabric.barrier()
resumed = train(MapleRecipe, "killed", resume=True)
predictor = fit_predictor(run.backbone, images, splits.validation, relabelling=run.relabelling, fabric=fabric)
arrays, _ = predictor.detector.get_state()
found = {
    "world_size": fabric.world_size,
    "whole": describe(run),
    "resumed": describe(resumed),
    "moments": digest(arrays[name] for name in sorted(arrays)),
    "errors": [error_when(0), error_when(1)],
}
(folder / f"rank-{fabric.global_rank}.json").write_text(json.dumps(found))
if fabric.is_global_zero:
    predictor.save(folder)
    np.save(folder / "cluster_ids.npy", run.relabelling.cluster_ids)
fabric.barrier()
os._exit(0)  # without taking gloo's threads apart, which now and then aborts the one that ends first
"""

# The command itself, but something goes wrong in one process only.
FAILING = """
import os, signal, sys

import maple.prediction.fit
import maple.training.loop
import maple.training.resume
from maple.cli.app import main
from maple.errors import DataError, RunError


def unreadable(*_, **__):
    raise DataError("cannot use 'diatom.png': it is truncated")
    yield


def full(*_, **__):
    raise RunError("cannot write 'resume.safetensors': no space left on device")


def killed(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


if os.environ["FAILURE"] == "kill" and os.environ.get("LOCAL_RANK") == "1":
    maple.training.loop.training_batches = killed
if os.environ["FAILURE"] == "image" and os.environ.get("LOCAL_RANK") == "1":
    maple.training.loop.training_batches = unreadable
if os.environ["FAILURE"] == "fit" and os.environ.get("LOCAL_RANK") == "1":
    maple.prediction.fit.embed_batches = unreadable
if os.environ["FAILURE"] == "disk":
    maple.training.resume.save_arrays = full  # which only the first process calls
main()
"""


def python(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program to its end and that of the processes it started: they share its pipes."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun passes it on to its processes
        _, errors = process.communicate()
        pytest.fail(f"the processes did not end within {TIMEOUT} s: {errors}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module", params=["fabric", "torchrun"])
def ranks(request, tmp_path_factory) -> tuple[Path, list[dict]]:
    """What each of two processes holds after training."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "driver.py").write_text(DRIVER)
    launcher = TORCHRUN if request.param == "torchrun" else ()
    result = python(*launcher, folder / "driver.py", folder)
    assert result.returncode == 0, result.stderr
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_processes_hold_the_same_weights_clusters_and_moments(ranks):
    _, (first, second) = ranks
    assert first["world_size"] == 2
    for name in ("whole", "resumed", "moments"):
        assert first[name] == second[name], name
    assert first["whole"]["history"][-1]["clusters"] > 10


@pytest.mark.slow
def test_resumed_processes_reach_the_same_weights(ranks):
    _, (first, _) = ranks
    assert first["resumed"] == first["whole"]


@pytest.mark.slow
def test_moments_are_those_of_one_process(ranks):
    folder, _ = ranks
    splits = load_splits("digits", DataOptions())
    train = splits.train.subset(np.arange(640))
    together = load_predictor(folder)
    cluster_ids = np.load(folder / "cluster_ids.npy")
    relabelling = Relabelling(
        cluster_ids, together.cluster_to_class, np.arange(together.cluster_to_class.size), np.ones(0)
    )
    alone = fit_predictor(together.backbone, train, splits.validation, relabelling=relabelling)
    ours, theirs = (each.detector.learned_.densities.moments for each in (together, alone))
    assert ours.by_exponent.keys() == theirs.by_exponent.keys()
    pairs = [(ours.by_exponent[exponent], moments) for exponent, moments in theirs.by_exponent.items()]
    for found, expected in [*pairs, (ours.shallow, theirs.shallow)]:
        np.testing.assert_array_equal(found.counts, expected.counts)
        np.testing.assert_allclose(found.means, expected.means, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(found.within_covariance, expected.within_covariance, rtol=1e-4, atol=1e-5)
    validation = embed(together.backbone, splits.validation)
    np.testing.assert_allclose(together.detector.score(validation), alone.detector.score(validation), rtol=1e-3)
    assert together.probability.temperature == pytest.approx(alone.probability.temperature, rel=1e-3)


@pytest.mark.slow
def test_error_of_one_process_is_raised_in_all(ranks):
    _, (first, second) = ranks
    assert first["errors"][0] == second["errors"][0] == ["DataError", "bad image"]
    assert first["errors"][1] == ["TrainError", "process 1 failed with KeyError: 'bug'"]
    assert second["errors"][1] == ["KeyError", "'bug'"]


@pytest.mark.slow
def test_command_in_two_processes(tmp_path):
    """``--devices 2`` and torchrun without it are one training of two processes each, and the same one."""
    options = ["--epochs", 1, "--batch-size", 64, "--recipe", "triplet", "--accelerator", "cpu"]
    launches = {
        "devices": ["-m", "maple", "train", "digits", "--devices", 2],
        "torchrun": [*TORCHRUN, "-m", "maple", "train", "digits"],
    }
    for name, launch in launches.items():
        result = python(*launch, "--out", tmp_path / name, *options)
        assert result.returncode == 0, result.stderr
        assert result.stderr.count("epoch 1/1") == 1, "only the first process may speak"
        assert (tmp_path / name / "report.html").exists()
    for file in ("weights.safetensors", "detector.safetensors"):
        assert (tmp_path / "devices" / file).read_bytes() == (tmp_path / "torchrun" / file).read_bytes()


@pytest.mark.parametrize(("rank", "aborted"), [("0", True), ("1", False)])
def test_a_process_that_has_done_its_share_ends_before_its_threads_can_abort_it(rank, aborted):
    program = "import atexit, os; atexit.register(os.abort); import maple.cli.app; maple.cli.app.main()"
    result = python("-c", program, "--version", RANK=rank)
    assert (result.returncode != 0) == aborted
    assert result.stdout.startswith("maple ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "sentence"),
    [
        ("image", "cannot use 'diatom.png'"),
        ("fit", "cannot use 'diatom.png'"),
        ("disk", "no space left on device"),
        ("kill", "another process of this training has ended"),
    ],
)
def test_error_of_one_process_ends_the_command_in_both(tmp_path, failure, sentence):
    (tmp_path / "failing.py").write_text(FAILING)
    arguments = ["train", "digits", "--out", tmp_path / "run", "--devices", 2, "--epochs", 1, "--accelerator", "cpu"]
    result = python(tmp_path / "failing.py", *arguments, FAILURE=failure)
    assert result.returncode == 1
    assert result.stderr.count(sentence) == 1
    assert result.stderr.count("error:") == 1
    assert "Traceback" not in result.stderr


# --- how many processes


@pytest.fixture
def environment(monkeypatch):
    for name in (*LAUNCHER_VARIABLES, "SLURM_NNODES", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


TORCHRUN_2X4 = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
SLURM_2X4 = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_JOB_NAME": "train"}


@pytest.mark.parametrize("launch", [TORCHRUN_2X4, SLURM_2X4], ids=["torchrun", "slurm"])
def test_launcher_decides_unless_it_is_contradicted(environment, launch):
    environment(**launch)
    for options in ({}, {"devices": 4}, {"nodes": 2}, {"devices": 4, "nodes": 2}):
        assert count_processes(TrainOptions(**options)) == (4, 2)
    with pytest.raises(UsageError, match="--devices"):
        count_processes(TrainOptions(devices=3))
    with pytest.raises(UsageError, match="--nodes"):
        count_processes(TrainOptions(nodes=3))


def test_without_a_launcher_the_options_decide(environment):
    environment(WORLD_SIZE="2", LOCAL_RANK="1")  # as in the processes that Fabric starts itself
    assert count_processes(TrainOptions(devices=2)) == (2, 1)
    assert count_processes(TrainOptions()) == (1, 1)


def test_missing_hardware_is_one_sentence(environment):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(UsageError, match="cuda"):
        make_fabric(TrainOptions(accelerator="cuda"))


def test_fabric_does_not_name_its_precision(environment, caplog):
    with caplog.at_level("INFO"):
        make_fabric(TrainOptions(precision="bf16-mixed", accelerator="cpu"))
    assert not caplog.records
