"""Functions that return a module: ``python:package.module:function``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from torch import nn

from maple.errors import UsageError
from maple.networks.origin import Origin


def make(origin: Origin) -> nn.Module:
    """Import the module and call its function."""
    spec = origin.spec
    name, _, function = spec.removeprefix("python:").partition(":")
    if not name or not function:
        raise UsageError(f"'{spec}' has no function: write python:package.module:function")
    with _current_folder_importable():
        try:
            make = getattr(import_module(name), function)
        except ImportError as error:
            raise UsageError(
                f"'{spec}' cannot be imported ({error}): run the command in the folder of the module, or install it"
            ) from None
        except AttributeError:
            raise UsageError(f"the module '{name}' has no function '{function}': check '{spec}'") from None
        try:
            module = make()
        except Exception as error:  # the function may raise anything
            raise UsageError(f"'{spec}' failed ({type(error).__name__}: {error}): call it in Python first") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"'{spec}' returned {type(module).__name__}: let it return a torch.nn.Module")
    return module


@contextmanager
def _current_folder_importable() -> Iterator[None]:
    """Inside the block, modules in the current folder can be imported; installed ones take precedence."""
    folder = str(Path.cwd())
    sys.path.append(folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
