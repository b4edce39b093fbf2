"""The lock and the bill of materials: complete, with hashes, and without the addresses of registries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements-lock.txt"
LINES = LOCK.read_text("utf-8").splitlines()[1:]


def locked() -> dict[str, str]:
    return dict(line.partition(" ")[0].split("==") for line in LINES)


def test_the_lock_has_a_hash_for_every_package() -> None:
    assert len(LINES) > 40 and len(locked()) == len(LINES)
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line) for line in LINES)
    assert "://" not in LOCK.read_text("utf-8")


def test_the_lock_fits_the_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["torch"], *extras["serve"], *extras["onnxruntime"]]
    found = locked()
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(found[requirement.name.lower()]), requirement


def test_the_bill_lists_what_is_locked() -> None:
    subprocess.run([sys.executable, ROOT / "benchmarks" / "supply.py", "sbom"], check=True, capture_output=True)
    bill = json.loads((ROOT / "build" / "sbom.json").read_text("utf-8"))
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {each["name"]: each["version"] for each in bill["components"]} == locked()
    assert all(each["purl"].startswith(f"pkg:pypi/{each['name']}@") for each in bill["components"])
    hashes = {each["hashes"][0]["content"] for each in bill["components"]}
    assert all(line.rpartition(":")[2] in hashes for line in LINES)
    refs = {each["bom-ref"] for each in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    for each in bill["dependencies"]:
        assert each["ref"] in refs and refs.issuperset(each["dependsOn"])
    (direct,) = [each["dependsOn"] for each in bill["dependencies"] if each["ref"] == "maple-uncertainty"]
    assert {"pillow", "numpy", "torch", "fastapi"} <= set(direct)
