"""A model's context: its cells as llama.cpp has laid them out. It can be made anew while the weights stay."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs

from cllm.backend import KvLayout, ModelSpec
from cllm_llamacpp import settings
from cllm_llamacpp.abortflag import AbortFlag
from cllm_llamacpp.adapters import Adapters
from cllm_llamacpp.facts import Facts
from cllm_llamacpp.failure import load_failed
from cllm_llamacpp.library import LOG
from cllm_llamacpp.pages import give_back_zeros


@attrs.frozen(kw_only=True, eq=False)
class Context:
    """A context's handles, and the sizes that llama.cpp says it has, which are not always those asked for."""

    handle: Any
    memory: Any  # none for models that keep no cells
    layout: KvLayout
    n_cells: int
    n_cells_slot: int
    n_sequences: int  # slots, and spare ones
    n_rows_max: int
    cells_bytes: int  # of all that is kept of sequences; 0: llama.cpp did not say
    fixed_bytes: int  # of these, what has other cells than `n_cells_slot`: recurrent states, windows


@attrs.define(eq=False)
class Contexts:
    """Makes the context of one model. There is one at a time, since its cells may be most of the memory."""

    lib: Any
    model: Any
    facts: Facts
    adapters: Adapters
    abort: AbortFlag
    gpu: bool
    _handle: Any = None

    def make(self, spec: ModelSpec, *, free_bytes: int = 0) -> Context:
        """Free the context that there is and make one as `spec` says; `free_bytes` counts where that names no cells.

        Raises: LoadFailed, there is none then.
        """
        self.free()
        params = settings.context_params(self.lib, spec, self.facts, free_bytes=free_bytes, gpu=self.gpu)
        params.abort_callback, params.abort_callback_data = self.abort.callback, self.abort.address
        LOG.forget()
        self._handle = self.lib.llama_init_from_model(self.model, params) or None
        if self._handle is None:
            raise load_failed(spec.path, f"no memory for {params.n_ctx} cells")
        self._give_back_outputs(self._handle)
        self.adapters.activate(self._handle)
        return self._described(self._handle, settings.layout_of(spec))

    def _give_back_outputs(self, handle: Any) -> None:
        """The rows of logits that nobody has needed yet: llama.cpp clears one for each slot, of 256 with 152k tokens 148 MiB.

        On a GPU they may lie in memory that is not the process's own.
        """
        if not self.gpu:
            n_vocab = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
            address = ctypes.cast(self.lib.llama_get_logits(handle), ctypes.c_void_p).value
            give_back_zeros(address or 0, ctypes.sizeof(ctypes.c_float) * n_vocab * self.lib.llama_n_seq_max(handle))

    def free(self) -> None:
        """Free the context, if there is one."""
        handle, self._handle = self._handle, None
        if handle is not None:
            self.lib.llama_free(handle)

    def _described(self, handle: Any, layout: KvLayout) -> Context:
        lib = self.lib
        caches, n_cells_slot = LOG.last_caches(), lib.llama_n_ctx_seq(handle)
        return Context(
            handle=handle,
            memory=lib.llama_get_memory(handle),
            layout=layout,
            n_cells=lib.llama_n_ctx(handle),
            n_cells_slot=n_cells_slot,
            n_sequences=lib.llama_n_seq_max(handle),
            n_rows_max=lib.llama_n_batch(handle),
            cells_bytes=sum(cache.n_bytes for cache in caches),
            # Where all lies apart, as DeepSeek V4's, caches of a fraction of the cells grow with them, too: nobody knows what does not.
            fixed_bytes=0 if self.facts.lies_apart else sum(cache.n_bytes for cache in caches if cache.n_cells != n_cells_slot),
        )
