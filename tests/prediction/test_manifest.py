"""The manifest of a run: what is changed, exchanged or mixed is found and named, and nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from commands import run
from maple.errors import RunError
from maple.files import RunFile
from maple.networks import create_backbone
from maple.prediction.manifest import check_digest, file_digest
from maple.prediction.store import load_predictor, save_backbone


@pytest.fixture
def copy(digits_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits_run, tmp_path / "run"))


@pytest.mark.parametrize("name", [RunFile.WEIGHTS, RunFile.DETECTOR])
def test_one_flipped_bit_is_found_and_named(copy: Path, name: RunFile, capsys: pytest.CaptureFixture) -> None:
    data = bytearray((copy / name).read_bytes())
    data[-20] ^= 1  # of an array: the file can still be read
    (copy / name).write_bytes(data)
    with pytest.raises(RunError, match=rf"{name}.*{RunFile.MANIFEST}"):
        load_predictor(copy)
    assert run("predict", copy, "digits", "--out", copy.parent / "p.csv") == 1
    assert str(copy / name) in " ".join(capsys.readouterr().err.split())
    (copy / RunFile.MANIFEST).unlink()
    with pytest.raises(RunError, match=str(name)):  # by the digest that the file has of its own arrays
        load_predictor(copy)


def test_files_of_another_run_are_found(copy: Path, tmp_path: Path) -> None:
    other = load_predictor(copy)
    next(iter(other.backbone.parameters())).data += 1
    other.save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / RunFile.WEIGHTS, copy / RunFile.WEIGHTS)
    with pytest.raises(RunError, match=str(RunFile.WEIGHTS)):
        load_predictor(copy)
    load_predictor(tmp_path / "other")


@pytest.mark.parametrize("command", ["predict", "evaluate", "serve", "export", "report", "monitor", "explain"])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_every_command_names_the_weights_of_another_run(
    copy: Path, tmp_path: Path, command: str, with_manifest: bool, capsys: pytest.CaptureFixture
) -> None:
    save_backbone(copy / RunFile.WEIGHTS, create_backbone("airbench-8", 10, embedding_size=5))
    if not with_manifest:
        (copy / RunFile.MANIFEST).unlink()
    arguments = {"predict": ["digits"], "monitor": ["digits"], "explain": ["digits"], "export": [tmp_path / "a.onnx"]}
    code = run(command, copy, *arguments.get(command, []))
    if command == "report" and not with_manifest:
        assert code == 0  # it reads no weights
        return
    assert code == 1
    error = " ".join(capsys.readouterr().err.split())
    assert str(copy / RunFile.WEIGHTS) in error and "restore" in error


@pytest.mark.parametrize("n_outputs", [-1, 3])
def test_weights_with_another_number_of_outputs_are_named(copy: Path, n_outputs: int) -> None:
    predictor = load_predictor(copy)
    backbone = predictor.backbone
    n = len(predictor.cluster_to_class) + n_outputs
    save_backbone(copy / RunFile.WEIGHTS, create_backbone(backbone.name, n, embedding_size=backbone.embedding_size))
    (copy / RunFile.MANIFEST).unlink()
    with pytest.raises(RunError, match=f"{n} outputs"):
        load_predictor(copy)


def test_the_digests_are_those_of_sha256sum(copy: Path) -> None:
    listed = json.loads((copy / RunFile.MANIFEST).read_text())["files"]
    assert list(listed) == [RunFile.WEIGHTS, RunFile.DETECTOR]
    assert all(file_digest(copy / name) == digest for name, digest in listed.items())
    if shutil.which("sha256sum"):
        lines = "".join(f"{digest}  {name}\n" for name, digest in listed.items())
        subprocess.run(["sha256sum", "--check", "--quiet"], input=lines, text=True, cwd=copy, check=True)


@pytest.mark.parametrize("content", ['{"format": 2}', '{"format": 2, "files": 3}', "[", '{"format": 2, "files": {}}'])
def test_a_damaged_manifest_is_named(copy: Path, content: str) -> None:
    (copy / RunFile.MANIFEST).write_text(content)
    with pytest.raises(RunError, match=str(RunFile.MANIFEST)):
        load_predictor(copy)


def test_a_kill_while_writing_leaves_a_run_that_loads(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = load_predictor(copy)

    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("maple.prediction.store.write_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        predictor.save(copy)
    assert not (copy / RunFile.MANIFEST).exists()
    load_predictor(copy)


def test_without_a_manifest_nothing_is_checked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    check_digest(tmp_path / "a", tmp_path)
