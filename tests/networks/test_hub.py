"""Networks that others trained: opened, wrapped, fitted, saved, loaded; and refused where they would run code."""

from __future__ import annotations

import csv
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from commands import run
from maple.data.image_set import ImageSet
from maple.detectors.maple import MapleDetector
from maple.errors import RunError, UsageError
from maple.networks._torchvision import import_torchvision
from maple.networks.backbone import Backbone, create_backbone, embed, linear_head, wrap_backbone
from maple.networks.hub import find_kind, needs_weights, open_model
from maple.prediction.predictor import Predictor, fit_predictor, load_backbone, load_predictor, save_backbone

pytestmark = [
    pytest.mark.filterwarnings("ignore:torchvision was built for another torch"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]
N_CLASSES = 3


def optional(package: str) -> ModuleType:
    """A package that need not be installed; those here import torchvision, which may need its repair."""
    try:
        import_torchvision()
    except UsageError:
        pytest.skip("no torchvision here")
    return pytest.importorskip(package)


def make_images(size: int, n: int = 30) -> ImageSet:
    """Noise around another colour for each of three classes."""
    rng = np.random.default_rng(size)
    labels = np.arange(n) % N_CLASSES
    colours = np.array([[200, 60, 60], [60, 200, 60], [60, 60, 200]])[labels]
    pixels = np.clip(colours[:, None, None] + rng.normal(0, 40, (n, size, size, 3)), 0, 255).astype(np.uint8)
    return ImageSet.from_arrays(pixels, labels, size=size)


def settle(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that differ from any new ones, and batch statistics that are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
        for name, buffer in module.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator))
    return module.eval()


def assert_same_as(backbone: Backbone, module: Callable[[Tensor], Any], size: int) -> None:
    """The logits are those of the module, and the head makes them of the embedding."""
    x = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = module((x - backbone.mean[:, None, None]) / backbone.std[:, None, None])
        embedding, logits = backbone(x)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
        assert embedding.shape == (3, backbone.embedding_size)
        torch.testing.assert_close(backbone.head(embedding), logits)


def assert_survives(backbone: Backbone, folder: Path, size: int, trust: bool = False) -> Backbone:
    """Fitted, saved, loaded, predicted: equal before and after."""
    images = make_images(size)
    parts = [images.subset(np.arange(len(images)) // N_CLASSES % 3 == part) for part in range(3)]
    detector = MapleDetector(norm_exponent=0.0, score_by="distance")
    before = fit_predictor(backbone, *parts, detector=detector)
    before.save(folder)
    after = load_predictor(folder, trust=trust)
    assert after.backbone is not backbone and not after.backbone.training
    said, again = before(images), after(images)
    for name in ("class_id", "probabilities", "score", "p_value", "softmax_class_id"):
        np.testing.assert_array_equal(getattr(said, name), getattr(again, name), err_msg=name)
    assert (after.backbone.size, after.backbone.name) == (backbone.size, backbone.name)
    assert after.class_names == images.class_names
    return after.backbone


# --- timm, torchvision, Hugging Face


@pytest.mark.parametrize(
    ("name", "embedding_size", "head"),
    [
        ("resnet18", 512, "fc"),
        ("convnext_atto", 320, "head.fc"),
        ("vit_tiny_patch16_224", 192, "head"),
        ("mobilenetv3_small_100", 1024, "classifier"),
        ("efficientnet_b0", 1280, "classifier"),
    ],
)
def test_timm(name: str, embedding_size: int, head: str, tmp_path: Path) -> None:
    timm = optional("timm")
    options = {"img_size": 32} if name.startswith("vit") else {}
    module = settle(timm.create_model(name, num_classes=N_CLASSES, **options))
    weights = tmp_path / "weights.safetensors"
    save_file(module.state_dict(), weights)
    backbone = open_model(f"timm/{name}", weights=weights, size=32)
    assert backbone.embedding_size == embedding_size and backbone.head.out_features == N_CLASSES
    assert (backbone.embedding_size == module.num_features) == (name != "mobilenetv3_small_100")
    assert backbone.origin["head"] == head and backbone.origin["fit"] == "crop" and backbone.size == 32
    np.testing.assert_allclose(backbone.mean, module.pretrained_cfg["mean"], rtol=1e-6)
    assert_same_as(backbone, module, 32)
    weights.unlink()  # a run needs none but its own
    assert_survives(backbone, tmp_path / "run", 32)


def test_torchvision(tmp_path: Path) -> None:
    models = optional("torchvision").models
    module = settle(models.resnet18(weights=None, num_classes=N_CLASSES))
    torch.save({"state_dict": {f"module.{k}": v for k, v in module.state_dict().items()}}, tmp_path / "w.pth")
    backbone = open_model("torchvision/resnet18", weights=tmp_path / "w.pth", size=32, shallow="layer2")
    np.testing.assert_allclose(backbone.std, [0.229, 0.224, 0.225], rtol=1e-6)
    assert_same_as(backbone, module, 32)
    again = assert_survives(backbone, tmp_path / "run", 32)
    responses = [embed(each, make_images(32)).shallow for each in (backbone, again)]
    assert responses[0].shape == (30, 128)
    np.testing.assert_array_equal(*responses)
    assert open_model("torchvision/resnet18", n_classes=4).size == 224


@pytest.fixture
def vit(tmp_path: Path) -> tuple[nn.Module, Path]:
    """A small Hugging Face ViT, saved, with its image processor."""
    transformers = optional("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=8,
        num_labels=N_CLASSES, id2label={0: "2", 1: "0", 2: "1"}, label2id={"2": 0, "0": 1, "1": 2},
    )  # fmt: skip
    module = settle(transformers.ViTForImageClassification(config))
    transformers.utils.logging.disable_progress_bar()
    module.save_pretrained(tmp_path / "vit")
    processor = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 16, "width": 16}}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(processor))
    return module, tmp_path / "vit"


