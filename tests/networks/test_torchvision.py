"""The repair of a torchvision that does not fit the installed torch, on packages made up for it and on the real one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from maple.errors import UsageError
from maple.networks import _torchvision as compat
from maple.networks import open_model
from maple.networks._torchvision import import_torchvision

FIXED = """
from torchvision import extension
"""
BROKEN = """
import compat_probe
from torchvision import extension
compat_probe.imports += 1
if not compat_probe.defined:
    raise RuntimeError("operator torchvision::nms does not exist")
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a torchvision of one's own and hides the real one."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchvision", "compat_probe")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "extension.py").write_text("import compat_probe\ncompat_probe.extensions += 1\n")
    (tmp_path / "compat_probe.py").write_text("imports = extensions = 0\ndefined = False\n")

    def write(source: str):
        (tmp_path / "torchvision" / "__init__.py").write_text(source)
        import compat_probe

        monkeypatch.setattr(compat, "_define_operators", lambda: setattr(compat_probe, "defined", True))
        return compat_probe

    yield write
    compat._forget_torchvision()
    sys.modules.pop("compat_probe", None)


def test_a_torchvision_that_works_is_left_alone(fake, recwarn):
    probe = fake(FIXED)
    assert import_torchvision() is sys.modules["torchvision"]
    assert not probe.defined and not recwarn.list


def test_the_known_failure_is_repaired_and_said_once(fake, recwarn):
    probe = fake(BROKEN)
    module = import_torchvision()
    assert module is sys.modules["torchvision"] and probe.defined
    assert (probe.imports, probe.extensions) == (2, 2)  # also what the failed import had left behind
    assert [str(warning.message)[:32] for warning in recwarn.list] == ["torchvision was built for another"[:32]]
    assert import_torchvision() is module and len(recwarn.list) == 1


def test_other_failures_are_not_touched(fake):
    fake("raise RuntimeError('no disk')")
    with pytest.raises(RuntimeError, match="no disk"):
        import_torchvision()
    fake("import a_package_that_is_not_there")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        import_torchvision()


def test_a_missing_torchvision_says_what_to_do(monkeypatch):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(compat, "import_module", missing)
    with pytest.raises(UsageError, match=r"maple-uncertainty.torchvision"):
        import_torchvision()


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own: an import that failed once cannot be made to fail again."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(not find_spec("torchvision"), reason="torchvision is not installed")
def test_the_installed_torchvision_imports():
    script = (
        "from maple.networks._torchvision import import_torchvision\n"
        "assert import_torchvision() is import_torchvision()\n"
        "import torch, torchvision.transforms, torchvision.models\n"
        "print(*torchvision.transforms.Resize(4)(torch.zeros(3, 8, 8)).shape)\n"
    )
    run = run_script(script)
    assert run.stdout.split() == ["3", "4", "4"], run.stderr


@pytest.mark.skipif(not all(map(find_spec, ("torchvision", "timm", "pytorch_ood"))), reason="needs dev packages")
def test_one_import_is_enough_for_own_scripts():
    """Also where torchvision alone cannot be imported: then it, timm and pytorch-ood can, after ours."""
    script = (
        "import maple.networks.torchvision\n"
        "import torch, torchvision, timm, pytorch_ood\n"
        "assert torchvision.models.resnet18(num_classes=3).eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 3)\n"
        "print(len(torchvision.datasets.FakeData(5)), timm.create_model('test_vit', num_classes=4).num_classes)\n"
    )
    run = run_script(script)
    assert run.stdout.split() == ["5", "4"], run.stderr


def test_versions_that_belong_together_are_pinned():
    """torchvision 0.N is built for torch 2.(N - 15); pip takes the newest, and with it another torch, if not pinned."""
    lines = Path(__file__).parents[2].joinpath("constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    minor = {name: int(version.split(".")[1]) for name, version in pinned.items()}
    assert minor["torchvision"] - minor["torch"] == 15


def test_missing_packages_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, spec, extra in (
        ("onnxruntime", str(tmp_path / "net.onnx"), "onnxruntime"),
        ("timm", "timm/resnet18", "timm"),
    ):
        (tmp_path / "net.onnx").write_bytes(b"graph")
        with monkeypatch.context() as patch:
            patch.setattr("maple.networks._torchvision.import_torchvision", lambda: None)
            patch.setattr("maple.networks._torchvision.import_module", _absent)
            with pytest.raises(UsageError, match=rf"{package}.*pip install 'maple-uncertainty\[{extra}\]'"):
                open_model(spec, n_classes=3)


def _absent(name: str) -> ModuleType:
    raise ModuleNotFoundError(name=name)
