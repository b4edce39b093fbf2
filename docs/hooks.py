"""What mkdocs does for this site beyond its own: formulas, generated tables, and links that leave ``docs/``.

- ``$...$`` and ``$$...$$`` become MathML, which browsers draw by themselves: no script, no download.
- ``<!-- commands -->``, ``<!-- options -->`` and ``<!-- names -->`` in a page are replaced by what the command line,
  the configuration and the package say of themselves.
- Pages may link to any file of the repository, as they do for readers of the repository itself. Files outside ``docs/``
  are copied into the site, at their own path.
"""

from __future__ import annotations

import html
import inspect
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
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
MADE_OF = {"MapleCallback": "MapleHooks"}  # public names that are made when asked for, and the class they are made of
NAV_ONLY = ("results/README.md", "CHANGELOG.md")  # pages outside docs/ that the navigation names


# ------------------------------------------------------------------------------------------------------------ files


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add whatever pages link to outside ``docs/``."""
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
    """Where a link leads; ``None`` out of the repository, as to another site."""
    if re.match("[a-z]+:", target):
        return None
    full = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return None if full.startswith("..") else full


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where things are in the site; fill in tables."""
    here = page.file.src_uri
    in_docs = Path(page.file.abs_src_path).is_relative_to(ROOT / DOCS)
    source = DOCS + here if in_docs else here

    def lead(match: re.Match) -> str:
        full = _repository_path(source, match[2])
        if full is None:
            return match[0]
        return match[1] + posixpath.relpath(full.removeprefix(DOCS), posixpath.dirname(here) or ".")

    markdown = LINK.sub(lead, markdown)
    for name, table in TABLES.items():
        marker = f"<!-- {name} -->"
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


# --------------------------------------------------------------------------------------------------------- formulas


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML."""
    return FORMULA.sub(lambda match: to_mathml(html.unescape(match[2]), match[1] == "div"), content)


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

    from maple.cli.app import app

    parsed = get_command(app).commands  # type: ignore[attr-defined]
    functions = {info.name or info.callback.__name__: info.callback for info in app.registered_commands}
    return "\n\n".join(_command(name, parsed[name], get_type_hints(functions[name])) for name in sorted(functions))


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
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _flags(option: Any, kind: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag else f"{names} {_cell(option.metavar or _word(kind))}"


def _word(kind: Any) -> str:
    """What stands for a value of this type.

    >>> _word(Path | None), _word(float), _word(list[str] | None)
    ('PATH', 'NUMBER', 'TEXT')
    """
    kinds = {kind, *get_args(kind)}
    return "PATH" if Path in kinds else "NUMBER" if kinds & {int, float} else "TEXT"


def _help(parameter: Any) -> str:
    """What the help says, without its markup; with the default, unless that is in the text."""
    text = re.sub(r"\\(?=\[)|\[/?(?:dim)?\]", "", parameter.help or "")
    if parameter.param_type_name == "option":
        if parameter.required:
            text += " [required]"
        elif parameter.show_default and "[default" not in text and parameter.default not in (None, False):
            text += f" [default: {'yes' if parameter.default is True else parameter.default}]"
    return _cell(text)


def options() -> str:
    """All sections of ``config.toml``, from the configuration itself, and the options of every recipe."""
    from maple.runs.config import SECTIONS
    from maple.training.recipe import find_recipe, list_recipes

    parts = [_section(name, group.__doc__ or "", fields(group)) for name, group in SECTIONS.items()]
    kinds = dict.fromkeys(find_recipe(name).kind for name in list_recipes())
    parts += [_section(kind.section, kind.__doc__ or "", fields(kind)) for kind in kinds]
    return "\n\n".join(parts)


def _section(name: str, doc: str, found: Iterable[Any]) -> str:
    shown = [f for f in found if f.metadata.get("flag", True)]
    rows = [(f"`{f.name}`", _default(f.default), _cell(f.metadata.get("help", ""))) for f in shown]
    heading = f"## `[{name}]` {{ #{name.replace('_', '-')} }}"
    summary = inspect.cleandoc(doc).partition("\n\n")[0]
    return "\n\n".join([heading, summary, _table(("key", "default", "meaning"), rows)])


def _default(value: Any) -> str:
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
        found = getattr(import_module(maple._EXPORTS[name]), described)
        summary = inspect.cleandoc(found.__doc__ or "").partition("\n\n")[0].replace("``", "`")
        summary = re.sub(r":[a-z]+:(?=`)", "", summary)  # roles
        rows.append((f"[`maple.{name}`][{found.__module__}.{described}]", _cell(summary)))
    return _table(("name", ""), rows)


def _cell(text: str) -> str:
    """Text that may stand in a cell of a table: no bars, no tags, in one line."""
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "&#124;").replace("*", "&#42;")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[], str]] = {"commands": commands, "options": options, "names": names}
