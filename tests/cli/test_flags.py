"""Flags: made from requests and options, and read into them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.main import get_command_from_info
from typer.models import CommandInfo

from commands import flat, run
from maple.cli import _flags as cli
from maple.cli.app import COMMANDS
from maple.errors import UsageError
from maple.options import flag, read_names
from maple.runs.flag_values import AsJson, Run, Workers


def test_settings_are_described_for_the_command():
    said = {
        name: inspect.signature(each.with_flags()).parameters["settings"].annotation.__metadata__[0].help
        for name, each in COMMANDS.items()
        if each.settings
    }
    assert "knn.k" in said["evaluate"] and "sngp" not in said["evaluate"] + said["fit"]
    assert "sngp.features" in said["train"]


def kind_of(parameter: inspect.Parameter) -> Any:
    return parameter.annotation.__origin__


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_are_documented_and_distinct(name):
    signature = inspect.signature(COMMANDS[name].with_flags())
    infos = [parameter.annotation.__metadata__[0] for parameter in signature.parameters.values()]
    assert all(info.help and not info.help.startswith("None") for info in infos)
    for each, info in zip(signature.parameters.values(), infos):
        takes = {kind_of(each), *get_args(kind_of(each))}
        assert info.metavar == cli.SWITCH or bool not in takes, each.name
        assert info.metavar == "NUMBER" or not {int, float} & takes, each.name
        lists = any(name in info.help for name in ("such as 0,1,2", "such as rmd,energy", "such as max_clusters,"))
        assert not lists or info.metavar.endswith(",..."), each.name
    assert "plugins" in signature.parameters  # in every command
    assert ("settings" in signature.parameters) == COMMANDS[name].settings


@dataclass(frozen=True)
class Asked:
    """A request of ours."""

    run: Run
    loud: bool = flag(False, "say more")
    colour: bool = flag(True, "use colours", shown="on a terminal")
    n_images: int = flag(3, lambda: "a costly text", "--images", min=1)
    names: tuple[str, ...] = flag((), "names", takes=str, read=lambda text: tuple(read_names(text or "")))
    workers: Workers = 2
    flags: dict[str, Any] = field(default_factory=dict)
    report: bool = True
    command: str = ""


def test_a_request_becomes_flags(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr("sys.argv", ["maple", "mine", "r"])

    @cli.command("decision", settings=True, rare=True, default="the run's")
    def mine(request: Asked, as_json: AsJson = False) -> None:
        """A command."""
        seen.extend([request, as_json])

    function = mine.with_flags()
    parameters = get_command_from_info(
        CommandInfo("mine", callback=function), pretty_exceptions_short=False, rich_markup_mode="rich"
    ).params
    shown = {each.name: each for each in parameters}
    assert shown["run"].required and shown["run"].metavar == "RUN"
    assert shown["loud"].opts == ["--loud"] and not shown["loud"].secondary_opts
    assert shown["colour"].opts == ["--colour"] and shown["colour"].secondary_opts == ["--no-colour"]
    assert shown["n_images"].opts == ["--images"] and shown["n_images"].help == "a costly text"
    assert shown["as_json"].opts == ["--json"] and "report" not in shown and "command" not in shown
    assert "on a terminal" in shown["colour"].help and "the run's" in shown["false_alarm"].help
    values = dict.fromkeys(shown) | {"run": Path("r"), "loud": True, "colour": False, "n_images": 5, "workers": 0}
    function(**values | {"names": "a, b", "false_alarm": "0.1", "settings": ["knn.k=3"], "as_json": True})
    flags = {"false_alarm": "0.1", "knn.k": "3"}
    assert seen == [Asked(Path("r"), True, False, 5, ("a", "b"), 0, flags, command="maple mine r"), True]


@pytest.mark.parametrize("pairs", [["k=3"], [".k=3"], ["knn.=3"], ["knn.k"], ["knn.k=3", "knn.k=4"]])
def test_settings_that_name_no_option_or_one_twice(pairs):
    with pytest.raises(UsageError) as caught:
        cli.read_settings(pairs)
    assert "--set" in str(caught.value)
    assert cli.read_settings(["knn.k=3", " knn.k = 3"]) == {"knn.k": "3"}


def test_a_default_that_follows_other_options_is_said_in_words():
    signature = inspect.signature(COMMANDS["train"].with_flags())
    said = {name: parameter.annotation.__metadata__[0].help for name, parameter in signature.parameters.items()}
    assert "default: muon for airbench, sgd for other networks" in said["optimizer"]
    assert "default: 0.1 with sgd, 0.001 with adam, 0.24 with muon" in said["learning_rate"]


def test_secrets_are_not_kept(monkeypatch):
    words = [
        "maple",
        "tune",
        "a b",
        "--storage",
        "postgresql://me:s3@cret@host/db",
        "--api-key=s3cret",
        "--api-key",
        "s3",
    ]
    monkeypatch.setattr("sys.argv", words)
    kept = cli.command_line()
    assert "s3" not in kept and "postgresql://me:***@host/db" in kept and kept.count("***") == 3
    assert cli.hide_secrets(["http://host:80/a@b", "a@b:c"]) == ["http://host:80/a@b", "a@b:c"]


@pytest.mark.parametrize(
    "command", ["evaluate runs/r --detector rmd --detector knn", "train r --leave-out a --leave-out b"]
)
def test_an_option_that_takes_a_list_is_given_once(command, capsys):
    """Of two lists only the last one would count."""
    assert run(*command.split()) == 2
    said = flat(capsys.readouterr().err)
    assert f"{command.split()[-2]} is given twice" in said and "commas" in said
