"""Reading weight files safely."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from classifiers import Tail
from maple.errors import UsageError
from maple.networks import (
    Backbone,
    create_backbone,
    load_weights,
    wrap_backbone,
)


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
        "classes.pt": (create_backbone("resnet20", 100).state_dict(), "head"),
        "other.pt": (create_backbone("resnet32", 10).state_dict(), "other.pt"),
        "short.pt": ({key: value for key, value in good.items() if "layer3" not in key}, "body.layer3"),
        "headless.pt": (fresh(2).body.state_dict(), "head.weight, head.bias"),
        "list.pt": ([1, 2], "state_dict"),
        "empty.pt": ({}, "state_dict"),
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
    with pytest.raises(UsageError, match=r"absent.pt"):
        load_weights(target, tmp_path / "absent.pt")
    assert_same(target, before)
