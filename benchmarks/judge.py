"""Which tests reach a line, and whether they notice a fault in it: for ``mutate.py``.

A server is a process that has collected some files of tests. It forks for each mutant: the code of the function is
replaced in place, and the tests run at once, without anything being imported again. What a module computes when it is
imported takes a pytest of its own.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import resource
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mutants import Mutant

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "maple"
CACHE = ROOT / "build" / "mutation"
TARGETS = ("stats/**/*.py", "decisions/*.py", "training/relabel.py")
WIDER = (
    "tests/stats",
    "tests/decisions",
    "tests/theory/test_degenerate.py",
    "tests/theory/test_invariance.py",
    "tests/theory/test_rounding.py",
    "tests/training/test_relabel.py",
    "tests/detectors/test_maple.py",
    "tests/detectors/test_distance.py",
    "tests/detectors/test_scores.py",
    "tests/contract/test_detectors.py",
)
PRELOAD = (
    "numpy", "scipy.special", "scipy.stats", "scipy.linalg", "scipy.sparse", "scipy.optimize", "scipy.spatial.distance",
    "sklearn.cluster", "sklearn.metrics", "sklearn.decomposition", "sklearn.discriminant_analysis",
    "sklearn.covariance", "hypothesis", "pydantic", "rich.progress", "torch", "lightning_fabric", "PIL.Image",
    "safetensors.numpy",
)  # fmt: skip
OPTIONS = (
    "-x", "-q", "-o", "addopts=", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "pytest_timeout",
    "-m", "not slow and not shared and not torture",
)  # fmt: skip
WIDER_SECONDS = 60.0  # of CPU time that the wider tests of a mutant may take
CAUGHT, SURVIVED, UNREACHED = "caught", "survived", "unreached"
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
PLAIN = (bool, int, float, str, types.NoneType)

Reached = dict[str, dict[str, list[str]]]  # file -> line -> tests
Tests = tuple[Reached, dict[str, float]]  # and the CPU seconds of each test


def target_files(only: str = "") -> list[Path]:
    return [path for pattern in TARGETS for path in sorted(PACKAGE.glob(pattern)) if only in name_of(path)]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_of(path: Path) -> str:
    return ".".join(["maple", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


def own_tests(path: Path) -> str:
    return f"tests/{path.relative_to(PACKAGE).parent}/test_{path.stem.lstrip('_')}.py"


def preload() -> None:
    """Import what tests import, once: forked processes share it."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()


