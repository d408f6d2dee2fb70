"""Takes a slot's content out of llama.cpp and back in."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any, Final

from cllm.errors import NoRoom, StepFailed
from cllm_llamacpp.library import LOG

_HEADER: Final = struct.Struct("<4sIIIQ")  # magic, position of the first cell, cells, the model's mark, bytes of llama.cpp's own data
_MAGIC: Final = b"cLs2"


class States:
    """Saved states carry a header: llama.cpp's own check of what it is given is an assertion in places.

    llama.cpp saves and restores whole sequences only. A part goes by way of the `spare` sequence, which is empty otherwise and
    shares the cells meanwhile: that costs a look at every cell's description, and no copy.
    """

    def __init__(self, lib: Any, context: Any, fingerprint: str, *, spare: int | None) -> None:
        self._lib = lib
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._mark = zlib.crc32(fingerprint.encode())
        self._spare = spare

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
        # Made at its full size and filled in place: a state has tens of megabytes, and a copy would cost as much as the save.
        state: bytes = _new_bytes(None, _HEADER.size + n_bytes)
        address = _address(state)
        ctypes.memmove(address, _HEADER.pack(_MAGIC, start, n_cells, self._mark, n_bytes), _HEADER.size)
        data = ctypes.cast(address + _HEADER.size, ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_get_data(self._context, data, n_bytes, slot) != n_bytes:
            raise StepFailed(f"llama.cpp did not save slot {slot}")
        return state

    def restore(self, slot: int, n_held: int, state: bytes) -> int:
        """Append `state` to the `n_held` cells of `slot`; return how many it has then."""
        start, n_cells = self._read_header(state)
        if start != n_held:
            raise StepFailed(f"slot {slot} has {n_held} cells, the state was saved behind {start}")
        if not start:
            self._restore(slot, state, n_cells)
        elif n_cells:
            spare = self._borrow()
            self._restore(spare, state, n_cells)
            self._lib.llama_memory_seq_cp(self._memory, spare, slot, start, -1)
            self._empty(spare)
        return start + n_cells

    def _restore(self, slot: int, state: bytes, n_cells: int) -> None:
        LOG.forget_errors()
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

    def _borrow(self) -> int:
        if self._spare is None:
            raise StepFailed("this memory saves and restores whole slots only")
        return self._spare

    def _empty(self, slot: int) -> None:
        self._lib.llama_memory_seq_rm(self._memory, slot, -1, -1)

    def _read_header(self, state: bytes) -> tuple[int, int]:
        if len(state) < _HEADER.size:
            raise StepFailed("this is not a saved state")
        magic, start, n_cells, mark, n_bytes = _HEADER.unpack_from(state)
        if magic != _MAGIC or n_bytes != len(state) - _HEADER.size:
            raise StepFailed("this is not a saved state, or not a whole one")
        if mark != self._mark:
            raise StepFailed("the state was saved by another model, or with other settings")
        return start, n_cells


_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
