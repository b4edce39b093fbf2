"""Mutants: each is one fault, is valid Python, and behaves unlike the source where it can."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
if not FOLDER.exists():
    pytest.skip("the benchmarks are not part of a source distribution", allow_module_level=True)
sys.path.insert(0, str(FOLDER))
from mutants import find_units  # noqa: E402
from mutate import draw, target_files  # noqa: E402

SOURCE = '''
"""A module."""
from typing import TYPE_CHECKING
LIMIT = 3
class Box:
    """A box."""
    size: int = 2
    def grow(self, by: int) -> int:
        """Grow by 1."""
        if by < 0 or not by:
            raise ValueError(f"by is {by}: give at least {1}")
        self.size += by
        print(min(self.size, LIMIT))
        return -self.size
    def __repr__(self):
        return "Box" + str(1)
'''


def faults() -> dict[str, list[str]]:
    return {unit.name: [mutant.fault for mutant in unit.mutants] for unit in find_units(SOURCE)}


def test_each_kind_of_code_has_its_faults():
    found = faults()
    assert set(found) == {"<module>", "Box.grow"}
    assert found["<module>"] == ["LIMIT = 3: 3 -> 4", "size: int = 2: 2 -> 3"]
    kinds = [fault.rpartition(": ")[2] for fault in found["Box.grow"]]
    assert sorted(kinds) == sorted(
        [
            "not (by < 0 or not by)", "Or -> And", "Lt -> LtE", "0 -> 1", "without Not", "Add -> Sub", "left out",
            "min -> max", "returns None", "without USub",
        ]
    )  # fmt: skip


def test_a_mutant_differs_in_one_place_and_can_be_compiled():
    plain = ast.unparse(ast.parse(SOURCE)).splitlines()
    for unit in find_units(SOURCE):
        for mutant in unit.mutants:
            compile(mutant.source, "mutant", "exec")
            changed = [line for line, other in zip(plain, mutant.source.splitlines(), strict=True) if line != other]
            assert len(changed) == 1, mutant.fault
            assert SOURCE.splitlines()[mutant.lines.start - 1].strip() in changed[0].strip()


def test_the_digest_of_a_function_changes_with_its_code_alone():
    def digest(source: str) -> str:
        return next(unit.digest for unit in find_units(source) if unit.name == "Box.grow")

    assert digest(SOURCE) == digest(SOURCE.replace("LIMIT = 3", "LIMIT = 4  # more"))
    assert digest(SOURCE) != digest(SOURCE.replace("by < 0", "by < 5"))


def test_a_sample_has_the_same_share_of_each_module():
    only = "stats/co"  # conditioning and covariance
    drawn, total = draw(0.1, 0, only)
    everything, same = draw(1.0, 0, only)
    assert total == same == len(everything)
    for path in target_files(only):
        n, n_all = (sum(each == path for _, each, _ in sample) for sample in (drawn, everything))
        assert 0 <= n - 0.1 * n_all < 1
    assert {key for key, _, _ in drawn} < {key for key, _, _ in everything}
    assert {key for key, _, _ in draw(0.1, 1, only)[0]} != {key for key, _, _ in drawn}


@pytest.mark.torture
def test_the_command_runs_the_tests_that_reach_a_mutant(tmp_path: Path):
    """Of a module of three mutants; with an interpreter of its own, which has imported nothing of the package."""
    results = tmp_path / "mutation.json"
    command = [sys.executable, "mutate.py", "run", "--narrow", "--only", "decisions/options", "--json", str(results)]
    subprocess.run(command, cwd=FOLDER, check=True)
    found = json.loads(results.read_text("utf-8"))["decisions/options.py"]["<module>"]
    assert found["mutants"] == 3 and len(found["survived"]) < 3
