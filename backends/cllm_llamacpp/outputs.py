"""Views of llama.cpp's logits, made once for each place and shape."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cllm.backend import Logits


class LogitsViews:
    """The logits lie in one buffer that llama.cpp replaces when a step has more outputs than any before it."""

    def __init__(self, lib: Any, context: Any, n_vocab: int) -> None:
        self._lib = lib
        self._context = context
        self._n_vocab = n_vocab
        self._get = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib.llama_cpp._lib))
        self._address = 0
        self._views: dict[int, Logits] = {}
        self._none: Logits = np.empty((0, n_vocab), np.float32)

    def of(self, n_outputs: int) -> Logits:
        """Wait for the computation's end, and return its outputs' logits in the order of the batch.

        llama.cpp computes outputs in the order of its own smaller batches and puts them right when it is asked for them.
        """
        if n_outputs == 0:
            self._lib.llama_synchronize(self._context)
            return self._none
        address = self._get(self._context)
        if address != self._address:
            self._views.clear()
            self._address = address
        view = self._views.get(n_outputs)
        if view is None:
            view = self._views[n_outputs] = self._view(n_outputs)
        return view

    def _view(self, n_outputs: int) -> Logits:
        floats = (ctypes.c_float * (n_outputs * self._n_vocab)).from_address(self._address)
        view: Logits = np.ctypeslib.as_array(floats).reshape(n_outputs, self._n_vocab)
        return view
