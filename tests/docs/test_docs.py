"""The site: what can be run in it is run, what it names exists, and it builds without a warning.

The word behind the fence of a code block says what happens to the block here, and to whoever reads the page:

===========  =========================================================================================================
``console``  lines that begin with ``$ maple`` are run; lines below, if any, are what is printed (stdout and stderr),
             compared as in doctest (``...`` stands for anything, spaces do not matter). ``# exit code 3`` behind a
             command says that it does not end with 0
``python``   is run; with ``title="name.py"`` it is written to a file of that name instead
``pycon``    is run as a doctest
``sh``       is parsed: each ``maple`` line by the command line itself, up to the moment when work would begin (all
             names and values of options are checked), each ``python benchmarks/`` line by the parser of that script
``toml``     is read as a configuration file
``text``     is for reading only
===========  =========================================================================================================

No other word is allowed, nor none. The blocks of a page are run in their order, in one temporary folder and with one
set of Python names. Pages under ``howto`` and ``reference`` begin with the folder that the blocks of ``howto/train.md``
leave behind. What takes hours or needs real data is ``sh``, as on the pages with results; blocks of the README, of
CONTRIBUTING and of ``results`` without a word are taken for ``sh``.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import os
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import typer

import maple.cli
from browser import open_browser
from commands import run
from maple.cli.app import app
from maple.decisions.options import DecisionOptions
from maple.errors import MapleError
from maple.evaluation.paper.profiles import find_profile
from maple.evaluation.paper.suites import find_suite
from maple.options import build_options
from maple.runs.benchmark.suites import ALL
from maple.runs.evaluate import create_detectors
from maple.runs.requests import BenchmarkRequest, RunRequest
from maple.runs.setup.config import resolve_config
from maple.runs.tune.plan import make_plan
from maple.training.recipe import find_recipe
from plugins import forgetting_plugins

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
if not (DOCS / "index.md").exists():
    pytest.skip("the site is not part of a source distribution", allow_module_level=True)

WORDS = ("console", "python", "pycon", "sh", "toml", "text")
FIRST = "howto/train.md"  # whose folder the other how-to pages begin with
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
ELSEWHERE = ("README.md", "CONTRIBUTING.md", "results/README.md")  # not pages of ours, but with commands like theirs
DOCTEST = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
GROUP = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {name: GROUP.get_command(None, name) for name in GROUP.list_commands(None)}  # type: ignore[attr-defined]


# --- reading ---------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    word: str
    title: str
    text: str
    line: int


def blocks(path: Path) -> list[Block]:
    """The fenced code blocks of a page."""
    text = path.read_text(encoding="utf-8")
    fence = r'^```(\S*?)(?: title="(.*?)")?\n(.*?)^```$'
    found = re.finditer(fence, text, flags=re.MULTILINE | re.DOTALL)
    return [Block(match[1], match[2] or "", match[3], text.count("\n", 0, match.start()) + 2) for match in found]


def inline_code(path: Path) -> list[str]:
    """What stands between single backticks."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def shell_lines(text: str) -> list[str]:
    """Commands, with lines that end in a backslash joined and remarks cut off."""
    joined = re.sub(r"\\\n\s*", " ", text)
    return [command for line in joined.splitlines() if (command := re.sub(r"(^|\s+)# .*", "", line).strip())]


class Command(NamedTuple):
    line: str
    exit_code: int
    expected: str


def console_commands(text: str) -> Iterator[Command]:
    for part in re.split(r"^\$ ", re.sub(r"\\\n\s*", " ", text), flags=re.MULTILINE)[1:]:
        line, _, expected = part.partition("\n")
        stated = re.search(r"# exit code (\d+)", line)
        yield Command(re.sub(r"\s+# .*", "", line), int(stated[1]) if stated else 0, expected)


def is_run(page: str) -> bool:
    return any(block.word in ("console", "python", "pycon") for block in blocks(DOCS / page))


HOWTO = [page for page in PAGES if page.startswith(("howto/", "reference/")) and is_run(page)]
OTHERS = [page for page in PAGES if page not in HOWTO and is_run(page)]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [block for block in blocks(DOCS / page) if block.word not in WORDS] == []
    assert 2 * len(blocks(DOCS / page)) == len(re.findall("^ *```", text, flags=re.MULTILINE))


# --- running ---------------------------------------------------------------------------------------------------------


