"""Mutation testing of the algebra: how many small faults do the tests notice?

    make mutate SHARE=0.1              # a random tenth of the mutants of each module; goes on where it stopped
    make mutate SHARE=all MINUTES=60   # every mutant
    python benchmarks/mutate.py sample --share 0.1 --seed 0 --minutes 60
    python benchmarks/mutate.py run --only stats/moments --again
    python benchmarks/mutate.py report

Each mutant (``mutants.py``) of ``stats/``, ``decisions/`` and ``training/relabel.py`` runs in a forked process, in
which its module is imported with the fault; the tests of the module that reach the line run, quickest first, until one
fails. Survivors then meet all tests that reach the line.

``sample`` draws the same share of the mutants of each module; the seed fixes which. It gives the share caught with a
confidence interval. Modules take turns, so that a sample that was stopped early is one with a smaller share.

Property tests draw the same examples each time. A mutant that takes five times as long as the tests is caught. Mutants
of functions whose code has not changed are not run again, unless ``--again`` asks for those with survivors. Doctests do
not count.

Own code instead of mutmut, which leaves out decorated functions (properties) and constants of modules, and of
cosmic-ray, which starts a new Python for each mutant: importing torch takes longer than most mutants.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported: processes are forked

import argparse
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mutants import Mutant, find_units

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "maple"
TARGETS = ("stats/**/*.py", "decisions/*.py", "training/relabel.py")
TESTS = (
    "tests/stats",
    "tests/decisions",
    "tests/theory",
    "tests/training/test_relabel.py",
    "tests/detectors/test_maple.py",
)
PRELOAD = (
    "numpy", "scipy.special", "scipy.stats", "scipy.linalg", "scipy.sparse", "scipy.optimize", "scipy.spatial.distance",
    "sklearn.cluster", "sklearn.metrics", "sklearn.decomposition", "sklearn.discriminant_analysis",
    "sklearn.covariance", "hypothesis", "pydantic", "rich.progress", "torch", "lightning_fabric", "PIL.Image",
    "safetensors.numpy",
)  # fmt: skip
OPTIONS = (
    "-x", "-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "pytest_timeout",
    "-m", "not slow and not shared",
)  # fmt: skip
CAUGHT, SURVIVED, UNREACHED = "caught", "survived", "unreached"

Results = dict[str, dict[str, Any]]  # file -> function -> digest, mutants, survived
Reached = dict[str, dict[str, list[str]]]  # file -> line -> tests
Drawn = tuple[str, Path, Mutant]  # a key, the file and the mutant of a sample


def main() -> None:
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # each process would import them again
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "sample", "report"))
    parser.add_argument("--json", type=Path, default=ROOT / "results" / "mutation.json")
    parser.add_argument("--only", default="", help="part of the name of a file, such as stats/moments")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--narrow", action="store_true", help="only with the tests of each module")
    parser.add_argument("--again", action="store_true", help="run survivors again, after new tests")
    parser.add_argument("--share", type=float, default=0.1, help="of the mutants of each module, in a sample")
    parser.add_argument("--seed", type=int, default=0, help="of a sample")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    if arguments.command == "sample":
        sampled = arguments.json.with_name("mutation_sample.json")
        run_sample(sampled, arguments.share, arguments.seed, until, arguments.again, arguments.narrow)
        return
    if arguments.command == "run":
        run_all(arguments.json, arguments.only, until, arguments.again)
        if not arguments.narrow:
            run_survivors(arguments.json, arguments.only, until)
    report(load(arguments.json))


# --- running ---------------------------------------------------------------------------------------------------------


def target_files(only: str = "") -> list[Path]:
    return [path for pattern in TARGETS for path in sorted(PACKAGE.glob(pattern)) if only in name_of(path)]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def run_all(results_file: Path, only: str, until: float, again: bool) -> None:
    """Run the mutants of functions without results with the tests of their module; save after each function."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # forked processes share what is loaded
    results = load(results_file)
    files = {path: find_units(path.read_text(encoding="utf-8")) for path in target_files(only)}
    for path, units in files.items():
        done = results.setdefault(name_of(path), {})
        for gone in set(done) - {unit.name for unit in units}:
            del done[gone]
        due = [
            unit
            for unit in units
            if done.get(unit.name, {}).get("digest") != unit.digest or (again and done[unit.name]["survived"])
        ]
        tests = reach([own_tests(path)]) if due else None
        for unit in due:
            if time.monotonic() > until:
                return
            assert tests is not None
            known = done.get(unit.name, {})
            left = known["survived"] if known.get("digest") == unit.digest else None
            chosen = [mutant for mutant in unit.mutants if left is None or mutant.key in left]
            found = run_mutants(path, chosen, tests)
            done[unit.name] = {
                "digest": unit.digest,
                "mutants": len(unit.mutants),
                "survived": found,
                "all tests": False,
            }
            save(results_file, results)


