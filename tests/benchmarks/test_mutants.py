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
from judge import PACKAGE, module_of  # noqa: E402
from mutants import find_units  # noqa: E402
from mutate import draw, equivalent_mutants, name_of, target_files  # noqa: E402

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


@pytest.mark.parametrize(
    ("file", "unit", "fault"),
    [
        ("decisions/sets.py", "min_labelled_images", ("return n", "return -1")),
        ("decisions/drift.py", "compare_scores", ("level: float=0.01", "level: float=0.5")),
        ("decisions/calibration.py", "Decision.kind", ("else 'confidence'", "else 'fault'")),  # a property
        ("stats/gaussians.py", "Gaussians.map_axes", (":2].T", ":1].T")),  # a cached property
        ("stats/moments.py", "Moments.from_arrays", ("cls(0, 0,", "cls(1, 1,")),  # a class method
        ("stats/_blas.py", "one_thread", ("limit_threads(1)", "limit_threads(2)")),  # a context manager
        ("stats/_blas.py", "_pools", ("user_api='blas'", "user_api='openmp'")),  # cached
    ],
)
def test_a_fault_takes_the_place_of_the_code_of_its_function(file, unit, fault):
    """In a process of its own, which also shows that the source without a fault leaves the code as it is."""
    path = PACKAGE / file
    source = ast.unparse(ast.parse(path.read_text("utf-8")))
    assert fault[0] in source
    script = f"""
import sys; sys.path[:0] = [{str(FOLDER)!r}, {str(PACKAGE.parent)!r}]
import importlib, judge; from pathlib import Path
path, source = Path({str(path)!r}), sys.stdin.read()
module = importlib.import_module({module_of(path)!r})
found = judge._function(module, {unit!r})
def code(): return found.__code__.co_code, found.__code__.co_consts, found.__code__.co_names, found.__defaults__
assert not judge.replace_code(path, '<module>', source)
assert judge.replace_code(path, {unit!r}, source)
before = [str(each).split(' at ')[0] for each in code()]
assert judge.replace_code(path, {unit!r}, source.replace(*{fault!r}))
assert before != [str(each).split(' at ')[0] for each in code()]
"""
    subprocess.run([sys.executable, "-c", script], input=source, text=True, check=True)


def test_listed_equivalent_mutants_exist_and_say_why():
    """An entry whose function has changed must be looked at again."""
    faults = {
        (name_of(path), mutant.key): mutant.fault
        for path in target_files()
        for unit in find_units(path.read_text("utf-8"))
        for mutant in unit.mutants
    }
    listed = equivalent_mutants()
    assert len({(each["file"], each["mutant"]) for each in listed}) == len(listed) > 0
    for each in listed:
        assert faults[each["file"], each["mutant"]] == each["fault"] and len(each["reason"]) > 10


def test_a_sample_leaves_out_what_earlier_ones_drew():
    only = "stats/co"
    first, total = draw(0.3, 0, only)
    second, _ = draw(0.3, 1, only, without=[{key: {} for key, _, _ in first}])
    rest, _ = draw(1.0, 1, only, without=[{key: {} for key, _, _ in first}])

    def places(drawn):
        return {(path, mutant.key) for _, path, mutant in drawn}

    assert len(second) == len(first) and len(rest) == total - len(first)
    assert not places(second) & places(first) and places(second) <= places(rest)


@pytest.mark.torture
def test_the_command_runs_the_tests_that_reach_a_mutant(tmp_path: Path):
    """Of a module of three mutants; with an interpreter of its own, which has imported nothing of the package."""
    results = tmp_path / "mutation.json"
    command = [sys.executable, "mutate.py", "run", "--narrow", "--only", "decisions/options", "--json", str(results)]
    subprocess.run(command, cwd=FOLDER, check=True)
    found = json.loads(results.read_text("utf-8"))["decisions/options.py"]["<module>"]
    assert found["mutants"] == 3 and len(found["survived"]) < 3
