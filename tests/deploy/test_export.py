"""The exported graph says what the run says, whatever was fitted, and a file that does not is never left behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from maple.baselines.mc_dropout import SampledBackbone
from maple.data.image_set import ImageSet
from maple.decisions.calibration import Calibration
from maple.decisions.conformal import conformal_p_values
from maple.decisions.probability import Probability
from maple.deploy.graph import OUTPUTS, DescriptionGraph, PredictorGraph
from maple.deploy.graph.decision import PValues
from maple.deploy.graph.scores import Surprises
from maple.detectors.maple import MapleDetector
from maple.detectors.scores import FUSED, SCORES, Surprise, fit_surprise
from maple.errors import RunError, UsageError
from maple.networks import Backbone, create_backbone, embed
from maple.prediction.fit import fit_predictor
from maple.prediction.predictor import Predictor
from maple.reporting.gallery import write_cluster_gallery
from maple.types import Outputs, Relabelling

CLUSTERS = np.array([0, 0, 1, 2, 3, 3, 3])  # the class of each
DIM, RESPONSES = 24, 10


# --- what the graph computes, against NumPy, from the same outputs ----------------------------------------------------


def simulated(n: int, seed: int = 0, mapping: np.ndarray = CLUSTERS) -> Outputs:
    rng = np.random.default_rng(seed)
    ids = np.arange(n) % len(mapping)
    centres = np.random.default_rng(9).normal(size=(len(mapping), DIM)) * 2
    embeddings = centres[ids] + rng.normal(size=(n, DIM)) * np.linspace(2, 0.2, DIM) + 1
    logits = 4 * np.eye(len(mapping))[ids] + rng.normal(size=(n, len(mapping)))
    return Outputs(
        embeddings.astype(np.float32),
        logits.astype(np.float32),
        labels=mapping[ids],
        cluster_ids=ids,
        cluster_to_class=mapping,
        shallow=rng.normal(size=(n, RESPONSES)).astype(np.float32),
    )


def unusual(n: int = 40) -> Outputs:
    """Known images, images amid all, images far out, and an embedding of zeros."""
    known, rng = simulated(n, seed=5), np.random.default_rng(6)
    scales = np.repeat([1.0, 0.01, 30.0, 1.0], n // 4)[:, None]
    embeddings = (known.embeddings * scales).astype(np.float32)
    embeddings[-1] = 0
    return dataclasses.replace(
        known, embeddings=embeddings, logits=(known.logits * rng.uniform(0, 3, (n, 1))).astype(np.float32)
    )


def exact(detector: MapleDetector) -> MapleDetector:
    """With products in float64, so that NumPy and torch agree to more digits."""
    densities = detector.learned_.densities
    given = {densities.exponent: densities.gaussians}
    if densities.exponent != 0 and 0.0 in densities.moments.by_exponent:
        given[0.0] = densities.plain_gaussians
    given = {exponent: dataclasses.replace(gaussians, float32=False) for exponent, gaussians in given.items()}
    densities = dataclasses.replace(densities, given=given)
    detector._learned = dataclasses.replace(detector.learned_, densities=densities)
    return detector


def predictor_of(detector: MapleDetector, calibrate: Outputs | None = None, **numbers) -> Predictor:
    backbone = create_backbone("resnet9", 2)  # which nobody asks
    predictor = Predictor(backbone, exact(detector), size=8, probability=Probability(temperature=2.5, **numbers))
    return predictor if calibrate is None else predictor.calibrate(calibrate, false_alarm=0.1)


def compare(predictor: Predictor, outputs: Outputs) -> None:
    """Every output of the graph, with what NumPy says."""
    wide = dataclasses.replace(outputs, embeddings=outputs.embeddings.astype(np.float64))
    found = predictor.detector.describe(wide)
    expected = dataclasses.replace(predictor.predict_described(found), position=found.position)
    logits = None if outputs.logits is None else torch.from_numpy(outputs.logits)
    said = DescriptionGraph(predictor)(torch.from_numpy(wide.embeddings), logits, torch.from_numpy(outputs.shallow))
    for name, output in zip(OUTPUTS, said, strict=True):
        wanted = getattr(expected, name)
        assert output.shape == wanted.shape and output.numpy().dtype == wanted.dtype, name
        tight = {"rtol": 1e-7, "atol": 1e-9}
        np.testing.assert_allclose(output.numpy(), wanted, **tight, err_msg=name)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0])
def test_every_score(score, exponent):
    detector = MapleDetector(score_by=score, norm_exponent=exponent).fit(simulated(600), simulated(200, 1))
    predictor = predictor_of(detector, simulated(150, 2), network_weight=0.7, odds_exponent=0.6)
    compare(predictor, unusual())
    assert predictor.predict_outputs(unusual()).is_ood.any()


@pytest.mark.parametrize("score", ["normalised", "fused", "relative"])
@pytest.mark.parametrize(
    "options", [{"covariance": "full"}, {"covariance": "global"}, {"distance": "euclidean"}, {"pca": False}]
)
def test_every_kind_of_gaussian(options, score):
    detector = MapleDetector(score_by=score, **options).fit(simulated(600), simulated(200, 1))
    compare(predictor_of(detector, simulated(150, 2)), unusual())


def test_a_single_component_and_a_single_class():
    outputs = simulated(200, mapping=np.zeros(1, dtype=int))
    flat = dataclasses.replace(outputs, embeddings=outputs.embeddings[:, :1])
    detector = MapleDetector(norm_exponent=0, score_by="distance", pca=False).fit(flat)
    predictor = predictor_of(detector)
    assert predictor.detector.gaussians_.n_components == 1  # the tail is erfc alone
    compare(predictor, flat[:20])


@pytest.mark.parametrize("score", ["fused", "energy", "normalised"])
@pytest.mark.parametrize(("weight", "exponent"), [(0.0, 1.0), (0.8, 1.0), (0.8, 0.4)])
def test_a_class_that_the_head_does_not_know(score, weight, exponent):
    detector = MapleDetector(score_by=score).fit(simulated(600), simulated(200, 1))
    new = simulated(100, 3)
    detector.extend(dataclasses.replace(new, embeddings=-new.embeddings, labels=np.full(100, 4)))
    assert detector.learned_.appended == 1
    predictor = predictor_of(detector, network_weight=weight, odds_exponent=exponent)
    outputs = unusual()
    beside = dataclasses.replace(outputs, embeddings=np.where(np.arange(40)[:, None] < 8, -1, 1) * outputs.embeddings)
    assert (predictor.predict_outputs(beside).class_id == 4).any()
    compare(predictor, beside)


def test_the_rule_of_the_paper_and_no_head():
    detector = MapleDetector(score_by="normalised").fit(simulated(600))
    compare(predictor_of(detector, class_rule="max"), unusual())
    compare(predictor_of(detector), dataclasses.replace(unusual(), logits=None))


def test_without_calibration_nothing_is_flagged():
    predictor = predictor_of(MapleDetector(score_by="normalised").fit(simulated(600)))
    compare(predictor, unusual())
    outputs = unusual()
    said = dict(
        zip(OUTPUTS, DescriptionGraph(predictor)(*map(torch.from_numpy, (outputs.embeddings, outputs.logits)), None))
    )
    assert said["p_value"].isnan().all() and not said["is_ood"].any()


@pytest.mark.parametrize("per_class", [False, True])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_decisions(per_class, confidence, rng):
    """Many calibration scores, ties among them; classes with thresholds of their own and classes without."""
    predictor = predictor_of(MapleDetector(score_by="normalised").fit(simulated(600)))
    scores = predictor.predict_outputs(simulated(400, 3)).score
    ties = np.repeat(scores, 5)
    class_ids = rng.choice(4, size=len(ties), p=[0.5, 0.3, 0.19, 0.01])
    predictor.calibration = Calibration(ties, class_ids, 4)
    predictor.decide(false_alarm=0.2, confidence=confidence, per_class=per_class)
    assert len(predictor.decision.group_scores) == (4 if per_class else 1)
    compare(predictor, simulated(400, 3))  # scores that are those of the calibration
    compare(predictor, unusual())


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30).map(sorted), min_size=1, max_size=4),
    st.data(),
)
def test_p_values_are_looked_up(groups, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maple.deploy.graph.decision.ONE_STEP", data.draw(st.sampled_from([0, 1024])))
        check_p_values([np.array(group) for group in groups], data)


def check_p_values(groups, data):
    known = st.sampled_from([value for group in groups for value in group])
    scores = np.array([data.draw(known | st.floats(-2e6, 2e6)) for _ in range(5)])
    which = np.arange(5) % len(groups)
    got = PValues(groups)(torch.from_numpy(scores)[:, None], torch.from_numpy(which)).numpy()
    expected = [conformal_p_values([score], groups[i]).item() for i, score in zip(which, scores)]
    np.testing.assert_array_equal(got, expected)
    alone = PValues(groups[:1])(torch.from_numpy(scores)[:, None]).numpy()
    np.testing.assert_array_equal(alone, conformal_p_values(scores, groups[0]))


def test_surprises_are_interpolated(rng):
    scores = rng.gamma(2, size=(300, 4)) * [1, 10, 0.1, 1]
    scores[:40, 1] = 3.0  # ties
    surprises = {name: fit_surprise(column) for name, column in zip(FUSED, scores.T)}
    surprises["shallow"] = Surprise(np.array([0.5]), np.array([0.7]), 0.3)  # a single knot
    new = np.concatenate([scores[:50], rng.gamma(2, size=(50, 4)) * 30 - 5])
    expected = sum(FUSED[name].add(surprises[name](column)) for name, column in zip(surprises, new.T))
    got = Surprises(surprises)(torch.from_numpy(new)).numpy()[:, 0]
    np.testing.assert_allclose(got, expected, rtol=1e-12)


# --- files ------------------------------------------------------------------------------------------------------------


def pictures(n: int, size: int = 8, seed: int = 0) -> ImageSet:
    """Four classes of different colour and pattern."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 4
    grid = np.indices((size, size)).sum(0)
    stripes = (grid[None] * (labels[:, None, None] + 1) % 5 * 30)[..., None]
    noise = rng.integers(0, 90, (n, size, size, 3))
    return ImageSet.from_arrays((stripes + noise).astype(np.uint8), labels, ["a", "b", "c", "d"])


