"""Backbones: normalisation, wrapping, embedding without side effects, safe weights."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from maple.data.sources import open_images
from maple.errors import UsageError
from maple.networks.architectures import create_network
from maple.networks.backbone import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Backbone,
    as_image_batch,
    create_backbone,
    embed,
    embed_batches,
    list_backbones,
    load_weights,
    wrap_backbone,
)
from maple.types import Outputs


@pytest.fixture
def backbone() -> Backbone:
    torch.manual_seed(0)
    return create_backbone("resnet9", n_classes=5)


@pytest.fixture
def pixels(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, size=(11, 8, 8, 3), dtype=np.uint8)


def plain(pixels: np.ndarray) -> Tensor:
    """(N, 3, H, W) float32 in [0, 1], by the longest way round."""
    return torch.stack([torch.tensor(p.transpose(2, 0, 1).astype(np.float32) / 255) for p in pixels])


def reference(backbone: Backbone, pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    clone = copy.deepcopy(backbone).eval()
    with torch.no_grad():
        embedding, logits = clone(plain(pixels))
    return embedding.numpy(), logits.numpy()


class Tail(nn.Module):
    """A small convolutional classifier whose output takes the form asked for."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.hidden = nn.Linear(6 * 16, 12)
        self.drop = nn.Dropout(0.5)
        self.classifier = nn.Linear(12, 4)
        self.other = nn.Linear(12, 7)

    def forward(self, x: Tensor) -> Any:
        x = nn.functional.adaptive_avg_pool2d(self.conv(x), 4)
        x = x.view(len(x), -1)  # needs the default memory format
        x = self.drop(torch.relu(self.hidden(x)))
        logits = self.classifier(x)
        return {
            "tensor": lambda: logits,
            "dict": lambda: {"aux": x.sum(1), "logits": logits},
            "nested": lambda: (x.mean(), [None, {"out": logits}]),
            "two": lambda: (logits, self.other(x)),
            "softmax": lambda: logits.softmax(1),
            "inplace": lambda: logits.mul_(2),
            "slice": lambda: logits[:, :4],
        }[self.form]()


# The class


def test_embedding_is_what_the_head_sees(backbone: Backbone) -> None:
    x = torch.rand(3, 3, 32, 32)
    backbone.eval()
    embedding, logits = backbone(x)
    assert embedding.shape == (3, 128) and logits.shape == (3, 5)
    assert torch.equal(backbone.embed(x), embedding)
    torch.testing.assert_close(logits, embedding @ backbone.head.weight.T + backbone.head.bias)


def test_images_are_normalised_inside(backbone: Backbone) -> None:
    backbone.eval()
    x = torch.rand(2, 3, 16, 16)
    normalised = torch.empty_like(x)
    for c in range(3):
        normalised[:, c] = (x[:, c] - IMAGENET_MEAN[c]) / IMAGENET_STD[c]
    torch.testing.assert_close(backbone.embed(x), backbone.body(normalised), rtol=1e-4, atol=1e-5)
    other = create_backbone("resnet9", 5, mean=(0.1, 0.2, 0.3), std=(1, 2, 3))
    assert other.mean.tolist() == pytest.approx([0.1, 0.2, 0.3]) and other.std.tolist() == [1, 2, 3]


def test_embedding_layer_in_front_of_the_head() -> None:
    backbone = create_backbone("resnet20", 10, embedding_size=24).eval()
    x = torch.rand(2, 3, 32, 32)
    embedding, logits = backbone(x)
    assert backbone.embedding_size == embedding.shape[1] == backbone.head.in_features == 24
    assert isinstance(backbone.embedding_layer, nn.Linear) and backbone.embedding_layer.in_features == 64
    torch.testing.assert_close(logits, backbone.head(embedding))
    logits.sum().backward()  # the head's loss shapes the embedding layer
    assert backbone.embedding_layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("size", [8, 32, 64])
def test_sizes_are_not_hard_coded(size: int) -> None:
    for name in ("resnet9", "resnet20", "wrn-10-2"):
        backbone = create_backbone(name, 3).eval()
        assert backbone.embed(torch.rand(2, 3, size, size)).shape == (2, backbone.embedding_size)


