"""Hooks of mkdocs for this site: formulas, generated tables, and links to files outside ``docs/``.

- ``$...$`` and ``$$...$$`` become MathML, which browsers render without a script.
- ``<!-- commands -->``, ``<!-- options -->``, ``<!-- names -->`` and ``<!-- torture -->`` in a page are replaced by
  tables of the command line, the options, the public names and the tally of ``make torture``.
- Options such as ``--time-limit`` stay on one line.
- Pages may link to any file of the repository. Linked files outside ``docs/`` are copied into the site at their path.
"""

from __future__ import annotations

import html
import inspect
import json
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = "docs/"
LINK = re.compile(r"(\]\()([^)#\s]+)")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', flags=re.DOTALL)
CODE = re.compile(r"<code\b[^>]*>.*?</code>", flags=re.DOTALL)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)(?![^<>]*>)")  # in the text, not within a tag
MADE_OF = {"MapleCallback": "MapleHooks"}  # public names created on first use, and the class behind them
NAV_ONLY = ("results/README.md", "CHANGELOG.md")  # pages outside docs/ in the navigation


# ------------------------------------------------------------------------------------------------------------ files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside ``docs/`` that pages link to."""
    waiting = [*NAV_ONLY, *(target for file in files.documentation_pages() for target in _outside(DOCS + file.src_uri))]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(path) is None and (ROOT / path).is_file():
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
            if path.endswith(".md"):
                waiting += _outside(path)
    return files


def _outside(path: str) -> Iterator[str]:
    """The files outside ``docs/`` that a page links to; all paths are relative to the repository."""
    for _, target in LINK.findall((ROOT / path).read_text(encoding="utf-8")):
        full = _repository_path(path, target)
        if full is not None and not full.startswith(DOCS):
            yield full


def _repository_path(page: str, target: str) -> str | None:
    """The target of a link in the repository; ``None`` for a target outside it."""
    if re.match("[a-z]+:", target):
        return None
    full = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return None if full.startswith("..") else full


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site and insert the generated tables."""
    here = page.file.src_uri
    in_docs = Path(page.file.abs_src_path).is_relative_to(ROOT / DOCS)
    source = DOCS + here if in_docs else here

    def rewrite(match: re.Match) -> str:
        full = _repository_path(source, match[2])
        if full is None:
            return match[0]
        return match[1] + posixpath.relpath(full.removeprefix(DOCS), posixpath.dirname(here) or ".")

    markdown = LINK.sub(rewrite, markdown)
    for name, table in TABLES.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


# --------------------------------------------------------------------------------------------------------- formulas


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML, and options that stay on one line."""
    content = FORMULA.sub(lambda match: to_mathml(html.unescape(match[2]), match[1] == "div"), content)
    return CODE.sub(lambda match: keep_options(match[0]), content)


def keep_options(code: str) -> str:
    """Options are not broken at their hyphens where a line of code is wrapped.

    >>> keep_options("<code>maple train slides --time-limit 20m</code>")
    '<code>maple train slides <span class="option">--time-limit</span> 20m</code>'
    """
    return OPTION.sub(r'<span class="option">\1</span>', code)


def to_mathml(formula: str, block: bool) -> str:
    r"""A formula in LaTeX as MathML.

    >>> to_mathml(r"x^2", block=False)
    '<math ... display="inline"><mrow><msup><mi>x</mi><mn>2</mn></msup></mrow></math>'
    """
    return convert(formula.strip(), display="block" if block else "inline")


# ----------------------------------------------------------------------------------------------------------- tables


def commands() -> str:
    """All commands with their arguments and options, from the command line itself."""
    from typer.main import get_command

    from maple.cli.app import COMMANDS, app

    group: Any = get_command(app)
    return "\n\n".join(
        _command(name, group.get_command(None, name), get_type_hints(COMMANDS[name].with_flags()))
        for name in sorted(COMMANDS)
    )


