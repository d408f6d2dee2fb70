"""A deterministic model without weights, for tests of everything above the seam.

It keeps the tokens of every slot and draws its logits from a hash of them, so that any mistake about slots, cells or positions changes the
text, and it refuses what the contract forbids.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Callable
from typing import TypeAlias

import attrs
import numpy as np

from cllm.backend import (
    CONTRACT_VERSION,
    Batch,
    Capabilities,
    Embedder,
    InfillTokens,
    KvLayout,
    Logits,
    ModelInfo,
    ModelSpec,
    OnProgress,
    Probe,
    StepModel,
    Vocabulary,
)
from cllm.errors import Aborted, LoadAborted, NoRoom, StepFailed

BOS, END_OF_TURN, TURN = 256, 257, 258  # after the 256 bytes
INFILL = InfillTokens(prefix=259, suffix=260, middle=261)  # where asked for
SPECIAL = {BOS: b"<bos>", END_OF_TURN: b"<end>", TURN: b"<turn>"}
N_TOKENS_LEAST = 259
N_ROWS_OF_LOGITS = 509  # prime: the hash picks one of so many prepared rows
HASH_FACTOR, HASH_MASK = 6364136223846793005, (1 << 64) - 1
N_STREAMS = 8  # slots in the streams layout, unless it is said how many sequences run at once
STATE_MAGIC, STATE_HEADER = b"fake", struct.Struct("<4sIII")  # magic, mark of the layout, position of the first cell, cells
STATE_CELL = np.dtype([("token", "<i4"), ("hash", "<u8")])

TEMPLATE = (
    "{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)


class FakeVocabulary:
    """One token for each byte, then `<bos>`, `<end>` (ends a turn), `<turn>`, then as many without text as are asked for.

    With `infills`, the first three of these are the fill-in-the-middle tokens.
    """

    def __init__(self, n_tokens: int = N_TOKENS_LEAST, *, infills: bool = False) -> None:
        assert n_tokens >= N_TOKENS_LEAST + (3 if infills else 0)
        self.infill = INFILL if infills else None
        self.n_tokens = n_tokens
        self.bos: int | None = BOS
        self.eos: int | None = END_OF_TURN
        self.end_tokens = frozenset({END_OF_TURN})
        self.adds_bos = True
        self.chat_template: str | None = TEMPLATE
        self.tool_template: str | None = None

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """One token a byte; `<bos>`, `<end>` and `<turn>` are read as such where asked for."""
        tokens = [BOS] if add_special else []
        if not parse_special:
            return tokens + list(text.encode("utf-8", "replace"))
        rest = text.encode("utf-8", "replace")
        while rest:
            for token, name in SPECIAL.items():
                if rest.startswith(name):
                    tokens.append(token)
                    rest = rest[len(name) :]
                    break
            else:
                tokens.append(rest[0])
                rest = rest[1:]
        return tokens

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """The byte, or for a special token its name where asked for; nothing for the others."""
        if not 0 <= token < self.n_tokens:
            raise IndexError(token)
        if token < 256:
            return bytes((token,))
        return SPECIAL.get(token, b"") if special else b""


@attrs.define(eq=False)
class _Cell:
    token: int
    hash: int  # of the prefix up to and including the token
    n_slots: int = 1  # that have it


_Slot: TypeAlias = list[_Cell]


def _hash(slot: _Slot, token: int) -> int:
    last = slot[-1].hash if slot else 0x9E3779B97F4A7C15
    return ((last ^ (token + 1)) * HASH_FACTOR + 1442695040888963407) & HASH_MASK


class FakeModel:
    """A `StepModel` whose next token is a function of the whole sequence.

    `step_s(batch)` gives the seconds that a step pretends to take, unless it is aborted where `can_abort`; `before_step` may raise, to
    make a step fail. It never draws a token that ends the turn unless `n_tokens_to_end` is given: then about one in so many does.
    Without `can_trim`, its memory is like a recurrent one: slots are copied whole, unless it is without `can_copy`, and dropped whole.
    Without `can_save`, they stay where they are. Where it `lays_out`, it takes either layout; `before_lay_out` may raise LoadFailed or
    ModelDied. If it `carries_states`, whole ones that were saved in one layout fit the other.
    """

    def __init__(
        self,
        *,
        n_cells: int = 4096,
        n_slots: int = 256,
        n_rows_max: int = 2048,
        n_tokens: int = N_TOKENS_LEAST,
        n_tokens_to_end: int | None = None,
        n_ctx_train: int = 4096,
        kv_layout: KvLayout = KvLayout.UNIFIED,
        can_trim: bool = True,
        can_save: bool = True,
        can_abort: bool = False,
        can_copy: bool = True,
        lays_out: bool = False,
        carries_states: bool = True,
        step_s: Callable[[Batch], float] | None = None,
        before_step: Callable[[Batch], None] | None = None,
        before_lay_out: Callable[[KvLayout, int], None] | None = None,
    ) -> None:
        self.vocabulary: Vocabulary = FakeVocabulary(n_tokens)
        self.info = ModelInfo(name="fake", architecture="fake", n_params=0, size_bytes=0, n_ctx_train=n_ctx_train, n_embd=0)
        self.capabilities = Capabilities(  # from a command line they come as numbers
            can_share=False, can_trim=bool(can_trim), can_save=bool(can_save), can_abort=bool(can_abort), can_copy=bool(can_copy)
        )
        self.layouts = frozenset((KvLayout.UNIFIED, KvLayout.STREAMS) if lays_out else (kv_layout,))
        self.carries_states = carries_states
        self.n_cells = n_cells
        self.n_rows_max = n_rows_max
        self.n_steps = 0
        self.n_aborts = 0
        self._aborted = threading.Event()
        self.before_step = before_step
        self.before_lay_out = before_lay_out
        self._step_s = step_s
        self._n_slots_at_load = n_slots
        self._lay_out(kv_layout, n_slots)
        self._n_tokens_to_end = n_tokens_to_end
        self._table = self._logits_table(n_tokens)
        self._logits = np.empty((n_rows_max if n_tokens < 1024 else min(n_rows_max, 256), n_tokens), np.float32)

    # --- the contract -------------------------------------------------------------------------------------------------

    def step(self, batch: Batch) -> Logits:
        """See `StepModel.step`."""
        self._aborted.clear()
        if self.before_step is not None:
            self.before_step(batch)
        n = batch.n_rows
        self._check(batch)
        self.n_steps += 1
        if self._step_s is not None:
            self._pretend(self._step_s(batch))  # before any cell is filled, so that an aborted step leaves the memory as it was
        out = self._logits[: batch.n_outputs]
        i = 0
        rows = zip(batch.tokens[:n].tolist(), batch.slots[:n].tolist(), batch.outputs[:n].tolist(), strict=True)
        for token, slot, wants_output in rows:
            cell = self._extend(self._slots[slot], token)
            if wants_output:
                self._write(out[i], cell.hash)
                i += 1
        return out

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """See `StepModel.share`."""
        origin, copy = self._slot(source), self._slot(target)
        if copy or not 0 <= n_tokens <= len(origin):
            raise StepFailed(f"slot {target} is not empty, or slot {source} has no {n_tokens} cells")
        can = self.capabilities
        if not can.can_share and (n_tokens != len(origin) or not can.can_copy):
            raise StepFailed("this slot, or a part of it, cannot be shared")
        if not can.can_share and self._pooled and self._n_cells_used + n_tokens > self.n_cells:
            raise NoRoom(f"no room for a copy of {n_tokens} cells")
        for cell in origin[:n_tokens]:
            if can.can_share:
                cell.n_slots += 1
                copy.append(cell)
            else:
                self._extend(copy, cell.token)

    def trim(self, slot: int, n_keep: int) -> None:
        """See `StepModel.trim`."""
        if n_keep < 0:
            raise StepFailed("a slot keeps no fewer than 0 cells")
        cells = self._slot(slot)
        if 0 < n_keep < len(cells) and not self.capabilities.can_trim:
            raise StepFailed("this memory cannot be trimmed, only dropped")
        for cell in cells[n_keep:]:
            cell.n_slots -= 1
            if not cell.n_slots:
                self._n_cells_used -= 1
        del cells[n_keep:]

    def drop(self, slot: int) -> None:
        """See `StepModel.drop`."""
        self.trim(slot, 0)

    def save(self, slot: int, start: int = 0) -> bytes:
        """See `StepModel.save`. As in a real model, a state's cells depend on the tokens before them, which it does not contain."""
        self._check_can_save()
        cells = self._slot(slot)
        if not 0 <= start <= len(cells) or (start and not self.capabilities.can_save_part):
            raise StepFailed(f"slot {slot} cannot be saved from {start} on")
        saved = np.array([(cell.token, cell.hash) for cell in cells[start:]], STATE_CELL)
        return STATE_HEADER.pack(STATE_MAGIC, self._mark, start, len(saved)) + saved.tobytes()

    def restore(self, slot: int, state: bytes) -> None:
        """See `StepModel.restore`."""
        self._check_can_save()
        cells = self._slot(slot)
        start, saved = _read_state(state, self._mark)
        if len(cells) != start:
            raise StepFailed(f"slot {slot} has {len(cells)} cells, the state was saved behind {start}")
        if start and not self.capabilities.can_save_part:
            raise StepFailed("this memory restores whole slots only")
        if start + len(saved) > self.n_cells_slot or len(saved) > self.n_cells - self._n_cells_used:
            raise NoRoom("the state needs more cells than are free")
        cells += [_Cell(token, hash_) for token, hash_ in saved]
        self._n_cells_used += len(saved)

    def abort(self) -> None:
        """See `StepModel.abort`; only the time that a step pretends to take can be cut short."""
        self.n_aborts += 1
        self._aborted.set()

    def close(self) -> None:
        """See `StepModel.close`."""
        self._slots.clear()

    def make_embedder(self, spec: ModelSpec) -> Embedder:
        """See `Embeds.make_embedder`."""
        from cllm.testing.fake_embedder import embedder_of

        return embedder_of(spec)

    def lay_out(self, layout: KvLayout, n_slots: int) -> None:
        """See `LaysOut.lay_out`. In either layout it has all its cells."""
        if layout not in self.layouts:
            raise StepFailed(f"this memory cannot be laid out as {layout.value}")
        for slot in range(self.n_slots):
            self.drop(slot)
        if self.before_lay_out is not None:
            self.before_lay_out(layout, n_slots)
        self._lay_out(layout, self._n_slots_at_load if layout is KvLayout.UNIFIED else max(1, min(n_slots, self.n_cells)))

    # --- for tests ----------------------------------------------------------------------------------------------------

    @property
    def n_cells_used(self) -> int:
        """Cells that hold a token; one that slots share counts once."""
        return self._n_cells_used

    def slot_tokens(self, slot: int) -> list[int]:
        """The tokens that a slot holds."""
        return [cell.token for cell in self._slot(slot)]

    # --- how it works -------------------------------------------------------------------------------------------------

    def _lay_out(self, layout: KvLayout, n_slots: int) -> None:
        pooled, can = layout is KvLayout.UNIFIED, self.capabilities
        self.capabilities = attrs.evolve(
            can, can_share=pooled and can.can_trim, can_save_part=pooled and can.can_trim and can.can_save, kv_layout=layout
        )
        self.info = attrs.evolve(self.info, fingerprint="fake" if self.carries_states else f"fake {layout.value} {n_slots}")
        self.n_slots = n_slots
        self.n_cells_slot = self.n_cells if pooled else self.n_cells // n_slots
        self._mark = zlib.crc32(self.info.fingerprint.encode())
        self._pooled = pooled
        self._slots: list[_Slot] = [[] for _ in range(n_slots)]
        self._n_cells_used = 0

    def _slot(self, slot: int) -> _Slot:
        if not 0 <= slot < len(self._slots):
            raise StepFailed(f"slot {slot} is not one of {len(self._slots)}")
        return self._slots[slot]

    def _check_can_save(self) -> None:
        if not self.capabilities.can_save:
            raise StepFailed("this memory cannot be saved")

    def _extend(self, slot: _Slot, token: int) -> _Cell:
        cell = _Cell(token, _hash(slot, token))
        slot.append(cell)
        self._n_cells_used += 1
        return cell

    def _pretend(self, seconds: float) -> None:
        if not self.capabilities.can_abort:
            time.sleep(seconds)
        elif self._aborted.wait(seconds):
            raise Aborted("the step was aborted")

    def _check(self, batch: Batch) -> None:
        n = batch.n_rows
        if not 0 < n <= self.n_rows_max:
            raise StepFailed(f"a step has 1 to {self.n_rows_max} rows, not {n}")
        if int(np.count_nonzero(batch.outputs[:n])) != batch.n_outputs:
            raise StepFailed("n_outputs is not the number of outputs")
        if batch.tokens[:n].view(np.uint32).max() >= self.vocabulary.n_tokens:  # seen as unsigned, a negative number is a large one
            raise StepFailed(f"a token is not below {self.vocabulary.n_tokens}")
        lengths: dict[int, int] = {}
        for slot, position in zip(batch.slots[:n].tolist(), batch.positions[:n].tolist(), strict=True):
            expected = lengths.get(slot)
            if expected is None:
                expected = len(self._slot(slot))
            if position != expected:
                raise StepFailed(f"inconsistent sequence positions: slot {slot} goes on at {expected}, not at {position}")
            lengths[slot] = expected + 1
        n_new_max = self.n_cells - self._n_cells_used
        if n > n_new_max or max(lengths.values()) > self.n_cells_slot:
            raise NoRoom(f"{n} rows, {n_new_max} free cells")

    def _write(self, row: Logits, value: int) -> None:
        row[:] = self._table[value % N_ROWS_OF_LOGITS]
        if self._n_tokens_to_end is not None and (value >> 32) % self._n_tokens_to_end == 0:
            row[END_OF_TURN] = 30.0

    @staticmethod
    def _logits_table(n_tokens: int) -> Logits:
        table = np.random.default_rng(20240607).normal(0.0, 2.0, (N_ROWS_OF_LOGITS, n_tokens)).astype(np.float32)
        table[:, :32] -= 20.0  # mostly text that a person can read
        table[:, 127:256] -= 8.0
        table[:, 256:N_TOKENS_LEAST] = -30.0
        return table