def test_outputs_are_float32_under_autocast(backbone: Backbone) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        embedding, logits = backbone(torch.rand(4, 3, 16, 16))
    assert embedding.dtype == logits.dtype == torch.float32


def test_memory_format_reaches_the_convolutions(backbone: Backbone) -> None:
    seen = []
    backbone.body.blocks[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    backbone(torch.rand(4, 3, 16, 16))
    assert seen[0].is_contiguous(memory_format=torch.channels_last)
    assert backbone.body.blocks[1][0].weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("shape", [(2, 1, 32, 32), (3, 32, 32), (2, 3, 4, 4), (2, 32, 32, 3)])
def test_wrong_shapes_say_what_is_right(backbone: Backbone, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"takes \(N, 3, H, W\), at least 8 pixels"):
        backbone(torch.rand(shape))


def test_no_head_no_logits() -> None:
    backbone = Backbone(create_network("resnet9"), None, embedding_size=128)
    with pytest.raises(UsageError, match="no head"):
        backbone(torch.rand(2, 3, 8, 8))
    outputs = embed(backbone, torch.rand(2, 3, 8, 8))
    assert outputs.logits is None and outputs.embeddings.shape == (2, 128)


def test_bad_arguments() -> None:
    with pytest.raises(UsageError, match="did you mean 'resnet9'"):
        create_backbone("resnet-9", 10)
    with pytest.raises(UsageError, match=r"6n \+ 4"):
        create_backbone("wrn-27-10", 10)
    with pytest.raises(UsageError, match="at least 1"):
        create_backbone("resnet9", 0)
    with pytest.raises(UsageError, match="at least 1"):
        create_backbone("resnet9", 2, embedding_size=0)
    with pytest.raises(UsageError, match="three numbers"):
        create_backbone("resnet9", 2, mean=(0.5,))
    with pytest.raises(UsageError, match="positive"):
        create_backbone("resnet9", 2, std=(1, 0, 1))
    assert {"resnet9", "resnet18", "resnet20", "resnet32", "resnet44", "resnet56", "wrn-28-10"} <= set(list_backbones())


# Wrapping


def assert_wrapped(
    module: nn.Module, logits_of: Any = lambda output: output, size: int = 32, **options: Any
) -> Backbone:
    """The backbone gives the module's logits, and the module stays as it was."""
    before = copy.deepcopy(module.state_dict())
    names = [name for name, _ in module.named_modules()]
    modes = [m.training for m in module.modules()]
    backbone = wrap_backbone(module, **options)
    x = torch.rand(3, 3, size, size)
    assert [name for name, _ in module.named_modules()] == names
    assert [m.training for m in module.modules()] == modes
    assert all(torch.equal(module.state_dict()[key], value) for key, value in before.items())
    module.eval(), backbone.eval()
    with torch.no_grad():
        expected = logits_of(module(x))
        embedding, logits = backbone(x)
    assert embedding.shape == (3, backbone.embedding_size)
    assert torch.equal(logits, expected)
    assert torch.equal(backbone.head(embedding), expected)
    return backbone


@pytest.mark.parametrize(
    ("form", "logits_of"),
    [
        ("tensor", lambda o: o),
        ("dict", lambda o: o["logits"]),
        ("nested", lambda o: o[1][1]["out"]),
    ],
)
def test_wrap_finds_the_head_in_any_output(form: str, logits_of: Any) -> None:
    backbone = assert_wrapped(Tail(form), logits_of)
    assert backbone.embedding_size == 12 and backbone.head.out_features == 4 and backbone.name == "Tail"
    assert backbone.mean.tolist() == [0, 0, 0] and backbone.std.tolist() == [1, 1, 1]


def test_wrap_sequential_and_own_networks() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 16), nn.ReLU())
    assert assert_wrapped(nn.Sequential(body, nn.Sequential(nn.Dropout(0.1), nn.Linear(16, 5)))).embedding_size == 16
    for name in ("resnet9", "resnet20", "wrn-10-2"):
        network = create_network(name)
        layers = OrderedDict(network=network, fc=nn.Linear(network.embedding_size, 6))
        assert assert_wrapped(nn.Sequential(layers)).embedding_size == network.embedding_size
    own = create_backbone("resnet9", 4)
    assert wrap_backbone(own) is own


