"""``maple train --init``: networks of others and of ours learn on, and end as runs like any other."""

from __future__ import annotations

import json
import os
import shutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from commands import flat, run
from maple.baselines.sngp import SngpRecipe
from maple.data.image_set import ImageSet
from maple.data.sources import open_images
from maple.errors import UsageError
from maple.files import RunFile, load_arrays, load_json
from maple.networks import Backbone, create_backbone, embed, wrap_backbone
from maple.networks._torchvision import import_torchvision
from maple.options import read_toml
from maple.prediction.predictor import Predictor
from maple.prediction.store import load_predictor, save_backbone
from maple.runs.setup.config import resolve_config
from maple.runs.setup.init import Start, follow_network, leave_out_unused, open_start, try_recipe, why_new_head
from maple.training.loop import train_backbone
from maple.training.maple import MapleRecipe
from maple.training.options import TrainOptions
from processes import run_processes

N_CLASSES = 5
TINY = ("--epochs", 1, "--batch-size", 32, "--accelerator", "cpu", "--precision", "32-true")
STILL = ("--learning-rate", 1e-30, "--weight-decay", 0)  # the network sees the images and learns nothing
SPLITTING = (
    "--epochs", 2, "--relabel-every", 1, "--hard-class-error", 0, "--cluster-method", "kmeans", "--max-clusters", 2,
    "--min-cluster-size", 5,
)  # fmt: skip
FABRIC = SimpleNamespace(world_size=1)
ZOO = f"""
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn


class Theirs(nn.Module):
    pretrained_cfg = {{"mean": (0.3, 0.4, 0.5), "std": (0.5, 0.6, 0.7), "input_size": (3, 8, 8)}}

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12)
        self.forgotten = nn.Linear(7, 7)  # has no part in the output
        self.drop = nn.Dropout(0.0)
        self.fc = nn.Linear(48, {N_CLASSES})

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        return {{"logits": self.fc(self.drop(nn.functional.adaptive_max_pool2d(x, 2).flatten(1)))}}


def make():
    module = Theirs()
    module.load_state_dict(load_file(Path(__file__).with_suffix(".safetensors")))
    return module
"""


