"""Points llama.cpp at the engine's batch columns, so that a step copies nothing."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cllm.backend import Batch


class BatchPointer:
    """A ``llama_batch`` whose columns are those of one `Batch`, which it keeps alive.

    Every row belongs to one sequence: n_seq_id is a column of ones, and row i's list of sequences is the address of ``slots[i]``.
    """

    def __init__(self, lib: Any, batch: Batch) -> None:
        n = len(batch.tokens)
        self.batch = batch
        self._ones = np.ones(n, np.int32)
        self._slot_addresses = batch.slots.ctypes.data + np.arange(n, dtype=np.uintp) * batch.slots.itemsize
        self._struct = lib.llama_batch(
            n_tokens=0,
            token=_pointer(batch.tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(batch.positions, ctypes.c_int32),
            n_seq_id=_pointer(self._ones, ctypes.c_int32),
            seq_id=_pointer(self._slot_addresses, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(batch.outputs, ctypes.c_int8),
        )

    def first(self, n_rows: int) -> Any:
        """Return the struct with its first `n_rows` rows in force."""
        self._struct.n_tokens = n_rows
        return self._struct


class BatchPointers:
    """Makes the pointers of a `Batch` once; an engine has one batch, or a few that it takes in turn."""

    _N_KEPT = 8

    def __init__(self, lib: Any) -> None:
        self._lib = lib
        self._made: dict[int, BatchPointer] = {}

    def of(self, batch: Batch) -> BatchPointer:
        pointer = self._made.get(id(batch))  # the pointer keeps its batch alive, so an id cannot come to mean another one
        if pointer is None:
            if len(self._made) >= self._N_KEPT:
                self._made.clear()
            pointer = self._made[id(batch)] = BatchPointer(self._lib, batch)
        return pointer


def _pointer(array: Any, element: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(element))
