"""Memory that was only ever cleared goes back to the kernel, and nothing else does."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from cllm_llamacpp.pages import give_back_zeros

N = 4 * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone promises zeros")
@pytest.mark.parametrize(("start", "end", "first", "last"), [(0, N, 0, 4), (1, N - 1, 1, 3), (1, mmap.PAGESIZE, 0, 0), (5, 4, 0, 0)])
def test_whole_pages_are_given_back_and_their_neighbours_stay(start: int, end: int, first: int, last: int) -> None:
    with mmap.mmap(-1, N, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = b"x" * N
        give_back_zeros(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + start, end - start)
        pages = [memory[place : place + mmap.PAGESIZE] for place in range(0, N, mmap.PAGESIZE)]
    assert [page == bytes(mmap.PAGESIZE) for page in pages] == [first <= number < last for number in range(4)]


def test_nothing_is_done_about_no_memory() -> None:
    give_back_zeros(0, N)
