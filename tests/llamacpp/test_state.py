"""Saved states, apart from what is in them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from cllm_llamacpp import state

SMAPS = Path("/proc/self/smaps")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # not there where the kernel was built without them
N_BYTES = 64 << 20


pytestmark = pytest.mark.skipif(
    not (hasattr(mmap, "MADV_HUGEPAGE") and SMAPS.exists() and HUGE_PAGES.exists()),
    reason="huge pages are asked for on Linux, which tells of them in smaps",
)


def test_memory_as_large_as_a_state_lies_in_huge_pages_where_there_are_any() -> None:
    # A mapping of its own: what the allocator gives may be where an earlier state was, which is so asked for already.
    with mmap.mmap(-1, N_BYTES) as blank:
        view = ctypes.c_char.from_buffer(blank)
        address = ctypes.addressof(view)
        assert "hg" not in flags_at(address + N_BYTES // 2)
        state._in_huge_pages(address, N_BYTES)
        assert "hg" in flags_at(address + N_BYTES // 2)
        del view


def test_a_state_is_asked_to_lie_in_huge_pages() -> None:
    blank = state._new_bytes(None, N_BYTES)
    address = state._address(blank)
    state._in_huge_pages(address, N_BYTES)
    assert "hg" in flags_at(address + N_BYTES // 2)
    assert len(blank) == N_BYTES


def flags_at(address: int) -> list[str]:
    """What the kernel says of the mapping that has this address."""
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", mapping)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            return mapping.partition("VmFlags:")[2].split()
    raise AssertionError("nothing is mapped there")
