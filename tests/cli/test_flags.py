"""Flags: made from records and options, read into values, and handed to requests."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command_from_info
from typer.models import CommandInfo

from maple.cli import _flags as cli
from maple.cli.app import COMMANDS
from maple.errors import ConfigError, UsageError

REQUESTS = {
    "train": "maple.runs.train:TrainRequest",
    "fit": "maple.runs.fit:FitRequest",
    "tune": "maple.runs.tune.plan:TuneRequest",
    "predict": "maple.runs.predict:PredictRequest",
    "explain": "maple.runs.explain:ExplainRequest",
    "monitor": "maple.runs.monitor:MonitorRequest",
    "evaluate": "maple.runs.evaluate:EvaluateRequest",
    "update": "maple.runs.update:UpdateRequest",
    "export": "maple.deploy.export:ExportRequest",
}
HERE = {"as_json", "dry_run", "config", "detector", "workers"}  # which the commands themselves read


@pytest.mark.parametrize("name", REQUESTS)
def test_every_argument_reaches_the_request(name):
    """A field that the request does not know would be dropped without a word."""
    module, kind = REQUESTS[name].split(":")
    known = {each.name for each in fields(getattr(import_module(module), kind))}
    arguments = {each.name for each in fields(get_type_hints(COMMANDS[name].function)["given"])}
    assert arguments - known <= HERE


def test_every_command_that_makes_a_request_is_checked():
    made = {name for name, each in COMMANDS.items() if "to_request" in each.function.__code__.co_names}
    assert made == REQUESTS.keys()


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
    switches = [each for each in signature.parameters.values() if bool in (kind_of(each), *get_args(kind_of(each)))]
    assert all(each.annotation.__metadata__[0].metavar == cli.SWITCH for each in switches)
    assert ("plugins" in signature.parameters) == COMMANDS[name].plugins
    assert ("settings" in signature.parameters) == COMMANDS[name].settings


@dataclass(frozen=True)
class Arguments:
    """Arguments of a command of ours."""

    run: Path = cli.argument("run folder", "RUN")
    loud: bool = cli.flag(False, "say more")
    colour: bool = cli.flag(True, "use colours", shown="on a terminal")
    n_images: int = cli.flag(3, lambda: "a costly text", "--images", min=1)
    workers: cli.Workers = 2


def test_a_record_becomes_flags():
    seen: list[Any] = []

    @cli.command("decision", settings=True, rare=True, default="the run's")
    def mine(given: Arguments, flags: dict[str, Any]) -> None:
        """A command."""
        seen.extend([given, flags])

    function = mine.with_flags()
    parameters = get_command_from_info(
        CommandInfo("mine", callback=function), pretty_exceptions_short=False, rich_markup_mode="rich"
    ).params
    shown = {each.name: each for each in parameters}
    assert shown["run"].required and shown["run"].metavar == "RUN"
    assert shown["loud"].opts == ["--loud"] and not shown["loud"].secondary_opts
    assert shown["colour"].opts == ["--colour"] and shown["colour"].secondary_opts == ["--no-colour"]
    assert shown["n_images"].opts == ["--images"] and shown["n_images"].help == "a costly text"
    assert "on a terminal" in shown["colour"].help and "the run's" in shown["false_alarm"].help
    values = dict.fromkeys(shown) | {"run": Path("r"), "loud": True, "colour": False, "n_images": 5, "workers": 0}
    function(**values | {"false_alarm": "0.1", "settings": ["knn.k=3"]})
    assert seen == [Arguments(Path("r"), True, False, 5, 0), {"false_alarm": "0.1", "knn.k": "3"}]


def test_a_request_takes_what_it_knows():
    @dataclass(frozen=True)
    class Request:
        run: Path
        n_images: int = 0
        command: str = ""

    given = Arguments(Path("r"), n_images=7)
    assert cli.to_request(given, Request, command="x") == Request(Path("r"), 7, "x")
    assert cli.to_request(given, Request, n_images=1) == Request(Path("r"), 1)


words = st.text(st.characters(categories=("L", "N")), min_size=1)


@given(st.dictionaries(words, words, max_size=4))
def test_pairs_come_back(sources):
    assert cli.named_sources([f"{name}={source}" for name, source in sources.items()]) == sources
    assert cli.read_settings([f"m.{name}={value}" for name, value in sources.items()]) == {
        f"m.{name}": value for name, value in sources.items()
    }


@pytest.mark.parametrize("pair", ["a", "=b", "a=", " =b"])
def test_sources_that_are_no_pair(pair):
    with pytest.raises(UsageError) as caught:
        cli.named_sources([pair])
    assert "--ood" in str(caught.value) and f"'{pair}'" in str(caught.value)


@pytest.mark.parametrize("pairs", [["k=3"], [".k=3"], ["knn.=3"], ["knn.k"], ["knn.k=3", "knn.k=4"]])
def test_settings_that_name_no_option_or_one_twice(pairs):
    with pytest.raises(UsageError) as caught:
        cli.read_settings(pairs)
    assert "--set" in str(caught.value)
    assert cli.read_settings(["knn.k=3", " knn.k = 3"]) == {"knn.k": "3"}


def test_values_to_search():
    assert cli.named_values(["a=1, 2", "b=x"]) == {"a": ["1", "2"], "b": ["x"]}
    assert cli.named_values(None) == {}
    for pairs in (["a=,"], ["a=1", "a=2"]):
        with pytest.raises(UsageError) as caught:
            cli.named_values(pairs)
        assert "--values" in str(caught.value) and "a" in str(caught.value)


@pytest.mark.parametrize("text", ["1,2", "1,2,x", "", "1,2,3,4"])
def test_numbers_of_the_wrong_kind_or_length(text):
    with pytest.raises(UsageError) as caught:
        cli.read_numbers(text, "--mean", float, "three numbers", length=3)
    assert "--mean" in str(caught.value) and f"'{text}'" in str(caught.value)
    assert cli.read_numbers(None, "--mean", float, "three numbers", length=3) is None


def test_a_file_may_not_hide_its_plugins(tmp_path):
    file = tmp_path / "c.toml"
    assert cli.read_config(None) == {}
    for text in ("plugin = 'a'", "plugin = [1]", "plugin = ['a']\n[origin]\n"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            cli.read_config(file)
        assert str(file) in str(caught.value)