def _command(name: str, command: Any, types: dict[str, Any]) -> str:
    arguments = [_placeholder(p) for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([f"maple {name}", *arguments, "[OPTIONS]"])
    panels: dict[str, list[tuple[str, ...]]] = {}
    for parameter in command.params:
        if getattr(parameter, "hidden", False):
            continue
        is_argument = parameter.param_type_name == "argument"
        panel = "Arguments" if is_argument else parameter.rich_help_panel or "Options"
        spelling = f"`{_placeholder(parameter)}`" if is_argument else _flags(parameter, types[parameter.name])
        panels.setdefault(panel, []).append((spelling, _help(parameter)))
    tables = [_table((panel, ""), rows) for panel, rows in panels.items()]
    return "\n\n".join([f"## {name} {{ #{name} }}", inspect.cleandoc(command.help), f"```text\n{usage}\n```", *tables])


def _placeholder(argument: Any) -> str:
    name = argument.metavar + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _flags(option: Any, kind: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {_cell(option.metavar or _word(kind))}"


def _word(kind: Any) -> str:
    """The placeholder for a value of this type.

    >>> _word(Path | None), _word(float), _word(list[str] | None)
    ('PATH', 'NUMBER', 'TEXT')
    """
    kinds = {kind, *get_args(kind)}
    return "PATH" if Path in kinds else "NUMBER" if kinds & {int, float} else "TEXT"


def _help(parameter: Any) -> str:
    """The help text without markup, with the default unless the text has it."""
    text = re.sub(r"\\(?=\[)|\[/?(?:dim)?\]", "", parameter.help or "")
    if parameter.param_type_name == "option":
        if parameter.required:
            text += " [required]"
        elif parameter.show_default and "[default" not in text and parameter.default not in (None, False):
            text += f" [default: {'yes' if parameter.default is True else parameter.default}]"
    return _cell(text)


def options() -> str:
    """All sections of ``config.toml``, from the configuration itself, and the options of every recipe."""
    from maple.runs.setup.config import SECTIONS
    from maple.training.recipe import find_recipe, list_recipes

    parts = [_section(name, group) for name, group in SECTIONS.items()]
    kinds = dict.fromkeys(find_recipe(name).kind for name in list_recipes())
    parts += [_section(kind.section, kind) for kind in kinds]
    return "\n\n".join(parts)


def _section(name: str, group: type) -> str:
    hints = get_type_hints(group, include_extras=True)
    shown = (each for each in fields(group) if each.metadata.get("flag", True))
    rows = [
        (f"`{each.name}`", _values(hints[each.name]), _default(each), _cell(each.metadata.get("help", "")))
        for each in shown
    ]
    heading = f"## `[{name}]` {{ #{name.replace('_', '-')} }}"
    return "\n\n".join([heading, _summary(group), _table(("key", "values", "default", "meaning"), rows)])


def _values(annotation: Any) -> str:
    """The values that an option takes, with spaces where a narrow column may break them."""
    from maple.cli._flags import value_text

    text = "true|false" if annotation is bool else value_text(annotation)
    return _cell(text.replace("|", " | "))


def _default(option: Field[Any]) -> str:
    if shown := option.metadata.get("shown"):
        return _cell(shown)
    value = option.default
    if value is None or value == ():
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


def names() -> str:
    """All public names with the first sentence about each, linked to the pages that describe them."""
    import maple

    rows = []
    for name in maple.__all__:
        described = MADE_OF.get(name, name)
        found = getattr(maple, name) if described == name else getattr(import_module(maple._EXPORTS[name]), described)
        place = found.__name__ if inspect.ismodule(found) else f"{found.__module__}.{described}"
        rows.append((f"[`maple.{name}`][{place}]", _cell(_summary(found))))
    return _table(("name", "summary"), rows)


def _summary(described: Any) -> str:
    """The first paragraph of a docstring, without roles."""
    first = inspect.cleandoc(described.__doc__ or "").partition("\n\n")[0].replace("``", "`")
    return re.sub(r":[a-z]+:(?=`)", "", first)


def _cell(text: str) -> str:
    """Text for a cell of a table: no bars, no tags, in one line."""
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "&#124;").replace("*", "&#42;")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def torture() -> str:
    """What ``make torture`` has tried so far, from its tally."""
    tally = json.loads((ROOT / "results" / "torture.json").read_text(encoding="utf-8"))
    tallied = [(kind, {name: n for name, n in counts.items() if n}) for kind, counts in sorted(tally["counts"].items())]
    rows = [
        # "load" counts seconds, requests and processes: no sum
        (
            kind,
            "" if kind == "load" else f"{sum(counts.values()):,}",
            "; ".join(f"{name} {n:,}" for name, n in sorted(counts.items())),
        )
        for kind, counts in tallied
    ]
    return _table(("what", "number", "of which"), rows)


TABLES: dict[str, Callable[[], str]] = {"commands": commands, "options": options, "names": names, "torture": torture}