@pytest.fixture(scope="module", autouse=True)
def no_report():
    """Drawing would take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("maple.runs.fit.write_report", lambda folder: "none")
        yield


@pytest.fixture(scope="module")
def digits():
    images = open_images("digits")
    known = np.flatnonzero(images.labels < N_CLASSES)[:360]
    return ImageSet.from_arrays(images.pixels[known], images.labels[known], name="digits")


@pytest.fixture(scope="module")
def place(tmp_path_factory, digits):
    """A folder with digits, and a network of others in a module; it was never trained, which makes no difference."""
    folder = tmp_path_factory.mktemp("place")
    np.savez(folder / "digits.npz", images=digits.pixels, labels=digits.labels)
    few = np.flatnonzero(digits.labels < 3)[:150]
    np.savez(folder / "three.npz", images=digits.pixels[few], labels=digits.labels[few])
    name = f"init_zoo_{os.getpid()}"
    (folder / f"{name}.py").write_text(ZOO)
    names: dict[str, object] = {}
    exec(compile(ZOO, "zoo", "exec"), names)  # noqa: S102 (our own text)
    torch.manual_seed(0)
    module = names["Theirs"]()
    save_file(module.state_dict(), folder / f"{name}.safetensors")
    return folder, f"python:{name}:make", module


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place[0])
    return place


@pytest.fixture(scope="module")
def own_run(place, no_report):
    """A run of ours, on the same digits."""
    folder = place[0] / "own"
    assert run("train", place[0] / "digits.npz", "--out", folder, "--recipe", "cross-entropy", *TINY) == 0
    return folder


def import_timm():
    if find_spec("timm") is None:
        pytest.skip("timm is not installed")
    import_torchvision()
    return import_module("timm")


def train(*options: object, data: str = "digits.npz") -> int:
    return run("train", data, *TINY, *options)


@pytest.fixture
def before_saving(monkeypatch, digits):
    """What predictors said about the digits when they were saved."""
    said = []
    save = Predictor.save

    def record(self, folder):
        said.append(self(digits))
        save(self, folder)

    monkeypatch.setattr(Predictor, "save", record)
    return said


def check_loaded(folder: Path, said, digits, **options) -> Predictor:
    """The run of a folder says what the predictor said before it was saved."""
    predictor = load_predictor(folder, **options)
    again = predictor(digits)
    for name in ("class_id", "score", "probability", "p_value", "is_ood", "cluster"):
        np.testing.assert_array_equal(getattr(again, name), getattr(said[-1], name), err_msg=name)
    return predictor


# --- timm, a module of someone's own, a run of ours


@pytest.mark.slow
def test_timm_with_a_new_head(here, tmp_path, digits, before_saving, capsys):
    timm = import_timm()
    torch.manual_seed(0)
    module = timm.create_model("resnet18", num_classes=7)
    save_file(module.state_dict(), tmp_path / "theirs.safetensors")
    options = ("--weights", tmp_path / "theirs.safetensors", "--size", 32, *STILL)
    assert train("--init", "timm/resnet18", *options, "--out", tmp_path / "run", data="three.npz") == 0
    said = flat(capsys.readouterr().err)
    assert "a new head for 3 classes: its own has 7 outputs" in said and "mean 0.485, 0.456, 0.406" in said
    predictor = check_loaded(tmp_path / "run", before_saving, digits)
    backbone = predictor.backbone
    assert backbone.head.out_features == 3 and predictor.size == 32 and predictor.fit == "crop"
    theirs = module.state_dict()
    for name, parameter in backbone.body.named_parameters():
        assert torch.allclose(parameter, theirs[name], rtol=0, atol=1e-20), name
    assert torch.equal(backbone.mean, torch.tensor([0.485, 0.456, 0.406]))
    assert not (tmp_path / "run" / RunFile.START).exists()
    assert read_toml(tmp_path / "run" / "config.toml")["model"]["backbone"] == "timm/resnet18"


def test_module_of_someones_own_keeps_its_head_and_learns(here, tmp_path, digits, before_saving, capsys):
    """Dictionary output, preprocessing of its own, splits on the way: maple by default."""
    _, model, module = here
    out = tmp_path / "run"
    assert train("--init", model, "--trust", "--out", out, "--preset", "finetune", *SPLITTING) == 0
    said = flat(capsys.readouterr().err)
    assert "its head is kept: 5 outputs" in said and "embedding of 48, 5 logits; mean 0.3, 0.4, 0.5" in said
    predictor = check_loaded(out, before_saving, digits, trust=True)
    backbone = predictor.backbone
    assert backbone.head.out_features == len(predictor.cluster_to_class) > N_CLASSES
    assert not torch.equal(backbone.body.module.conv.weight, module.conv.weight)
    assert torch.equal(backbone.body.module.forgotten.weight, module.forgotten.weight)
    assert torch.equal(backbone.std, torch.tensor([0.5, 0.6, 0.7])) and predictor.size == 8
    config = read_toml(out / "config.toml")
    assert config["origin"]["init"] == model and config["data"]["size"] == 8
    assert (config["train"]["learning_rate"], config["train"]["weight_decay"]) == (0.01, 1e-4)
    assert json.loads((out / "results.json").read_text())["n_ind"] > 0
    assert run("report", out) == 0 and "init_zoo" in (out / "report.html").read_text()
    assert run("predict", out, "digits.npz", "--out", tmp_path / "p.csv") == 2  # it runs code, as any such run
    assert run("predict", out, "digits.npz", "--out", tmp_path / "p.csv", "--trust") == 0


def test_the_head_is_kept_as_it_is(here, tmp_path):
    _, model, module = here
    assert train("--init", model, "--trust", "--out", tmp_path / "run", *STILL, "--recipe", "triplet") == 0
    backbone = load_predictor(tmp_path / "run", trust=True).backbone
    assert torch.equal(backbone.head.weight, module.fc.weight) and torch.equal(backbone.head.bias, module.fc.bias)
    assert torch.equal(backbone.body.module.conv.weight, module.conv.weight)


def test_run_of_ours(here, own_run, tmp_path, digits, before_saving, capsys):
    """With the same classes it keeps its head; with others, be they as many, it gets a new one."""
    out = tmp_path / "same"
    assert train("--init", own_run, "--out", out, *STILL, "--recipe", "triplet") == 0
    assert "its head is kept" in flat(capsys.readouterr().err)
    before, after = load_predictor(own_run), check_loaded(out, before_saving, digits)
    assert torch.equal(before.backbone.head.weight, after.backbone.head.weight)
    assert torch.equal(before.backbone.mean, after.backbone.mean)  # not those of these images
    others = np.load("digits.npz")
    np.savez(tmp_path / "others.npz", images=others["images"], labels=others["labels"] + 3)
    assert train("--init", own_run, "--out", tmp_path / "others", *STILL, data=str(tmp_path / "others.npz")) == 0
    assert "a new head for 5 classes: its own is for other classes" in flat(capsys.readouterr().err)
    after = check_loaded(tmp_path / "others", before_saving, digits)
    assert not torch.equal(before.backbone.head.weight, after.backbone.head.weight)
    for a, b in zip(before.backbone.body.parameters(), after.backbone.body.parameters()):
        assert torch.equal(a, b)


def test_classes_are_taken_in_the_order_of_the_head(here, tmp_path, capsys):
    _, model, _ = here
    fitted = tmp_path / "fitted"
    images = open_images("digits")
    known = images.labels[-400:] < N_CLASSES
    np.savez(tmp_path / "unseen.npz", images=images.pixels[-400:][known], labels=images.labels[-400:][known])
    options = ("--data", "digits.npz", "--class-names", "4,3,2,1,0", "--calibrate", tmp_path / "unseen.npz", "--trust")
    assert run("fit", model, *options, "--out", fitted) == 0
    assert train("--init", fitted, "--out", tmp_path / "run", "--trust", *STILL) == 0
    assert "its head is kept" in flat(capsys.readouterr().err)
    assert load_json(tmp_path / "run" / "classes.json")["classes"] == ["4", "3", "2", "1", "0"]
    assert run("evaluate", tmp_path / "run", "--trust") == 0  # the same images and classes, cut again


# --- resuming


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["timm", "python"])
def test_resumed_without_the_original_equals_uninterrupted(here, tmp_path, monkeypatch, kind):
    """Killed after the first epoch; of timm the weights are gone by then, of a module only its code is needed."""
    _, model, module = here
    options = [*SPLITTING, "--seed", 3]
    weights = tmp_path / "theirs.safetensors"
    if kind == "timm":
        torch.manual_seed(1)
        save_file(import_timm().create_model("test_resnet", num_classes=7).state_dict(), weights)
        options += ["--init", "timm/test_resnet", "--weights", weights, "--size", 32]
    else:
        options += ["--init", model, "--trust"]
    assert train(*options, "--out", tmp_path / "whole", data="three.npz") == 0

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("maple.training.loop.TrainDisplay.begin_epoch", lambda self, epoch, *_: epoch == 2 and kill())
        with pytest.raises(Killed):
            train(*options, "--out", tmp_path / "killed", data="three.npz")
    assert (tmp_path / "killed" / RunFile.START).is_file() and (tmp_path / "killed" / "resume.safetensors").is_file()
    weights.unlink(missing_ok=True)
    original = Path(model.split(":")[1]).with_suffix(".safetensors")
    if kind == "python":  # the module is needed, what was in its weights is not
        save_file({name: torch.zeros_like(value) for name, value in module.state_dict().items()}, original)
    try:
        trust = ["--trust"] if kind == "python" else []
        assert run("train", "three.npz", "--out", tmp_path / "killed", "--resume", *trust) == 0
    finally:
        save_file(module.state_dict(), original)
    for file in ("weights.safetensors", "detector.safetensors"):
        whole, _ = load_arrays(tmp_path / "whole" / file)
        resumed, _ = load_arrays(tmp_path / "killed" / file)
        assert whole.keys() == resumed.keys()
        if file == "weights.safetensors":
            assert len(whole["head.weight"]) > 3  # classes were split on the way
        for name, array in whole.items():
            np.testing.assert_array_equal(array, resumed[name], err_msg=name)
    assert not (tmp_path / "killed" / RunFile.START).exists()


def test_resumed_before_the_first_epoch(here, own_run, tmp_path, monkeypatch, capsys):
    """Nothing is learned yet: the network is in the run folder already, with what was decided about its head."""
    options = ["--init", own_run, "--out", tmp_path / "run"]

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", stop)
        assert train(*options, data="three.npz") == 130
    assert train(*options, "--resume", data="three.npz") == 0
    assert train("--init", own_run, "--out", tmp_path / "whole", data="three.npz") == 0
    resumed, whole = (load_file(tmp_path / name / "weights.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_resume_is_that_of_the_same_network(here, own_run, tmp_path, monkeypatch, capsys):
    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", stop)
        assert train("--init", own_run, "--out", tmp_path / "run") == 130
    assert train("--init", "resnet20", "--out", tmp_path / "run", "--resume") == 2
    assert "--init" in flat(capsys.readouterr().err)


def test_resumed_by_the_same_words_when_the_original_is_gone(here, own_run, tmp_path, monkeypatch, capsys):
    """What names a path that is not there any more names the same path."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    shutil.copytree(own_run, "moved")
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.train.train_backbone", stop)
        assert train("--init", "moved", "--out", tmp_path / "run", "--recipe", "cross-entropy") == 130
    shutil.rmtree("moved")
    words = ("--out", tmp_path / "run", "--recipe", "cross-entropy", "--resume")
    assert train("--init", "elsewhere", *words) == 2
    assert "was started with --init" in flat(capsys.readouterr().err)
    assert train("--init", "moved", *words) == 0