def test_hugging_face(vit: tuple[nn.Module, Path], tmp_path: Path) -> None:
    module, folder = vit
    backbone = open_model(str(folder))
    assert backbone.size == 16 and backbone.embedding_size == 16 and backbone.origin["class_names"] == ["2", "0", "1"]
    np.testing.assert_allclose(backbone.mean, [0.5, 0.4, 0.3], rtol=1e-6)
    assert_same_as(backbone, lambda x: module(x).logits, 16)
    for path in folder.iterdir():
        path.unlink()
    assert_survives(backbone, tmp_path / "run", 16)


def test_hugging_face_configurations(vit: tuple[nn.Module, Path], tmp_path: Path) -> None:
    folder = vit[1]
    processor = folder / "preprocessor_config.json"
    crop = {"do_center_crop": True, "crop_size": {"height": 16, "width": 16}, "size": {"shortest_edge": 20}}
    processor.write_text(json.dumps({"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [51.0] * 3, **crop}))
    backbone = open_model(str(folder))
    assert backbone.size == 16 and backbone.origin["fit"] == "crop"
    np.testing.assert_allclose(backbone.mean, [0.5] * 3)  # images are 0 to 255 there
    np.testing.assert_allclose(backbone.std, [0.2] * 3, rtol=1e-6)
    processor.write_text(json.dumps({"do_normalize": False, "size": 16}))
    assert open_model(str(folder)).std.tolist() == [1, 1, 1]
    processor.unlink()
    assert open_model(str(folder), mean=(0.1, 0.1, 0.1)).size == 16  # the network's own
    settings = json.loads((folder / "config.json").read_text())
    theirs = {"auto_map": {"AutoModelForImageClassification": "theirs.Net"}, "attn_implementation": "theirs/kernel"}
    (folder / "config.json").write_text(json.dumps(settings | theirs))
    assert not theirs.keys() & open_model(str(folder)).origin["config"].keys()
    (folder / "config.json").write_text(json.dumps(settings | {"id2label": {str(i): str(i) for i in range(5)}}))
    with pytest.raises(UsageError, match="classifier"):
        open_model(str(folder))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="image classifier"):
        open_model(str(folder))
    with pytest.raises(UsageError, match=r"config\.json"):
        open_model(str(tmp_path))


def test_the_configuration_of_the_model_gives_way_to_what_is_asked(tmp_path: Path) -> None:
    optional("timm")
    backbone = open_model("timm/mobilenetv3_small_050", n_classes=4, size=48, mean=(0.1, 0.2, 0.3), std=(1, 1, 1))
    assert backbone.size == 48 and backbone.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert backbone.origin["n_classes"] == 4


# --- graphs


class Small(nn.Module):
    """A small classifier whose output takes the form asked for; two of its layers have as many outputs as classes."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.mixed = nn.Linear(6, N_CLASSES)
        self.hidden = nn.Linear(N_CLASSES, 5)
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(5, N_CLASSES)
        self.other = nn.Linear(5, 7)

    def forward(self, x: Tensor):
        x = self.drop(torch.tanh(self.hidden(self.mixed(self.conv(x).mean(dim=(2, 3))))))
        logits = self.classifier(x)
        if self.form == "dict":
            return {"aux": x.sum(1), "logits": logits}
        if self.form == "two":
            return logits, self.other(x)
        return logits.softmax(1) if self.form == "softmax" else logits


def traced(module: nn.Module, path: Path, **options: Any) -> Path:
    torch.jit.trace(module.eval(), torch.rand(2, 3, 16, 16), **options).save(str(path))
    return path


def test_torchscript(tmp_path: Path) -> None:
    module = settle(Small())
    path = traced(module, tmp_path / "net.pt")
    assert find_kind(str(path)) == "torchscript"
    backbone = open_model(str(path), trust=True, mean=(0.2, 0.2, 0.2))
    assert backbone.embedding_size == 5 and backbone.origin["head"] == "classifier"
    assert_same_as(backbone, module, 16)
    assert_same_as(backbone, module, 20)
    run = tmp_path / "run"
    again = assert_survives(backbone, run, 16, trust=True)
    assert (run / "network" / "net.pt").read_bytes() == path.read_bytes()
    path.unlink()
    save_backbone(tmp_path / "copy" / "weights.safetensors", again)  # a loaded run can be saved elsewhere
    copied = load_backbone(tmp_path / "copy" / "weights.safetensors", trust=True)
    assert_same_as(copied, module, 16)
    assert linear_head(copied).weight.shape == (N_CLASSES, 5)
    trainable = {name for name, parameter in copied.named_parameters() if parameter.requires_grad}
    assert "head.weight" in trainable and "body.graph.classifier.weight" not in trainable


def test_torchscript_of_other_forms(tmp_path: Path) -> None:
    module = settle(Small("dict"))
    backbone = open_model(str(traced(module, tmp_path / "dict.pt", strict=False)), trust=True)
    assert backbone.origin["path"] == ["logits"]
    assert_same_as(backbone, lambda x: module(x)["logits"], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    path = str(traced(settle(Small("two")), tmp_path / "two.pt"))
    with pytest.raises(UsageError, match=r"several heads \(classifier, other\): name one, --head classifier"):
        open_model(path, trust=True)
    assert open_model(path, head="other", trust=True).head.out_features == 7
    with pytest.raises(UsageError, match="no linear layer 'fc'; it has: mixed, hidden, classifier, other"):
        open_model(path, head="fc", trust=True)
    with pytest.raises(UsageError, match="no softmax"):
        open_model(str(traced(settle(Small("softmax")), tmp_path / "softmax.pt")), trust=True)
    frozen = torch.jit.freeze(torch.jit.trace(settle(Small()), torch.rand(2, 3, 16, 16)))
    frozen.save(str(tmp_path / "frozen.pt"))
    with pytest.raises(UsageError, match="before it is frozen"):
        open_model(str(tmp_path / "frozen.pt"), trust=True)
    with pytest.raises(UsageError, match=r"torch\.float64"):
        open_model(str(traced_double(tmp_path)), trust=True)


def traced_double(folder: Path) -> Path:
    torch.jit.trace(Small().double().eval(), torch.rand(2, 3, 16, 16).double()).save(str(folder / "double.pt"))
    return folder / "double.pt"


def test_exported(tmp_path: Path) -> None:
    module = settle(Small("dict"))
    some = {0: torch.export.Dim("n")}
    program = torch.export.export(module, (torch.rand(2, 3, 16, 16),), dynamic_shapes=(some,))
    torch.export.save(program, tmp_path / "net.pt2")
    assert find_kind(str(tmp_path / "net.pt2")) == "export"
    backbone = open_model(str(tmp_path / "net.pt2"), trust=True)
    assert backbone.size == 16 and backbone.origin["path"] == ["logits"]  # the size of the export
    assert_same_as(backbone, lambda x: module(x)["logits"], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    assert (tmp_path / "run" / "network" / "net.pt2").is_file()
    torch.export.save(torch.export.export(module, (torch.rand(2, 3, 16, 16),)), tmp_path / "two.pt2")
    with pytest.raises(UsageError, match=r"exported for 2 images at a time.*Dim\('n'\)"):
        open_model(str(tmp_path / "two.pt2"), trust=True)


# --- ONNX, with the real onnxruntime


class WithEmbedding(nn.Module):
    """A small classifier that also gives what its head sees."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        with self.module.classifier.register_forward_hook(lambda layer, x, y: seen.append(x[0])):
            return self.module(images), seen[0]


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return settle(Small())


def export_onnx(module: nn.Module, path: Path, *outputs: str) -> Path:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    options = {"input_names": ["images"], "output_names": outputs, "dynamic_shapes": ({0: torch.export.Dim("n")},)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, about itself
        torch.onnx.export(module, (torch.rand(2, 3, 16, 16),), path, verbose=False, **options)
    return path


@pytest.fixture(scope="module")
def two_outputs(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(WithEmbedding(small), tmp_path_factory.mktemp("two") / "net.onnx", "logits", "embedding")


@pytest.fixture(scope="module")
def one_output(small: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_onnx(small, tmp_path_factory.mktemp("one") / "net.onnx", "logits")


def test_onnx(small: nn.Module, two_outputs: Path, tmp_path: Path) -> None:
    backbone = open_model(str(two_outputs), mean=(0.5, 0.5, 0.5))
    assert backbone.size == 16 and backbone.embedding_size == 5
    x = torch.rand(3, 3, 16, 16)
    embedding, logits = backbone(x)
    torch.testing.assert_close(logits, small(x - 0.5).detach())
    torch.testing.assert_close(small.classifier(embedding).detach(), logits)
    again = assert_survives(backbone, tmp_path / "run", 16)
    assert again.mean.tolist() == [0.5, 0.5, 0.5]
    data = Path("network") / "net.onnx.data"  # where the exporter of torch puts the tensors
    assert (tmp_path / "run" / data).read_bytes() == two_outputs.with_name(data.name).read_bytes()
    with pytest.raises(UsageError, match="cannot be computed alone"):
        again.head(embedding)
    headless = open_model(str(two_outputs), drop_head=True)
    assert headless.head is None and headless.embed(x).shape == (3, 5)
    assert len(load_predictor(tmp_path / "run")(np.zeros((0, 16, 16, 3), np.uint8))) == 0


def test_onnx_for_one_image_at_a_time(small: nn.Module, two_outputs: Path, tmp_path: Path) -> None:
    import onnx

    model = onnx.load(two_outputs)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, tmp_path / "net.onnx")
    backbone, x = open_model(str(tmp_path / "net.onnx")), torch.rand(3, 3, 16, 16)
    assert backbone.body.batch == 1
    torch.testing.assert_close(backbone(x)[1], small(x).detach())
    assert_survives(backbone, tmp_path / "run", 16)


def test_onnx_with_the_embedding_inside(small: nn.Module, one_output: Path, tmp_path: Path) -> None:
    """It is what the last linear layer sees, or a tensor by its name; both survive in a run."""
    import onnx

    assert [output.name for output in onnx.load(one_output).graph.output] == ["logits"]
    backbone, x = open_model(str(one_output)), torch.rand(3, 3, 16, 16)
    embedding, logits = backbone(x)
    torch.testing.assert_close(logits, small(x).detach())
    torch.testing.assert_close(small.classifier(embedding).detach(), logits)
    assert_survives(backbone, tmp_path / "found", 16)
    name = next(node.output[0] for node in onnx.load(one_output).graph.node if node.op_type == "ReduceMean")
    pooled = open_model(str(one_output), head=name)
    assert pooled.embedding_size == 6
    torch.testing.assert_close(pooled.embed(x), small.conv(x).mean((2, 3)).detach())
    torch.testing.assert_close(pooled(x)[1], logits)
    again = assert_survives(pooled, tmp_path / "named", 16)
    assert again.origin["embedding"] == name and again.embedding_size == 6
    with pytest.raises(UsageError, match=f"no tensor '{name}s': did you mean '{name}'"):
        open_model(str(one_output), head=f"{name}s")


def write_onnx(path: Path, *outputs: str, batch: int | str = "n", dtype: str = "FLOAT", location: str = "") -> str:
    """The mean colour and a matrix product, as other exporters write a linear layer; tensors may be elsewhere."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node, info, kind = onnx.helper.make_node, onnx.helper.make_tensor_value_info, getattr(onnx.TensorProto, dtype)
    nodes = [
        node("GlobalAveragePool", ["images"], ["mean"]),
        node("Flatten", ["mean"], ["colour"]),
        node("MatMul", ["colour", "weight"], ["product"]),
        node("Add", ["bias", "product"], ["logits"]),
        node("Softmax", ["logits"], ["probabilities"]),
        node("Neg", ["logits"], ["energies"]),
    ]
    number = onnx.helper.tensor_dtype_to_np_dtype(kind)
    tensors = [onnx.numpy_helper.from_array(array.astype(number), name) for name, array in TENSORS.items()]
    images = info("images", kind, [batch, 3, 8, 8])
    graph = onnx.helper.make_graph(nodes, "net", [images], [info(name, kind, None) for name in outputs], tensors)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path, save_as_external_data=bool(location), location=location or None, size_threshold=0)
    return str(path)


TENSORS = {"weight": np.float32(9 * np.eye(3) + np.arange(9).reshape(3, 3) / 9), "bias": np.float32([0.5, 0, -0.5])}


def test_onnx_with_a_product_and_a_sum(tmp_path: Path) -> None:
    x = torch.rand(4, 3, 8, 8)
    backbone = open_model(write_onnx(tmp_path / "net.onnx", "logits"))
    embedding, logits = backbone(x)
    torch.testing.assert_close(embedding, x.mean((2, 3)))
    torch.testing.assert_close(logits, torch.from_numpy(x.mean((2, 3)).numpy() @ TENSORS["weight"] + TENSORS["bias"]))
    assert backbone.origin["embedding"] == "colour" and backbone.size == 8
    assert_survives(backbone, tmp_path / "run", 8)
    alone = open_model(write_onnx(tmp_path / "net.onnx", "colour"), head="colour")
    assert alone.head is None and alone.embedding_size == 3


def test_onnx_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run no longer needs the file that it was made of."""
    monkeypatch.chdir(tmp_path)
    images = make_images(8, 120)
    for name, part in (("train", slice(0, 60)), ("unseen", slice(60, 120))):
        np.savez(f"{name}.npz", images=images.pixels[part], labels=images.labels[part])
    file = write_onnx(Path("net.onnx"), "logits")
    assert run("fit", file, "--data", "train.npz", "--calibrate", "unseen.npz", "--head", "colour", "--out", "run") == 0
    Path(file).unlink()
    assert run("predict", "run", "unseen.npz", "--out", "said.csv") == 0
    with Path("said.csv").open() as lines:
        said = list(csv.DictReader(lines))
    expected = load_predictor("run")(images.pixels[60:])
    assert [row["class"] for row in said] == [str(label) for label in images.labels[60:]]
    assert [float(row["score"]) for row in said] == pytest.approx(expected.score.tolist(), rel=1e-5)


@pytest.mark.parametrize(
    ("outputs", "head", "reason"),
    [
        (["probabilities"], None, r"no linear layer gives 'probabilities'.*no softmax"),
        (["probabilities"], "colour", r"are probabilities: export it without its softmax, or add --drop-head"),
        (["energies", "probabilities"], "colour", r"several other outputs \(energies, probabilities\)"),
        (["logits"], "nowhere", "no tensor 'nowhere': its outputs are logits"),
        (["logits"], "mean", r"\(2, 3, 1, 1\).*must be one vector per image"),
    ],
)
def test_onnx_outputs_that_will_not_do(outputs: list[str], head: str | None, reason: str, tmp_path: Path) -> None:
    file = write_onnx(tmp_path / "net.onnx", *outputs)
    with pytest.raises(UsageError, match=reason):
        open_model(file, head=head)
    if "drop-head" in reason:
        assert open_model(file, head=head, drop_head=True).embedding_size == 3


def test_onnx_files_that_will_not_do(tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    with pytest.raises(UsageError, match=r"takes tensor\(float\) \[8, 3, 8, 8\].*any number or 1"):
        open_model(write_onnx(file, "logits", batch=8))
    with pytest.raises(UsageError, match=r"takes tensor\(float16\).*in float32"):
        open_model(write_onnx(file, "mean", dtype="FLOAT16"), head="mean")
    write_onnx(file, "logits", location="tensors.bin")
    with pytest.raises(UsageError, match=r"tensors in 'tensors.bin'.*'net.onnx.data'"):
        open_model(str(file))
    write_onnx(file, "logits", location="net.onnx.data")
    assert open_model(str(file)).embedding_size == 3
    (tmp_path / "net.onnx.data").unlink()
    with pytest.raises(UsageError, match="cannot read the network"):
        open_model(str(file))
    file.write_bytes(b"no graph")
    with pytest.raises(UsageError, match="cannot read the network"):
        open_model(str(file))
    file.write_bytes(b"")
    for head in (None, "embedding"):
        with pytest.raises(UsageError, match="has no outputs: it is empty"):
            open_model(str(file), head=head)


def write_constants(path: Path, *, inputs: bool = True, in_function: bool = False) -> str:
    """The mean colour, if there are images, times a Constant whose data are to be in other.bin."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    node, info, kind = onnx.helper.make_node, onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    weight = onnx.numpy_helper.from_array(TENSORS["weight"], "weight")
    onnx.external_data_helper.set_external_data(weight, "other.bin", offset=0, length=len(weight.raw_data))
    path.with_name("other.bin").write_bytes(weight.raw_data)
    weight.ClearField("raw_data")
    constant, opsets = node("Constant", [], ["weight"], value=weight), [onnx.helper.make_opsetid("", 17)]
    functions = []
    if in_function:
        functions = [onnx.helper.make_function("own", "Weight", [], ["weight"], [constant], opsets)]
        constant, opsets = node("Weight", [], ["weight"], domain="own"), [*opsets, onnx.helper.make_opsetid("own", 1)]
    body = [node("GlobalAveragePool", ["images"], ["mean"]), node("Flatten", ["mean"], ["colour"])]
    head = [constant, node("MatMul", ["colour" if inputs else "weight", "weight"], ["logits"])]
    graph = onnx.helper.make_graph(
        [*body, *head] if inputs else head,
        "net",
        [info("images", kind, ["n", 3, 8, 8])] if inputs else [],
        [info("logits", kind, None)],
    )
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)
    path.write_bytes(model.SerializeToString())
    return str(path)


@pytest.mark.parametrize("in_function", [False, True])
def test_onnx_tensors_elsewhere_are_found_wherever_they_are_named(in_function: bool, tmp_path: Path) -> None:
    """A run would not take their file along."""
    file = write_constants(tmp_path / "net.onnx", in_function=in_function)
    with pytest.raises(UsageError, match=r"tensors in 'other.bin'.*'net.onnx.data'"):
        open_model(file)


def test_onnx_without_inputs(tmp_path: Path) -> None:
    import onnx

    file = write_constants(tmp_path / "net.onnx", inputs=False)
    onnx.save(onnx.load(file), file)  # with the tensors inside
    with pytest.raises(UsageError, match=r"takes no input: export it for images \(N, 3, H, W\)"):
        open_model(file)


def test_missing_packages_name_their_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package, spec, extra in (
        ("onnxruntime", str(tmp_path / "net.onnx"), "onnxruntime"),
        ("timm", "timm/resnet18", "timm"),
    ):
        (tmp_path / "net.onnx").write_bytes(b"graph")
        with monkeypatch.context() as patch:
            patch.setattr("maple.networks.hub.import_torchvision", lambda: None)
            patch.setattr("maple.networks.hub.import_module", _absent)
            with pytest.raises(UsageError, match=rf"{package}.*pip install 'maple-uncertainty\[{extra}\]'"):
                open_model(spec, n_classes=3)


def _absent(name: str) -> ModuleType:
    raise ModuleNotFoundError(name=name)


# --- python:


ZOO = """
import torch
from torch import nn
from maple.networks.backbone import Backbone

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.out = nn.Linear(24, 3)

    def forward(self, x):
        return {"mean": x.mean(), "scores": [self.out(self.layers(x))]}

made = []

def make():
    made.append(Net())
    return made[-1]

def embedding():
    return Backbone(nn.Sequential(nn.AvgPool2d(4), nn.Flatten()), None, embedding_size=48, name="pooled")

def number():
    return 5

def broken():
    raise RuntimeError("no such file")
"""


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, new for each test."""
    name = f"zoo_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(ZOO)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_function_that_returns_a_module(zoo: str, tmp_path: Path) -> None:
    path = list(sys.path)
    backbone = open_model(f"python:{zoo}:make", trust=True)
    assert sys.path == path
    original = sys.modules[zoo].made[0]
    assert_same_as(backbone, lambda x: original(x)["scores"][0], 16)
    assert_survives(backbone, tmp_path / "run", 16, trust=True)
    with pytest.raises(UsageError, match=rf"'python:{zoo}:make' is not opened.*--trust"):
        load_predictor(tmp_path / "run")


def test_only_the_caller_can_trust(zoo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = open_model(f"python:{zoo}:make", trust=True)
    save_backbone(tmp_path / "weights.safetensors", backbone)
    monkeypatch.setenv("MAPLE_TRUST", "1")  # the environment has no say
    with pytest.raises(UsageError, match="--trust"):
        load_backbone(tmp_path / "weights.safetensors")
    assert load_backbone(tmp_path / "weights.safetensors", trust=True).origin == backbone.origin


def test_weights_beside_a_function(zoo: str, tmp_path: Path) -> None:
    settled = settle(wrap_backbone(open_model(f"python:{zoo}:make", trust=True)))  # a backbone is its own wrapper
    state = {key.removeprefix("body.module."): value for key, value in settled.state_dict().items()}
    module_state = {key: value for key, value in state.items() if key.startswith("layers")}
    module_state |= {"out.weight": state["head.weight"], "out.bias": state["head.bias"]}
    save_file(module_state, tmp_path / "w.safetensors")
    backbone = open_model(f"python:{zoo}:make", weights=tmp_path / "w.safetensors", trust=True)
    for name, value in settled.state_dict().items():
        torch.testing.assert_close(backbone.state_dict()[name], value)


def test_a_function_that_returns_a_backbone_without_head(zoo: str, tmp_path: Path) -> None:
    backbone = open_model(f"python:{zoo}:embedding", trust=True)
    assert backbone.head is None and backbone.embedding_size == 48
    again = assert_survives(backbone, tmp_path / "run", 16, trust=True)
    assert again.head is None


def test_functions_that_cannot_be_used(zoo: str) -> None:
    for spec, message in (
        (f"{zoo}:number", "returned int"),
        (f"{zoo}:broken", "RuntimeError: no such file"),
        (f"{zoo}:absent", "no function 'absent'"),
        ("nowhere_at_all:make", "cannot be imported"),
        (zoo, "names no function"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(f"python:{spec}", trust=True)


# --- three lines of Python


def save_folder(folder: Path, images: ImageSet) -> Path:
    """One subfolder per class."""
    for i, label in enumerate(images.labels):
        path = folder / images.class_names[label] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images.pixels[i]).save(path)
    return folder


def test_folders_are_enough(tmp_path: Path) -> None:
    images = make_images(16, n=36)
    parts = [images.subset(np.arange(len(images)) // N_CLASSES % 3 == part) for part in range(3)]
    folders = [save_folder(tmp_path / name, part) for name, part in zip("abc", parts)]
    backbone = open_model("resnet9", n_classes=N_CLASSES)
    expected = fit_predictor(backbone, *parts)
    predictor = fit_predictor(backbone, *folders)
    assert predictor.class_names == ("0", "1", "2")
    np.testing.assert_allclose(predictor.calibration_scores, expected.calibration_scores, rtol=1e-6)
    files = [tmp_path / "c" / "1" / "1.png", tmp_path / "c" / "2" / "2.png"]  # of the third part, images 7 and 8
    np.testing.assert_allclose(predictor(files).score, expected(images.subset([7, 8])).score, rtol=1e-4)
    assert len(predictor(str(tmp_path / "c")).score) == 12
    again = predictor.calibrate(folders[2], false_alarm=0.2)
    np.testing.assert_allclose(again.calibration_scores, expected.calibration_scores, rtol=1e-6)
    assert len(again.calibration.set_scores) == 12


class Pairs(Dataset):
    """Images (3, S, S) in [0, 1] with labels."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.images.pixels[i].transpose(2, 0, 1)).float() / 255, int(self.images.labels[i])


def test_a_detector_of_ones_own_makes_a_predictor() -> None:
    """A dataset of PyTorch in, and neither names nor sizes where the backbone knows them."""
    images = make_images(16)
    backbone = open_model("resnet9", n_classes=N_CLASSES, size=16)
    outputs, expected = embed(backbone, Pairs(images), batch_size=8), embed(backbone, images)
    np.testing.assert_allclose(outputs.embeddings, expected.embeddings, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(outputs.labels, images.labels)
    done: list[tuple[int, int]] = []
    chosen = embed(
        backbone,
        Pairs(images),
        indices=np.array([9, 4]),
        cluster_ids=np.arange(30),
        cluster_to_class=np.arange(30) % N_CLASSES,
        progress=lambda *counts: done.append(counts),
    )
    np.testing.assert_allclose(chosen.embeddings, expected.embeddings[[9, 4]], rtol=1e-5, atol=1e-6)
    assert chosen.cluster_ids.tolist() == [9, 4] and chosen.labels.tolist() == [0, 1] and done == [(2, 2)]
    predictor = Predictor(backbone, MapleDetector().fit(outputs)).calibrate(DataLoader(Pairs(images), 7))
    assert predictor.class_names == ("0", "1", "2") and predictor.size == 16
    assert predictor(Pairs(images)).class_id.shape == (30,)
    with pytest.raises(UsageError, match="give the predictor size="):
        Predictor(open_model("resnet9", n_classes=N_CLASSES), predictor.detector)
    with pytest.raises(UsageError, match="open_images makes one"):
        embed(backbone, "folder")


# --- networks of ours, heads, refusals


def test_own_networks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create_backbone("resnet9", 4)
    state = {key.removeprefix("body."): value for key, value in network.state_dict().items() if key.startswith("body")}
    torch.save(state | {"fc.weight": network.head.weight, "fc.bias": network.head.bias}, tmp_path / "w.pth")
    backbone = open_model("resnet9", weights=tmp_path / "w.pth")
    assert backbone.head.out_features == 4 and backbone.origin is None
    x = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(backbone(x)[1], network.eval()(x)[1])
    headless = open_model("resnet9", weights=tmp_path / "w.pth", drop_head=True)
    again = assert_survives(headless, tmp_path / "run", 16)
    assert again.head is None


def test_a_head_may_have_grown_since(zoo: str, tmp_path: Path) -> None:
    backbone = open_model(f"python:{zoo}:make", trust=True)
    backbone.head = nn.Linear(10, 5, bias=False)
    backbone.embedding_layer, backbone.embedding_size = nn.Linear(24, 10), 10
    save_backbone(tmp_path / "weights.safetensors", backbone)
    again = load_backbone(tmp_path / "weights.safetensors", trust=True)
    x = torch.rand(2, 3, 16, 16)
    assert again.embedding_size == 10
    torch.testing.assert_close(again(x), backbone(x))


def test_weights_of_another_network(tmp_path: Path) -> None:
    optional("timm")
    state = create_backbone("resnet20", 4).state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, tmp_path / "w.safetensors")
    for spec, message in (("timm/resnet18", "another network, or need --classes"), ("resnet32", "another network")):
        with pytest.raises(UsageError, match=message):
            open_model(spec, weights=tmp_path / "w.safetensors")
    with pytest.raises(UsageError, match=r"head\.bias of shape \(4,\), the backbone \(5,\)"):
        open_model("resnet20", weights=tmp_path / "w.safetensors", n_classes=5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("timm/resnet81", "did you mean 'timm/resnet18[a-z]*'"),
        ("timm/hf-hub:someone/theirs", "unknown network"),
        ("torchvision/resnet81", "did you mean 'torchvision/resnet18'"),
        ("resnet81", "did you mean 'resnet18'.*timm/NAME"),
        ("nowhere/net.pt2", "no such file or folder"),
        ("wrn-27-10", "whole number of blocks"),
    ],
)
def test_unknown_names(spec: str, message: str) -> None:
    if "/" in spec and not spec.startswith("nowhere"):
        optional(spec.partition("/")[0])
    with pytest.raises(UsageError, match=message):
        open_model(spec, n_classes=3)


def test_nothing_runs_code_unless_trusted(tmp_path: Path) -> None:
    path = str(traced(Small(), tmp_path / "net.pt"))
    with pytest.raises(UsageError, match=r"a program.*--trust"):
        open_model(path)
    torch.save(Small(), tmp_path / "whole.pth")
    with pytest.raises(UsageError, match="could run code"):
        open_model("resnet9", weights=tmp_path / "whole.pth")
    with pytest.raises(UsageError, match="file of weights needs the name of its network"):
        open_model(str(tmp_path / "whole.pth"), trust=True)


def test_requests_that_make_no_sense(tmp_path: Path) -> None:
    path = str(traced(Small(), tmp_path / "net.pt"))
    for options, message in (
        ({"weights": path}, "its own weights"),
        ({"shallow": "conv"}, "shallow layer"),
        ({"n_classes": 5}, "gives 3 logits, not 5"),
        ({"size": 2, "mean": (1, 2)}, "three numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            open_model(path, trust=True, **options)
    with pytest.raises(UsageError, match="number of classes"):
        open_model("resnet9")
    assert needs_weights("resnet9") and not needs_weights(path)


def test_a_wrapped_module_without_origin_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"python:package\.module:function"):
        save_backbone(tmp_path / "weights.safetensors", wrap_backbone(Small()))
    assert not list(tmp_path.iterdir())
