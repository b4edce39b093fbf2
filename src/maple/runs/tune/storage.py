"""Where a study is kept: the Optuna storage, and what all processes of a study must have in common."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maple.data.splits import Splits
from maple.errors import RunError, UsageError
from maple.options import flag_name
from maple.runs.setup.splits import digest_images
from maple.runs.tune.plan import Plan
from maple.training.resume import FREE_OPTIONS

_DATABASE = "study.db"
_HEARTBEAT, _LOST = 30, 300  # seconds between heartbeats, and without one until another process may take a trial
_SQLITE_PATIENCE = 60  # seconds to wait for another process


def import_optuna() -> Any:
    """Optuna, or a clear error where it is not installed."""
    try:
        import filelock  # noqa: F401
        import optuna
    except ImportError:
        raise UsageError("maple tune needs Optuna: pip install 'maple-uncertainty[tune]'") from None
    return optuna


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's own messages."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)


@contextmanager
def storage_errors(optuna: Any) -> Iterator[None]:
    try:
        yield
    except optuna.exceptions.StorageInternalError as error:
        raise RunError(
            f"the storage of the study failed ({_first_line(error)}): rerun the same command to resume"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error.__cause__ or error).partition("\n")[0]


def open_storage(optuna: Any, url: str | None, out: Path) -> Any:
    """An Optuna storage; databases keep heartbeats, by which trials of lost machines are noticed."""
    if url is None:
        out.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{out.resolve() / _DATABASE}"
    scheme, separator, _ = url.partition("://")
    if not separator:
        raise UsageError(f"--storage takes an Optuna URL, such as sqlite:///study.db or postgresql://..., not '{url}'")
    waiting = {"connect_args": {"timeout": _SQLITE_PATIENCE}} if scheme.startswith("sqlite") else {}
    try:
        if scheme.startswith("redis"):
            return optuna.storages.get_storage(url)
        return optuna.storages.RDBStorage(url, engine_kwargs=waiting, heartbeat_interval=_HEARTBEAT, grace_period=_LOST)
    except Exception as error:  # of SQLAlchemy, of drivers, of the network
        raise RunError(
            f"cannot open the storage {scheme}://...: {_first_line(error)}; check --storage, and that the driver of "
            "the database is installed"
        ) from None


def study_identity(plan: Plan, splits: Splits) -> dict[str, Any]:
    """Everything that all processes and calls of a study must share, as JSON gives it back."""
    options = {
        key: value
        for section in plan.config.sections().values()
        for key, value in section.items()
        if key not in FREE_OPTIONS and key not in plan.space
    }
    identity = {
        "space": {name: dataclasses.asdict(found) for name, found in plan.space.items()},
        "search": plan.search,
        "criterion": plan.criterion,
        "prune": plan.prune,
        "options": options,
        "images": [digest_images(splits.train), digest_images(splits.validation)],
    }
    return json.loads(json.dumps(identity))


def check_same_study(then: dict[str, Any], now: dict[str, Any], name: str) -> None:
    """Refuse to add trials that could not be compared with those of the study."""

    def refuse(difference: str) -> None:
        raise UsageError(f"the study '{name}' was started with {difference}: use the same ones, or another --out")

    if then.get("space") != now["space"]:
        refuse("other --parameters or --values")
    before, after = ({**found, **found.get("options", {})} for found in (then, now))
    for key in ("search", "criterion", "prune", *now["options"]):
        if before.get(key) != after[key]:
            refuse(f"{flag_name(key)} {before.get(key)}, not {after[key]}")
    if then.get("images") != now["images"]:
        refuse("other images")