def test_there_is_no_run_without_its_network(here, own_run, tmp_path, monkeypatch):
    """Killed while the folder is made: what is asked again starts a run, since none was there."""

    def kill(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.fit.save_backbone", kill)
        with pytest.raises(Killed):
            train("--init", own_run, "--out", tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()
    with monkeypatch.context() as patch:
        patch.setattr("maple.runs.folder.to_toml", kill)
        with pytest.raises(Killed):
            train("--init", own_run, "--out", tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {RunFile.START, RunFile.LOCK}


@pytest.mark.parametrize("file", ["weights.safetensors", "network/theirs.pt"])
def test_a_file_that_would_be_replaced_is_no_start(here, own_run, tmp_path, capsys, file):
    run_folder = tmp_path / "run"
    shutil.copytree(own_run, run_folder)
    (run_folder / file).parent.mkdir(exist_ok=True)
    shutil.copy(own_run / "weights.safetensors", run_folder / file)
    assert train("--init", "resnet9", "--weights", run_folder / file, "--out", run_folder, "--overwrite") == 2
    assert f"'{run_folder / file}'" in flat(capsys.readouterr().err)
    assert (run_folder / file).is_file()


# --- settings


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        ((), (0.01, 1e-4, 4), True),
        (("--learning-rate", 0.03), (0.03, 1e-4, 4), True),
        (("--preset", "paper"), (0.05, 1e-4, 10), False),
    ],
)
def test_a_trained_network_learns_slowly(here, own_run, tmp_path, monkeypatch, capsys, options, expected, said):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("maple.runs.train.train_backbone", stop)
    assert train("--init", own_run, "--out", tmp_path / "run", *options) == 130
    config = read_toml(tmp_path / "run" / "config.toml")
    found = (config["train"]["learning_rate"], config["train"]["weight_decay"], config["recipe"]["relabel_every"])
    assert found == expected
    assert ("--preset finetune" in flat(capsys.readouterr().err)) == said
    assert config["origin"]["preset"] == ("finetune" if said else "paper")


@pytest.mark.parametrize("options", [("--fit", "stretch"), ("--set", "data.fit=stretch")])
def test_the_shape_of_images_can_be_asked_for(here, own_run, tmp_path, monkeypatch, options):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("maple.runs.train.train_backbone", stop)
    assert train("--init", own_run, "--out", tmp_path / "run", *options) == 130
    assert read_toml(tmp_path / "run" / "config.toml")["data"]["fit"] == "stretch"


def test_help_says_what_can_be_started_from(capsys):
    assert run("train", "--help") == 0
    said = flat(capsys.readouterr().out.replace("│", " "))
    panel = said[said.index("Start from a trained network") :]
    assert "except compiled graphs" in panel and "--trust" in panel
    assert "TorchScript" not in said


# --- other recipes


def test_members_of_an_ensemble_start_from_the_network(here, tmp_path, digits, before_saving):
    _, model, module = here
    options = ("--recipe", "ensemble", "--set", "ensemble.members=2", *STILL, "--trust")
    assert train("--init", model, *options, "--out", tmp_path / "run") == 0
    predictor = check_loaded(tmp_path / "run", before_saving, digits, trust=True)
    assert predictor.backbone.embedding_size == 96
    for member, head in zip(predictor.backbone.body.member_bodies, predictor.backbone.head.members):
        assert torch.equal(member.module.conv.weight, module.conv.weight)
        assert torch.equal(head.weight, module.fc.weight)


def test_members_get_new_heads_where_classes_are_others(here, tmp_path, digits, before_saving):
    _, model, module = here
    options = ("--recipe", "ensemble", "--set", "ensemble.members=2", *STILL, "--trust")
    assert train("--init", model, *options, "--out", tmp_path / "run", data="three.npz") == 0
    predictor = check_loaded(tmp_path / "run", before_saving, digits, trust=True)
    first, second = predictor.backbone.head.members
    assert first.out_features == second.out_features == 3
    assert not torch.equal(first.weight, second.weight)  # each from a seed of its own
    for member in predictor.backbone.body.member_bodies:
        assert torch.equal(member.module.conv.weight, module.conv.weight)


@pytest.mark.parametrize("recipe", ["mc-dropout", "duq", "sngp"])
def test_recipes_with_heads_of_their_own(here, tmp_path, digits, before_saving, recipe):
    more = ("--set", "sngp.features=32") if recipe == "sngp" else ()
    out = tmp_path / "run"
    assert train("--init", here[1], "--trust", "--recipe", recipe, *more, "--out", out, "--learning-rate", 1e-3) == 0
    check_loaded(out, before_saving, digits, trust=True)


def test_a_recipe_that_would_change_the_network_is_refused(digits):
    """Layers beyond the bound of SNGP would be scaled down before the first step; those within stay what they are."""
    torch.manual_seed(0)
    start = create_backbone("resnet9", N_CLASSES)
    for factor, refused in ((1.0, False), (50.0, True)):
        with torch.no_grad():
            next(start.body.parameters()).mul_(factor)
        if refused:
            with pytest.raises(UsageError, match=r"'sngp'.*'resnet9'"):
                try_recipe(SngpRecipe(), start, N_CLASSES, FABRIC, digits)
        else:
            try_recipe(SngpRecipe(), start, N_CLASSES, FABRIC, digits)


def test_layers_that_a_recipe_cannot_prepare(digits):
    """They pad images themselves, so that the operator that SNGP makes of their settings is another one."""

    class Padding(nn.Conv2d):
        def forward(self, x):
            return nn.functional.conv2d(nn.functional.pad(x, (3, 3, 3, 3)), self.weight, self.bias)

    module = nn.Sequential(nn.AdaptiveAvgPool2d(2), Padding(3, 4, 5), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = wrap_backbone(nn.Sequential(*module, nn.Linear(4, N_CLASSES)))
    with pytest.raises(UsageError, match=r"'sngp'.*'Sequential'"):
        try_recipe(SngpRecipe(), backbone, N_CLASSES, FABRIC, digits)


# --- parts


def test_why_new_head():
    backbone = create_backbone("resnet9", 3)
    assert why_new_head(Start(backbone), ("a", "b", "c")) is None
    assert why_new_head(Start(backbone), ("a", "b")) == "its own has 3 outputs"
    assert why_new_head(Start(backbone, class_names=("c", "b", "a")), ("a", "b", "c")) is None
    assert why_new_head(Start(backbone, class_names=("c", "b", "d")), ("a", "b", "c")) == "its own is for other classes"
    backbone.head = nn.Sequential(backbone.head)
    assert why_new_head(Start(backbone), ("a", "b", "c")) == "its own is a Sequential, not linear"
    backbone.head = None
    assert why_new_head(Start(backbone), ("a", "b", "c")) == "it has none of its own"
    assert why_new_head(Start(backbone, recipe="sngp"), ("a", "b", "c")) == "its own belongs to recipe 'sngp'"


def test_images_follow_the_network_unless_asked_otherwise():
    config = resolve_config({"fit": "stretch"})
    assert follow_network(config, 64, "crop", {"fit"}).data.fit == "stretch"
    followed = follow_network(config, 64, "crop", ()).data
    assert (followed.size, followed.fit) == (64, "crop")
    followed = follow_network(config, None, None, ()).data
    assert (followed.size, followed.fit) == ("auto", "stretch")


def test_what_has_no_part_in_the_embedding_is_not_trained(place, digits):
    backbone = wrap_backbone(place[2])
    leave_out_unused(backbone, digits)
    still = {name for name, parameter in backbone.named_parameters() if not parameter.requires_grad}
    assert still == {"body.module.forgotten.weight", "body.module.forgotten.bias"}
    assert all(parameter.grad is None for parameter in backbone.parameters())
    backbone.requires_grad_(False)
    with pytest.raises(UsageError, match="maple fit"):
        leave_out_unused(backbone, digits)


def test_train_backbone_takes_wrapped_modules(place, digits):
    """In Python: any wrapped module, its head or a new one."""
    options = TrainOptions(epochs=1, batch_size=32, precision="32-true", learning_rate=0.01)
    parts = digits.subset(np.arange(200)), digits.subset(np.arange(200, 360))
    runs = []
    for keep in (True, False):
        backbone = wrap_backbone(place[2])
        backbone.head = backbone.head if keep else None
        runs.append(train_backbone(backbone, MapleRecipe(), *parts, options=options, show_progress=False))
        assert backbone.head.out_features == N_CLASSES
        assert embed(runs[-1].backbone, parts[1]).logits.shape == (160, N_CLASSES)
    assert not torch.equal(place[2].conv.weight, runs[0].backbone.body.module.conv.weight)
    assert place[2].fc.out_features == N_CLASSES  # the module itself stays as it is


# --- refusals


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--init", "MODEL"], "--trust"),
        (["--init", "resnet20"], "--weights"),
        (["--init", "net.onnx"], "maple fit"),
        (["--init", "net.pt", "--trust"], "maple fit"),
        (["--init", "MODEL", "--trust", "--backbone", "resnet9"], "--backbone"),
        (["--init", "MODEL", "--trust", "--embedding-size", 8], "--embedding-size"),
        (["--init", "MODEL", "--trust", "--set", "model.embedding_size=8"], "--embedding-size"),
        (["--init", "MODEL", "--trust", "--head", "fc2"], "'fc2'"),
        (["--init", "own", "--head", "fc"], "--head"),
        (["--init", "OUT"], "choose another --out"),
        (["--weights", "net.pt"], "--init"),
        (["--init", "joined"], "'ensemble'"),
        (["--init", "own", "--recipe", "mc-dropouts"], "'mc-dropout'"),
    ],
)  # fmt: skip
def test_refusals(here, own_run, tmp_path, capsys, options, named):
    folder, model, _ = here
    (folder / "net.onnx").write_bytes(b"onnx")
    if not (folder / "net.pt").exists():
        plain = nn.Sequential(nn.Flatten(), nn.Linear(192, N_CLASSES))
        torch.jit.trace(plain, torch.rand(2, 3, 8, 8)).save(str(folder / "net.pt"))
    if "joined" in options and not (folder / "joined").exists():
        assert train("--out", "joined", "--recipe", "ensemble", "--set", "ensemble.members=1") == 0
        capsys.readouterr()
    out = tmp_path / "run"
    names = {"MODEL": model, "OUT": out}
    if "OUT" in options:
        out.mkdir()
    assert train(*(names.get(str(word), word) for word in options), "--out", out) == 2
    assert named in flat(capsys.readouterr().err)
    assert not out.exists() or not any(out.iterdir())


