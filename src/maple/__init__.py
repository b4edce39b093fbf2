"""MAPLE: class, probability, uncertainty and an out-of-distribution decision from one forward pass.

Public names are imported on first use, so that ``import maple`` stays light and needs torch only where torch is used.
"""


def attach_stub(package: str, file: str):  # the stub annotates the result: typing is slow to import
    """The ``__getattr__`` of a package, and the module of each name in its stub: ``from MODULE import NAME as NAME``.

    The stub ``__init__.pyi`` beside the package lists the names once, for type checkers and for the interpreter
    (Scientific Python, SPEC 1); a name without ``as`` is not exported, as in any stub.

    >>> import maple
    >>> attach_stub("maple", maple.__file__)[1]["Moments"]
    'maple.stats.moments'
    """
    modules: dict[str, str] = {}
    with open(f"{file}i", encoding="utf-8") as stub:  # noqa: PTH123
        statements = stub.read().replace("(", "").replace(")", "").split("from ")[1:]
    for statement in statements:
        module, names = statement.split(" import ")
        modules |= {name.split(" as ")[0].strip(): module for name in names.split(",") if " as " in name}

    def import_name(name: str):
        from importlib import import_module

        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module = import_module(modules[name])
        if not hasattr(module, name):  # a module in a package, as in an import statement
            return import_module(f"{modules[name]}.{name}")
        return getattr(module, name)

    return import_name, modules


__version__ = "0.1.0"
__getattr__, _EXPORTS = attach_stub(__name__, __file__)
__all__ = sorted(_EXPORTS)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
