"""Takes a slot's content out of llama.cpp and back in."""

from __future__ import annotations

import ctypes
import struct
import zlib
from typing import Any, Final, Protocol

from cllm.backend import Capabilities
from cllm.errors import NoRoom, StepFailed
from cllm_llamacpp.facts import Facts
from cllm_llamacpp.library import LOG

_HEADER: Final = struct.Struct("<4sIQQ")  # magic, cells, the model's mark, bytes of llama.cpp's own data
_MAGIC: Final = b"cLs1"


class _Shape(Protocol):
    n_slots: int
    capabilities: Capabilities


class States:
    """Saved states carry a header: llama.cpp's own check of what it is given is an assertion in places."""

    def __init__(self, lib: Any, context: Any, facts: Facts, shape: _Shape) -> None:
        self._lib = lib
        self._context = context
        self._mark = _mark(facts, shape)

    def save(self, slot: int, n_cells: int) -> bytes:
        n_bytes = self._lib.llama_state_seq_get_size(self._context, slot)
        # Made at its full size and filled in place: a state has tens of megabytes, and a copy would cost as much as the save.
        state: bytes = _new_bytes(None, _HEADER.size + n_bytes)
        address = _address(state)
        ctypes.memmove(address, _HEADER.pack(_MAGIC, n_cells, self._mark, n_bytes), _HEADER.size)
        data = ctypes.cast(address + _HEADER.size, ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_get_data(self._context, data, n_bytes, slot) != n_bytes:
            raise StepFailed(f"llama.cpp did not save slot {slot}")
        return state

    def restore(self, slot: int, state: bytes) -> int:
        """Fill `slot` and return its number of cells."""
        n_cells, n_bytes = self._read_header(state)
        LOG.forget_errors()
        data = ctypes.cast(_address(state) + _HEADER.size, ctypes.POINTER(ctypes.c_uint8))
        if self._lib.llama_state_seq_set_data(self._context, data, n_bytes, slot) != n_bytes:
            self._raise(slot, n_cells)
        return n_cells

    def _raise(self, slot: int, n_cells: int) -> None:
        """llama.cpp returns 0 whatever went wrong; its log tells one case from the other."""
        self._lib.llama_memory_seq_rm(self._lib.llama_get_memory(self._context), slot, -1, -1)
        errors = " ".join(LOG.last_errors())
        if "available cells" in errors or "not enough cells" in errors:
            raise NoRoom(f"no room to restore {n_cells} cells")
        raise StepFailed("llama.cpp did not accept the state")

    def _read_header(self, state: bytes) -> tuple[int, int]:
        if len(state) < _HEADER.size:
            raise StepFailed("this is not a saved state")
        magic, n_cells, mark, n_bytes = _HEADER.unpack_from(state)
        if magic != _MAGIC or n_bytes != len(state) - _HEADER.size:
            raise StepFailed("this is not a saved state, or not a whole one")
        if mark != self._mark:
            raise StepFailed("the state was saved by another model, or with other settings")
        return n_cells, n_bytes


def _mark(facts: Facts, shape: _Shape) -> int:
    """Return a number that differs between models whose states do not fit each other."""
    info = facts.info
    text = f"{info.name}|{info.architecture}|{info.n_params}|{info.size_bytes}|{shape.capabilities.kv_layout}|{shape.n_slots}"
    return zlib.crc32(text.encode())


_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))
