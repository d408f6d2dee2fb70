"""Takes a slot's content out of llama.cpp and back in."""

from __future__ import annotations

import ctypes
import mmap
import struct
import zlib
from typing import Any, Final

import attrs

from cllm.errors import NoRoom, StepFailed
from cllm_llamacpp.library import LOG

_HEADER: Final = struct.Struct("<4sIIIHHQ")  # magic, position of the first cell, cells, the model's mark, `_Form`, bytes of the data
_MAGIC: Final = b"cLs3"
_N_BYTES_HUGE: Final = 4 << 20  # of less, few pages would be whole ones
_HEAD: Final = 8  # bytes of llama.cpp's own data before the number of streams: a magic number, and whose it was
_COUNT: Final = struct.Struct("<I")


@attrs.frozen
class _Form:
    """How llama.cpp wrote a slot's data: behind the number of its streams is, for each, the number of cells there, and these behind it.

    A slot's cells are all in one stream, `place`; of the others the data has a 0 each.
    """

    n_streams: int
    place: int


@attrs.frozen
class _Header:
    start: int  # position of the first cell
    n_cells: int
    form: _Form


class States:
    """Saved states carry a header: llama.cpp's own check of what it is given is an assertion in places.

    llama.cpp saves and restores whole sequences only. A part goes by way of the `spare` sequence, which is empty otherwise and
    shares the cells meanwhile: that costs a look at every cell's description, and no copy.

    With `n_streams`, slots have their cells in so many streams, each in its own or all in one, and a state from position 0 on fits whatever
    their number was when it was saved; None: the memory is not of that kind, and states stay what they are.
    """

    def __init__(self, lib: Any, context: Any, fingerprint: str, *, spare: int | None, n_streams: int | None) -> None:
        self._lib = lib
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._mark = zlib.crc32(fingerprint.encode())
        self._spare = spare
        self._n_streams = n_streams

    def save(self, slot: int, start: int, n_cells: int) -> bytes:
        """Return the state of `slot` from `start` on, which are `n_cells` cells."""
        if not start:
            return self._save(slot, 0, n_cells)
        spare = self._borrow()
        self._lib.llama_memory_seq_cp(self._memory, slot, spare, start, -1)
        try:
            return self._save(spare, start, n_cells)
        finally:
            self._empty(spare)

    def _save(self, slot: int, start: int, n_cells: int) -> bytes:
        n_bytes = self._lib.llama_state_seq_get_size(self._context, slot)
        if not n_bytes:  # whatever went wrong; and so many would be written, which would look like success
            raise StepFailed(f"llama.cpp did not say how large the state of slot {slot} is")
        # Made at its full size and filled in place: a state has tens of megabytes, and a copy would cost as much as the save.
        state: bytes = _new_bytes(None, _HEADER.size + n_bytes)
        address = _address(state)
        _in_huge_pages(address, len(state))
        form = self._form_of(slot)
        header = _HEADER.pack(_MAGIC, start, n_cells, self._mark, form.n_streams, form.place, n_bytes)
        ctypes.memmove(address, header, _HEADER.size)
        data = ctypes.cast(address + _HEADER.size, ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_get_data(self._context, data, n_bytes, slot) != n_bytes:
            raise StepFailed(f"llama.cpp did not save slot {slot}")
        return state

    def restore(self, slot: int, n_held: int, state: bytes) -> int:
        """Append `state` to the `n_held` cells of `slot`; return how many it has then."""
        header = self._read_header(state)
        start, n_cells = header.start, header.n_cells
        if start != n_held:
            raise StepFailed(f"slot {slot} has {n_held} cells, the state was saved behind {start}")
        if self._n_streams is not None and header.form.n_streams != self._n_streams:
            state = _for_streams(state, header.form, self._n_streams)
        if not start:
            self._restore(slot, state, n_cells)
        elif n_cells:
            spare = self._borrow()
            self._restore(spare, state, n_cells)
            self._lib.llama_memory_seq_cp(self._memory, spare, slot, start, -1)
            self._empty(spare)
        return start + n_cells

    def _restore(self, slot: int, state: bytes, n_cells: int) -> None:
        LOG.forget()
        n_bytes = len(state) - _HEADER.size
        data = ctypes.cast(_address(state) + _HEADER.size, ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_set_data(self._context, data, n_bytes, slot) != n_bytes:
            self._raise(slot, n_cells)

    def _raise(self, slot: int, n_cells: int) -> None:
        """llama.cpp returns 0 whatever went wrong; its log tells one case from the other."""
        self._empty(slot)
        errors = " ".join(LOG.last_errors())
        if "available cells" in errors or "not enough cells" in errors:
            raise NoRoom(f"no room to restore {n_cells} cells")
        raise StepFailed("llama.cpp did not accept the state")

    def _form_of(self, slot: int) -> _Form:
        n_streams = self._n_streams or 0
        return _Form(n_streams, slot if n_streams > 1 else 0)

    def _borrow(self) -> int:
        if self._spare is None:
            raise StepFailed("this memory saves and restores whole slots only")
        return self._spare

    def _empty(self, slot: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def _read_header(self, state: bytes) -> _Header:
        if len(state) < _HEADER.size:
            raise StepFailed("this is not a saved state")
        magic, start, n_cells, mark, n_streams, place, n_bytes = _HEADER.unpack_from(state)
        if magic != _MAGIC or n_bytes != len(state) - _HEADER.size or not n_bytes:
            raise StepFailed("this is not a saved state, or not a whole one")
        if mark != self._mark:
            raise StepFailed("the state was saved by another model, or with other settings")
        return _Header(start, n_cells, _Form(n_streams, place))


def _for_streams(state: bytes, form: _Form, n_streams: int) -> bytes:
    """Return a state as a memory of so many streams would have saved it; its cells stay what they are. Raises: StepFailed."""
    head_end = _HEADER.size + _HEAD
    counts_at = head_end + _COUNT.size
    cells_at = counts_at + _COUNT.size * form.place
    cells_end = len(state) - _COUNT.size * (form.n_streams - 1 - form.place)
    n_others = (cells_at - counts_at) + (len(state) - cells_end)
    data = memoryview(state)
    is_as_known = (
        0 <= form.place < form.n_streams
        and cells_end >= cells_at + _COUNT.size
        and _COUNT.unpack_from(state, head_end) == (form.n_streams,)
        and not any(data[counts_at:cells_at])
        and not any(data[cells_end:])
    )
    if not is_as_known:
        raise StepFailed("the state was saved in another form")
    n_bytes = len(state) - _HEADER.size - n_others + _COUNT.size * (n_streams - 1)
    magic, start, n_cells, mark, *_ = _HEADER.unpack_from(state)
    header = _HEADER.pack(magic, start, n_cells, mark, n_streams, 0, n_bytes)
    head = (header, data[_HEADER.size : head_end], _COUNT.pack(n_streams))
    return b"".join((*head, data[cells_at:cells_end], bytes(_COUNT.size * (n_streams - 1))))


def _in_huge_pages(address: int, n_bytes: int) -> None:
    """Ask for large pages for memory that is written at once: 200 MiB took 20 ms in place of 90. Where there are none, nothing happens."""
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + n_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise is not None and end - start >= _N_BYTES_HUGE:
        _madvise(start, end - start, mmap.MADV_HUGEPAGE)


def _find_madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # of Linux alone
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise


_madvise = _find_madvise()
_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