def test_a_run_that_is_not_finished_is_no_start(here, tmp_path, capsys):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.toml").write_text("[origin]\nformat = 2\n")
    assert train("--init", tmp_path / "half", "--out", tmp_path / "run") == 1
    assert "finished run" in flat(capsys.readouterr().err)


def test_heads_of_methods_are_left_behind(tmp_path, digits, monkeypatch):
    """A run of DUQ has a head that only its recipe knows: the network goes on without."""
    from maple.prediction.fit import fit_predictor
    from maple.training.recipe import create_recipe

    parts = digits.subset(np.arange(200)), digits.subset(np.arange(200, 360))
    options = TrainOptions(epochs=1, batch_size=32, learning_rate=0.01)
    trained = train_backbone(
        create_backbone("resnet9", N_CLASSES), create_recipe("duq"), *parts, options=options, show_progress=False
    )
    fit_predictor(trained.backbone, *parts).save(tmp_path)
    start = open_start(str(tmp_path))
    assert start.backbone.head is None and start.backbone.made_by is None
    assert why_new_head(start, digits.class_names) == "its own belongs to recipe 'duq'"
    assert start.class_names == digits.class_names and start.backbone.size == 8
    save_backbone(tmp_path / RunFile.START, start.backbone)


# --- two processes


def train_theirs(folder: Path, model: str, out: Path) -> str:
    """What the command says in this process."""
    os.chdir(folder)
    with (out.parent / f"told-{os.environ['RANK']}").open("w") as told:
        os.dup2(told.fileno(), 2)
        assert train("--init", model, "--trust", "--out", out) == 0
    return Path(told.name).read_text()


@pytest.mark.slow
def test_two_processes(here, tmp_path):
    """With parameters that have no part in the output, for whose gradients the processes would wait."""
    ((code, (errors,)), (other, _)) = run_processes(train_theirs, *here[:2], tmp_path / "run")
    assert (code, other) == (0, 0), errors
    assert errors.count("its head is kept") == 1 and (tmp_path / "told-1").read_text() == ""
    assert isinstance(load_predictor(tmp_path / "run", trust=True).backbone, Backbone)
