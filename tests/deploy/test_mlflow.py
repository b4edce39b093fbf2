"""The MLflow flavour, with a real MLflow: logged into SQLite, loaded, scored and served, without pickle."""

from __future__ import annotations

import base64
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import maple
from exported import fit_pictures, pictures
from image_files import encode
from maple.deploy.mlflow import _copy_run
from maple.errors import MapleError, RunError, UsageError
from maple.files import load_arrays, save_arrays
from maple.networks import create_backbone
from maple.types import PREDICTION_COLUMNS

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("sqlalchemy", reason="the store of MLflow in SQLite needs it")
pd = pytest.importorskip("pandas")
# MLflow, of itself, and of how it uses SQLAlchemy
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def predictor():
    torch.manual_seed(0)
    return fit_pictures(create_backbone("resnet9", 4))


@pytest.fixture(scope="module")
def logged(predictor, tmp_path_factory) -> str:
    """The address of a model in a tracking store of its own."""
    folder = tmp_path_factory.mktemp("mlflow")
    predictor.save(folder / "run")
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = mlflow.create_experiment("pictures", artifact_location=(folder / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment):
        info = maple.mlflow.log_model(folder / "run", registered_model_name="pictures")
    yield info.model_uri
    mlflow.set_tracking_uri(before)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.concatenate([pictures(70, seed=3).pixels, 255 - pictures(10, seed=4).pixels])


@pytest.fixture(scope="module")
def table(images):
    return pd.DataFrame({"image": [encode(Image.fromarray(each)) for each in images]})


def test_nothing_asks_for_an_input_example(predictor, tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        maple.mlflow.save_model(predictor, tmp_path / "saved")
    assert not [each for each in said if "example" in str(each.message)]


def test_a_logged_model_scores_as_the_run(logged, predictor, images, table):
    """In more than one batch, at the level of the run and at another."""
    for uri in (logged, "models:/pictures/1"):
        model = mlflow.pyfunc.load_model(uri)
        said = model.predict(table)
        expected = predictor.predict_pixels(images)
        assert list(said.columns) == [name for name in PREDICTION_COLUMNS if name != "file"]
        assert said["class"].tolist() == [predictor.class_names[i] for i in expected.class_id]
        np.testing.assert_allclose(said["score"], expected.score, rtol=1e-6)
        np.testing.assert_array_equal(said["is_ood"], expected.is_ood)
        loose = model.predict(table, params={"false_alarm": 0.5})
        np.testing.assert_array_equal(loose["is_ood"], said["p_value"] <= 0.5)
        np.testing.assert_array_equal(model.predict(table)["is_ood"], said["is_ood"])  # the level was that call's


def test_nothing_is_pickled(logged):
    folder = Path(mlflow.artifacts.download_artifacts(logged))
    files = {path.name for path in folder.rglob("*") if path.is_file()}
    assert {"MLmodel", "weights.safetensors", "detector.safetensors", "manifest.json"} <= files
    assert not {name for name in files if name.endswith((".pkl", ".pickle", ".pt", ".py"))}
    flavour = mlflow.models.Model.load(str(folder)).flavors["python_function"]
    assert flavour["loader_module"] == "maple.deploy.mlflow" and "python_model" not in flavour


def test_the_scoring_server_of_mlflow_serves_it(logged, predictor, images, table):
    from mlflow.pyfunc import scoring_server
    from starlette.testclient import TestClient

    encoded = [[base64.b64encode(each).decode()] for each in table["image"][-3:]]
    with TestClient(scoring_server.init(mlflow.pyfunc.load_model(logged))) as client:
        body = {"dataframe_split": {"columns": ["image"], "data": encoded}, "params": {"false_alarm": 0.5}}
        said = client.post("/invocations", json=body)
        assert said.status_code == 200, said.text
        rows = said.json()["predictions"]
        broken = client.post("/invocations", json={"dataframe_split": {"columns": ["image"], "data": [["aGk="]]}})
        assert broken.status_code >= 400
    expected = predictor.predict_pixels(images[-3:])
    assert [row["class"] for row in rows] == [predictor.class_names[i] for i in expected.class_id]
    assert [row["is_ood"] for row in rows] == (expected.p_value <= 0.5).tolist()
    json.dumps(rows, allow_nan=False)


def test_models_of_every_kind_are_saved(predictor, images, table, tmp_path):
    pytest.importorskip("onnxruntime")
    maple.export_onnx(predictor, tmp_path / "model.onnx", check=images[:4])
    kinds = [predictor, tmp_path / "model.onnx", maple.OnnxPredictor.open(tmp_path / "model.onnx")]
    for number, model in enumerate(kinds):
        maple.mlflow.save_model(model, tmp_path / str(number))
        native = maple.mlflow.load_model(str(tmp_path / str(number)))
        assert native.runtime == ("torch" if number == 0 else "onnxruntime")
        said = mlflow.pyfunc.load_model(str(tmp_path / str(number))).predict(table[:5])
        np.testing.assert_allclose(said["score"], native.predict_pixels(images[:5]).score)


def test_weights_of_an_earlier_version_lose_the_folder_of_their_network(predictor, tmp_path):
    predictor.save(tmp_path / "run")
    arrays, metadata = load_arrays(tmp_path / "run" / "weights.safetensors")
    named = metadata | {"backbone": "/secret/vit", "origin": {"kind": "huggingface", "spec": "/secret/vit"}}
    save_arrays(tmp_path / "run" / "weights.safetensors", arrays, named)
    (stored := tmp_path / "stored").mkdir()
    _copy_run(tmp_path / "run", stored)
    assert not any(b"secret" in path.read_bytes() for path in stored.iterdir())
    again, found = load_arrays(stored / "weights.safetensors")
    assert found["backbone"] == "vit" and all((again[name] == arrays[name]).all() for name in arrays)


def test_links_of_a_run_are_not_stored(predictor, tmp_path):
    """A copy of a network is a folder, and all of it would be in the store."""
    predictor.save(tmp_path / "run")
    (tmp_path / "id_rsa").write_text("a key")
    (tmp_path / "run" / "network").mkdir()
    (tmp_path / "run" / "network" / "a").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(RunError, match="network/a"):
        maple.mlflow.save_model(tmp_path / "run", tmp_path / "stored")
    assert not [path for path in tmp_path.rglob("a") if not path.is_symlink()]


def test_what_cannot_be_stored_or_loaded_is_a_sentence(tmp_path):
    with pytest.raises(MapleError, match="nowhere"):
        maple.mlflow.save_model(tmp_path / "nowhere", tmp_path / "a")
    with pytest.raises(UsageError, match=r"lost\.onnx"):
        maple.mlflow.save_model(tmp_path / "lost.onnx", tmp_path / "b")
    mlflow.pyfunc.save_model(str(tmp_path / "c"), loader_module="json", data_path=__file__, pip_requirements=["pip"])
    with pytest.raises(UsageError, match=r"maple\.mlflow\.log_model"):
        maple.mlflow.load_model(str(tmp_path / "c"))
