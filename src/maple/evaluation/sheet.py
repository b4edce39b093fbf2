"""A table of results as text: Markdown, and LaTeX with the rules of booktabs.

A :class:`Sheet` holds cells that are written already; suites and evaluations fill one and choose the format.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_LATEX = {  # characters with a meaning in LaTeX, or without a glyph in its usual fonts
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": "$<$",
    ">": "$>$",
    "±": r"$\pm$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
    "−": "$-$",
    "[": "{[}",  # at the start of a row it would be the length of the row's skip
    "]": "{]}",
}


@dataclass(frozen=True)
class Sheet:
    """Headings and cells; the first column names the rows."""

    title: str
    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = field(default_factory=frozenset)  # row and cell of figures in bold
    subtitle: str = ""
    note: str = ""

    def to_markdown(self) -> str:
        """A title, the table and the note.

        >>> print(Sheet("Digits", ["", "AUROC ↑"], [["maple", "0.97"]], note="One seed.").to_markdown())
        # Digits
        <BLANKLINE>
        |  | AUROC ↑ |
        | --- | ---: |
        | maple | 0.97 |
        <BLANKLINE>
        One seed.
        <BLANKLINE>
        """
        rows = [self.headings, ["---"] + ["---:"] * (len(self.headings) - 1), *self.lines]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in rows)
        parts = [f"# {self.title}", self.subtitle, table if len(self.headings) > 1 else "", self.note]
        return "\n\n".join(part for part in parts if part) + "\n"

    def to_latex(self, label: str = "") -> str:
        r"""A ``table`` with caption, best figures in bold; the preamble needs ``\usepackage{booktabs}``.

        >>> sheet = Sheet("Digits", ["", "AUROC ↑"], [["maple", "0.97 ± 0.01"]], frozenset({(0, 1)}))
        >>> print(sheet.to_latex("tab:digits"))
        \begin{table}
        \centering
        \caption{Digits}
        \label{tab:digits}
        \begin{tabular}{lr}
        \toprule
         & AUROC $\uparrow$ \\
        \midrule
        maple & \textbf{0.97 $\pm$ 0.01} \\
        \bottomrule
        \end{tabular}
        \end{table}
        <BLANKLINE>
        """
        lines = [
            [f"\\textbf{{{to_tex(cell)}}}" if (i, k) in self.best else to_tex(cell) for k, cell in enumerate(line)]
            for i, line in enumerate(self.lines)
        ]
        caption = ". ".join(part.rstrip(".") for part in (self.title, self.subtitle, self.note) if part)
        return "\n".join(
            [
                r"\begin{table}",
                r"\centering",
                f"\\caption{{{to_tex(caption)}}}",
                *([f"\\label{{{label}}}"] if label else []),
                f"\\begin{{tabular}}{{l{'r' * (len(self.headings) - 1)}}}",
                r"\toprule",
                " & ".join(map(to_tex, self.headings)) + r" \\",
                r"\midrule",
                *(" & ".join(line) + r" \\" for line in lines),
                r"\bottomrule",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def to_tex(text: str) -> str:
    r"""Text in LaTeX: special characters escaped, code between backquotes set as such.

    >>> to_tex("plain P_MD, 95 % of `a_b`")
    'plain P\\_MD, 95 \\% of \\texttt{a\\_b}'
    >>> to_tex("[0.1, 0.2]")
    '{[}0.1, 0.2{]}'
    """
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"`([^`]*)`", r"\\texttt{\1}", escaped)
