"""Memory that was only ever cleared, given back to the kernel."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Final

_DONTNEED: Final = 4  # MADV_DONTNEED in Linux's <asm-generic/mman-common.h>


def give_back_zeros(address: int, n_bytes: int) -> None:
    """Let the kernel have the whole pages of private memory of the process that holds nothing but zeros; they are zeros again once touched.

    What cannot be given back, as locked memory, stays. Linux alone promises zeros; elsewhere nothing is done.
    """
    if sys.platform != "linux" or not address:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), ctypes.c_int(_DONTNEED))
