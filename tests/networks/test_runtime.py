"""Allocator and detection of native bfloat16."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from maple.networks.runtime import _cpu_flags, bfloat16_is_fast, use_fast_allocator


def test_fast_allocator_is_idempotent_and_stops_page_faults() -> None:
    """In a process of its own: large blocks that were freed are reused without a page fault."""
    code = """
import resource, sys
import torch
from maple.networks.runtime import use_fast_allocator
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
    monkeypatch.setattr("maple.networks.runtime._cpu_flags", lambda: _cpu_flags(cpuinfo))
    assert bfloat16_is_fast("cpu") is fast
    assert bfloat16_is_fast("mps") is False
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bfloat16_is_fast() is fast
    assert bfloat16_is_fast("cuda") is False


def test_bfloat16_without_cpuinfo(tmp_path) -> None:
    assert _cpu_flags(tmp_path / "absent") == set()
