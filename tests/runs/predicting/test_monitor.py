"""``maple monitor`` as a user runs it: verdicts, exit codes, states that go on, and what it says of bad input."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save

from commands import flat, run
from image_files import encode, write_parquet
from maple.decisions.drift import StreamMonitor, compare_scores
from maple.files import load_arrays, save_arrays
from maple.files.formats import FORMAT_VERSION
from maple.runs.predicting.monitor import Monitoring


def noise(n: int, seed: int, contrast: int = 30) -> list[Image.Image]:
    """Dark and bright in turn; with more contrast it is something else."""
    rng = np.random.default_rng(seed)
    levels = np.where(np.arange(n) % 2, 190, 60)
    shape = (12, 12, 3)
    return [Image.fromarray(rng.integers(v - contrast, v + contrast, shape).astype(np.uint8)) for v in levels]


def write_images(path: Path, n: int, seed: int, contrast: int = 30) -> Path:
    """Images in one file, or in a folder."""
    images = noise(n, seed, contrast)
    if path.suffix == ".parquet":
        return write_parquet(path, {"image": [encode(image) for image in images], "label": np.arange(n) % 2})
    path.mkdir()
    for i, image in enumerate(images):
        image.save(path / f"{i:03}.png")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with 120 calibration images; new images that are like them, and others."""
    folder = tmp_path_factory.mktemp("monitor")
    sets = {"train": (60, 1, 30), "calibration": (120, 2, 30), "same": (80, 3, 30), "other": (40, 4, 60)}
    for name, (n, seed, contrast) in sets.items():
        write_images(folder / f"{name}.parquet", n, seed, contrast)
    code = run(
        "train", folder / "train.parquet", "--calibration", folder / "calibration.parquet", "--out", folder / "run",
        "--backbone", "resnet9", "--epochs", 1, "--batch-size", 16,
        "--splits", "0.7,0.2,0,0.1", "--score-by", "normalised", "--workers", 0,
    )  # fmt: skip
    assert code == 0
    return folder


# --- verdicts