def run_command(command: Command) -> None:
    program, *arguments = shlex.split(command.line)
    assert program == "maple", f"only maple is run here, not {program}"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), forgetting_plugins():
        code = run(*arguments)  # plug-ins are those of the command alone, as in a process of its own
    got = printed.getvalue()
    assert code == command.exit_code, f"{command.line}\nexit code {code}\n{got}"
    if command.expected.strip():
        equal = doctest.OutputChecker().check_output(command.expected, got, DOCTEST)
        assert equal, f"{command.line}\n--- the page says\n{command.expected}\n--- printed\n{got}"


def run_python(block: Block, page: str, names: dict[str, Any]) -> None:
    code = "\n" * (block.line - 1) + block.text
    exec(compile(code, page, "exec"), names)  # noqa: S102 (our own pages)


def run_doctest(block: Block, page: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, names, page, page, block.line - 1)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=DOCTEST, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert runner.failures == 0, report.getvalue()


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page in a folder."""
    with forgetting_plugins(), forgetting_modules(folder):
        run_blocks(page, folder)


@contextlib.contextmanager
def forgetting_modules(folder: Path) -> Iterator[None]:
    """Within it, modules in a folder may be imported; afterwards those are imported anew.

    Scripts share modules, which may have bound functions that :func:`no_work` had stopped.
    """
    known = set(sys.modules)
    try:
        yield
    finally:
        for name in set(sys.modules) - known:
            if str(getattr(sys.modules[name], "__file__", None)).startswith(str(folder)):
                del sys.modules[name]


def run_blocks(page: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        for block in blocks(DOCS / page):
            if block.title:
                Path(block.title).write_text(block.text, encoding="utf-8")
            elif block.word == "python":
                run_python(block, page, names)
            elif block.word == "pycon":
                run_doctest(block, page, names)
            elif block.word == "console":
                for command in console_commands(block.text):
                    run_command(command)
    finally:
        os.chdir(before)
        sys.path[:] = path


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """No data root, and lines of the usual width."""
    monkeypatch.delenv("MAPLE_DATA", raising=False)
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture(scope="module")
def first_folder(tmp_path_factory) -> Path:
    """What the first how-to page leaves behind."""
    folder = tmp_path_factory.mktemp("howto")
    run_page(FIRST, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHERS)
def test_tutorials_run(page, tmp_path):
    run_page(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", HOWTO)
def test_howto_pages_run(page, tmp_path, first_folder):
    if page != FIRST:
        run_page(page, Path(shutil.copytree(first_folder, tmp_path / "here")))


# --- parsing ---------------------------------------------------------------------------------------------------------


class Parsed(Exception):
    """A command was understood, and work would begin."""


# Functions with these verbs describe or prepare: they run. Every other function that a command imports is its work.
LIGHT = ("build_", "create_", "default_", "describe_", "find_", "list_", "make_", "read_", "to_")


class Work(NamedTuple):
    """A function that a command imports when it is called."""

    command: str
    module: str
    name: str


def find_work() -> Iterator[Work]:
    """The functions that do the work of the commands, read from the imports inside the commands."""
    for source in Path(maple.cli.__file__).parent.glob("*.py"):
        body = ast.parse(source.read_text(encoding="utf-8")).body
        commands = (node for node in body if isinstance(node, ast.FunctionDef))
        for command in (each for each in commands if each.name in COMMANDS):
            imports = (node for node in ast.walk(command) if isinstance(node, ast.ImportFrom))
            for module, name in ((node.module, alias.name) for node in imports for alias in node.names):
                found = resolve_name(f"{module}:{name}") if module.startswith("maple.") else None
                if inspect.isfunction(found) and not name.startswith(LIGHT):
                    yield Work(command.name, module, name)


def stop(function: Callable) -> Callable[..., None]:
    """A function that checks the options it is given, and goes no further."""
    signature = inspect.signature(function)

    def stopped(*arguments: Any, **keywords: Any) -> None:
        given = signature.bind(*arguments, **keywords).arguments
        check_options(given.get("request", SimpleNamespace(**given)))
        raise Parsed

    return stopped


def check_options(request: Any) -> None:
    """Resolve the options of a request, as the work would do first."""
    if isinstance(request, maple.TuneRequest):
        make_plan(request)
    elif isinstance(request, BenchmarkRequest):
        assert [find_suite(name) for name in request.names if name != ALL] or ALL in request.names
        assert find_profile(request.profile).seeds and request.seeds != ()
        resolve_config(request.flags)
    elif isinstance(request, RunRequest):
        config = resolve_config(request.flags, getattr(request, "file", {}), getattr(request, "preset", None))
        find_recipe(config.model.recipe)
    elif hasattr(request, "flags"):
        settings = {key: value for key, value in request.flags.items() if "." in key}
        create_detectors(getattr(request, "detectors", None) or (), settings)
        decision = {key: value for key, value in request.flags.items() if key not in settings}
        build_options(DecisionOptions, decision, where=None)
    elif hasattr(request, "decision"):
        build_options(DecisionOptions, request.decision, where=None)


@pytest.fixture
def no_work(monkeypatch):
    """Commands and scripts end with ``Parsed`` where their work would begin."""
    # First all imports: a module must not bind a function that is stopped already. Two commands may share one.
    for module, name in dict.fromkeys((import_module(work.module), work.name) for work in list(find_work())):
        monkeypatch.setattr(module, name, stop(getattr(module, name)))
    monkeypatch.setattr("argparse.ArgumentParser.parse_args", parse_only)


def test_every_command_is_stopped_before_its_work():
    assert {work.command for work in find_work()} == set(COMMANDS) - {"methods"}


def parse_only(self, args=None, namespace=None):
    _, unknown = self.parse_known_args(args, namespace)
    assert not unknown, f"{self.prog} does not know {unknown}"
    raise Parsed


def parse(line: str) -> None:
    """Parse a command of ours; others pass. Configuration files that the page does not have are taken to be empty."""
    program, *arguments = shlex.split(line)
    if program == "maple":
        with contextlib.suppress(Parsed):
            own = {name: path if (path := Path(sys.path[0]) / name).is_file() else os.devnull for name in arguments}
            code = run(*(own[argument] if argument.endswith(".toml") else argument for argument in arguments))
            assert code == 0, f"exit code {code}: {line}"
    elif program == "python" and arguments[0].startswith("benchmarks/"):
        script = ROOT / arguments[0]
        with pytest.MonkeyPatch.context() as patch, forgetting_modules(script.parent), pytest.raises(Parsed):
            patch.setattr(sys, "argv", [str(script), *arguments[1:]])
            patch.syspath_prepend(str(script.parent))
            runpy.run_path(str(script), run_name="__main__")


@pytest.mark.parametrize("script", ["probability", "posthoc"])
def test_scripts_that_were_parsed_leave_no_stopped_functions_behind(no_work, script, monkeypatch):
    """Which modules that they share would keep, for all later tests of the same process."""
    for name in ("pretrained", "baselines", "public", "resnet20", "split_study"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    parse(f"python benchmarks/{script}.py --shared ../shared --json rows.json")
    kept = [name for name, each in sys.modules.items() if "benchmarks" in str(getattr(each, "__file__", None))]
    assert not {"pretrained", "baselines", "public", "resnet20", "split_study"} & {*kept}


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), *ELSEWHERE])
def test_commands_are_understood(page, no_work, tmp_path, monkeypatch):
    """The modules that a page defines are there for its ``--plugin``."""
    monkeypatch.syspath_prepend(tmp_path)
    for block in blocks(ROOT / page):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    shell = ("sh", "") if page in ELSEWHERE else ("sh",)
    with forgetting_plugins():
        for line in (line for block in blocks(ROOT / page) if block.word in shell for line in shell_lines(block.text)):
            if line.startswith(("maple ", "python ")):
                parse(line)


@pytest.mark.parametrize(
    "line",
    [
        "maple trian digits",
        "maple train digits --epohcs 3",
        "maple train digits --epochs many",
        "maple train digits --recipe nosuch",
        "maple train digits --preset nosuch",
        "maple predict run",
        "maple predict run images --false-alarm 2",
        "maple evaluate run --detector nosuch",
        "maple tune digits --parameters nosuch",
        "maple benchmark nosuch",
        "maple data nosuch",
    ],
)
def test_wrong_commands_are_not(line, no_work):
    with pytest.raises((MapleError, AssertionError)):
        parse(line)


def test_wrong_arguments_of_scripts_are_not_understood(no_work):
    with pytest.raises((SystemExit, AssertionError)):
        parse("python benchmarks/figures.py --out docs/images --sede 1")


@pytest.mark.parametrize("page", PAGES)
def test_configurations_are_valid(page):
    for block in blocks(DOCS / page):
        if block.word == "toml" and not block.title:  # those with a name are used by the commands of the page
            resolve_config(file=tomllib.loads(block.text))


def all_options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("page", [*(f"docs/{page}" for page in PAGES), *ELSEWHERE])
def test_names_in_the_text_exist(page, no_work):
    """Commands, scripts and options between backticks: they may lack arguments, but not exist."""
    ours = set().union(*map(all_options, COMMANDS.values()), all_options(GROUP))
    scripts = "".join(script.read_text(encoding="utf-8") for script in ROOT.glob("benchmarks/*.py"))
    for code in inline_code(ROOT / page):
        if match := re.match(r"maple ([a-z]+)\b(.*)", code):
            assert match[1] in COMMANDS, code
            assert set(re.findall(r"(?<=\s)--[a-z-]+", match[2])) <= all_options(COMMANDS[match[1]]), code
        elif code.startswith("python benchmarks/"):
            parse(code)
        elif match := re.match(r"(benchmarks/\S+\.py)(.*)", code):
            script = (ROOT / match[1]).read_text(encoding="utf-8")
            assert all(f'"{option}"' in script for option in re.findall(r"(?<=\s)--[a-z-]+", match[2])), code
        elif match := re.match(r"--[a-z][a-z-]*", code):
            assert match[0] in ours or f'"{match[0]}"' in scripts, code


# --- the site --------------------------------------------------------------------------------------------------------


def load_extension(name: str) -> ModuleType:
    """One of the modules that mkdocs is given, which are in no package."""
    for package in ("mkdocs", "latex2mathml"):
        pytest.importorskip(package)
    spec = spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def places() -> set[str]:
    """Where public names are described."""
    made_of = load_extension("hooks").MADE_OF
    return {f"{maple._EXPORTS[name]}.{made_of.get(name, name)}" for name in maple.__all__}


def test_every_public_name_is_described():
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "reference").glob("*.md"))
    described = set(re.findall(r"^::: (\S+)", text, flags=re.MULTILINE))
    assert places() <= described


def test_pictures_of_the_explanation_can_be_made(tmp_path):
    import matplotlib
    import numpy as np

    script = runpy.run_path(str(ROOT / "benchmarks" / "figures.py"))
    text = (DOCS / "explanation.md").read_text(encoding="utf-8")
    for name, draw in script["PICTURES"].items():
        assert f"images/{name}.svg" in text and (DOCS / "images" / f"{name}.svg").exists()
        with matplotlib.rc_context(script["STYLE"]):
            draw(np.random.default_rng(0)).savefig(tmp_path / f"{name}.svg")
        assert "nan" not in (tmp_path / f"{name}.svg").read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("name", ["hooks", "docstrings"])
def test_examples_of_the_extensions(name):
    failures, tried = doctest.testmod(load_extension(name), optionflags=DOCTEST)
    assert tried > 0 and failures == 0


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as ``make docs`` builds it: strictly, so that a broken link or anchor is an error."""
    pytest.importorskip("mkdocs")
    for plugin in ("material", "mkdocstrings", "latex2mathml"):
        pytest.importorskip(plugin)
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    return folder


