"""ONNX files, with the real onnxruntime."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from commands import run
from maple.errors import UsageError
from maple.networks import (
    open_model,
)
from maple.prediction.store import load_predictor
from opening import Small, assert_survives, make_images, settle


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
    with pytest.raises(UsageError, match="ONNX"):
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
    assert again.origin.embedding == name and again.embedding_size == 6
    with pytest.raises(UsageError, match=f"'{name}s'.*'{name}'"):
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
    assert backbone.origin.embedding == "colour" and backbone.size == 8
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
        (["probabilities"], None, "probabilities.*--head"),
        (["probabilities"], "colour", "probabilities.*--drop-head"),
        (["energies", "probabilities"], "colour", "energies, probabilities"),
        (["logits"], "nowhere", "'nowhere'.*logits"),
        (["logits"], "mean", r"\(2, 3, 1, 1\)"),
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
    with pytest.raises(UsageError, match=r"\[8, 3, 8, 8\]"):
        open_model(write_onnx(file, "logits", batch=8))
    with pytest.raises(UsageError, match=r"tensor\(float16\)"):
        open_model(write_onnx(file, "mean", dtype="FLOAT16"), head="mean")
    write_onnx(file, "logits", location="tensors.bin")
    with pytest.raises(UsageError, match=r"tensors.bin.*net.onnx.data"):
        open_model(str(file))
    write_onnx(file, "logits", location="net.onnx.data")
    assert open_model(str(file)).embedding_size == 3
    (tmp_path / "net.onnx.data").unlink()
    with pytest.raises(UsageError, match=r"net.onnx"):
        open_model(str(file))
    file.write_bytes(b"no graph")
    with pytest.raises(UsageError, match=r"net.onnx"):
        open_model(str(file))
    file.write_bytes(b"")
    for head in (None, "embedding"):
        with pytest.raises(UsageError, match=r"net.onnx"):
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
    with pytest.raises(UsageError, match=r"other.bin.*net.onnx.data"):
        open_model(file)


def test_onnx_without_inputs(tmp_path: Path) -> None:
    import onnx

    file = write_constants(tmp_path / "net.onnx", inputs=False)
    onnx.save(onnx.load(file), file)  # with the tensors inside
    with pytest.raises(UsageError, match=r"net.onnx.*\(N, 3, H, W\)"):
        open_model(file)
