"""A model loaded by llama.cpp: computes rows, and moves slots' cells."""

from __future__ import annotations

from contextlib import ExitStack
from typing import NoReturn

import attrs
import numpy as np

from cllm.backend import Batch, Capabilities, Embedder, Int32s, KvLayout, Logits, ModelSpec, Vocabulary
from cllm.errors import Aborted, LoadFailed, ModelDied, NoRoom, StepFailed
from cllm_llamacpp import settings
from cllm_llamacpp.batch import BatchPointers
from cllm_llamacpp.codes import ABORTED, INVALID, NO_ROOM, check_alive
from cllm_llamacpp.context import Context
from cllm_llamacpp.embedder import N_TOKENS_BESIDE, make_embedder
from cllm_llamacpp.facts import Facts
from cllm_llamacpp.fingerprint import fingerprint, mark_of_files
from cllm_llamacpp.native import Native
from cllm_llamacpp.outputs import LogitsViews
from cllm_llamacpp.state import States
from cllm_llamacpp.vocabulary import LlamaVocabulary


class LlamaModel:
    """See `cllm.backend.StepModel`; what follows is said there less exactly.

    Memory after errors. After NoRoom, and after a StepFailed for a batch that llama.cpp refused, all slots are as they were. After
    Aborted or a failed computation, the batch's slots have the cells they had before the step, or none where the memory cannot be
    trimmed. A failed computation with recurrent memory is ModelDied: their states lie among each other and move within the graph,
    so that no slot can be vouched for. So it is on a GPU: where a command failed there (Metal), every further one does.

    An abort counts for the step that runs when it comes. One that comes earlier is lost, also if the step's call is already on its
    way: better to finish a step than to stop one that nobody meant.
    """

    def __init__(self, native: Native, context: Context, facts: Facts, spec: ModelSpec, *, gpu: bool) -> None:
        lib = native.lib
        self._native: Native | None = native
        self._facts = facts
        self._spec = spec  # as it was loaded
        self._gpu = gpu
        self._lib = lib
        self._abort = native.abort
        self._why_dead = ""
        self._vocabulary = LlamaVocabulary(lib, native.model, facts.info.metadata.get("tokenizer.ggml.pre", ""))
        self.vocabulary: Vocabulary = self._vocabulary
        self.layouts = settings.layouts_of(spec, facts, gpu=gpu)
        self.carries_states = facts.keeps_all and facts.n_ctx_unscaled is None and not facts.has_two_caches
        self.n_rows_max = context.n_rows_max
        self._n_cells_at_load = context.n_cells
        self._mark_of_files = mark_of_files(spec)
        self._ramp = np.arange(self.n_rows_max)
        self._pointers = BatchPointers(lib)
        self._take(context, spec)

    def _take(self, context: Context, spec: ModelSpec) -> None:
        """Go on with the cells of `context`, all of them free, which was made as `spec` says."""
        facts, layout = self._facts, context.layout
        self._laid_out = spec
        self._context = context.handle
        self._memory = context.memory
        self.capabilities = _capabilities(facts, layout, gpu=self._gpu)
        self.n_cells = context.n_cells
        self.n_cells_slot = context.n_cells_slot
        self.n_slots = context.n_sequences - settings.N_SPARE if self.capabilities.can_save_part else context.n_sequences
        mark = fingerprint(self._mark_of_files, spec, facts, n_slots=self.n_slots, n_cells_slot=self.n_cells_slot, gpu=self._gpu)
        cells_bytes = context.cells_bytes or int(settings.bytes_per_cell(spec, facts) * self.n_cells)
        threads = f"{self._lib.llama_n_threads(context.handle)} and {self._lib.llama_n_threads_batch(context.handle)} threads"
        self.info = attrs.evolve(
            facts.info,
            fingerprint=mark,
            cells_bytes=cells_bytes,
            fixed_bytes=context.fixed_bytes,
            build=f"{facts.info.build} {threads}",
        )
        # Cells of a window are shared until one of the sharers frees them, and meanwhile cannot be overwritten: copies do not run full.
        self._shares_cells = layout is KvLayout.UNIFIED and not (facts.has_window or facts.lies_apart)
        self._n_rows_fitting = context.n_rows_max  # fewer than at load where there are fewer cells than a step may have rows
        self._lengths: Int32s = np.zeros(self.n_slots, np.int32)  # cells of each slot
        self._views = LogitsViews(self._lib, context.handle, self.vocabulary.n_tokens)
        self._states = States(
            self._lib,
            context.handle,
            mark,
            spare=self.n_slots if self.capabilities.can_save_part else None,
            n_streams=(self.n_slots if layout is KvLayout.STREAMS else 1) if facts.keeps_all else None,
        )

    # --- a step ---

    def step(self, batch: Batch) -> Logits:
        self._check_open()
        lengths = self._checked_lengths(batch)
        self._abort.clear()
        code = self._lib.llama_decode(self._context, self._pointers.of(batch).first(batch.n_rows))
        if code != 0:
            self._raise(code, batch)
        self._lengths = lengths
        logits = self._views.of(batch.n_outputs)
        if suppressed := self._vocabulary.suppressed:
            logits[:, suppressed] = -np.inf
        return logits

    def warm_up(self) -> None:
        """Compute two rows, which brings the weights into memory, and see that it gives numbers, and can be trimmed where it says so.

        Raises: StepFailed.
        """
        n = min(2, self.n_rows_max)
        batch = Batch(n)
        batch.n_rows, batch.n_outputs = n, 1
        batch.positions[:] = range(n)
        batch.outputs[n - 1] = 1
        if not np.isfinite(self.step(batch)).any():  # each answer would fail, of a model that says that it is ready
            raise StepFailed("its logits are not numbers: the file is damaged, or was converted badly")
        if self.capabilities.can_trim:
            self.trim(0, 1)
        self.drop(0)

    def abort(self) -> None:
        if self.capabilities.can_abort:
            self._abort.set()

    def _checked_lengths(self, batch: Batch) -> Int32s:
        """Return what the slots' lengths are after this step.

        What llama.cpp answers with an assertion, or with wrong numbers, is a StepFailed here: a mistake of the caller, which must not
        end the process.
        """
        n = batch.n_rows
        if not 0 < n <= self.n_rows_max:
            raise StepFailed(f"a step takes 1 to {self.n_rows_max} rows, not {n}")
        if n > self._n_rows_fitting:
            raise NoRoom(f"no room for {n} rows")
        if n == 1:
            return self._checked_length(batch)
        slots, positions = batch.slots[:n], batch.positions[:n]
        # Seen as unsigned, a negative number is a large one.
        if slots.view(np.uint32).max() >= self.n_slots:
            raise StepFailed(f"a slot is not below {self.n_slots}")
        if batch.tokens[:n].view(np.uint32).max() >= self.vocabulary.n_tokens:
            raise StepFailed(f"a token is not below {self.vocabulary.n_tokens}")
        if np.count_nonzero(batch.outputs[:n]) != batch.n_outputs:
            raise StepFailed("n_outputs is not the number of rows that are outputs")
        counts = np.bincount(slots, minlength=self.n_slots)
        # Sorted by slot, row i of a slot whose rows start at s has position length + (i - s).
        order = slots.argsort(kind="stable")
        bases = self._lengths - (counts.cumsum() - counts)
        if not np.array_equal(positions[order] - bases[slots[order]], self._ramp[:n]):
            raise StepFailed("a row's position does not go on from its slot's cells")
        lengths: Int32s = self._lengths + counts.astype(np.int32)
        return lengths

    def _checked_length(self, batch: Batch) -> Int32s:
        """The same for one row, without twelve calls of NumPy, for which a model has left nothing in the caches."""
        slot = int(batch.slots[0])
        if not 0 <= slot < self.n_slots:
            raise StepFailed(f"a slot is not below {self.n_slots}")
        if not 0 <= int(batch.tokens[0]) < self.vocabulary.n_tokens:
            raise StepFailed(f"a token is not below {self.vocabulary.n_tokens}")
        if bool(batch.outputs[0]) != batch.n_outputs:
            raise StepFailed("n_outputs is not the number of rows that are outputs")
        if batch.positions[0] != self._lengths[slot]:
            raise StepFailed("a row's position does not go on from its slot's cells")
        lengths = self._lengths.copy()
        lengths[slot] += 1
        return lengths

    def _raise(self, code: int, batch: Batch) -> NoReturn:
        if code == NO_ROOM:
            raise NoRoom(f"no room for {batch.n_rows} rows")
        if code == INVALID:
            raise StepFailed("llama.cpp refused the batch")
        check_alive(code, has_recurrent_state=self._facts.has_recurrent_state, gpu=self._gpu)
        for slot in np.unique(batch.slots[: batch.n_rows]).tolist():
            self._cut(slot, int(self._lengths[slot]))
        if code == ABORTED:
            raise Aborted("the step was aborted")
        raise StepFailed(f"llama.cpp failed with code {code}")

    # --- slots ---

    def share(self, source: int, target: int, n_tokens: int) -> None:
        self._check_slots(source, target)
        n_source = int(self._lengths[source])
        if self._lengths[target] or source == target:
            raise StepFailed(f"slot {target} is not empty")
        if not 0 <= n_tokens <= n_source:
            raise StepFailed(f"slot {source} has {n_source} cells, {n_tokens} cannot be shared")
        if n_tokens < n_source and not self.capabilities.can_share:
            raise StepFailed("this memory shares whole slots only")
        if n_tokens == 0:
            return
        if self._shares_cells:
            end = -1 if n_tokens == n_source else n_tokens
            self._lib.llama_memory_seq_cp(self._memory, source, target, 0, end)
            self._lengths[target] = n_tokens
        else:
            self.restore(target, self.save(source))

    def trim(self, slot: int, n_keep: int) -> None:
        self._check_slots(slot)
        if n_keep < 0:
            raise StepFailed(f"{n_keep} cells cannot be kept")
        if n_keep >= self._lengths[slot]:
            return
        if n_keep and not self.capabilities.can_trim:
            raise StepFailed("this memory cannot be trimmed, only dropped")
        self._cut(slot, n_keep)

    def drop(self, slot: int) -> None:
        self._check_slots(slot)
        self._cut(slot, 0)

    def save(self, slot: int, start: int = 0) -> bytes:
        self._check_slots(slot)
        n_cells = int(self._lengths[slot])
        if not 0 <= start <= n_cells:
            raise StepFailed(f"slot {slot} has {n_cells} cells, it cannot be saved from {start} on")
        return self._states.save(slot, start, n_cells - start)

    def restore(self, slot: int, state: bytes) -> None:
        self._check_slots(slot)
        self._lengths[slot] = self._states.restore(slot, int(self._lengths[slot]), state)

    def _cut(self, slot: int, n_keep: int) -> None:
        """Free the cells from `n_keep` on; all of them where the memory cannot be trimmed."""
        if not self.capabilities.can_trim:
            n_keep = 0
        if not self._lib.llama_memory_seq_rm(self._memory, slot, n_keep or -1, -1):
            raise StepFailed(f"llama.cpp did not trim slot {slot} to {n_keep} cells")
        self._lengths[slot] = n_keep

    # --- all of them ---

    def lay_out(self, layout: KvLayout, n_slots: int) -> None:
        self._check_open()
        if layout not in self.layouts:
            raise StepFailed(f"this memory cannot be laid out as {layout.value}")
        before = self._laid_out
        try:
            self._remake(settings.laid_out(self._spec, layout, n_slots, self._n_cells_at_load))
        except LoadFailed:
            self._restore_layout(before)
            raise

    # The cells are freed before the new ones are made, for they may be most of the memory. So a failure costs what was in them.

    def _remake(self, spec: ModelSpec) -> None:
        assert self._native is not None
        self._take(self._native.contexts.make(spec), spec)

    def _restore_layout(self, spec: ModelSpec) -> None:
        try:
            self._remake(attrs.evolve(spec, n_cells=self.n_cells))
        except LoadFailed as error:
            self._why_dead = f"no cells are left after an attempt to lay them out anew: {error}"
            raise ModelDied(self._why_dead) from error

    # --- beside it ---

    def make_embedder(self, spec: ModelSpec) -> Embedder:
        self._check_open()
        assert self._native is not None
        with ExitStack() as parts:
            native, words = self._native, self._vocabulary
            adapters = native.contexts.adapters
            embedder = make_embedder(
                self._lib, native.model, self._facts, spec, words, adapters, parts, n_usual=N_TOKENS_BESIDE, gpu=self._gpu
            )
            embedder.own(parts.pop_all())
            return embedder

    # --- its end ---

    def close(self) -> None:
        if self._native is None:
            return
        native, self._native = self._native, None
        self._why_dead = "the model is closed"
        self._vocabulary.close()
        native.parts.close()

    def _check_open(self) -> None:
        if self._why_dead:
            raise ModelDied(self._why_dead)

    def _check_slots(self, *slots: int) -> None:
        self._check_open()
        for slot in slots:
            if not 0 <= slot < self.n_slots:
                raise StepFailed(f"slot {slot} is not one of {self.n_slots}")


def _capabilities(facts: Facts, layout: KvLayout, *, gpu: bool) -> Capabilities:
    """Say what the memory can do.

    Windows: cells that slid out are overwritten as neighbours need room, so that an earlier length is not there any more. Recurrent
    states know only their latest position. An aborted step leaves them half moved: with two of six slots in the batch, 26 of 58 aborts
    spoiled one that was not.
    """
    return Capabilities(
        can_share=facts.keeps_all and layout is KvLayout.UNIFIED,
        can_trim=facts.keeps_all,
        can_save=True,
        can_save_part=facts.keeps_all and layout is KvLayout.UNIFIED,
        can_copy=True,
        can_abort=not gpu and not facts.has_recurrent_state,
        kv_layout=layout,
    )