def run_survivors(results_file: Path, only: str, until: float) -> None:
    """Run survivors again, with all tests."""
    results, tests = load(results_file), None
    for path in target_files(only):
        for unit in find_units(path.read_text(encoding="utf-8")):
            known = results.get(name_of(path), {}).get(unit.name, {"survived": {}})
            if not known["survived"] or known["all tests"]:
                continue
            tests = tests or reach(TESTS)
            if time.monotonic() > until:
                return
            left = tuple(mutant for mutant in unit.mutants if mutant.key in known["survived"])
            known |= {"survived": run_mutants(path, left, tests), "all tests": True}
            save(results_file, results)


# --- a random sample -------------------------------------------------------------------------------------------------


def draw(share: float, seed: int, only: str = "") -> tuple[list[Drawn], int]:
    """The same share of the mutants of each module, at least one, in an order in which modules take turns; of how many.

    The random order of the mutants of a module depends on the seed and their code alone.
    """
    chosen, total = list[tuple[float, Drawn]](), 0
    for path in target_files(only):
        shuffled = sorted(
            (hashlib.sha256(f"{seed} {name_of(path)} {unit.digest} {mutant.key}".encode()).hexdigest()[:16], mutant)
            for unit in find_units(path.read_text(encoding="utf-8"))
            for mutant in unit.mutants
        )
        n, total = len(shuffled), total + len(shuffled)
        places = enumerate(shuffled[: math.ceil(share * n)])
        chosen += [((i + 0.5) / n, (key, path, mutant)) for i, (key, mutant) in places]
    return [drawn for _, drawn in sorted(chosen, key=lambda each: (each[0], each[1][0]))], total


def run_sample(results_file: Path, share: float, seed: int, until: float, again: bool, narrow: bool) -> None:
    """Run a sample, go on where it stopped, and print the share caught; survivors then meet all tests.

    Mutants of functions that have changed since are run again, with ``again`` those that survived, too.
    """
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    found: dict[str, Any] = load(results_file)
    chosen, total = draw(share, seed)
    before = found.get("outcomes", {}) if found.get("seed") == seed else {}
    if again:
        before = {key: each for key, each in before.items() if each["outcome"] == CAUGHT}
    outcomes = {key: before[key] for key, _, _ in chosen if key in before}

    def run(due: list[Drawn], tests_of: Callable[[Path], tuple[Reached, dict[str, float]]], all_tests: bool) -> None:
        for key, path, mutant in due:
            if time.monotonic() > until:
                return
            outcome = run_mutant(path, mutant, *tests_of(path))
            fault = f"{name_of(path)} line {mutant.lines.start}: {mutant.fault}"
            outcomes[key] = {"outcome": outcome, "fault": fault, "all tests": all_tests}
            print(f"{len(outcomes)} of {len(chosen)}: {outcome}: {fault}", flush=True)
            save(results_file, {"seed": seed, "all mutants": total, "outcomes": outcomes})

    run([each for each in chosen if each[0] not in outcomes], cache(lambda path: reach([own_tests(path)])), False)
    left = [each for each in chosen if outcomes.get(each[0], {}).get("outcome", CAUGHT) != CAUGHT]
    left = [each for each in left if not outcomes[each[0]]["all tests"]]
    if left and not narrow and time.monotonic() < until:
        everything = reach(TESTS)
        run(left, lambda path: everything, True)
    report_sample(outcomes)


