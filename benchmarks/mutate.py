"""Mutation testing of the algebra: how many small faults do the tests notice?

    make mutate SHARE=0.1              # a random tenth of the mutants of each module; goes on where it stopped
    make mutate SHARE=all MINUTES=60   # every mutant
    python benchmarks/mutate.py sample --share 0.1 --seed 0 --minutes 60
    python benchmarks/mutate.py run --only stats/moments --again
    python benchmarks/mutate.py report

Each mutant (``mutants.py``) of ``stats/``, ``decisions/`` and ``training/relabel.py`` runs in a forked process that has
collected the tests (``judge.py``); the tests of the module that reach the line run, quickest first, until one fails.
Survivors then meet the quick tests of other modules that reach the line, as many as fit into a minute. Which lines a
file of tests reaches is kept in ``build/mutation`` until the file or the package changes.

``sample`` draws the same share of the mutants of each module; the seed fixes which. Samples are kept side by side:
one leaves out what those with smaller seeds have drawn. It gives the share caught with a confidence interval. Modules
take turns, so that a sample that was stopped early is one with a smaller share.

``equivalent_mutants.toml`` lists mutants that no input tells from the original, each with the reason; the share
is given of all mutants and of the others. One that a test catches is reported: the list is wrong then.

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
import hashlib
import json
import math
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from judge import CAUGHT, ROOT, Judge, name_of, preload, target_files
from mutants import Mutant, find_units

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.toml")

Results = dict[str, Any]  # file -> function -> digest, mutants, survived
Outcomes = dict[str, dict[str, Any]]  # of a sample: key -> outcome, mutant, fault, wider tests
Drawn = tuple[str, Path, Mutant]  # a key, the file and the mutant of a sample


def main() -> None:
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
        sample = Sample(arguments.json.with_name("mutation_sample.json"), arguments.share, arguments.seed)
        sample.run(until, arguments.again, arguments.narrow)
        return
    if arguments.command == "run":
        run_all(arguments.json, arguments.only, until, arguments.again)
        if not arguments.narrow:
            run_survivors(arguments.json, arguments.only, until)
    report(load(arguments.json))


# --- running ---------------------------------------------------------------------------------------------------------


def run_all(results_file: Path, only: str, until: float, again: bool) -> None:
    """Run the mutants of functions without results with the tests of their module; save after each function."""
    preload()
    results, judge = load(results_file), Judge()
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
        for unit in due:
            if time.monotonic() > until:
                return
            known = done.get(unit.name, {})
            left = known["survived"] if known.get("digest") == unit.digest else None
            chosen = [mutant for mutant in unit.mutants if left is None or mutant.key in left]
            found = run_mutants(path, chosen, judge)
            done[unit.name] = {
                "digest": unit.digest,
                "mutants": len(unit.mutants),
                "survived": found,
                "all tests": False,
            }
            save(results_file, results)


def run_survivors(results_file: Path, only: str, until: float) -> None:
    """Run survivors again, with the wider tests."""
    results, judge = load(results_file), Judge()
    for path in target_files(only):
        for unit in find_units(path.read_text(encoding="utf-8")):
            known = results.get(name_of(path), {}).get(unit.name, {"survived": {}})
            if not known["survived"] or known["all tests"]:
                continue
            if time.monotonic() > until:
                return
            left = tuple(mutant for mutant in unit.mutants if mutant.key in known["survived"])
            known |= {"survived": run_mutants(path, left, judge, wider=True), "all tests": True}
            save(results_file, results)


def run_mutants(path: Path, mutants: Sequence[Mutant], judge: Judge, wider: bool = False) -> dict[str, str]:
    """The faults that no test notices, by key."""
    outcomes = {mutant.key: judge.judge(path, mutant, wider) for mutant in mutants}
    faults = {mutant.key: f"line {mutant.lines.start}: {mutant.fault}" for mutant in mutants}
    left = {key: faults[key] for key, outcome in outcomes.items() if outcome != CAUGHT}
    name = mutants[0].key.rpartition(":")[0]
    print(f"{name_of(path)} {name}: {len(outcomes) - len(left)} of {len(outcomes)} caught", flush=True)
    return left


# --- a random sample -------------------------------------------------------------------------------------------------


def draw(share: float, seed: int, only: str = "", without: Sequence[Outcomes] = ()) -> tuple[list[Drawn], int]:
    """The same share of the mutants of each module, at least one, in an order in which modules take turns; of how many.

    The random order of the mutants of a module depends on the seed and their code alone. ``without`` are the samples
    with the seeds 0, 1, .., whose mutants are left out.
    """
    chosen, total = list[tuple[float, Drawn]](), 0
    for path in target_files(only):
        units = find_units(path.read_text(encoding="utf-8"))
        texts = [(f"{name_of(path)} {unit.digest} {each.key}", each) for unit in units for each in unit.mutants]
        fresh = [each for each in texts if not any(_key(i, each[0]) in drawn for i, drawn in enumerate(without))]
        shuffled = sorted((_key(seed, text), mutant) for text, mutant in fresh)
        n, total = len(shuffled), total + len(texts)
        places = enumerate(shuffled[: math.ceil(share * len(texts))])
        chosen += [((i + 0.5) / n, (key, path, mutant)) for i, (key, mutant) in places]
    return [drawn for _, drawn in sorted(chosen, key=lambda each: (each[0], each[1][0]))], total


def _key(seed: int, text: str) -> str:
    return hashlib.sha256(f"{seed} {text}".encode()).hexdigest()[:16]


class Sample:
    """A random sample of the mutants; the file holds all samples, by seed."""

    def __init__(self, file: Path, share: float, seed: int) -> None:
        self.file, self.seed = file, str(seed)
        self.samples: dict[str, Outcomes] = load(file).get("samples", {})
        self.chosen, self.total = draw(share, seed, without=[self.samples.get(str(i), {}) for i in range(seed)])
        before = self.samples.get(self.seed, {})
        self.outcomes = {key: before[key] for key, _, _ in self.chosen if key in before}

    def run(self, until: float, again: bool, narrow: bool) -> None:
        """Run the sample, go on where it stopped, and print the share caught; survivors then meet wider tests.

        Mutants of functions that have changed since are run again, with ``again`` those that survived, too.
        """
        preload()
        due = [key for key, _, _ in self.chosen if not self._is_caught(key) and (again or key not in self.outcomes)]
        self._run(due, False, until)
        left = [key for key, each in self.outcomes.items() if each["outcome"] != CAUGHT and not each["all tests"]]
        if left and not narrow and time.monotonic() < until:
            self._run(left, True, until)
        report_sample(self.outcomes)

    def _is_caught(self, key: str) -> bool:
        return self.outcomes.get(key, {}).get("outcome") == CAUGHT

    def _run(self, due: list[str], wider: bool, until: float) -> None:
        judge = Judge()
        for key, path, mutant in self.chosen:
            if key not in due:
                continue
            if time.monotonic() > until:
                return
            outcome = judge.judge(path, mutant, wider)
            fault = f"{name_of(path)} line {mutant.lines.start}: {mutant.fault}"
            self.outcomes[key] = {"outcome": outcome, "mutant": mutant.key, "fault": fault, "all tests": wider}
            print(f"{len(self.outcomes)} of {len(self.chosen)}: {outcome}: {mutant.key}: {fault}", flush=True)
            self.samples[self.seed] = self.outcomes
            save(self.file, {"all mutants": self.total, "samples": self.samples})


def report_sample(outcomes: Outcomes) -> None:
    """Print the survivors, and the share caught with its interval: of all, and of those that are not equivalent."""
    listed = {(each["file"], each["mutant"], each["fault"]): each["reason"] for each in equivalent_mutants()}
    n_equivalent = 0
    for each in outcomes.values():
        is_caught, reason = each["outcome"] == CAUGHT, listed.get(_identity(each))
        n_equivalent += not is_caught and reason is not None
        if is_caught and reason:
            print(f"    caught, though listed as equivalent: {each['fault']}")
        if not is_caught and not reason:
            print(f"    {each['mutant']}: {each['fault']}")
    caught = sum(each["outcome"] == CAUGHT for each in outcomes.values())
    own = sum(each["outcome"] == CAUGHT and not each["all tests"] for each in outcomes.values())
    print(f"{own} of {len(outcomes)} caught by the tests of their module, {caught - own} by wider ones")
    for what, n in ("mutants", len(outcomes)), ("mutants that are not equivalent", len(outcomes) - n_equivalent):
        low, high = wilson(caught, n)
        print(f"{caught} of {n} {what} caught: {caught / n:.1%}, 95 % interval {low:.1%} to {high:.1%}")


def equivalent_mutants() -> list[dict[str, str]]:
    """The mutants that no input tells from the original: file, mutant, fault and reason of each."""
    return tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("equivalent", [])


def _identity(outcome: dict[str, Any]) -> tuple[str, str, str]:
    """The file, the key and the fault of a mutant, without its line."""
    file, _, rest = outcome["fault"].partition(" line ")
    return file, outcome.get("mutant", ""), rest.partition(": ")[2]


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a share (Wilson 1927).

    >>> tuple(round(end, 3) for end in wilson(9, 10))
    (0.596, 0.982)
    """
    centre = (successes + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * (successes * (n - successes) / n + z**2 / 4) ** 0.5
    return centre - half, centre + half


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