def test_two_heads_must_be_named() -> None:
    with pytest.raises(UsageError, match="several heads \\(classifier, other\\): name one, head='classifier'"):
        wrap_backbone(Tail("two"))
    assert assert_wrapped(Tail("two"), lambda o: o[0], head="classifier").head.out_features == 4
    assert assert_wrapped(Tail("two"), lambda o: o[1], head="other").head.out_features == 7


def test_named_head_need_not_be_linear() -> None:
    class Cosine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 8))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(x) @ nn.functional.normalize(self.weight).T

    layers = OrderedDict(conv=nn.Conv2d(3, 8, 3), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), cosine=Cosine())
    with pytest.raises(UsageError, match="no linear layer"):
        wrap_backbone(nn.Sequential(layers))
    assert assert_wrapped(nn.Sequential(layers), head="cosine").embedding_size == 8


def test_wrap_takes_given_or_timm_settings() -> None:
    module = Tail()
    module.pretrained_cfg = {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.1), "input_size": (3, 48, 48)}
    backbone = wrap_backbone(module)
    assert backbone.size == 48 and backbone.mean.tolist() == pytest.approx([0.5, 0.4, 0.3])
    backbone = wrap_backbone(module, mean=IMAGENET_MEAN, std=IMAGENET_STD).eval()
    x = torch.rand(2, 3, 20, 20)
    mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
    torch.testing.assert_close(backbone(x)[1], module.eval()((x - mean) / std))


def test_modules_that_view_take_channels_last_images() -> None:
    backbone = wrap_backbone(Tail())
    assert backbone.embed(torch.rand(2, 3, 32, 32).to(memory_format=torch.channels_last)).shape == (2, 12)


