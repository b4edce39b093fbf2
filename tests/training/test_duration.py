"""Time limits: which epochs fit, what becomes of the schedule, and that the run ends valid."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from commands import flat, run
from maple.errors import ConfigError
from maple.networks import create_backbone
from maple.options import build_options
from maple.training import duration
from maple.training.duration import Clock, describe_rise, shorten
from maple.training.maple import MapleRecipe
from maple.training.optimizers import check_schedule, learning_rate_at
from maple.training.options import TrainOptions
from maple.training.recipe import create_recipe
from short_training import start


class Watch:
    """A clock that the test moves."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(duration, "time", SimpleNamespace(monotonic=lambda: self.now))


def train(
    options: TrainOptions, watch: Watch, epoch_seconds: list[float], steps: int = 20, warm_up: float = 0.0
) -> list[float]:
    """Plan a training whose epochs take these seconds; the learning rate of every step."""
    clock, plan, done, rates = Clock(options, _started=watch.now), options, [], []
    while len(done) < plan.epochs:
        epoch, seconds = len(done) + 1, epoch_seconds[min(len(done), len(epoch_seconds) - 1)]
        for step in range(steps):
            rates.append(learning_rate_at((epoch - 1 + step / steps) / plan.epochs, plan))
            watch.now += 0.9 * seconds / steps + (warm_up if not rates[1:] else 0.0)
            if step + 1 in clock.looks(steps):
                plan = clock.plan(plan, done, epoch, (step + 1) / steps)
        watch.now += 0.1 * seconds
        done.append(seconds)
    return rates


@pytest.mark.parametrize("schedule", ["triangular", "linear", "cosine"])
@pytest.mark.parametrize("limit", [60, 95, 130])
def test_epochs_fit_and_the_learning_rate_ends_near_zero(monkeypatch, limit, schedule):
    watch = Watch(monkeypatch)
    rates = train(TrainOptions(epochs=16, time_limit=limit, learning_rate=1.0, schedule=schedule), watch, [10.0])
    assert limit - 2 * 10.0 * duration.SLOWER <= watch.now <= limit
    assert rates[-1] < 0.05 < 0.8 < max(rates)


def test_a_slow_first_epoch_does_not_waste_the_rest(monkeypatch):
    watch = Watch(monkeypatch)
    train(TrainOptions(epochs=40, time_limit=120), watch, [20.0, 5.0])
    assert 100 < watch.now <= 120


def test_a_slow_first_step_does_not_waste_the_rest(monkeypatch):
    watch = Watch(monkeypatch)
    train(TrainOptions(epochs=200, time_limit=30), watch, [2.0], warm_up=3.0)
    assert 22 < watch.now <= 30


def test_epochs_that_become_slower_exceed_the_limit_by_less_than_one_epoch(monkeypatch):
    watch = Watch(monkeypatch)
    train(TrainOptions(epochs=40, time_limit=100), watch, [5.0] * 10 + [15.0])
    assert watch.now <= 100 + 15


def test_enough_time_changes_nothing(monkeypatch):
    watch, options = Watch(monkeypatch), TrainOptions(epochs=5, time_limit=1000.0)
    assert train(options, watch, [10.0]) == train(TrainOptions(epochs=5), watch, [10.0])


def test_seconds_before_a_resumed_training_count(monkeypatch):
    watch = Watch(monkeypatch)
    clock = Clock(options := TrainOptions(epochs=10, time_limit=60.0), before=40.0, _started=watch.now)
    watch.now += 1.0
    assert clock.plan(options, [10.0] * 4, 5, 0.1).epochs == 5
    assert clock.describe(5) and clock.describe(10) is None


def test_epochs_of_no_measurable_time_fit(monkeypatch):
    """The history rounds seconds to hundredths, so that an epoch may have taken 0."""
    clock = Clock(options := TrainOptions(epochs=10, time_limit=60.0), _started=Watch(monkeypatch).now)
    assert clock.plan(options, [0.0], 2, 0.5).epochs == 10


def test_milestones_stay_in_their_places():
    options = TrainOptions(epochs=100, schedule="step", milestones=(60, 80, 90))
    check_schedule(shorten(options, 10))
    assert shorten(options, 10).milestones == (6, 8, 9)
    assert shorten(options, 2).milestones == (1, 2)  # of which the last has no effect any more


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("20m", 1200), ("1h30m", 5400), ("90s", 90), ("2 min", 120), ("45", 45), (45, 45), ("none", None)],
)
def test_times_are_read(value, seconds):
    assert build_options(TrainOptions, {"time_limit": value}).time_limit == seconds


@pytest.mark.parametrize("value", ["soon", "-5m", "0", "1.2.3h", "m", "", "20 minutes ago"])
def test_wrong_times_are_refused(value, capsys):
    with pytest.raises(ConfigError, match="time_limit"):
        build_options(TrainOptions, {"time_limit": value})
    assert run("train", "digits", "--time-limit", value) == 2
    assert "--time-limit" in flat(capsys.readouterr().err)


def test_a_benchmark_has_no_time_limit(capsys):
    assert run("benchmark", "table1", "--time-limit", "20m") == 2
    assert "--time-limit" in flat(capsys.readouterr().err)


# --- whole trainings


def test_a_training_without_time_ends_valid_after_one_epoch(splits, tmp_path):
    recipe = create_recipe("maple", relabel_every=1, hard_class_error=0.0, min_cluster_size=10)
    found = start(recipe, splits, tmp_path, epochs=8, time_limit=1e-3)
    assert (
        len(found.history) == 1 and set(found.snapshots) == {"before", "after"} and not found.history[0]["relabelled"]
    )
    assert found.history[0]["learning_rate"] < 0.1 * max(TrainOptions().learning_rate, 1e-9)
    again = start(recipe, splits, tmp_path, epochs=8, resume=True)  # nothing is left to train
    assert len(again.history) == 1
    for name, value in found.backbone.state_dict().items():
        assert torch.equal(value, again.backbone.state_dict()[name])


