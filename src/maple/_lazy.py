"""Names of a package that are imported on first use (Scientific Python, SPEC 1).

The stub ``__init__.pyi`` beside the package lists them once, for type checkers and for the interpreter.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], dict[str, str]]:
    """The ``__getattr__`` of a package, and the module of each name in its stub: ``from MODULE import NAME as NAME``.

    >>> import maple
    >>> attach_stub("maple", maple.__file__)[1]["Moments"]
    'maple.stats.moments'
    """
    statements = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [each for each in statements if isinstance(each, ast.ImportFrom)]
    modules = {alias.name: each.module or "" for each in imports for alias in each.names}

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return import_name, modules