def test_fixed_input_sizes_are_tried_or_given() -> None:
    for size in (32, 64, 224):
        module = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * (size // 4) ** 2, 2))
        assert_wrapped(module, size=size)
    odd = nn.Sequential(nn.Flatten(), nn.Linear(3 * 20 * 20, 9), nn.Linear(9, 2))
    with pytest.raises(UsageError, match=r"failed on images of 32, 64, 224 pixels .*pass example="):
        wrap_backbone(odd)
    backbone = assert_wrapped(odd, size=20, example=torch.rand(2, 3, 20, 20))
    assert backbone.size == 20 and backbone.embedding_size == 9
    assert wrap_backbone(odd, example=np.zeros((2, 20, 20, 3), np.uint8)).size == 20


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Tail("softmax"), {}, r"no linear layer .*no softmax.*Backbone\(module, None"),
        (Tail("softmax"), {"head": "classifier"}, "'classifier' is not the output of the module"),
        (Tail("inplace"), {}, "no linear layer"),
        (Tail("slice"), {}, "without its head 'classifier' the module does not return what the head saw"),
        (Tail(), {"head": "fc"}, "no layer 'fc'; its linear layers: hidden, classifier, other"),
        (Tail(), {"head": "hidden"}, "'hidden' is not the output"),
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Linear(32, 5)), {}, r"sees \(2, 2, 32, 32\), not one vector per image"),
        (nn.Conv2d(3, 2, 1), {}, "no linear layer"),
        (Tail().double(), {}, r"torch.float64: call module.float\(\)"),
    ],
)
def test_wrapping_failures_say_what_to_do(module: nn.Module, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap_backbone(module, **options)


def test_wrapping_leaves_random_numbers_alone() -> None:
    module = Tail()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    wrap_backbone(module)
    assert torch.equal(torch.rand(2), expected)


def test_wrapped_backbone_trains() -> None:
    backbone = wrap_backbone(Tail("dict"))
    embedding, logits = backbone(torch.rand(8, 3, 32, 32))
    (logits.logsumexp(1).mean() + embedding.square().mean()).backward()
    assert all(p.grad is not None for name, p in backbone.named_parameters() if "other" not in name)


# Embedding


def test_embed_arrays_tensors_and_loaders_alike(backbone: Backbone, pixels: np.ndarray) -> None:
    expected = reference(backbone, pixels)
    x = plain(pixels)
    labels = torch.arange(11) % 3
    sources = {
        "uint8 NHWC": pixels,
        "uint8 NCHW": pixels.transpose(0, 3, 1, 2),
        "float32 tensor": x,
        "float64 NHWC": pixels.astype(np.float64) / 255,
        "uint8 tensor": torch.from_numpy(pixels),
        "channels_last": x.to(memory_format=torch.channels_last),
        "loader of x": DataLoader(list(x), batch_size=4),
        "loader of (x, y)": DataLoader(TensorDataset(x, labels), batch_size=4),
        "loader of uint8": DataLoader(list(torch.from_numpy(pixels)), batch_size=5),
        "generator": (part for part in x.split(3)),
    }
    for name, source in sources.items():
        outputs = embed(backbone, source, batch_size=4)
        np.testing.assert_allclose(outputs.embeddings, expected[0], rtol=1e-4, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(outputs.logits, expected[1], rtol=1e-4, atol=1e-5, err_msg=name)
        assert outputs.embeddings.dtype == outputs.logits.dtype == np.float32
        assert outputs.embeddings.shape == (11, 128)
        if name == "loader of (x, y)":
            assert outputs.labels.dtype == np.int64 and outputs.labels.tolist() == labels.tolist()
        else:
            assert outputs.labels is None


def test_embed_image_sets_in_order_with_labels_and_clusters(
    backbone: Backbone, pixels: np.ndarray, tmp_path: Path
) -> None:
    np.savez(tmp_path / "few.npz", images=pixels, labels=np.arange(11) % 3)
    images = open_images(tmp_path / "few.npz")
    expected = reference(backbone, pixels)[0]
    clusters, mapping = np.arange(11) % 4, np.array([0, 1, 2, 2])
    outputs = embed(backbone, images, batch_size=4, cluster_ids=clusters, cluster_to_class=mapping)
    np.testing.assert_allclose(outputs.embeddings, expected, rtol=1e-4, atol=1e-5)
    assert outputs.labels.tolist() == (np.arange(11) % 3).tolist()
    assert outputs.cluster_ids.tolist() == clusters.tolist() and outputs.cluster_to_class is mapping
    again = embed(backbone, images, batch_size=4)
    assert np.array_equal(outputs.embeddings, again.embeddings)  # nothing random
    chosen = np.array([7, 2, 9, 0, 2])
    some = embed(backbone, images, batch_size=2, cluster_ids=clusters, indices=chosen)
    np.testing.assert_allclose(some.embeddings, expected[chosen], rtol=1e-4, atol=1e-5)
    assert some.labels.tolist() == (chosen % 3).tolist() and some.cluster_ids.tolist() == clusters[chosen].tolist()


def test_indices_of_arrays(backbone: Backbone, pixels: np.ndarray) -> None:
    chosen = np.array([3, 1, 10])
    outputs = embed(backbone, pixels, indices=chosen, cluster_ids=np.arange(11))
    np.testing.assert_allclose(outputs.embeddings, reference(backbone, pixels)[0][chosen], rtol=1e-4, atol=1e-5)
    assert outputs.cluster_ids.tolist() == chosen.tolist()


def test_no_images_give_empty_outputs(backbone: Backbone, pixels: np.ndarray) -> None:
    outputs = embed(backbone, pixels, indices=np.array([], dtype=np.int64))
    assert outputs.embeddings.shape == (0, 128) and outputs.logits.shape == (0, 5) and len(outputs.labels) == 0


def test_batches_add_up_and_are_lazy(backbone: Backbone, pixels: np.ndarray) -> None:
    done: list[tuple[int, int]] = []
    batches = embed_batches(backbone, pixels, batch_size=4, progress=lambda *counts: done.append(counts))
    first = next(batches)
    assert len(first) == 4 and done == []
    parts = [first, *batches]
    assert [len(part) for part in parts] == [4, 4, 3] and done == [(4, 11), (8, 11), (11, 11)]
    for source, n in ((DataLoader(list(plain(pixels)), batch_size=8), 11), (plain(pixels).split(8), 0)):
        done.clear()
        embed(backbone, source, progress=lambda *counts: done.append(counts))
        assert done == [(8, n), (11, n)]
    whole = embed(backbone, pixels, batch_size=4)
    assert np.array_equal(Outputs.concatenate(parts).embeddings, whole.embeddings)


def modes(module: nn.Module) -> list[bool]:
    return [m.training for m in module.modules()]


def test_embed_restores_the_mode_of_every_layer(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    backbone.body.blocks[0].eval()  # frozen on purpose by the user
    before = modes(backbone)
    embed(backbone, pixels)
    assert modes(backbone) == before
    backbone.eval()
    embed(backbone, pixels)
    assert not any(modes(backbone))


def test_embed_restores_the_mode_after_an_exception(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    with pytest.raises(UsageError):
        embed(backbone, pixels[:, :4, :4])
    assert all(modes(backbone))

    def fail(*_: object) -> None:
        raise RuntimeError("broken layer")

    backbone.body.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="broken layer"):
        embed(backbone, pixels)
    assert all(modes(backbone)) and torch.is_grad_enabled()


def test_between_batches_the_caller_may_train(backbone: Backbone, pixels: np.ndarray) -> None:
    """A generator must not leave its caller in evaluation mode or without gradients."""
    backbone.train()
    batches = embed_batches(backbone, pixels, batch_size=4)
    next(batches)
    assert all(modes(backbone)) and torch.is_grad_enabled()
    backbone(plain(pixels))[1].sum().backward()


def test_embed_changes_no_statistics_and_keeps_no_graph(backbone: Backbone, pixels: np.ndarray) -> None:
    backbone.train()
    before = copy.deepcopy(backbone.state_dict())
    embed(backbone, pixels)
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    backbone(plain(pixels))  # training does move them, so the comparison can fail
    assert not torch.equal(
        backbone.state_dict()["body.blocks.0.1.running_mean"], before["body.blocks.0.1.running_mean"]
    )
    assert all(p.grad is None for p in backbone.parameters())


def test_embed_ignores_autocast(backbone: Backbone, pixels: np.ndarray) -> None:
    expected = embed(backbone, pixels)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = embed(backbone, pixels)
    assert outputs.embeddings.dtype == np.float32
    assert np.array_equal(outputs.embeddings, expected.embeddings) and np.array_equal(outputs.logits, expected.logits)


def test_dropout_is_off_while_embedding(pixels: np.ndarray) -> None:
    backbone = create_backbone("wrn-10-1", 3).train()
    for layer in (m for m in backbone.modules() if isinstance(m, nn.Dropout)):
        layer.p = 0.5
    assert np.array_equal(embed(backbone, pixels).embeddings, embed(backbone, pixels).embeddings)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 8, 8), np.uint8), r"shape \(2, 8, 8\)"),
        (np.zeros((2, 3, 8, 3), np.uint8), "other than 3"),
        (np.zeros((2, 8, 8, 4), np.uint8), r"\(N, H, W, 3\)"),
        (np.full((2, 8, 8, 3), 200.0), r"\[0, 1\]"),
        (np.full((2, 8, 8, 3), np.nan), r"\[0, 1\]"),
        (-torch.ones(2, 3, 8, 8), r"before any normalisation"),
        (np.zeros((2, 8, 8, 3), np.int64), "uint8"),
        ("cifar10", "cannot embed str"),
        (7, "cannot embed int"),
    ],
)
def test_ambiguous_images_are_refused(backbone: Backbone, images: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        embed(backbone, images)


def test_misused_options_are_refused(backbone: Backbone, pixels: np.ndarray) -> None:
    loader = DataLoader(list(plain(pixels)), batch_size=4, shuffle=True)
    with pytest.raises(UsageError, match="shuffle=False"):
        embed(backbone, loader, cluster_ids=np.zeros(11))
    with pytest.raises(UsageError, match="Subset"):
        embed(backbone, loader, indices=np.arange(3))
    with pytest.raises(UsageError, match="one per image"):
        embed(backbone, pixels, cluster_ids=np.zeros(5))
    with pytest.raises(UsageError, match="batch size"):
        embed(backbone, pixels, batch_size=0)


def test_as_image_batch_keeps_the_colours_apart() -> None:
    red = np.zeros((1, 8, 10, 3), np.uint8)
    red[..., 0] = 255
    x = as_image_batch(red)
    assert x.shape == (1, 3, 8, 10) and x[:, 0].min() == 1 and x[:, 1:].max() == 0


# Weights


def assert_same(a: Backbone, b: Backbone) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(value, b.state_dict()[key]) for key, value in a.state_dict().items())