def test_images_like_the_calibration_images(folder, tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    assert run("monitor", folder / "run", folder / "same.parquet", "--out", plot) == 0
    text = capsys.readouterr().out
    assert text.startswith("no drift seen: ")
    assert "80 new, 120 for calibration" in text and "expected 5 %" in text
    assert "martingale" not in text and "wealth" not in text and "--state" in text
    assert ElementTree.parse(plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert "martingale" not in plot.read_text()


def test_other_images_are_drift_with_an_exit_code_of_its_own(folder, capsys):
    assert run("monitor", folder / "run", folder / "other.parquet") == 3
    captured = capsys.readouterr()
    assert captured.out.startswith("drift: ") and "maple predict" in captured.out
    assert "error" not in captured.err


def test_json_holds_what_was_computed(folder, capsys):
    code = run("monitor", folder / "run", folder / "other.parquet", "--json", "--level", 0.05, "--false-alarm", 0.2)
    found = json.loads(capsys.readouterr().out)
    assert code == 3 and found["drift"] and found["decided_by"] == "batch"
    assert (found["images"], found["calibration_images"], found["level"]) == (40, 120, 0.05)
    assert found["batch"]["expected_share"] == pytest.approx(24 / 121)
    assert found["batch"]["p_value"] == 2 * min(found["batch"]["share_p_value"], found["batch"]["ks_p_value"])
    assert found["stream"] is None


def test_what_predict_flags_is_what_is_counted(folder, tmp_path, capsys):
    assert run("predict", folder / "run", folder / "same.parquet", "--out", tmp_path / "p.jsonl") == 0
    rows = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    capsys.readouterr()
    run("monitor", folder / "run", folder / "same.parquet", "--json")
    assert json.loads(capsys.readouterr().out)["batch"]["flagged"] == sum(row["is_ood"] for row in rows)


def test_a_folder_sorted_by_class_has_one_verdict(folder, tmp_path, capsys):
    """Without a state nothing says that images are in order of arrival, so that no alarm contradicts the verdict."""
    shades = np.sort(np.random.default_rng(3).integers(30, 220, size=60))
    for i, shade in enumerate(shades):
        name = "dark" if i < 30 else "light"
        (tmp_path / "sorted" / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 12), (int(shade),) * 3).save(tmp_path / "sorted" / name / f"{i:03}.png")
    codes = [run("monitor", folder / "run", tmp_path / "sorted", *options) for options in ((), ("--level", 0.01))]
    text = capsys.readouterr().out
    assert codes[0] == codes[1] and "alarm" not in text and "stream  " not in text


def test_few_images_are_said_to_be_few(folder, tmp_path, capsys):
    write_images(tmp_path / "few.parquet", 3, seed=9)
    assert run("monitor", folder / "run", tmp_path / "few.parquet") == 0
    assert "from 3 images" in capsys.readouterr().out


def test_files_that_are_no_images_are_counted(folder, tmp_path, capsys):
    (tmp_path / "slides").mkdir()
    Image.new("RGB", (12, 12), (60, 60, 60)).save(tmp_path / "slides" / "a.png")
    (tmp_path / "slides" / "broken.png").write_bytes(b"not an image")
    run("monitor", folder / "run", tmp_path / "slides")
    captured = capsys.readouterr()
    assert "1 file could not be used" in flat(captured.err)
    assert "from 1 image\n" in captured.out


# --- streams


def test_a_stream_goes_on_over_calls(folder, tmp_path, capsys):
    """In parts, and after a change of images: as if all had come at once."""
    parts = [write_images(tmp_path / f"day{i}", n, 20 + i, c) for i, (n, c) in enumerate([(30, 30), (26, 60)])]
    state = tmp_path / "states" / "lake"
    codes = [run("monitor", folder / "run", part, "--state", state, "--json") for part in parts]
    *_, last = capsys.readouterr().out.split("\n{")
    found = json.loads("{" + last)["stream"]
    assert codes == [0, 3]
    assert found["images"] == 56 and 30 < found["alarm_image"] <= 56
    assert found["alarm_file"].endswith(f"{found['alarm_image'] - 31:03}.png")
    run("monitor", folder / "run", *parts, "--json", "--state", tmp_path / "at-once")
    at_once = json.loads(capsys.readouterr().out)["stream"]
    assert found["log_wealth"] == pytest.approx(at_once["log_wealth"])
    assert found["alarm_image"] == at_once["alarm_image"]


def test_an_alarm_stays(folder, tmp_path, capsys):
    state = tmp_path / "state"
    assert run("monitor", folder / "run", folder / "other.parquet", "--state", state) == 3
    assert run("monitor", folder / "run", folder / "same.parquet", "--state", state) == 3
    assert "before these images" in capsys.readouterr().out


def test_the_stream_decides_not_the_call(rng):
    """A call that looks odd by itself is no alarm while the stream is calm: there are many calls."""
    calibration = rng.normal(size=200)
    stream = StreamMonitor(calibration)
    stream.update(rng.normal(size=50))
    shifted = compare_scores(rng.normal(2, size=50), calibration)
    found = Monitoring(shifted, stream)
    assert shifted.drift and not found.drift
    assert found.describe().startswith("no drift seen in 50 images of the stream")
    assert "this call alone" in found.describe()
    assert found.to_dict()["decided_by"] == "stream"


def test_an_alarm_that_the_order_may_explain_says_so(rng):
    calibration, scores = rng.normal(size=300), np.sort(rng.normal(size=300))  # as in a folder sorted by class
    stream = StreamMonitor(calibration)
    stream.update(scores)
    found = Monitoring(compare_scores(scores, calibration), stream, "b/1.png")
    assert found.drift and "order alone" in found.describe()
    shifted = compare_scores(scores + 2, calibration)
    assert "order alone" not in Monitoring(shifted, stream, "b/1.png").describe()


def test_drift_towards_usual_images_lists_nothing(rng):
    calibration, scores = rng.normal(size=300), rng.normal(-2, 0.1, size=50)
    found = Monitoring(compare_scores(scores, calibration))
    assert found.drift and not found.batch.n_flagged
    assert "maple predict" not in found.describe() and "calibrate with them" in found.describe()


def test_level_is_kept_in_the_state(folder, tmp_path, capsys):
    state = tmp_path / "state"
    assert run("monitor", folder / "run", folder / "same.parquet", "--state", state, "--level", 0.2) == 0
    capsys.readouterr()
    run("monitor", folder / "run", folder / "same.parquet", "--state", state, "--json")
    assert json.loads(capsys.readouterr().out)["level"] == 0.2
    before = state.read_bytes()
    assert run("monitor", folder / "run", folder / "same.parquet", "--state", state, "--level", 0.01) == 2
    assert "--level 0.2, not with 0.01" in capsys.readouterr().err
    assert state.read_bytes() == before


def test_a_call_that_fails_is_not_counted(folder, tmp_path, monkeypatch, capsys):
    state = tmp_path / "state"
    run("monitor", folder / "run", folder / "same.parquet", "--state", state)
    before = state.read_bytes()
    (tmp_path / "a-file").write_text("")
    assert (
        run("monitor", folder / "run", folder / "same.parquet", "--state", state, "--out", tmp_path / "a-file/p.svg")
        == 1
    )
    monkeypatch.setattr("maple.prediction.predictor.Predictor.predict_batches", _interrupt)
    assert run("monitor", folder / "run", folder / "same.parquet", "--state", state) == 130
    assert state.read_bytes() == before


def _interrupt(*_arguments, **_options):
    raise KeyboardInterrupt


def test_states_that_do_not_belong(folder, tmp_path, capsys):
    def refused(state: Path, code: int) -> str:
        before = state.read_bytes()
        assert run("monitor", folder / "run", folder / "same.parquet", "--state", state) == code
        assert state.read_bytes() == before
        errors = capsys.readouterr().err
        assert errors.startswith("error: ") and errors.count("\n") == 1
        assert "new file" in errors and "train" not in errors
        return errors

    shutil.copy(folder / "run" / "weights.safetensors", tmp_path / "weights")
    assert "maple monitor" in refused(tmp_path / "weights", 1)
    (tmp_path / "damaged").write_bytes(b"junk")
    assert "damaged" in refused(tmp_path / "damaged", 1)
    header = {"maple": json.dumps({"format": FORMAT_VERSION + 1, "kind": "monitor"})}
    (tmp_path / "newer").write_bytes(save({"scores": np.ones(3)}, header))
    assert "upgrade" in refused(tmp_path / "newer", 1)
    save_arrays(tmp_path / "other", StreamMonitor([1.0, 2.0]).to_arrays(), {"kind": "monitor"})
    assert "another run" in refused(tmp_path / "other", 2)
    save_arrays(tmp_path / "part", {"scores": np.ones(3)}, {"kind": "monitor"})
    assert "lacks" in refused(tmp_path / "part", 1)
    assert run("monitor", folder / "run", folder / "same.parquet", "--state", tmp_path) == 2
    assert "--state" in flat(capsys.readouterr().err)


def test_the_state_file_has_a_format(folder, tmp_path):
    run("monitor", folder / "run", folder / "same.parquet", "--state", tmp_path / "state")
    arrays, metadata = load_arrays(tmp_path / "state")
    assert metadata["kind"] == "monitor" and metadata["format"] >= 1
    assert len(arrays["scores"]) == 80 and len(arrays["calibration_scores"]) == 120


# --- bad input


def test_a_run_without_calibration_images(folder, tmp_path, capsys):
    options = ["--epochs", 1, "--batch-size", 16, "--splits", "0.7,0.3,0,0"]
    assert run("train", folder / "train.parquet", "--out", tmp_path / "bare", *options) == 0
    capsys.readouterr()
    assert run("monitor", tmp_path / "bare", folder / "same.parquet") == 1
    errors = flat(capsys.readouterr().err)
    assert "calibration images" in errors and "--calibration" in errors
    assert "will be flagged" not in errors  # nothing will be done at all


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--out", "plot.png"], ".svg"), (["--level", "0"], "level 0"), (["--false-alarm", "2"], "false")],
)
def test_wrong_options_are_refused_before_images_are_read(folder, monkeypatch, capsys, options, message):
    monkeypatch.setattr("maple.runs.loading.open_images", _interrupt)
    assert run("monitor", folder / "run", folder / "same.parquet", *options) == 2
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


def test_help_names_the_exit_codes(capsys):
    assert run("monitor", "--help") == 0
    assert "0 no drift seen, 3 drift, 2 wrong use, 1 failure" in flat(capsys.readouterr().out)