def interrupt(history):
    raise KeyboardInterrupt


class Planned(MapleRecipe):
    """Keeps the number of epochs that it was told at the beginning of each."""

    def begin_epoch(self, backbone, epoch, epochs):
        vars(self).setdefault("told", {})[epoch] = epochs


def test_a_resumed_training_plans_its_epochs_before_the_first_step(few, tmp_path):
    """Else that step has the learning rate of a training without a limit."""
    recipe = Planned(triplet=False, clustering=False)
    with pytest.raises(KeyboardInterrupt):
        start(recipe, few, tmp_path, epochs=50, time_limit=1e6, on_epoch=interrupt)
    found = start(recipe, few, tmp_path, epochs=50, time_limit=1e-3, resume=True)
    assert recipe.told == {1: 50, 2: 2} and len(found.history) == 2
    assert set(found.snapshots) == {"before", "after"}


def test_epochs_before_an_interruption_count(few, tmp_path):
    """Time for five, of which one is done: three and four fifths of those that may be a twentieth slower are left."""
    recipe, history = Planned(triplet=False, clustering=False), []

    def note(found):
        history.extend(found)
        interrupt(found)

    with pytest.raises(KeyboardInterrupt):
        start(recipe, few, tmp_path, epochs=50, time_limit=1e6, on_epoch=note)
    with pytest.raises(KeyboardInterrupt):
        limit = 5 * history[0]["seconds"]
        start(recipe, few, tmp_path, epochs=50, time_limit=limit, resume=True, on_epoch=interrupt)
    assert recipe.told == {1: 50, 2: 4}


def test_a_limit_that_is_not_reached_leaves_the_weights_to_the_last_bit(splits):
    recipe = create_recipe("cross-entropy")
    found = []
    for limit in (None, 1e6):
        torch.manual_seed(0)
        backbone = create_backbone("resnet9", 10)
        found.append(start(recipe, splits, epochs=1, backbone=backbone, time_limit=limit).backbone.state_dict())
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# --- still rising


@pytest.mark.parametrize(
    ("accuracies", "n_images", "rising"),
    [
        ([0.5, 0.6], 1000, True),
        ([0.5], 1000, False),
        ([0.9, 0.9, 0.9, 0.9], 1000, False),
        ([0.5, 0.9, 0.8], 1000, False),
        ([0.88, 0.90], 50, False),  # one image in 50
        ([0.0, 1 / 24], 24, False),  # one image, where the standard error of so small a share would be smaller
        ([1 - 2 / 200, 1 - 1 / 200], 200, False),
        ([0.7 + 0.02 * i for i in range(10)], 1000, True),
        ([*[0.5 + 0.04 * i for i in range(10)], *[0.9] * 10], 1000, False),
    ],
)
def test_more_epochs_are_advised_if_accuracy_was_rising(accuracies, n_images, rising):
    history = [{"validation_accuracy": accuracy} for accuracy in accuracies]
    said = describe_rise(history, n_images, TrainOptions(schedule="constant"))
    assert (said is not None) == rising
    assert said is None or f"{2 * len(accuracies)} instead of {len(accuracies)}" in said


def epochs(*losses, clusters=10):
    """Rising accuracies, with pairs of training and validation loss; the clusters are those of the last epoch."""
    rows = [
        {"validation_accuracy": 0.8 + 0.05 * i, "cross_entropy": train, "validation_loss": validation, "clusters": 10}
        for i, (train, validation) in enumerate(losses)
    ]
    return [*rows[:-1], {**rows[-1], "clusters": clusters}]


@pytest.mark.parametrize("schedule", ["triangular", "linear", "cosine"])
@pytest.mark.parametrize(
    ("history", "advised"),
    [
        (epochs((0.38, 0.41), (0.27, 0.26)), True),  # CIFAR-10, 4 epochs
        (epochs((1.11, 1.55), (0.90, 1.39)), True),  # plankton, 6 epochs
        (epochs((0.145, 0.265), (0.107, 0.253)), False),  # CIFAR-10, 24 epochs: it begins to overfit
        (epochs((0.009, 0.137), (0.008, 0.135)), False),  # digits, 16 epochs
        (epochs((1.2, 0.35), (1.1, 0.32), clusters=33), False),  # the demo: the loss is about clusters
    ],
)
def test_with_a_falling_rate_the_training_loss_must_leave_room_too(history, advised, schedule):
    assert (describe_rise(history, 5000, TrainOptions(schedule=schedule)) is not None) == advised


def test_a_recipe_without_cross_entropy_gets_no_advice_with_a_falling_rate():
    history = [{"validation_accuracy": 0.5, "clusters": 3}, {"validation_accuracy": 0.7, "clusters": 3}]
    assert describe_rise(history, 1000, TrainOptions(schedule="linear")) is None


def test_nothing_is_advised_where_no_mistake_is_left():
    history = [{"validation_accuracy": value} for value in (0.5, 0.9, 1.0)]
    assert describe_rise(history[:2], 1000, TrainOptions(schedule="constant")) is not None
    assert describe_rise(history, 1000, TrainOptions(schedule="constant")) is None


def test_more_time_is_advised_where_a_time_limit_ended_the_training():
    limited = TrainOptions(schedule="linear", epochs=16, time_limit=60)
    said = describe_rise(epochs((0.5, 0.5), (0.4, 0.4)), 1000, limited)
    assert said is not None and "twice the --time-limit" in said and "epochs" not in said
