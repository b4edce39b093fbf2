"""Parsers of data from outside end with a sentence, whatever they are given: no traceback, no hang, no flood of memory.

The quick test gives each parser the corpus and some mutated files, the long one new ones as long as there is time. A
failure shows the input in base64: add it to ``tests/fuzz/corpus/TARGET/found-1~NAME`` with what is corrected.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torture import Torture

RUN = Path(__file__).with_name("run.py")
TARGETS = (
    *("images", "tables", "lists", "configs", "plugins", "runs", "checkpoints", "weights", "graphs", "bodies"),
    *("predictions", "archives"),
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of Linux")


def feed(*arguments: object, folder: Path) -> dict[str, dict[str, Any]]:
    """What the fuzzer found, by target."""
    command = [sys.executable, str(RUN), "--keep", str(folder), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    kept = [path.name for path in folder.iterdir() if path.is_file()]
    assert done.returncode == 0, (done.returncode, kept, done.stderr[-2000:])
    return {found["target"]: found for found in map(json.loads, done.stdout.splitlines())}


def show(found: dict[str, Any]) -> str:
    return "\n\n".join(f"{each['file']}: {each['data']}\n{each['error']}" for each in found["failures"][:3])


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return feed("--inputs", 80, folder=tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_and_mutated_files(quick: dict[str, dict[str, Any]], target: str) -> None:
    assert quick[target]["inputs"] > 80
    assert not quick[target]["failures"], show(quick[target])


def test_every_parser_is_tested(quick: dict[str, dict[str, Any]]) -> None:
    assert set(quick) == set(TARGETS)


def test_the_fuzzer_finds_what_is_wrong(tmp_path: Path) -> None:
    """A parser that fails, one that hangs, one that floods the memory: each is found."""
    (tmp_path / "broken.py").write_text(BROKEN)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(RUN.parent)!r}]; import broken"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == ["KeyError", "TooSlow", "MemoryError", "no sentence", "None"], done.stderr


BROKEN = """
from pathlib import Path
import run
from maple.errors import DataError

def fail(path): return {}["a"]
def hang(path):
    while True: pass
def flood(path): return bytes(2**33)
def mutter(path): raise DataError("no")
def refuse(path): raise DataError("'a.png' is no image: give another one")

run.INPUT_SECONDS = 0.2
run._limit()
for each in (fail, hang, flood, mutter, refuse):
    run.TARGETS[each.__name__] = each
    said = str(run.feed(each.__name__, Path("x"))).strip().splitlines()[-1]
    print(said.partition(":")[0].rpartition(".")[2])
"""


@pytest.mark.torture
@pytest.mark.parametrize("target", TARGETS)
def test_new_files_as_long_as_there_is_time(torture: Torture, tmp_path: Path, target: str) -> None:
    while torture.goes_on():
        seconds = min(torture.seconds, 120)
        found = feed(
            target, "--inputs", 0, "--seconds", seconds, "--seed", torture.rng.integers(2**31), folder=tmp_path
        )
        assert not found[target]["failures"], show(found[target])
        torture.count("fuzzed", target, found[target]["inputs"])