def fresh(seed: int = 1, **options: Any) -> Backbone:
    torch.manual_seed(seed)
    return create_backbone("resnet20", 10, **options)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".th"])
def test_state_round_trip(tmp_path: Path, suffix: str) -> None:
    source = fresh(mean=(0.1, 0.2, 0.3), embedding_size=20)
    source(torch.rand(4, 3, 16, 16))  # moves the statistics
    path = tmp_path / f"weights{suffix}"
    state = {key: value.contiguous() for key, value in source.state_dict().items()}
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    target = fresh(2, embedding_size=20)
    assert load_weights(target, path) is target
    assert_same(source, target)
    assert target.body.conv1.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("key", ["state_dict", "model", None])
@pytest.mark.parametrize("prefix", ["module.", ""])
@pytest.mark.parametrize("head", ["linear", "fc", "classifier.1"])
def test_names_of_the_bare_network(tmp_path: Path, key: str | None, prefix: str, head: str) -> None:
    """As in the public files: no buffers of step counts, 'module.' in front, another name for the head."""
    source = fresh()
    state = {prefix + name: value for name, value in source.body.state_dict().items() if "num_batches" not in name}
    state |= {f"{prefix}{head}.{name}": value for name, value in source.head.state_dict().items()}
    torch.save(state if key is None else {key: state, "best_prec1": 91.7}, tmp_path / "public.th")
    target = load_weights(fresh(2), tmp_path / "public.th")
    assert_same(source, target)


