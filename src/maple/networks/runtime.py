"""Settings of the machine that decide how fast networks run: glibc's allocator and native bfloat16."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

import torch

_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16"}  # of /proc/cpuinfo


def use_fast_allocator() -> bool:
    """Let glibc keep freed memory for the next training step; returns True if that worked (Linux with glibc).

    By default glibc maps each large tensor separately and unmaps it when freed, so the kernel zeroes the same pages
    step after step. With mmap off and no trimming, tensors come from a persistent heap, and the page faults end after
    a few steps. The gain depends on machine, tensor sizes and precision: from a few per cent to several times. The
    process keeps its peak memory until it ends. On other systems (macOS, Windows, musl) nothing happens. Repeated calls
    have no further effect.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "mallopt")):
        return False
    m_trim_threshold, m_mmap_max = -1, -4  # from <malloc.h>
    return bool(libc.mallopt(m_mmap_max, 0)) and bool(libc.mallopt(m_trim_threshold, 2**31 - 1))


def use_threads(n: int | None) -> None:
    """Let torch compute with ``n`` threads; None leaves as many as there are."""
    if n is not None:
        torch.set_num_threads(n)


def bfloat16_is_fast(device: str | None = None) -> bool:
    """Whether ``device`` ('cpu', 'cuda', ...; None: the GPU if there is one) computes natively in bfloat16.

    Without native instructions bfloat16 is emulated, and training is up to ten times slower than in float32.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    return device == "cpu" and not _BFLOAT16_FLAGS.isdisjoint(_cpu_flags())


def _cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """Instruction sets of the first processor; empty if the kernel does not list them."""
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError:
        return set()
    return set(found[1].split()) if found else set()