class Judge:
    """Runs mutants with the tests of their own module, or with those of other modules that reach the same lines."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def judge(self, path: Path, mutant: Mutant, wider: bool = False) -> str:
        server = self._server("wider", WIDER) if wider else self._server(own_tests(path), [own_tests(path)])
        tests = chosen_tests(path, mutant, server.tests, wider)
        if not tests:
            return UNREACHED
        limit = 10 + 5 * sum(server.tests[1].get(test, 0.0) for test in tests)
        code = server.ask(path, mutant, tests, limit)
        if code == Server.CANNOT:
            code = in_child(lambda: run_tests(tests, path, mutant.source), limit)
        return SURVIVED if code in PASSED else CAUGHT

    def _server(self, name: str, tests: Sequence[str]) -> Server:
        if name not in self._servers:
            self._servers[name] = Server([test for test in tests if (ROOT / test).exists()])
        return self._servers[name]


def chosen_tests(path: Path, mutant: Mutant, tests: Tests, wider: bool = False) -> list[str]:
    """The tests that reach a mutant, quickest first; ``wider`` without those of its module, for a minute."""
    reached, seconds = tests
    lines = reached.get(name_of(path), {})
    chosen = {test for line in mutant.lines for test in lines.get(str(line), ())}
    if not chosen or mutant.key.startswith("<module>"):  # computed when the module is imported
        chosen |= {test for found in lines.values() for test in found}
        chosen = chosen or {test for test in seconds if test.startswith(own_tests(path))}  # it has no functions
    ordered = sorted(chosen, key=lambda test: seconds.get(test, 0.0))
    if not wider:
        return ordered
    others = [test for test in ordered if not test.startswith(own_tests(path))]
    return [test for i, test in enumerate(others) if sum(map(seconds.__getitem__, others[:i])) < WIDER_SECONDS]


# --- a server --------------------------------------------------------------------------------------------------------


class Server:
    """A process in which pytest has collected tests; it ends with this one."""

    CANNOT = 71  # the answer where no code can be replaced

    def __init__(self, tests: Sequence[str]) -> None:
        (child_reads, ours), (our_end, child_writes) = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(ours)
            os.close(our_end)
            try:
                silence()
                loop = _Loop(os.fdopen(child_reads), os.fdopen(child_writes, "w"))
                run_tests(list(tests), target_files()[0], None, (loop,))
            finally:
                os._exit(0)
        os.close(child_reads)
        os.close(child_writes)
        self._from, self._to = os.fdopen(our_end), os.fdopen(ours, "w")
        self.tests: Tests = self._answer()

    def ask(self, path: Path, mutant: Mutant, tests: Sequence[str], limit: float) -> int:
        """The exit code of the tests with the fault, or ``CANNOT``."""
        unit = mutant.key.rpartition(":")[0]
        self._to.write(json.dumps([str(path), unit, mutant.source, list(tests), limit]) + "\n")
        self._to.flush()
        return int(self._answer())

    def _answer(self) -> Any:
        line = self._from.readline()
        if not line.strip() or isinstance(found := json.loads(line), str):
            raise SystemExit(f"tests fail without a fault: {found if line.strip() else 'pytest ended'}")
        return found


class _Loop:
    """The plugin of pytest that makes a process a server."""

    def __init__(self, reads: Any, writes: Any) -> None:
        self.reads, self.writes = reads, writes

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        self.items = {item.nodeid: item for item in session.items}
        gc.freeze()
        self._say(self._reached())
        for line in self.reads:
            path, unit, source, tests, limit = json.loads(line)
            self._say(in_child(functools.partial(self._run_mutant, Path(path), unit, source, tests), limit))
        return True

    def _say(self, answer: Any) -> None:
        self.writes.write(json.dumps(answer) + "\n")
        self.writes.flush()

    def _run_mutant(self, path: Path, unit: str, source: str, tests: list[str]) -> int:
        if not replace_code(path, unit, source):
            return Server.CANNOT
        return self._run([self.items[test] for test in tests])

    def _run(self, items: Sequence[pytest.Item]) -> int:
        for item, after in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
            if self.session.testsfailed:
                return int(pytest.ExitCode.TESTS_FAILED)
        return int(pytest.ExitCode.OK)

    def _reached(self) -> Tests | str:
        """The tests that reach each line, and their CPU seconds; the file whose tests fail without a fault."""
        reached: Reached = {name_of(path): {} for path in target_files()}
        seconds: dict[str, float] = {}
        for file in sorted({item.path for item in self.session.items}):
            items = [item for item in self.session.items if item.path == file]
            kept = CACHE / f"{hashlib.sha256(file.read_bytes() + _targets_digest()).hexdigest()[:24]}.json"
            if not kept.exists() and (code := in_child(functools.partial(self._listen, items, kept), 36_000)):
                return f"exit code {code}: run pytest {file.relative_to(ROOT)}"
            found, times = json.loads(kept.read_text(encoding="utf-8"))
            seconds |= times
            for name, lines in found.items():
                for line, names in lines.items():
                    reached[name].setdefault(line, []).extend(names)
        return reached, seconds

    def _listen(self, items: Sequence[pytest.Item], kept: Path) -> int:
        listener = Listener()
        for item, after in zip(items, [*items[1:], None]):
            with listener.listening(item.nodeid):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)
        if self.session.testsfailed:
            return int(pytest.ExitCode.TESTS_FAILED)
        CACHE.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(".tmp")
        beside.write_text(json.dumps([listener.reached(), listener.seconds]), encoding="utf-8")
        beside.replace(kept)
        return 0


@functools.cache
def _targets_digest() -> bytes:
    return hashlib.sha256(b"".join(path.read_bytes() for path in target_files())).digest()


class Listener:
    """Notes which lines each test reaches, and its time."""

    def __init__(self) -> None:
        import coverage

        files = [str(path) for path in target_files()]
        self.coverage = coverage.Coverage(data_file=None, config_file=False, include=files)
        self.coverage.start()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def listening(self, test: str) -> Iterator[None]:
        self.coverage.switch_context(test)
        started = time.process_time()
        yield
        self.seconds[test] = time.process_time() - started

    def reached(self) -> Reached:
        self.coverage.stop()
        data = self.coverage.get_data()
        found: Reached = {}
        for path in target_files():
            lines = data.contexts_by_lineno(str(path))
            found[name_of(path)] = {str(line): [test for test in tests if test] for line, tests in lines.items()}
        return found


# --- a fault in place ------------------------------------------------------------------------------------------------


def replace_code(path: Path, unit: str, source: str) -> bool:
    """Give a function of a loaded module the code that it has in ``source``; whether that could be done.

    Whoever has imported the function, or an instance of its class, then runs the fault.
    """
    module = sys.modules.get(module_of(path))
    if module is None or unit == "<module>":
        return False
    other = types.ModuleType(module.__name__)
    other.__file__ = module.__file__
    exec(compile(source, path, "exec", dont_inherit=True), other.__dict__)  # noqa: S102 - our own source
    old, new = _function(module, unit), _function(other, unit)
    if old is None or new is None or len(old.__code__.co_freevars) != len(new.__code__.co_freevars):
        return False
    old.__code__ = new.__code__
    old.__defaults__ = tuple(map(_default, old.__defaults__ or (), new.__defaults__ or ())) or None
    theirs = new.__kwdefaults__ or {}
    old.__kwdefaults__ = {name: _default(value, theirs[name]) for name, value in (old.__kwdefaults__ or {}).items()}
    return True


def _default(old: Any, new: Any) -> Any:
    return new if isinstance(new, PLAIN) else old  # the others may be of a class of the module


def _function(module: types.ModuleType, unit: str) -> Any:
    """The function itself, within what decorators made of it."""
    found: Any = module
    for name in unit.split("."):
        found = inspect.getattr_static(found, name, None)
    while found is not None and not isinstance(found, types.FunctionType):
        if hasattr(found, "cache_clear"):
            found.cache_clear()
        inner = ("fget", "func", "__func__", "__wrapped__")
        found = next((getattr(found, name) for name in inner if getattr(found, name, None) is not None), None)
    return None if found is None else inspect.unwrap(found)


# --- processes -------------------------------------------------------------------------------------------------------


def run_tests(tests: list[str], path: Path, source: str | None, plugins: tuple[object, ...] = ()) -> int:
    """The exit code of pytest for these tests, with ``source``, if given, in the place of a module."""
    os.environ["MAPLE_SAME_EXAMPLES"] = "1"  # for tests/conftest.py
    sys.path.insert(0, str(ROOT / "src"))
    if source is not None:
        sys.meta_path.insert(0, Replaced(path, source))
    os.chdir(ROOT)
    return int(pytest.main([*OPTIONS, *tests], plugins=list(plugins)))


class Replaced(importlib.machinery.PathFinder):
    """Finds one module of the package, with another source."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source
        self.name = module_of(path)

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
