"""Requests: values of flags that are more than one word, and folders that are not named."""

from __future__ import annotations

from pathlib import Path

import pytest

from maple.errors import ConfigError
from maple.runs.flag_values import read_config
from maple.runs.requests import FitRequest, TrainRequest, TuneRequest


def test_a_folder_that_is_not_named_is_named_after_the_images():
    assert TrainRequest("digits").folder == FitRequest(model="net", source="digits").folder == Path("runs/digits")
    assert (
        TuneRequest("digits").folder == Path("runs/digits-tune") and TuneRequest("digits").study_name == "digits-tune"
    )
    assert TuneRequest("digits", Path("mine")).folder == Path("mine")


def test_a_file_may_not_hide_its_plugins(tmp_path):
    file = tmp_path / "c.toml"
    assert read_config(None) == {}
    for text in ("plugin = 'a'", "plugin = [1]", "plugin = ['a']\n[origin]\n"):
        file.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_config(file)
        assert str(file) in str(caught.value)