def report_sample(outcomes: dict[str, dict[str, Any]]) -> None:
    """Print the survivors, and the share caught with its interval."""
    survived, n = [each["fault"] for each in outcomes.values() if each["outcome"] != CAUGHT], len(outcomes)
    print("", *survived, sep="\n    ")
    low, high = wilson(n - len(survived), n)
    print(f"{n - len(survived)} of {n} caught: {1 - len(survived) / n:.1%}, 95 % interval {low:.1%} to {high:.1%}")


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a share (Wilson 1927).

    >>> tuple(round(end, 3) for end in wilson(9, 10))
    (0.596, 0.982)
    """
    centre = (successes + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * (successes * (n - successes) / n + z**2 / 4) ** 0.5
    return centre - half, centre + half


def own_tests(path: Path) -> str:
    return f"tests/{path.relative_to(PACKAGE).parent}/test_{path.stem.lstrip('_')}.py"


def run_mutants(path: Path, mutants: Sequence[Mutant], tests: tuple[Reached, dict[str, float]]) -> dict[str, str]:
    """The faults that no test notices, by key."""
    outcomes = {mutant.key: run_mutant(path, mutant, *tests) for mutant in mutants}
    faults = {mutant.key: f"line {mutant.lines.start}: {mutant.fault}" for mutant in mutants}
    left = {key: faults[key] for key, outcome in outcomes.items() if outcome != CAUGHT}
    name = mutants[0].key.rpartition(":")[0]
    print(f"{name_of(path)} {name}: {len(outcomes) - len(left)} of {len(outcomes)} caught", flush=True)
    return left


def run_mutant(path: Path, mutant: Mutant, reached: Reached, seconds: dict[str, float]) -> str:
    """Whether a test notices the fault."""
    lines = reached.get(name_of(path), {})
    chosen = {test for line in mutant.lines for test in lines.get(str(line), ())}
    if not chosen or mutant.key.startswith("<module>"):  # computed when the module is imported
        chosen |= {test for found in lines.values() for test in found}
        chosen = chosen or {test for test in seconds if test.startswith(own_tests(path))}  # it has no functions
    if not chosen:
        return UNREACHED
    ordered = sorted(chosen, key=lambda test: (own_tests(path) not in test, seconds.get(test, 0.0)))
    limit = 10 + 5 * sum(seconds.get(test, 0.0) for test in ordered)
    code = in_child(lambda: run_tests(ordered, path, mutant.source), limit)
    return SURVIVED if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else CAUGHT


def run_tests(tests: list[str], path: Path, source: str, plugins: tuple[object, ...] = ()) -> int:
    """The exit code of pytest for these tests, with ``source`` in the place of a module."""
    os.environ["MAPLE_SAME_EXAMPLES"] = "1"  # for tests/conftest.py
    sys.path.insert(0, str(ROOT / "src"))
    sys.meta_path.insert(0, Replaced(path, source))
    os.chdir(ROOT)
    return int(pytest.main([*OPTIONS, *tests], plugins=list(plugins)))


class Replaced(importlib.machinery.PathFinder):
    """Finds one module of the package, with another source."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.name = ".".join(["maple", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:  # type: ignore[override]
        if fullname != self.name:
            return None
        source = self.source

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> Any:
                return compile(source, self.path, "exec", dont_inherit=True)

        return importlib.util.spec_from_file_location(fullname, self.path, loader=Loader(fullname, str(self.path)))


def in_child(work: Callable[[], int], cpu_seconds: float) -> int:
    """The exit code of ``work`` in a forked process; minus the signal that ended it, such as for too much CPU time."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            soft = int(cpu_seconds + sum(os.times()[:2])) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, soft + 1))
            silence()
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def silence() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


# --- which tests reach a line ----------------------------------------------------------------------------------------


class Listener:
    """A plugin of pytest that notes which lines each test reaches, and its time."""

    def __init__(self) -> None:
        import coverage

        self.coverage = coverage.Coverage(
            data_file=None, config_file=False, include=[str(path) for path in target_files()]
        )
        self.coverage.start()
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.coverage.switch_context(item.nodeid)
        started = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - started

    def reached(self) -> Reached:
        self.coverage.stop()
        data = self.coverage.get_data()
        found: Reached = {}
        for path in target_files():
            lines = data.contexts_by_lineno(str(path))
            found[name_of(path)] = {str(line): [test for test in tests if test] for line, tests in lines.items()}
        return found


def reach(tests: Sequence[str]) -> tuple[Reached, dict[str, float]]:
    """The tests that reach each line, and their CPU seconds; an error if the tests fail without a fault."""
    path = target_files()[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reached.json"

        def listen() -> int:
            listener = Listener()
            code = run_tests(list(tests), path, path.read_text(encoding="utf-8"), (listener,))
            file.write_text(json.dumps([listener.reached(), listener.seconds]))
            return code

        if code := in_child(listen, 36_000):
            raise SystemExit(f"the tests fail without a fault (exit code {code}): run pytest {' '.join(tests)}")
        reached, seconds = json.loads(file.read_text())
    return reached, seconds


# --- results ---------------------------------------------------------------------------------------------------------


def load(path: Path) -> Results:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save(path: Path, results: Results) -> None:
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def report(results: Results) -> None:
    """Print the share caught of each file, functions that were not run, and survivors."""
    total = caught = left = 0
    for path in target_files():
        done = results.get(name_of(path), {})
        units = find_units(path.read_text(encoding="utf-8"))
        current = {unit.name: done[unit.name] for unit in units if done.get(unit.name, {}).get("digest") == unit.digest}
        n = sum(unit["mutants"] for unit in current.values())
        survived = [fault for unit in current.values() for fault in unit["survived"].values()]
        missing = sum(len(unit.mutants) for unit in units if unit.name not in current)
        total, caught, left = total + n, caught + n - len(survived), left + missing
        if n or missing:
            print(f"{name_of(path):32} {n - len(survived):5} of {n:5} caught, {missing:5} not run")
        for fault in survived:
            print(f"    {fault}")
    print(f"{'all':32} {caught:5} of {total:5} caught ({caught / max(total, 1):.1%}), {left:5} not run")


if __name__ == "__main__":
    main()