def test_weights_of_a_wrapped_module(tmp_path: Path) -> None:
    for form in ("tensor", "dict"):
        source = Tail(form)
        torch.save(source.state_dict(), tmp_path / "tail.pt")
        backbone = load_weights(wrap_backbone(Tail(form)), tmp_path / "tail.pt")
        x = torch.rand(2, 3, 32, 32)
        output = source.eval()(x)
        torch.testing.assert_close(backbone.eval()(x)[1], output if form == "tensor" else output["logits"])


class _Payload:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Payload, "ran", True)


def test_files_with_code_are_not_run(tmp_path: Path) -> None:
    torch.save({"state_dict": _Payload()}, tmp_path / "evil.pth")
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(_Payload(), protocol=2))
    for name in ("evil.pth", "evil.pkl"):
        with pytest.raises(UsageError, match=name):
            load_weights(fresh(), tmp_path / name)
    assert _Payload.ran is False


def test_wrong_weights_say_what_to_do_and_change_nothing(tmp_path: Path) -> None:
    target = fresh(1)
    before = copy.deepcopy(target)
    good = fresh(2).state_dict()
    cases: dict[str, tuple[Any, str]] = {
        "classes.pt": (create_backbone("resnet20", 100).state_dict(), "number of classes"),
        "other.pt": (create_backbone("resnet32", 10).state_dict(), "also holds"),
        "short.pt": ({key: value for key, value in good.items() if "layer3" not in key}, "lacks body.layer3.*more"),
        "headless.pt": (fresh(2).body.state_dict(), "lacks head.weight, head.bias"),
        "list.pt": ([1, 2], "no state dictionary"),
        "empty.pt": ({}, "no state dictionary"),
    }
    for name, (content, message) in cases.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(UsageError, match=message) as caught:
            load_weights(target, tmp_path / name)
        assert name in str(caught.value)
        assert_same(target, before)
    (tmp_path / "cut.pt").write_bytes((tmp_path / "other.pt").read_bytes()[:5000])
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\x00")
    for name in ("cut.pt", "cut.safetensors"):
        with pytest.raises(UsageError, match=name):
            load_weights(target, tmp_path / name)
    with pytest.raises(UsageError, match="no weights file"):
        load_weights(target, tmp_path / "absent.pt")
    assert_same(target, before)
