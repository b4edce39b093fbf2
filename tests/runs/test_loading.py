"""Opening the model of a command: run folder or exported graph, with the decision that was asked for."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest

from blobs import make_predictor
from cheap import Cheap, use
from commands import flat
from maple.detectors.maple import MapleDetector
from maple.errors import UsageError
from maple.runs.loading import (
    describe_skipped,
    is_graph,
    open_predictor,
    ready_model,
    ready_predictor,
    say_conditioning,
)
from maple.types import Outputs, Skipped


@pytest.fixture
def graph(monkeypatch, tmp_path):
    """The file of an exported graph, which opens as a cheap predictor."""
    monkeypatch.setitem(sys.modules, "maple.prediction.onnx", types.ModuleType("maple.prediction.onnx"))
    (tmp_path / "cheap.onnx").write_bytes(b"a graph")
    return tmp_path / "cheap.onnx"


def test_which_models_are_graphs(graph, tmp_path):
    use(predictor := Cheap())
    assert open_predictor(graph) is predictor
    (tmp_path / "run.onnx").mkdir()
    assert is_graph(tmp_path / "A.ONNX") and not is_graph(tmp_path / "run.onnx")


def test_a_graph_has_no_network(graph):
    with pytest.raises(UsageError, match=graph.name):
        ready_predictor(graph)


def test_the_decision_is_overridden(graph):
    use(Cheap())
    assert ready_model(graph, {"false_alarm": 0.2}).options.false_alarm == 0.2


def test_with_fdr_all_classes_share_their_p_values(graph):
    use(Cheap())
    options = ready_model(graph, fdr=0.1).options
    assert options.confidence is None and not options.per_class
    with pytest.raises(UsageError, match=r"--false-alarm.*--fdr"):
        ready_model(graph, {"false_alarm": 0.2}, fdr=0.1)


def test_a_wrong_option_is_found_before_the_model_is_opened(tmp_path):
    with pytest.raises(UsageError, match="--false-alarm"):
        ready_model(tmp_path / "none.onnx", {"false_alarm": 2.0})


@pytest.mark.parametrize(("n_calibration", "options", "named"), [
    (0, {}, "--false-alarm"), (9, {"false_alarm": 0.01}, "--false-alarm"), (60, {"per_class": True}, "--per-class"),
])  # fmt: skip
def test_a_decision_without_effect_is_reported(graph, capsys, n_calibration, options, named):
    use(Cheap(n_calibration=n_calibration))
    ready_model(graph, options)
    assert named in capsys.readouterr().err


def test_skipped_files_are_counted_and_the_first_is_named():
    skipped = [Skipped("a.png", "empty"), Skipped("b.png", "broken")]
    assert (
        "2 files of 'x'" in (text := describe_skipped(skipped, of=" of 'x'"))
        and "a.png" in text
        and "b.png" not in text
    )


def test_conditioning_is_said_and_a_thin_direction_warned_of(capsys, rng):
    predictor = make_predictor()
    say_conditioning(predictor)
    said = capsys.readouterr()
    assert "6 components" in flat(said.out + said.err) and "warning" not in said.err
    embeddings = rng.normal(size=(500, 3)) * [1, 1, 1e-4]
    embeddings[:, 2] += embeddings[:, 0]  # standardised, it hardly differs from the first
    labels = np.arange(500) % 2
    options = {"norm_exponent": 0.0, "explained_variance": 1.0}
    predictor.detector = MapleDetector(**options).fit(Outputs(embeddings, labels=labels))
    say_conditioning(predictor)
    assert "--explained-variance" in flat(capsys.readouterr().err)