def fit_pictures(backbone: Backbone, size: int = 8, split: bool = False, n: int = 160, **options) -> Predictor:
    train = pictures(n, size)
    relabelling = None
    if split:
        ids = np.where((train.labels == 3) & (np.arange(n) % 8 == 7), 4, train.labels)
        mapping = np.array([0, 1, 2, 3, 3])
        relabelling = Relabelling(ids, mapping, mapping, np.ones(5))
    return fit_predictor(
        backbone.eval(), train, pictures(80, size, 1), pictures(120, size, 2), relabelling=relabelling, **options
    )


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    """With a split class, and thresholds for each class where there are enough images: for none of them."""
    torch.manual_seed(0)
    return fit_pictures(create_backbone("resnet9", 5), split=True)


@pytest.fixture
def onnx():
    pytest.importorskip("onnxruntime")
    return pytest.importorskip("onnx")


@pytest.mark.parametrize("preprocess", [False, True])
def test_the_file(predictor, preprocess, tmp_path, onnx):
    """Read by onnxruntime alone, in batches of any size."""
    import onnxruntime

    from maple.deploy.export import export_onnx

    images = pictures(20, seed=3).pixels
    path = tmp_path / "deep" / "model.onnx"
    report = export_onnx(predictor, path, preprocess=preprocess, check=images, exemplars={4: images[:3]})
    assert path.stat().st_size == report.n_bytes and list(path.parent.iterdir()) == [path]
    assert report.n_exemplars == 3 and report.n_images == 36
    assert "agrees with the run on 36 images" in report.describe()
    assert json.loads(json.dumps(report.to_dict()))["differences"]["squared_distance"] < 1e-4
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(OUTPUTS)
    expected = predictor.predict_pixels(images)
    x = images if preprocess else images.transpose(0, 3, 1, 2).astype(np.float32) / 255
    for rows in (slice(0, 1), slice(0, 20)):
        said = dict(zip(OUTPUTS, session.run(None, {"images": x[rows]}), strict=True))
        np.testing.assert_array_equal(said["class_id"], expected.class_id[rows])
        np.testing.assert_array_equal(said["is_ood"], expected.is_ood[rows])
        np.testing.assert_allclose(said["squared_distance"], expected.squared_distance[rows], rtol=1e-4)
        np.testing.assert_allclose(said["probabilities"], expected.probabilities[rows], atol=1e-4)
        np.testing.assert_allclose(said["p_value"], expected.p_value[rows], atol=0.02)
        degrees = predictor.detector.gaussians_.n_components
        np.testing.assert_allclose(said["typicality"], chi2.sf(said["squared_distance"], degrees), atol=1e-6)
        np.testing.assert_allclose(said["typicality"] + said["uncertainty"], 1)
        np.testing.assert_allclose(said["position"], expected.position[rows], rtol=1e-3, atol=1e-3)
    assert "Abs" not in {node.op_type for node in onnx.load(path).graph.node}  # the shallow layer ends in ReLUs
    text = path.read_bytes()
    assert b"site-packages" not in text and b".py" not in text  # nothing of the machine that it was made on


