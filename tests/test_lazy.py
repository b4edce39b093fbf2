"""Names of a package that its stub lists."""

from __future__ import annotations

from collections import Counter

import pytest

from maple._lazy import attach_stub


@pytest.fixture
def package(tmp_path):
    (tmp_path / "__init__.pyi").write_text("from collections import Counter as Counter, deque as deque\nversion: str\n")
    return str(tmp_path / "__init__.py")


def test_the_stub_says_where_names_come_from(package):
    assert attach_stub("pets", package)[1] == {"Counter": "collections", "deque": "collections"}


def test_a_name_is_imported_on_first_use(package):
    import_name, _ = attach_stub("pets", package)
    assert import_name("Counter") is Counter


def test_an_unknown_name_is_an_attribute_error_that_names_the_package(package):
    import_name, _ = attach_stub("pets", package)
    with pytest.raises(AttributeError, match=r"'pets'.*'version'"):
        import_name("version")
