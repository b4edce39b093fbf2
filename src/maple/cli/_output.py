"""Printing of results, tables and facts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

output = Console()


def print_line(text: str) -> None:
    """Text as it is: no markup, no line breaks added."""
    output.print(text, markup=False, highlight=False, soft_wrap=True)


def print_described(found: Any, as_json: bool) -> None:
    """An object as JSON, by ``to_dict``, or as text, by ``describe``."""
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
    else:
        print_line(found.describe())


def print_results(results: Any, as_json: bool, others: Sequence[Any] = ()) -> None:
    """The results of a run, None in all processes but the first and without test images; or of several runs."""
    if results is None:
        return
    if as_json:
        several = ",\n".join(each.to_json() for each in (results, *others))
        print(f"[{several}]" if others else several)
        return
    from maple.evaluation.table import format_table

    output.print(format_table(results, *others))


def print_facts(facts: dict[str, Any]) -> None:
    """One fact per line, several lines if it is a list; lines are not broken, so that addresses can be copied."""
    width = max(map(len, facts)) + 2
    for name, value in facts.items():
        lines = (
            value if isinstance(value, list) else ["yes" if value is True else "no" if value is False else str(value)]
        )
        for i, line in enumerate(lines):
            print_line((name if i == 0 else "").ljust(width) + line)


def make_grid(rows: Iterable[tuple[str, str]], style: str = "bold") -> Table:
    """Names in this style, each with a text, which may have markup."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style=style)
    table.add_column(overflow="fold")  # a long list of values is shown to its end
    for row in rows:
        table.add_row(*row)
    return table


def print_named(rows: Mapping[str, tuple[str, str]]) -> None:
    """Names, each with a text and a dim second line."""
    from rich.markup import escape

    output.print(
        make_grid((name, f"{escape(text)}\n[dim]{escape(remark)}[/]") for name, (text, remark) in rows.items())
    )


def print_rows(rows: list[dict[str, Any]], as_json: bool) -> None:
    """Rows of the same keys as a table."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.markup import escape

    texts = [{name: "–" if value is None else str(value) for name, value in row.items()} for row in rows]
    blocks = fitting_columns(texts, output.width) if texts else []
    for first, *others in blocks:
        names = [first, *others]
        table = Table(escape(first))  # which takes the width that the others leave
        for name in others:
            table.add_column(escape(name), width=_longest_word(texts, name) if len(blocks) > 1 else None)
        for text in texts:
            table.add_row(*(escape(text[name]) for name in names))
        output.print(table)


def fitting_columns(rows: list[dict[str, str]], width: int) -> list[list[str]]:
    """Columns that fit next to each other without breaking a word; the first is repeated in front of each block.

    >>> fitting_columns([{"method": "energy", "AUROC svhn": "0.946", "AUROC cifar100": "0.858"}], 24)
    [['method', 'AUROC svhn'], ['method', 'AUROC cifar100']]
    """
    border = 3  # a line, and a space at each side
    need = {name: border + _longest_word(rows, name) for name in (rows[0] if rows else ())}
    blocks: list[list[str]] = []
    first, *others = need or [""]
    for name in others:
        if not blocks or 1 + sum(need[each] for each in (*blocks[-1], name)) > width:
            blocks.append([first])
        blocks[-1].append(name)
    return blocks or [[first]]


def _longest_word(rows: list[dict[str, str]], name: str) -> int:
    return max(len(word) for text in (name, *(row[name] for row in rows)) for word in text.split() or [""])