def test_classes_with_their_own_thresholds_and_a_new_class(tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    torch.manual_seed(1)
    predictor = fit_pictures(create_backbone("resnet9", 4), class_rule="max")
    new = dataclasses.replace(
        embed(predictor.backbone, pictures(60, seed=4).pixels[:, ::-1] // 3), labels=np.full(60, 4)
    )
    predictor.detector.extend(new)
    probability = Probability(network_weight=0.6, odds_exponent=0.5)
    known = Predictor(predictor.backbone, predictor.detector, list("abcde"), size=8, probability=probability)
    known.calibrate(pictures(900, seed=5), per_class=True, false_alarm=0.2)
    assert known.decision.n_own_thresholds >= 2
    export_onnx(known, tmp_path / "model.onnx", check=pictures(30, seed=6).pixels)
    said = OnnxPredictor.open(tmp_path / "model.onnx").run(pictures(40, seed=7).pixels)
    expected = known.predict_pixels(pictures(40, seed=7).pixels)
    np.testing.assert_array_equal(said["class_id"], expected.class_id)
    np.testing.assert_array_equal(said["softmax_class_id"], expected.softmax_class_id)
    np.testing.assert_allclose(said["probabilities"], expected.probabilities, atol=1e-4)
    np.testing.assert_array_equal(said["is_ood"], said["score"] > known.decision.thresholds[said["class_id"]])


def test_absolute_values_of_what_is_never_negative_are_left_out(onnx):
    import onnxruntime

    from maple.deploy.export import drop_idle_abs

    text = """<ir_version: 8, opset_import: ["": 18]>
    example (float[N, 3] x) => (float[N, 3] of_relus, float[N, 3] of_any)
    { a = Relu(x)  b = Cast<to = 1>(a)  c = Add(a, b)  d = Abs(c)  of_relus = Neg(d)
      e = Add(a, x)  f = Abs(e)  g = Abs(f)  of_any = Neg(g) }"""
    model, x = onnx.parser.parse_model(text), np.array([[-1.0, 0.0, 2.0]], np.float32)
    before = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})
    drop_idle_abs(model.graph)
    assert sum(node.op_type == "Abs" for node in model.graph.node) == 2
    onnx.checker.check_model(model)
    np.testing.assert_array_equal(onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x}), before)


