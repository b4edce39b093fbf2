"""Options of the service are checked when they are made."""

from __future__ import annotations

import pytest

from maple.data import decode
from maple.deploy.serve.app import create_app
from maple.deploy.serve.options import MOST_PIXELS, ServeOptions
from maple.errors import ConfigError, UsageError
from maple.options import build_options
from serving import Colours


@pytest.mark.parametrize("key", ["", " a", "ä", "a\nb"])
def test_keys_that_no_header_can_carry_are_refused(key):
    with pytest.raises(UsageError, match="API key"):
        create_app(Colours(), ServeOptions(api_key=key))


def test_options_that_do_not_fit_together_are_refused():
    with pytest.raises(UsageError, match="--queue 8"):
        create_app(Colours(), ServeOptions(queue=8))
    with pytest.raises(ConfigError, match="--max-batch 0"):
        build_options(ServeOptions, {"max_batch": "0"}, where=None)
    assert build_options(ServeOptions, {"max_batch": "7", "access_log": True}, where=None).max_batch == 7
    assert MOST_PIXELS == decode.MAX_PIXELS
