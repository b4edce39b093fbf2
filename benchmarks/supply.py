"""Lock what an installation for production consists of, with hashes, and list it as a software bill of materials.

    python benchmarks/supply.py lock     # requirements-lock.txt, by asking pip; needs the registries
    python benchmarks/supply.py sbom     # build/sbom.json (CycloneDX), from the lock and what is installed

The lock is that of ``maple-uncertainty[torch,onnxruntime,serve]`` on this platform and Python. It is installed by
``pip install --require-hashes -r requirements-lock.txt``, then maple itself by ``pip install --no-deps .``; programs
that look up known vulnerabilities, such as pip-audit, read the lock or the list.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LOCK, SBOM = ROOT / "requirements-lock.txt", ROOT / "build" / "sbom.json"
EXTRAS = "torch,onnxruntime,serve"
OURS = "maple-uncertainty"


class Package(NamedTuple):
    """A package of the lock."""

    name: str
    version: str
    sha256: str


# --- the lock --------------------------------------------------------------------------------------------------------


def ask_pip() -> list[Package]:
    """What pip would install into an empty environment here."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        wanted = ["--constraint", "constraints.txt", f".[{EXTRAS}]"]
        options = ["--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet", "--report", str(report)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *wanted], cwd=ROOT, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    packages = [
        Package(
            re.sub(r"[-_.]+", "-", each["metadata"]["name"]).lower(),
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found
        if each["metadata"]["name"] != OURS
    ]
    return sorted(packages)


def lock_text(packages: list[Package]) -> str:
    """The lock as pip reads it."""
    where = f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"# {OURS}[{EXTRAS}] on {where}, written by: python benchmarks/supply.py lock"]
    lines += [f"{each.name}=={each.version} --hash=sha256:{each.sha256}" for each in packages]
    return "\n".join(lines) + "\n"


def read_lock(text: str) -> list[Package]:
    """The inverse of :func:`lock_text`."""
    return [Package(*found) for found in re.findall(r"^([\w.-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$", text, re.M)]


# --- the bill of materials -------------------------------------------------------------------------------------------


def bill(packages: list[Package]) -> dict[str, Any]:
    """The packages as CycloneDX 1.6; licences and dependencies are those of the installed versions."""
    own = version(OURS)
    about = {"type": "application", "bom-ref": OURS, "name": OURS, "version": own, "purl": f"pkg:pypi/{OURS}@{own}"}
    names = {each.name for each in packages}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, OURS + own + repr(packages))}",
        "version": 1,
        "metadata": {"component": about},
        "components": [component(each) for each in packages],
        "dependencies": [{"ref": name, "dependsOn": sorted(needed(name) & names)} for name in (OURS, *sorted(names))],
    }


def component(package: Package) -> dict[str, Any]:
    """One package."""
    licences = list(licence(package))
    return {
        "type": "library",
        "bom-ref": package.name,
        "name": package.name,
        "version": package.version,
        "purl": f"pkg:pypi/{package.name}@{package.version.replace('+', '%2B')}",
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        **({"licenses": licences} if licences else {}),
    }


def licence(package: Package) -> Iterator[dict[str, Any]]:
    """The licence that an installed package states; nothing if another version is installed, or none."""
    try:
        found = distribution(package.name)
    except PackageNotFoundError:
        return
    if found.version != package.version:
        return
    if expression := found.metadata.get("License-Expression"):
        yield {"expression": expression}
    elif stated := [each for each in found.metadata.get_all("Classifier", []) if each.startswith("License ::")]:
        yield {"license": {"name": stated[0].rpartition(" :: ")[2]}}


def needed(name: str) -> set[str]:
    """The names of what an installed package requires, extras included."""
    try:
        required = distribution(name).requires or []
    except PackageNotFoundError:
        return set()
    return {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", each, maxsplit=1)[0]).lower() for each in required}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("lock", "sbom"))
    if parser.parse_args().what == "lock":
        LOCK.write_text(lock_text(ask_pip()), encoding="utf-8")
        print(f"wrote {LOCK}")
        return
    SBOM.parent.mkdir(exist_ok=True)
    listed = bill(read_lock(LOCK.read_text(encoding="utf-8")))
    SBOM.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {SBOM}: {len(listed['components'])} packages")


if __name__ == "__main__":
    main()