def _read_state(state: bytes, mark: int) -> tuple[int, list[tuple[int, int]]]:
    """Return where the state's first cell stands, and its (token, hash) pairs."""
    if len(state) < STATE_HEADER.size:
        raise StepFailed("this is not a saved state")
    magic, mark_then, start, n_cells = STATE_HEADER.unpack_from(state)
    if magic != STATE_MAGIC or len(state) != STATE_HEADER.size + STATE_CELL.itemsize * n_cells:
        raise StepFailed("this is not a saved state, or not a whole one")
    if mark_then != mark:
        raise StepFailed("the state was saved in another layout")
    saved: list[tuple[int, int]] = np.frombuffer(state, STATE_CELL, offset=STATE_HEADER.size).tolist()
    return start, saved


class FakeBackend:
    """A backend that gives `FakeModel`s; `options` of the spec are its keyword arguments, as integers. With `draws`, they draw tokens."""

    contract_version = CONTRACT_VERSION

    def probe(self) -> Probe:
        """Always available, only by name."""
        return Probe(available=True, reason="a model without weights, for tests")

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        """Give a `FakeModel`. See `Backend.load`."""
        for progress in (0.0, 0.5, 1.0):
            if not on_progress(progress):
                raise LoadAborted("the load was asked to stop")
        chosen: dict[str, int] = {name: int(value) for name, value in spec.options.items()}
        if spec.n_cells is not None:
            chosen["n_cells"] = spec.n_cells
        layout = KvLayout.UNIFIED if spec.kv_layout is KvLayout.AUTO else spec.kv_layout
        if layout is KvLayout.STREAMS:
            chosen.setdefault("n_slots", spec.n_live or N_STREAMS)
        return _model_class(draws=bool(chosen.pop("draws", 0)))(n_rows_max=spec.n_rows_max, kv_layout=layout, **chosen)  # type: ignore[arg-type]

    def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Embedder:
        """Give a `FakeEmbedder`. See `LoadsEmbedders.load_embedder`."""
        from cllm.testing.fake_embedder import embedder_of

        if not on_progress(1.0):
            raise LoadAborted("the load was asked to stop")
        return embedder_of(spec)


def _model_class(*, draws: bool) -> type[FakeModel]:
    from cllm.testing.fake_drawing import DrawingFakeModel

    return DrawingFakeModel if draws else FakeModel


def make_backend() -> FakeBackend:
    """What an entry point names."""
    return FakeBackend()
