"""How processes are started: by the command itself, by torchrun, by SLURM."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import maple.prediction.fit as fit
import maple.training.loop as loop
import maple.training.resume as resume
from commands import LAUNCHER_VARIABLES, python, run
from image_files import write_digits
from maple.errors import DataError, RunError, UsageError
from maple.training.options import TrainOptions
from maple.training.processes import count_processes, make_fabric
from maple.training.processes.launch import share_threads
from processes import in_processes, run_processes

SHORT = ("--epochs", 1, "--batch-size", 64, "--backbone", "resnet9", "--recipe", "triplet", "--accelerator", "cpu")


def told_by(work: Callable[[], int], file: Path) -> tuple[int, str]:
    """Exit code of ``work`` and what it says on standard error."""
    with file.open("w") as stream:
        os.dup2(stream.fileno(), 2)
        code = work()
    return code, file.read_text()


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("digits") / "digits.npz", n=300)


def train_in_slurm(digits: Path, folder: Path, job: int) -> tuple[int, str]:
    """One task of a job of SLURM: exit code and what it says."""
    rank = os.environ["RANK"]
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2"}
    os.environ |= {"SLURM_NNODES": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": str(job)}
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
    os.environ.pop("MASTER_PORT"), os.environ.pop("MASTER_ADDR")
    return told_by(partial(run, "train", digits, "--out", folder, *SHORT), folder.parent / f"told-by-slurm-{rank}")


def unreadable(*_: object, **__: object) -> Iterator[None]:
    raise DataError("cannot use 'diatom.png': it is truncated")
    yield


def full(*_: object, **__: object) -> None:
    raise RunError("cannot write 'resume.safetensors': no space left on device")


def train_failing(digits: Path, folder: Path, failure: str) -> tuple[int, str]:
    """The command, but something goes wrong in one process."""
    rank = os.environ["RANK"]
    if failure == "image" and rank == "1":
        loop.training_batches = unreadable
    if failure == "fit" and rank == "1":
        fit.embed_batches = unreadable
    if failure == "disk":
        resume.save_arrays = full  # which only the first process calls
    return told_by(partial(run, "train", digits, "--out", folder / "run", *SHORT), folder / f"told-{rank}.txt")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failure", "sentence"), [("image", "diatom.png"), ("fit", "diatom.png"), ("disk", "no space left")]
)
def test_an_error_of_one_process_ends_the_command_in_both(digits, tmp_path, failure, sentence):
    (first, told), (second, silence) = in_processes(train_failing, digits, tmp_path, failure)
    assert (first, second, silence) == (1, 1, "")
    assert told.count(sentence) == told.count("error:") == 1
    assert "Traceback" not in told


def free_job() -> int:
    """A number of a job for which the port that Lightning derives from it, 15000 and its last digits, is free."""
    for job in range(7000, 8000):
        with socket.socket() as port:
            if port.connect_ex(("127.0.0.1", 15000 + job)):
                return job
    raise AssertionError("no port is free")


def train_in_torchrun(digits: Path, folder: Path) -> tuple[int, str]:
    told = folder.parent / f"told-by-torchrun-{os.environ['RANK']}"
    return told_by(partial(run, "train", digits, "--out", folder, *SHORT), told)


def are_equal(*folders: Path) -> bool:
    """Whether runs have the same network and detector, to the last bit."""
    files = ("weights.safetensors", "detector.safetensors")
    return all(len({(folder / file).read_bytes() for folder in folders}) == 1 for file in files)


def train_in_both(digits: Path, folder: Path, work: Callable[..., tuple[int, str]]) -> Path:
    """The run of two processes, of which only the first speaks."""
    (first, answer), (second, left) = run_processes(work, digits, folder)
    assert (first, second, left) == (0, 0, None), "the second process leaves without taking gloo apart"
    (code, told), *_ = answer
    assert code == 0, told
    assert told.count("epoch 1/1") == 1 and "GLOBAL_RANK" not in told
    assert next(folder.parent.glob("told-by-*-1")).read_text() == ""
    return folder


@pytest.fixture(scope="module")
def by_torchrun(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in the environment that torchrun gives its processes."""
    return train_in_both(digits, tmp_path_factory.mktemp("torchrun") / "run", train_in_torchrun)


@pytest.mark.slow
def test_slurm_starts_the_training_of_torchrun(digits, by_torchrun, tmp_path):
    found = train_in_both(digits, tmp_path / "run", partial(train_in_slurm, job=free_job()))
    assert are_equal(found, by_torchrun)


@pytest.mark.slow
def test_devices_start_the_training_of_torchrun(digits, by_torchrun, tmp_path):
    """In processes of their own, which import everything themselves; torchrun itself is started by make torture."""
    result = python("-m", "maple", "train", digits, "--devices", 2, "--out", tmp_path / "run", *SHORT)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("epoch 1/1") == 1, "only the first process may speak"
    assert "GLOBAL_RANK" not in result.stderr
    assert (tmp_path / "run" / "report.html").exists()
    assert are_equal(tmp_path / "run", by_torchrun)


@pytest.mark.parametrize(("rank", "aborted"), [("0", True), ("1", False)])
def test_a_process_that_has_done_its_share_ends_before_its_threads_can_abort_it(rank, aborted):
    program = "import atexit, os; atexit.register(os.abort); import maple.cli.app; maple.cli.app.main()"
    result = python("-c", program, "--version", RANK=rank)
    assert (result.returncode != 0) == aborted
    assert result.stdout.startswith("maple ")


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


def test_several_machines_need_a_launcher(environment):
    with pytest.raises(UsageError, match="torchrun --nnodes 3 --nproc-per-node 2"):
        make_fabric(TrainOptions(nodes=3, devices=2))


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


def test_processes_of_a_machine_share_its_processors(monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    try:
        for said, n_processes, threads in ((None, 2, 4), (None, 1, 6), (None, 100, 1), ("6", 2, 6)):
            torch.set_num_threads(6)
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            if said is not None:
                monkeypatch.setenv("OMP_NUM_THREADS", said)
            share_threads(n_processes)
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