def test_a_network_of_timm(tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.networks import open_model

    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    torch.manual_seed(0)
    backbone = open_model("timm/resnet18", n_classes=4, size=32, shallow="layer2")
    predictor = fit_pictures(backbone, size=32, n=60, detector=MapleDetector(covariance="full"))
    assert predictor.score_name == "fused" and "shallow" in predictor.detector.learned_.surprises
    report = export_onnx(predictor, tmp_path / "model.onnx", check=pictures(8, 32).pixels)
    assert report.differences["squared_distance"] <= 1e-4


def spoilt(graph, predictor, opset):
    """A model that is wrong in one number: the first bias of the projection."""
    import onnx

    model = trace(graph, predictor, opset)
    (bias,) = (each for each in model.graph.initializer if each.name.endswith("description.project.bias"))
    array = onnx.numpy_helper.to_array(bias).copy()
    array[0] += 0.5
    bias.CopyFrom(onnx.numpy_helper.from_array(array, bias.name))
    return model


def trace(*arguments):
    raise AssertionError("set by the test")


def test_a_file_that_disagrees_is_not_left_behind(predictor, tmp_path, onnx, monkeypatch):
    import maple.deploy.export

    monkeypatch.setitem(globals(), "trace", maple.deploy.export._trace)
    monkeypatch.setattr(maple.deploy.export, "_trace", spoilt)
    path = tmp_path / "model.onnx"
    with pytest.raises(RunError, match=r"differ in 'squared_distance' by .*no file was written"):
        maple.deploy.export.export_onnx(predictor, path, check=pictures(8).pixels)
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"before")
    with pytest.raises(RunError):
        maple.deploy.export.export_onnx(predictor, path)
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "probability"])
def test_the_check_sees_every_output(predictor, name):
    """A graph that is wrong in one output, for one image of many."""
    from maple.deploy.export import check_parity

    graph, images = PredictorGraph(predictor, preprocess=True).eval(), pictures(24, seed=3).pixels

    def run(pixels):
        with torch.no_grad():
            said = {key: value.numpy() for key, value in zip(OUTPUTS, graph(torch.from_numpy(pixels)), strict=True)}
        if len(pixels) > 1:
            wrong = said[name][11]
            said[name][11] = ~wrong if name == "is_ood" else (wrong + 1) % 4 if wrong.dtype == np.int64 else wrong + 0.1
        return said

    with pytest.raises(RunError, match="differ in"):
        check_parity(predictor, run, images)


