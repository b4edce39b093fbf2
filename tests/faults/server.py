"""Commands in processes that start at once: one process has imported everything and forks for each command.

    python tests/faults/server.py     reads one request per line, as :class:`Forge` writes them

The commands are those of the command line, from its entry point to the exit code. Figures of reports are not drawn:
that takes most of the time of a command on small data, and no file is written meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KILLED = -signal.SIGKILL
PRELOADED = (
    "maple.cli.app",
    "maple.runs.train",
    "maple.runs.update",
    "maple.runs.predicting.explain",
    "maple.runs.predicting.monitor",
    "maple.runs.predicting.predict",
    "maple.runs.benchmark.suites",
    "maple.deploy.export",
    "maple.reporting.report",
    "maple.stats.clustering.splitting",
    "maple.data.simulate",
    "maple.data.stream",
    "maple.baselines.due",
    "maple.baselines.duq",
    "maple.baselines.sngp",
    "maple.baselines.vmdls",
    "filelock",
    "lightning_fabric",
    "matplotlib.figure",
    "onnx",
    "onnxruntime",
    "PIL.JpegImagePlugin",
    "pyarrow.pandas_compat",
    "pyarrow.parquet",
    "scipy.stats",
    "sklearn.decomposition",
    "sklearn.neighbors",
    "torch.onnx",
    "typer._adapters",
)


@dataclass(frozen=True)
class Ended:
    """What became of a command: the exit code (negative: the signal), what it printed, its seconds and operations."""

    code: int
    out: str
    err: str
    seconds: float
    operations: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether it succeeded, or failed with an error in plain words and the right code."""
        if self.code == 0:
            return True
        return self.code in (1, 2) and "Traceback" not in self.err and "error:" in self.err


class Forge:
    """A client of the process that forks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._expect("ready")

    def run(self, argv: Sequence[object], cwd: Path, *, kill_after: float | None = None, **fault: Any) -> Ended:
        """Run ``maple ARGV``; with ``kill_after``, kill it after so many seconds. ``fault`` as for ``Fault``."""
        from faults.injection import Fault

        out, err = self._folder / "stdout", self._folder / "stderr"
        request = {"argv": [*map(str, argv)], "cwd": str(cwd), "out": str(out), "err": str(err)}
        request["fault"] = asdict(Fault(str(cwd), **fault))
        start = time.monotonic()
        self._say(request)
        process = int(self._expect("pid"))
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        code, operations = map(int, self._expect("ended").split())
        texts = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
        return Ended(code, *texts, time.monotonic() - start, operations)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _say(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()

    def _expect(self, word: str) -> str:
        assert self._process.stdout is not None
        said, _, rest = self._process.stdout.readline().strip().partition(" ")
        assert said == word, f"the server said '{said} {rest}', not '{word}'"
        return rest


@contextlib.contextmanager
def forging(folder: Path) -> Iterator[Forge]:
    folder.mkdir(parents=True, exist_ok=True)
    forge = Forge(folder)
    try:
        yield forge
    finally:
        forge.close()


# --- the process that forks -------------------------------------------------------------------------------------------


def main() -> None:
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    _draw_nothing()
    _compile_templates()
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        process = os.fork()
        if not process:
            os.close(reader)
            os._exit(_run(request, writer))
        os.close(writer)
        print(f"pid {process}", flush=True)
        _, status = os.waitpid(process, 0)
        n = os.read(reader, 64)  # nothing if it was killed
        os.close(reader)
        print(f"ended {os.waitstatus_to_exitcode(status)} {int(n or 0)}", flush=True)
    os._exit(0)  # without taking all libraries apart


def _draw_nothing() -> None:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    def print_svg(canvas: FigureCanvasSVG, file: Any, **_: Any) -> None:
        file.write('<svg viewBox="0 0 1 1"></svg>')

    FigureCanvasSVG.print_svg = print_svg  # type: ignore[method-assign]


def _compile_templates() -> None:
    from maple.reporting.page import _environment

    for name in _environment().list_templates(extensions=["j2"]):
        _environment().get_template(name)


def _run(request: dict[str, Any], writer: int) -> int:
    """The command, in the process that was forked for it; its exit code."""
    from faults.injection import Fault, install
    from maple.cli.app import main as maple

    os.setpgid(0, 0)
    os.chdir(request["cwd"])
    for number, path in ((0, os.devnull), (1, request["out"]), (2, request["err"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["maple", *request["argv"]]
    operations, code = install(Fault(**request["fault"])), 0
    try:
        maple()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(writer, str(operations.n).encode())
    return code


if __name__ == "__main__":
    main()
