"""What the source may not do, and that every threat of docs/threats.md has its test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

# Modules that make objects, or run code, of what they read; and who may import one, for its error or a digest alone.
FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "jsonpickle", "yaml", "code"}
ALLOWED = {("pickle", "maple/networks/weights.py")}
CALLS = {"eval", "exec", "compile", "__import__", "execfile", "input"}
METHODS = {  # by the name after the last dot, with what it must be given
    "pickle.load": None,
    "pickle.loads": None,
    "pickle.Unpickler": None,
    "os.system": None,
    "os.popen": None,
    "tempfile.mktemp": None,
    "ssl._create_unverified_context": None,
    "torch.load": ("weights_only", True),
    "np.load": ("allow_pickle", False),
    "numpy.load": ("allow_pickle", False),
}
UNPACKING = {"extractall", "unpack_archive"}  # archives are read in place
TRUSTED = {  # runs what a file holds: asked for by --trust, or our own
    "torch.jit.load": {"maple/networks/hub/_graphs.py"},
    "torch.export.load": {"maple/networks/hub/_graphs.py", "maple/deploy/export.py"},  # which has just written it
}


def faults(tree: ast.AST, name: str) -> Iterator[str]:
    """What a module does that it may not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            for module in modules:
                if module.partition(".")[0] in FORBIDDEN and (module, name) not in ALLOWED:
                    yield f"line {node.lineno} imports {module}"
        elif isinstance(node, ast.Call):
            yield from _faults_of_call(node, name)
        elif isinstance(node, ast.Attribute) and node.attr == "MAX_IMAGE_PIXELS" and isinstance(node.ctx, ast.Store):
            if name != "maple/data/_decoder.py":
                yield f"line {node.lineno} changes the limit of Pillow"
        elif isinstance(node, ast.Name) and node.id == "MAX_IMAGE_PIXELS":
            yield f"line {node.lineno} names the limit of Pillow"


def _faults_of_call(node: ast.Call, name: str) -> Iterator[str]:
    called = ast.unparse(node.func)
    given = {each.arg: getattr(each.value, "value", ...) for each in node.keywords}
    if called in CALLS:
        yield f"line {node.lineno} calls {called}"
    if called in METHODS:
        asked = METHODS[called]
        if asked is None or given.get(asked[0], ...) is not asked[1]:
            yield f"line {node.lineno} calls {called}" + (f" without {asked[0]}={asked[1]}" if asked else "")
    if called.rpartition(".")[2] in UNPACKING:
        yield f"line {node.lineno} unpacks an archive"
    if called in TRUSTED and name not in TRUSTED[called]:
        yield f"line {node.lineno} calls {called}"
    if given.get("shell") is True or given.get("verify") is False or given.get("allow_pickle") is True:
        yield f"line {node.lineno} gives {called} what is unsafe"
    if called == "Image.open" and "formats" not in given and name != "maple/data/_corruptions.py":  # of its own bytes
        yield f"line {node.lineno} opens an image of any format"


def test_the_source_runs_nothing_that_it_reads() -> None:
    assert len(SOURCES) > 200
    found = {
        name: said
        for path in SOURCES
        if (said := list(faults(ast.parse(path.read_text("utf-8")), name := path.relative_to(ROOT / "src").as_posix())))
    }
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "pickle.loads(data)",
        "from yaml import load",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "archive.extractall(folder)",
        "subprocess.run(text, shell=True)",
        "os.system(text)",
        "torch.jit.load(path)",
        "Image.MAX_IMAGE_PIXELS = None",
        "Image.open(file)",
    ],
)
def test_each_fault_would_be_found(code: str) -> None:
    assert list(faults(ast.parse(code), "maple/example.py"))


def test_each_threat_has_its_test() -> None:
    """The page names tests as ``tests/FILE::NAME``; each row of its table has at least one."""
    text = (ROOT / "docs" / "threats.md").read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) >= 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text("utf-8"), f"{file} has no {test}"


def test_pillow_is_new_enough() -> None:
    import PIL

    assert int(PIL.__version__.partition(".")[0]) >= 13
    assert '"pillow>=13.0"' in (ROOT / "pyproject.toml").read_text("utf-8")
