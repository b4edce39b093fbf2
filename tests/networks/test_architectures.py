"""Networks: published parameter counts, any image size, shapes, initialisation; the two CPU helpers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from maple.errors import UsageError
from maple.networks.architectures import (
    NETWORKS,
    ConvBlock,
    Subsample,
    WideResNet,
    _cpu_flags,
    bfloat16_is_fast,
    create_network,
    use_fast_allocator,
)

SMALL = ["resnet9", "resnet18", "resnet20", "resnet56", "wrn-16-4", "efficientnet-b0"]


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("name", "embedding_size", "millions", "digits"),
    [
        ("resnet9", 128, 0.41, 2),
        ("resnet18", 512, 11.2, 1),
        ("resnet20", 64, 0.27, 2),  # He et al. 2016, table 6
        ("resnet32", 64, 0.46, 2),
        ("resnet44", 64, 0.66, 2),
        ("resnet56", 64, 0.85, 2),
        ("wrn-28-10", 640, 36.5, 1),  # Zagoruyko & Komodakis 2016, table 4
        ("wrn-40-4", 256, 8.9, 1),
        ("wrn-16-8", 512, 11.0, 1),
        ("wrn-40-1", 64, 0.6, 1),
    ],
)
def test_parameters_match_the_publications(name: str, embedding_size: int, millions: float, digits: int) -> None:
    with torch.device("meta"):
        network = create_network(name)
        head = nn.Linear(network.embedding_size, 10)
    assert network.embedding_size == embedding_size
    assert round((count(network) + count(head)) / 1e6, digits) == millions


def test_efficientnet_has_the_parameters_of_others() -> None:
    """torchvision's ``efficientnet_b0().features`` has 4,007,548."""
    with torch.device("meta"):
        assert count(create_network("efficientnet-b0")) == 4_007_548


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [8, 32, 64])
def test_any_image_size_gives_one_embedding_per_image(name: str, size: int) -> None:
    network = create_network(name).eval()
    with torch.no_grad():
        embedding = network(torch.randn(2, 3, size, size))
    assert embedding.shape == (2, network.embedding_size)
    assert embedding.dtype == torch.float32
    assert torch.isfinite(embedding).all()


@pytest.mark.parametrize("size", [8, 32, 64])
def test_wide_networks_take_any_image_size(size: int) -> None:
    with torch.device("meta"):
        assert create_network("wrn-28-10")(torch.empty(2, 3, size, size)).shape == (2, 640)


def test_images_need_not_be_square_nor_even() -> None:
    for name in ("resnet9", "resnet20", "wrn-10-1"):
        network = create_network(name).eval()
        assert network(torch.randn(2, 3, 21, 34)).shape == (2, network.embedding_size)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_receives_a_gradient_and_signals_keep_their_scale(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name)
    embedding = network(torch.randn(16, 3, 16, 16))
    assert 0.05 < embedding.std() < 20
    embedding.square().sum().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", SMALL)
def test_eval_mode_treats_images_one_by_one(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name).eval()
    x = torch.randn(4, 3, 16, 16)
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(row[None]) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_names_of_listed_networks_are_valid() -> None:
    with torch.device("meta"):
        for name in NETWORKS:
            assert create_network(name).embedding_size > 0


def test_cifar_resnets_have_the_names_of_the_public_files() -> None:
    keys = create_network("resnet20").state_dict().keys()
    assert {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "layer3.2.bn2.bias"} <= keys
    assert not any("shortcut" in key for key in keys)  # option A has no parameters


def test_option_a_shortcut_by_loop() -> None:
    x = torch.randn(2, 4, 6, 6)
    y = Subsample(4)(x)
    assert y.shape == (2, 8, 3, 3)
    for channel in range(8):
        for i in range(3):
            for j in range(3):
                expected = x[:, channel - 2, 2 * i, 2 * j] if 2 <= channel < 6 else torch.zeros(2)
                assert torch.equal(y[:, channel, i, j], expected)


def test_pooling_before_normalisation_equals_pooling_behind_it_in_eval_mode() -> None:
    """Maximum commutes with ReLU and with a rising affine map: the faster order computes the same function."""
    block = ConvBlock(3, 4, pool=True).eval()
    conv, pool, norm, relu, _ = block
    norm.running_mean.uniform_(-1, 1), norm.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(block(x.clone()), pool(relu(norm(conv(x)))))


@pytest.mark.parametrize("name", ["resnet9", "resnet20", "wrn-10-1"])
def test_dropout_is_there_and_off_until_someone_sets_it(name: str) -> None:
    torch.manual_seed(0)
    network = create_network(name)
    layers = [m for m in network.modules() if isinstance(m, nn.Dropout)]
    assert layers and all(layer.p == 0 for layer in layers)
    for layer in layers:
        layer.p = 0.5
    x = torch.randn(4, 3, 16, 16)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


def test_wide_depth_counts_its_convolutions() -> None:
    for depth in (10, 16, 28):
        layers = [m for m in WideResNet(depth, 1).modules() if isinstance(m, nn.Conv2d)]
        on_main_path = [m for m in layers if m.kernel_size == (3, 3)]
        assert len(on_main_path) + 3 == depth  # the paper counts three 1x1 shortcuts as well


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet21", "did you mean 'resnet"),
        ("zzzz", "known: .*resnet9"),
        ("wrn-27-10", r"6n \+ 4, such as 22 or 28"),
        ("wrn-4-1", r"6n \+ 4, such as 10 or 16"),
        ("wrn-28-0", "at least 1"),
        ("wrn-28", "did you mean 'wrn-28-10'"),
    ],
)
def test_unknown_names_say_what_to_do(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        create_network(name)


def test_fast_allocator_is_idempotent_and_stops_page_faults() -> None:
    """In a process of its own: large blocks that were freed are reused without a page fault."""
    code = """
import resource, sys
import torch
from maple.networks.architectures import use_fast_allocator
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
torch.set_num_threads(1)
slow = faults()
first, again = use_fast_allocator(), use_fast_allocator()
assert first == again
if first:
    fast = min(faults() for _ in range(6))  # the heap settles after a few blocks
    assert fast < slow / 5, (slow, fast)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_fast_allocator_is_silent_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert use_fast_allocator() is False


@pytest.mark.parametrize(
    ("flags", "fast"),
    [("fpu avx2 avx512f avx512_bf16", True), ("amx_tile amx_bf16", True), ("fpu avx2 avx512f avx512bw", False)],
)
def test_bfloat16_needs_native_instructions(tmp_path, monkeypatch, flags: str, fast: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: flags\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    assert _cpu_flags(cpuinfo) == set(flags.split())
    monkeypatch.setattr("maple.networks.architectures._cpu_flags", lambda: _cpu_flags(cpuinfo))
    assert bfloat16_is_fast("cpu") is fast
    assert bfloat16_is_fast("mps") is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bfloat16_is_fast() is fast
    assert bfloat16_is_fast("cuda") is False


def test_bfloat16_without_cpuinfo(tmp_path) -> None:
    assert _cpu_flags(tmp_path / "absent") == set()
