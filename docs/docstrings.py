"""Convert docstrings to Markdown for mkdocstrings.

Docstrings are plain text with a few elements of reStructuredText. A Griffe extension converts these to Markdown while
it reads the package, which is not imported (no torch needed):

- roles such as ``:func:`x` `` become code,
- ``.. math::`` becomes a formula,
- doctest examples, blocks after ``::`` and tables of ``====`` become code blocks.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([^`]+)`")
MATH = re.compile(r"^( *)\.\. math::(.*(?:\n(?: *\S.*))*)", flags=re.MULTILINE)
LITERAL = re.compile(r"::\n\n((?:(?: +\S.*)?\n)+)")
TABLE = re.compile(r"^=+ +=[= ]*\n(?:.+\n)+?=+ +=[= ]*$", flags=re.MULTILINE)
EXAMPLE = re.compile(r"^( *)>>> .*(?:\n\1 *\S.*)*", flags=re.MULTILINE)


def to_markdown(text: str) -> str:
    r"""A docstring as Markdown.

    >>> to_markdown("See :func:`~maple.embed`.\n\n>>> 1 + 1  # doctest: +SKIP\n2")
    'See `maple.embed`.\n\n```pycon\n>>> 1 + 1\n2\n```'
    >>> to_markdown(">>> np.eye(2)\narray([[1., 0.],\n       [0., 1.]])")
    '```pycon\n>>> np.eye(2)\narray([[1., 0.],\n       [0., 1.]])\n```'
    >>> print(to_markdown("So\n\n.. math:: a = b,\n          c\n\nand"))
    So
    <BLANKLINE>
    $$
    a = b,
    c
    $$
    <BLANKLINE>
    and
    """
    text = ROLE.sub(r"`\1`", text)
    text = MATH.sub(_formula, text)
    text = TABLE.sub(lambda match: f"```text\n{match[0]}\n```", text)
    text = EXAMPLE.sub(_example, text)
    return LITERAL.sub(_literal, text + "\n").rstrip("\n")


def _formula(match: re.Match) -> str:
    lines = [line.strip() for line in match[2].strip().splitlines()]
    return textwrap.indent("\n".join(["$$", *lines, "$$"]), match[1])


def _literal(match: re.Match) -> str:
    code = textwrap.dedent(match[1]).strip("\n")
    return f":\n\n```python\n{code}\n```\n\n"


def _example(match: re.Match) -> str:
    code = re.sub(r"  # doctest: .*", "", textwrap.dedent(match[0]))
    return textwrap.indent(f"```pycon\n{code}\n```", match[1])


class MarkdownDocstrings(Extension):
    """Rewrites every docstring."""

    def on_instance(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