@pytest.mark.slow
def test_the_site_builds(site):
    """And loads nothing from elsewhere, has its formulas as MathML, and describes every command and public name."""
    pages = {str(page.relative_to(site)): page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    for name, text in pages.items():
        loaded = re.findall(r'<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"', text)
        assert loaded == [], name
        assert "arithmatex" not in text, name
    assert pages["explanation.html"].count("<math ") > 10
    for name in COMMANDS:
        assert f'id="{name}"' in pages["reference/cli.html"]
    described = "".join(text for name, text in pages.items() if name.startswith("reference/"))
    for place in places():
        assert f'id="{place}"' in described


CUT = """() => [document.documentElement, ...document.querySelectorAll('pre code')]
  .filter(box => box.scrollWidth > box.clientWidth + 1).map(box => box.innerText.slice(0, 80))"""
BROKEN = """() => [...document.querySelectorAll('code .option')]
  .filter(option => option.getClientRects().length > 1).map(option => option.innerText)"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [420, 1400])
def test_no_command_is_cut(width, site):
    """Long lines of code are wrapped, but not within an option."""
    with open_browser() as browser:
        page = browser.new_page(viewport={"width": width, "height": 900})
        for name in ("index", "decisions", "howto/evaluate", "howto/pretrained", "tutorials/biologist"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate(CUT) == [], name
            assert page.evaluate(BROKEN) == [], name
        assert page.locator("pre .option").count() > 0


def test_the_table_of_extras_is_complete():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (DOCS / "index.md").read_text(encoding="utf-8").partition("| extra |")[2].partition("\n\n")[0]
    rows = [row.split(" | ") for row in table.splitlines()[2:]]
    assert {name for first, *_ in rows for name in re.findall(r"`(\w+)`", first)} == set(extras)
    for *_, line in rows:
        (named,) = re.findall(r"`pip install -c constraints\.txt (?:-e )?'\.\[([\w,]+)\]'`", line)
        assert set(named.split(",")) <= set(extras)