def test_the_check_sees_a_batch_that_mixes_images(predictor):
    from maple.deploy.export import check_parity

    graph = PredictorGraph(predictor, preprocess=True).eval()

    def run(pixels):
        with torch.no_grad():
            said = graph(torch.from_numpy(pixels if len(pixels) > 1 else pixels // 2))
        return {key: value.numpy() for key, value in zip(OUTPUTS, said, strict=True)}

    with pytest.raises(RunError, match="'batch'"):
        check_parity(predictor, run, pictures(24, seed=3).pixels)


def test_quantised(predictor, tmp_path, onnx):
    from maple.deploy.export import export_onnx
    from maple.prediction.onnx import OnnxPredictor

    test = pictures(60, seed=3)
    unknown = ImageSet.from_arrays(np.random.default_rng(0).integers(0, 256, (30, 8, 8, 3)).astype(np.uint8))
    plain = export_onnx(predictor, tmp_path / "plain.onnx")
    report = export_onnx(
        predictor, tmp_path / "small.onnx", check=test.pixels, quantise=True, test=test, ood={"noise": unknown}
    )
    assert report.n_bytes < 0.6 * plain.n_bytes
    exact, small = (OnnxPredictor.open(tmp_path / name) for name in ("plain.onnx", "small.onnx"))
    assert small.metadata["quantised"] and not exact.metadata["quantised"]
    change = report.change
    assert change is not None and change.accuracy is not None and change.auroc is not None
    said = small(test)
    assert change.accuracy[1] == (said.class_id == test.labels).mean() and change.flagged[1] == said.is_ood.mean()
    from maple.stats.metrics import auroc

    assert change.auroc["noise"] == (
        auroc(exact(test).score, exact(unknown).score),
        auroc(said.score, small(unknown).score),
    )
    assert "AUROC noise" in report.describe() and "promise holds no longer" in report.describe()
    kinds = {node.op_type for node in onnx.load(tmp_path / "small.onnx").graph.node if "/description/" in node.name}
    assert not {kind for kind in kinds if "Integer" in kind or "Quantize" in kind}


def test_what_quantisation_changes_is_said_or_said_to_be_unknown():
    from maple.deploy.export import Change

    both = (0.5, 0.6)
    nothing, some = Change(1.0), Change(1.0, accuracy=both, ece=both, flagged=both, auroc={})
    assert "accuracy, ECE and AUROC is not known" in nothing.describe() and "--ood" not in nothing.describe()
    assert "ECE 0.5000 -> 0.6000" in some.describe() and "AUROC is not known; name some with --ood" in some.describe()
    assert "not known" not in Change(1.0, both, both, both, {"noise": both}).describe()


def test_networks_that_are_no_graph(predictor, tmp_path, onnx):
    from maple.deploy.export import export_onnx

    sampled = SampledBackbone.from_backbone(create_backbone("resnet9", 5), n_samples=3).eval()
    with pytest.raises(UsageError, match="takes 4 passes"):
        export_onnx(Predictor(sampled, predictor.detector, size=8), tmp_path / "model.onnx")
    body = torch.jit.trace(create_backbone("resnet9", 5).eval().body, torch.rand(2, 3, 8, 8), check_trace=False)
    compiled = Backbone(body, None, embedding_size=128, name="net.pt")
    with pytest.raises(UsageError, match="TorchScript file"):
        export_onnx(Predictor(compiled, predictor.detector, size=8), tmp_path / "model.onnx")

    class Stubborn(torch.nn.Module):
        def forward(self, x):
            raise ValueError("no tracing\nof any kind")

    with pytest.raises(UsageError, match=r"cannot turn the network 'mine' into a graph \(no tracing\)"):
        backbone = Backbone(Stubborn(), None, embedding_size=128, name="mine")
        detector = MapleDetector(score_by="normalised").fit(
            dataclasses.replace(embed(predictor.backbone, pictures(80)), cluster_to_class=None)
        )
        export_onnx(Predictor(backbone, detector, size=8), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_is_too_large(predictor, tmp_path, onnx, monkeypatch):
    import maple.deploy.export

    monkeypatch.setattr(maple.deploy.export, "MAX_FILE_BYTES", 10**6)
    with pytest.raises(UsageError, match=r"takes 0\.0 GB, and a file of ONNX at most 2"):
        maple.deploy.export.export_onnx(predictor, tmp_path / "model.onnx")


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(predictor, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    predictor.save(folder)
    train = pictures(160)
    outputs = dataclasses.replace(
        embed(predictor.backbone, train), cluster_ids=train.labels, cluster_to_class=np.arange(4)
    )
    write_cluster_gallery(folder / "gallery", train, outputs)
    return folder


def test_a_run_whose_images_are_gone_is_not_exported_unchecked(run_folder, tmp_path):
    from maple.deploy.export import export_run

    bare = tmp_path / "bare"
    shutil.copytree(run_folder, bare, ignore=shutil.ignore_patterns("gallery"))
    with pytest.raises(RunError, match="say where they are with --data-root"):
        export_run(bare, tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()


def test_a_run(run_folder, predictor, tmp_path, onnx):
    from maple.deploy.export import export_run
    from maple.prediction.onnx import OnnxPredictor

    report = export_run(run_folder, tmp_path / "model.onnx", preprocess=True)
    assert report.n_exemplars == 16 and report.n_images == 48 + 16  # 12 of each class, and noise
    opened = OnnxPredictor.open(report.path)
    assert {cluster: len(images) for cluster, images in opened.exemplars.items()} == {0: 4, 1: 4, 2: 4, 3: 4}
    shown = {image.tobytes() for image in pictures(160).pixels[3::4]}
    assert all(image.tobytes() in shown for image in opened.exemplars[3])
    assert export_run(run_folder, tmp_path / "model.onnx", exemplars=False).n_exemplars == 0
    assert OnnxPredictor.open(report.path).exemplars == {}


@pytest.mark.parametrize(
    ("out", "options", "reason"),
    [
        ("model.pb", {}, r"end the name in \.onnx or \.pt2"),
        ("model.pt2", {"quantise": True}, "--quantise is for ONNX"),
        ("model.onnx", {"ood": {"far": "digits"}}, "--ood is for what --quantise changes"),
    ],
)
def test_requests_that_make_no_sense(run_folder, tmp_path, out, options, reason):
    from maple.deploy.export import export_run

    with pytest.raises(UsageError, match=reason):
        export_run(run_folder, tmp_path / out, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
def test_torch_export(predictor, tmp_path):
    from maple.deploy.export import export_torch

    images = pictures(20, seed=3)
    report = export_torch(predictor, tmp_path / "model.pt2", preprocess=True, check=images.pixels)
    extra = {"maple.json": ""}
    module = torch.export.load(report.path, extra_files=extra).module()
    for rows in (slice(0, 1), slice(0, 20)):
        with torch.no_grad():
            said = dict(zip(OUTPUTS, module(torch.from_numpy(images.pixels[rows])), strict=True))
        expected = predictor.predict_pixels(images.pixels[rows])
        np.testing.assert_allclose(said["squared_distance"], expected.squared_distance, rtol=1e-4)
        np.testing.assert_array_equal(said["is_ood"], expected.is_ood)
    assert json.loads(extra["maple.json"])["class_names"] == ["a", "b", "c", "d"]
    with zipfile.ZipFile(report.path) as archive:  # nothing of the machine that it was made on
        assert not any(
            str(Path(torch.__file__).parents[1]).encode() in archive.read(name) for name in archive.namelist()
        )


# --- real images ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("network", ["resnet9", "resnet18", "wrn-16-4"])
def test_a_thousand_images_of_cifar(network, shared_dir, tmp_path, onnx, monkeypatch):
    import pyarrow.parquet as pq

    import maple.deploy.export
    from maple.data.sources import open_images

    table = pq.read_table(shared_dir / "data" / "cifar10" / "test.parquet").slice(0, 1600)
    pq.write_table(table, tmp_path / "some.parquet")
    images = open_images(tmp_path / "some.parquet", size=32)
    train, validation, calibration, test = (
        images.subset(np.arange(*ends)) for ends in ((0, 400), (400, 500), (500, 600), (600, 1600))
    )
    torch.manual_seed(0)
    predictor = fit_predictor(create_backbone(network, 10).eval(), train, validation, calibration)
    monkeypatch.setattr(maple.deploy.export, "CHECK_IMAGES", 1000)
    report = maple.deploy.export.export_onnx(predictor, tmp_path / "model.onnx", check=test.pixels)
    assert report.n_images == 1016
    found = report.differences
    assert found["squared_distance"] <= 1e-4 and found["probabilities"] <= 1e-4 and found["typicality"] <= 1e-6
    assert found["class_id"] == 0 and found["is_ood"] == 0
