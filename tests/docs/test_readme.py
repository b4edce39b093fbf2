"""The README's Python runs as it stands, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

from maple.cli.app import COMMANDS

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def test_python_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)  # noqa: S102 (our own file)
    prediction = names["prediction"]
    assert (prediction.class_id == names["splits"].test.labels).mean() > 0.7


def test_commands_exist():
    known = set(COMMANDS)
    used = set(re.findall(r"^maple (\w+)", README, flags=re.MULTILINE))
    assert used <= known
    assert {"train", "predict", "report", "evaluate"} <= used
