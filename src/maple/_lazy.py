"""Names of a package that are imported on first use (Scientific Python, SPEC 1).

The stub ``__init__.pyi`` beside the package lists them once, for type checkers and for the interpreter. This module
imports nothing itself: ``import maple`` is to cost as little as it can.
"""

from __future__ import annotations

TYPE_CHECKING = False  # that of typing, without importing it
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], dict[str, str]]:
    """The ``__getattr__`` of a package, and the module of each name in its stub: ``from MODULE import NAME as NAME``.

    >>> import maple
    >>> attach_stub("maple", maple.__file__)[1]["Moments"]
    'maple.stats.moments'
    """
    modules: dict[str, str] = {}
    with open(f"{file}i", encoding="utf-8") as stub:  # noqa: PTH123
        statements = stub.read().replace("(", "").replace(")", "").split("from ")[1:]
    for statement in statements:
        module, names = statement.split(" import ")
        modules |= {name.split(" as ")[0].strip(): module for name in names.split(",") if name.strip()}

    def import_name(name: str) -> Any:
        from importlib import import_module

        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return import_name, modules
