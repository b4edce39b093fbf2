"""The tally of ``make torture`` only grows, and its time is shared out."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import torture
from torture import Torture, changing, read, share

ONE_TEST = """
import pytest

@pytest.mark.torture
@pytest.mark.parametrize("right", [True, False])
def test(torture, right):
    while torture.goes_on():
        assert right
        torture.count("tries", "mine")
"""


def test_many_add_to_one_tally(tmp_path: Path) -> None:
    tally = tmp_path / "tally.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: Torture(1, 0, tally).count("kills", f"command {i % 2}"), range(40)))
    assert read(tally)["counts"] == {"kills": {"command 0": 20, "command 1": 20}}
    assert [path.name for path in tmp_path.iterdir()] == [tally.name]


def test_a_failure_leaves_the_tally_as_it_was(tmp_path: Path) -> None:
    tally = tmp_path / "tally.json"
    Torture(1, 0, tally).count("kills", "train")
    with pytest.raises(ZeroDivisionError), changing(tally) as content:
        content["counts"].clear()
        1 / 0  # noqa: B018
    assert read(tally)["counts"] == {"kills": {"train": 1}}


def test_time_that_is_left_is_shared_and_names_have_seeds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAPLE_TORTURE_SECONDS", "100")
    monkeypatch.setenv("MAPLE_TORTURE_SEED", "7")
    monkeypatch.delenv("MAPLE_TORTURE_TALLY", raising=False)
    first, second = share("a", 0, 4, 0.0), share("b", 1, 4, 10.0)
    assert (first.seconds, second.seconds, first.tally) == (25.0, 30.0, None)
    assert first.seed != second.seed and share("a", 0, 4, 0.0).seed == first.seed
    assert share("a", 3, 4, 1000.0).seconds == 1.0


def test_a_part_counts_and_names_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "mine").mkdir(parents=True)
    (tmp_path / "tests" / "mine" / "test_mine.py").write_text(ONE_TEST)
    (tmp_path / "tests" / "conftest.py").write_bytes((Path(__file__).parent / "conftest.py").read_bytes())
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.pytest.ini_options]\npythonpath = ["{Path(__file__).parent}"]\nmarkers = ["torture"]\n'
    )
    monkeypatch.setattr(torture, "ROOT", tmp_path)
    monkeypatch.setitem(torture.PARTS, "faults", (1.0, "tests/mine"))
    failed = torture.run_part("faults", 1, 0, tmp_path / "tally.json")
    assert len(failed) == 1 and "False" in failed[0]
    assert read(tmp_path / "tally.json")["counts"]["tries"]["mine"] > 1
    assert torture.run_part("load", 1, 0, tmp_path / "tally.json") == []  # which has no tests here


def test_each_target_of_make_has_a_rule() -> None:
    """Without one, make says that nothing is to be done, and succeeds."""
    text = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    named = [name for line in text.splitlines() if line.startswith(".PHONY:") for name in line.split()[1:]]
    assert "torture" in named
    assert [name for name in named if not re.search(rf"^{re.escape(name)}:", text, flags=re.MULTILINE)] == []
