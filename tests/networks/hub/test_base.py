"""Missing packages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from maple.errors import UsageError
from maple.networks import (
    open_model,
)


def test_missing_packages_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, spec, extra in (
        ("onnxruntime", str(tmp_path / "net.onnx"), "onnxruntime"),
        ("timm", "timm/resnet18", "timm"),
    ):
        (tmp_path / "net.onnx").write_bytes(b"graph")
        with monkeypatch.context() as patch:
            patch.setattr("maple.networks.hub.base.import_torchvision", lambda: None)
            patch.setattr("maple.networks.hub.base.import_module", _absent)
            with pytest.raises(UsageError, match=rf"{package}.*pip install 'maple-uncertainty\[{extra}\]'"):
                open_model(spec, n_classes=3)


def _absent(name: str) -> ModuleType:
    raise ModuleNotFoundError(name=name)
