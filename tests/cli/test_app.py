"""All commands: errors are one sentence with the right exit code, and the help is complete."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from PIL import Image

from commands import flat, run
from maple.cli.app import COMMANDS
from maple.detectors.options import ScoreBy
from maple.runs.setup.presets import list_presets

# --- bad input: a sentence that says what to do, the right exit code, no traceback


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["train", "cifar11", "--out", "{tmp}/r"], 2, "cifar11"),
        (["train", "digits", "--out", "{tmp}/r", "--backbone", "resnet90"], 2, "'resnet9'"),
        (["train", "digits", "--out", "{tmp}/r", "--recipe", "mapel"], 2, "'maple'"),
        (["train", "digits", "--out", "{tmp}/r", "--epochs", "0"], 2, "--epochs 0"),
        (["train", "digits", "--out", "{tmp}/r", "--size", "abc"], 2, "--size abc"),
        (
            ["train", "digits", "--out", "{tmp}/r", "--splits", "0.8,0.1,0.1"],
            2,
            "--splits 0.8,0.1,0.1",
        ),
        (["train", "digits", "--out", "{tmp}/r", "--seed", "-10"], 2, "--seed -10"),
        (["demo", "--out", "{tmp}/r", "--seed", "-10"], 2, "--seed -10"),
        (["predict", "{run}", "digits", "--confidence", "1.5"], 2, "--confidence 1.5"),
        (["predict", "{run}", "digits", "--fdr", "2"], 2, "--fdr 2"),
        (["predict", "{run}", "digits", "--fdr", "0.1", "--per-class"], 2, "--per-class"),
        (["predict", "{run}", "digits", "--coverage", "1"], 2, "--coverage 1"),
        (["train", "digits", "--out", "{tmp}/r", "--ood", "x=nowhere"], 2, "'nowhere'"),
        (["train", "digits", "--out", "{tmp}/r", "--augment", "crup"], 2, "'crop'"),
        (["train", "digits", "--out", "{tmp}/r", "--false-alarm", "0"], 2, "--false-alarm 0"),
        (["train", "digits", "--out", "{tmp}/r", "--preset", "papr"], 2, "'paper'"),
        (["train", "{tmp}/empty", "--out", "{tmp}/r"], 1, "empty"),
        (["train", "{tmp}/one", "--out", "{tmp}/r"], 1, "'only'"),
        (["predict", "{tmp}/nothing", "{tmp}/empty"], 1, "nothing"),
        (["evaluate", "{run}", "--ood", "svhn"], 2, "NAME=SOURCE"),
        (["predict", "{run}", "{tmp}/missing.png"], 2, "missing.png"),
        (["predict", "{run}", "digits", "--out", "{tmp}/p.xls"], 2, ".csv"),
        (["predict", "{run}", "digits", "--false-alarm", "2"], 2, "false-alarm"),
    ],
)
def test_errors_are_one_sentence(finished, tmp_path, capsys, arguments, code, named):
    (tmp_path / "empty").mkdir()
    (tmp_path / "one" / "only").mkdir(parents=True)
    for i in range(8):
        Image.new("RGB", (8, 8), (i, i, 9 * i)).save(tmp_path / "one" / "only" / f"{i}.png")
    words = [word.format(tmp=tmp_path, run=finished) for word in arguments]
    assert run(*words) == code
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert named in errors
    assert errors.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_unknown_config_key_is_suggested(tmp_path, capsys):
    (tmp_path / "c.toml").write_text("[train]\nepoch = 3\n")
    assert run("train", "digits", "--out", tmp_path / "r", "--config", tmp_path / "c.toml") == 2
    assert "'epochs'" in flat(capsys.readouterr().err)


def test_names_of_suites_are_whole(capsys):
    assert run("benchmark", "--list") == 0
    shown = capsys.readouterr().out
    assert "openood-imagenet" in shown and "…" not in shown


def test_help_is_complete(capsys):
    assert run("train", "--help") == 0
    text = capsys.readouterr().out
    for flag in ("--relabel-every", "--hard-class-error", "--max-clusters", "--devices", "--resume", "--preset"):
        assert flag in text
    assert all(name in flat(text).replace("│ │ ", "") for name in list_presets())


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_no_types_of_python(name, capsys):
    assert run(name, "--help") == 0
    text = capsys.readouterr().out
    assert not re.search(r"<(bool|str|path|int|float|list)|\bFalse\b|\bTrue\b", text)
    assert re.search(r"--help +show this help", text)
    assert not re.search(r"[{}]|\[default: [^]]*\] *\[default:", re.sub(r"\s*│[\s│]*", " ", text))


def test_help_breaks_no_value(capsys):
    assert run("--help") == 0 and run("fit", "--help") == 0
    text = capsys.readouterr().out
    assert set(re.findall(r"--help +(.*?) *│", text)) == {"show this help"}
    assert all(re.search(rf"\b{name}\b", text) for name in get_args(ScoreBy))


def test_options_of_a_method_have_defaults_as_they_are_typed(capsys):
    assert run("methods", "maple") == 0
    assert not re.search(r"default (True|False)", capsys.readouterr().out)
