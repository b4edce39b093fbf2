"""Networks of suites: what is trained, shared, and known by its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from maple.detectors.registry import list_detectors
from maple.errors import UsageError
from maple.evaluation.paper.profiles import PROFILES
from maple.evaluation.paper.rows import STANDARD_DETECTORS, Training
from maple.evaluation.paper.suites import SUITES, find_suite
from maple.runs.benchmark.jobs import Job, digest_source, list_jobs
from maple.training.recipe import list_recipes


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_every_row_can_be_trained_and_read(suite, profile):
    known = {*list_detectors(), *list_recipes(), "maple-paper"}
    for row in suite.rows(profile):
        job = Job(row.training, profile, 3, Path("nowhere"))
        config = job.config
        assert config.recipe.name == config.model.recipe
        assert config.train.seed == 3 and row.method in known
        assert row.method in (
            *STANDARD_DETECTORS,
            *suite.detectors(profile),
            config.model.recipe,
            "maple",
            "maple-paper",
        )


@pytest.mark.parametrize(
    ("suite", "epochs", "optimizer", "batch_size", "relabel_every"),
    [("cifar10", 200, "sgd", 64, 10), ("imagenet", 300, "adam", 64, 20), ("microorganisms", 100, "adam", 4, 10)],
)
def test_the_paper_profile_trains_as_the_paper_does_on_such_images(suite, epochs, optimizer, batch_size, relabel_every):
    row = find_suite(suite).rows(PROFILES["paper"])[-1]
    config = Job(row.training, PROFILES["paper"], 0, Path("nowhere")).config
    assert (config.train.epochs, config.train.optimizer, config.train.batch_size) == (epochs, optimizer, batch_size)
    assert config.recipe.relabel_every == relabel_every


def test_suites_share_networks():
    """The paper's own setting, t = 0.3, p = 10, at most 5 clusters, is one training, whoever asks."""
    profile = PROFILES["cpu"]
    asked = {
        "fnr": "t = 0.3",
        "max-clusters": "at most 5, t = 0.3",
        "frequency": "p = 10",
        "clustering": "X-Means",
        "ablation": "MAPLE, X-Means",
        "gaussian": "MAPLE, X-Means",
    }
    found = {
        row.training for name, title in asked.items() for row in find_suite(name).rows(profile) if row.title == title
    }
    assert len(found) == 1
    suites = [find_suite(name) for name in ("cifar10", "confidence", "calibration", "md")]
    assert len(list_jobs(suites, profile, (0, 1), Path("x"))) == 2 * 8
    assert len(PROFILES["paper"].seeds) == 10
    ensembles = {
        name: dict(find_suite(name).rows(PROFILES["paper"])[2].training.flags)["members"]
        for name in ("cifar10", "imagenet")
    }
    assert ensembles == {"cifar10": 10, "imagenet": 3}


@pytest.mark.parametrize("key", ["epochs", "train.epochs"])
def test_changes_go_before_the_profile(key):
    job = Job(
        Training.of("cifar10", recipe="sngp"), PROFILES["tiny"], 0, Path("x"), changes={key: "7", "sngp.ridge": 2}
    )
    assert job.config.train.epochs == 7 and job.config.recipe.ridge == 2
    other = Job(Training.of("cifar10", recipe="triplet"), PROFILES["tiny"], 0, Path("x"), changes=job.changes)
    assert other.config.train.epochs == 7


def test_keys_follow_what_is_learned(tmp_path):
    profile = PROFILES["tiny"]

    def key(seed=0, changes=None, **flags):
        return Job(Training.of("cifar10", **flags), profile, seed, tmp_path, changes=changes or {}).key

    assert key(recipe="maple") == key(recipe="maple") == key(recipe="maple", relabel_every=10)  # the default
    assert key(recipe="maple", changes={"workers": 7}) == key(recipe="maple")
    others = [key(recipe="triplet"), key(1, recipe="maple"), key(recipe="maple", max_clusters=3)]
    assert len({key(recipe="maple"), *others, key(recipe="maple", changes={"epochs": 1})}) == 5


def test_keys_follow_the_files(tmp_path):
    (tmp_path / "set").mkdir()
    file = tmp_path / "set" / "train.parquet"
    file.write_bytes(b"first")
    before = digest_source("set", tmp_path)
    assert list(before) == ["train.parquet"]
    file.write_bytes(b"other")
    assert digest_source("set", tmp_path) != before
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / "folder" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / name).write_bytes(b"1234")
    before = digest_source(str(tmp_path / "folder"))
    (tmp_path / "folder" / "b" / "2.png").write_bytes(b"12345")
    assert digest_source(str(tmp_path / "folder")) != before
    with pytest.raises(UsageError, match="nowhere"):
        digest_source("nowhere", tmp_path)
