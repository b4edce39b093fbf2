"""Errors carry exit codes, suggest names and name the extra that is missing."""

from __future__ import annotations

import errno
import importlib

import numpy as np
import pytest

from maple import errors
from maple.errors import (
    EXTRAS,
    LONGEST,
    ConfigError,
    DataError,
    MapleError,
    UsageError,
    check_integer,
    describe_failure,
    naming_extras,
    same_class,
    suggest,
)


def test_wrong_use_is_two_and_failure_is_one():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MapleError)]
    assert len(kinds) >= 8
    for kind in kinds:
        assert kind("x").exit_code == (2 if issubclass(kind, UsageError) else 1)
    assert issubclass(ConfigError, UsageError) and issubclass(UsageError, ValueError)


def test_the_nearest_name_is_suggested_else_all():
    assert "'resnet18'" in suggest("resnet81", ["resnet9", "resnet18"])
    assert suggest("zzz", iter(["b", "a"])).endswith("a, b")


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_a_missing_extra_is_named(package):
    with pytest.raises(UsageError) as caught, naming_extras():
        raise ModuleNotFoundError(name=package)
    assert package in str(caught.value) and f"[{EXTRAS[package]}]" in str(caught.value)


def test_other_missing_packages_are_not():
    with pytest.raises(ModuleNotFoundError) as caught, naming_extras():
        importlib.import_module("no_such_package_anywhere")
    assert not isinstance(caught.value, MapleError)


def test_a_class_that_is_loaded_again_is_the_same():
    again = type("UsageError", (), {"__module__": "maple.errors"})
    assert same_class(again, UsageError) and not same_class(again, ConfigError)


@pytest.mark.parametrize("value", [0, 6, 2.0, "3", None, [1]])
def test_numbers_that_are_not_whole_or_out_of_bounds_are_named(value):
    with pytest.raises(UsageError, match="severity"):
        check_integer("severity", value, 1, 5)


def test_whole_numbers_of_any_type_become_plain():
    assert check_integer("n", np.int16(7), 1) == 7 and type(check_integer("n", np.int16(7), 1)) is int


def test_errors_are_one_line_without_control_characters():
    said = str(DataError("no column 'label': found \x1b]0;title\x07\nfile,\r\nb\u202e" + "x" * 10_000))
    assert (
        said.isprintable() and said.startswith("no column 'label': found ?]0;title? file, b?x") and len(said) <= LONGEST
    )
    assert str(DataError("two  spaces stay")) == "two  spaces stay"


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (MemoryError(), "--batch-size"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), "--batch-size"),
        (RuntimeError("std::bad_alloc"), "--workers"),
        (ImportError("a.so: failed to map segment from shared object"), "--batch-size"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "--batch-size"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "--workers"),  # of fork
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), "'runs/a': No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "runs/b"), "'runs/b': Permission denied"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),  # without a file
    ],
)
def test_failures_of_the_machine_say_what_to_do(error, named):
    said = describe_failure(error)
    assert named in said and said.endswith("then try again") and "None" not in said


@pytest.mark.parametrize(
    "error",
    [
        *(ValueError("x"), RuntimeError("shapes differ"), OSError("no number"), KeyError("a"), DataError("x")),
        ImportError("a.so: failed to map segment from shared object: Operation not permitted"),  # on a disk with noexec
    ],
)
def test_faults_of_the_program_are_not_taken_for_failures_of_the_machine(error):
    assert describe_failure(error) is None
