"""Progress: lines for people without markup, bars only on a terminal, one process speaks."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from maple import progress
from maple.progress import CountDisplay, TrainDisplay, counting, is_first_process, say, track, warn

ROW = {
    "epoch": 2,
    "cross_entropy": 0.5,
    "triplet": 0.25,
    "validation_accuracy": 0.75,
    "clusters": 11,
    "relabelled": "3;8",
    "seconds": 4.4,
}


@pytest.fixture(params=[False, True], ids=["file", "terminal"])
def shown(request, monkeypatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(progress, "console", Console(file=file, force_terminal=request.param, width=200))
    return file


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_only_the_first_process_speaks(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    assert is_first_process()
    monkeypatch.setenv(name, "1")
    assert not is_first_process()


def test_names_in_lines_are_not_markup(shown):
    say("class [bold]a[/] of 'x[0]'")
    warn("[/]")
    assert "class [bold]a[/] of 'x[0]'\n" in shown.getvalue() and "warning:" in shown.getvalue()


def test_items_pass_through_a_bar(shown):
    assert list(track(iter(range(5)), "reading", total=5)) == [0, 1, 2, 3, 4]
    with counting("fetching") as note:
        if note is not None:
            note(1, 2)
    assert (note is not None) == progress.console.is_terminal
    assert ("reading" in shown.getvalue()) == ("fetching" in shown.getvalue()) == progress.console.is_terminal


def test_a_count_shows_a_step_at_once_and_the_time_left(shown, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with CountDisplay("loading 'runs/a'") as display:
        assert ("loading 'runs/a'" in shown.getvalue()) == progress.console.is_terminal  # before anything else
        display.begin("predicting", 1000, 3000)
        display.update(2000, 3000)
    if not progress.console.is_terminal:
        lines = shown.getvalue().splitlines()
        assert lines[0] == "predicting 2,000 images" and "2,000 of 3,000" in lines[1] and lines[1].endswith("s left")


def test_the_time_left_counts_only_what_was_done_in_this_call(monkeypatch):
    """Of a resumed request: 100 images in 10 seconds, 200 are left; the 700 before took no time of this call."""
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress, "console", Console(file=file, width=200))
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(progress, "LINE_SECONDS", 5.0)
    with CountDisplay("loading") as display:
        display.begin("predicting", 700, 1000)
        now[0] = 10.0
        display.update(800, 1000)
    assert file.getvalue().splitlines()[-1] == "predicting: 800 of 1,000 images, about 20 s left"


def test_rows_printed_beside_a_bar_stay_on_standard_output(shown, capsys):
    with CountDisplay("predicting"):
        sys.stdout.write("a.png,cat\n")
    assert capsys.readouterr().out == "a.png,cat\n" and "a.png" not in shown.getvalue()


@pytest.mark.parametrize("enabled", [True, False])
def test_an_epoch_is_one_line(shown, enabled):
    with TrainDisplay(enabled) as display:
        display.begin_epoch(2, epochs=7, steps=3)
        display.step({"cross_entropy": 0.7})
        display.end_epoch(ROW, epochs=5)
        display.warn("collapsed")
        display.say("shortened")
    said = shown.getvalue()
    for text in (
        "epoch 2/5",
        "cross_entropy 0.500",
        "triplet 0.250",
        "0.7500",
        "clusters 11",
        "split 3, 8",
        "about 13 s left",
        "collapsed",
        "shortened",
    ):
        assert (text in said) == enabled


def test_the_last_epoch_leaves_no_time(shown):
    with TrainDisplay() as display:
        display.end_epoch(ROW, epochs=2)
    assert "epoch 2/2" in shown.getvalue() and "left" not in shown.getvalue()
