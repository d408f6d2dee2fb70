"""Feeds a model rows by hand, as the engine would, and compares logits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, Final

import attrs
import numpy as np
import numpy.typing as npt
import pytest

from cllm.backend import Batch, KvLayout, Logits, StepModel, Vocabulary
from cllm.errors import Aborted, ModelDied, NoRoom, StepFailed

N_CELLS_TO_FILL_MAX: Final = 8192  # more would take minutes on a real model


class Outputs(Enum):
    """Which of a part's rows are outputs."""

    NONE = "none"
    LAST = "last"
    ALL = "all"


@attrs.frozen
class Row:
    """One row as the batch's columns have it."""

    slot: int
    token: int
    position: int
    is_output: bool = False


class Hand:
    """Keeps count of what each slot holds, so that a test only says what comes next.

    Logits are given as copies: the model's own are valid only until its next call.
    """

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.batch = Batch(model.n_rows_max)
        self._held: dict[int, list[int]] = {}

    def held(self, slot: int) -> list[int]:
        """Return the tokens that `slot` holds."""
        return self._held.setdefault(slot, [])

    @property
    def n_held(self) -> int:
        """Tokens in all slots together."""
        return sum(len(tokens) for tokens in self._held.values())

    def rows(self, slot: int, tokens: Iterable[int], outputs: Outputs = Outputs.LAST) -> list[Row]:
        """Return the rows that go on from what `slot` holds."""
        tokens = list(tokens)
        start, last = len(self.held(slot)), len(tokens) - 1
        wanted = [outputs is Outputs.ALL or (outputs is Outputs.LAST and i == last) for i in range(len(tokens))]
        return [Row(slot, token, start + i, wanted[i]) for i, token in enumerate(tokens)]

    def write(self, rows: list[Row], batch: Batch | None = None) -> Batch:
        """Write `rows` into the columns."""
        batch = self.batch if batch is None else batch
        n = batch.n_rows = len(rows)
        batch.n_outputs = sum(row.is_output for row in rows)
        for i, row in enumerate(rows):
            batch.slots[i], batch.tokens[i], batch.positions[i], batch.outputs[i] = row.slot, row.token, row.position, row.is_output
        batch.slots[n:], batch.tokens[n:], batch.positions[n:], batch.outputs[n:] = -7, -7, -7, 1  # which nobody may look at
        return batch

    def step(self, rows: list[Row], batch: Batch | None = None) -> Logits:
        """Compute `rows` in one step; return the outputs' logits."""
        written = self.write(rows, batch)
        with only_read(written):
            logits = self.model.step(written).copy()
        for row in rows:
            self.held(row.slot).append(row.token)
        return logits

    def put(self, slot: int, tokens: Iterable[int], outputs: Outputs = Outputs.LAST, *, n_rows_max: int | None = None) -> Logits:
        """Compute `tokens` in as many steps as it takes; return the outputs' logits."""
        rows = self.rows(slot, tokens, outputs)
        n = n_rows_max or self.model.n_rows_max
        return np.concatenate([self.step(rows[i : i + n]) for i in range(0, len(rows), n)])

    def alone(self, tokens: Iterable[int], outputs: Outputs = Outputs.ALL) -> Logits:
        """Return the logits of `tokens` in a model that holds nothing else, and leave it empty."""
        assert not self.n_held, "then it would not be alone"
        logits = self.put(0, tokens, outputs)
        self.drop(0)
        return logits

    def share(self, source: int, target: int, n_tokens: int) -> None:
        """See `StepModel.share`."""
        self.model.share(source, target, n_tokens)
        self._held[target] = self.held(source)[:n_tokens]

    def trim(self, slot: int, n_keep: int) -> None:
        """See `StepModel.trim`."""
        self.model.trim(slot, n_keep)
        del self.held(slot)[n_keep:]

    def drop(self, slot: int) -> None:
        """See `StepModel.drop`."""
        self.model.drop(slot)
        self._held.pop(slot, None)

    def restore(self, slot: int, state: bytes, tokens: list[int]) -> None:
        """Restore a `state` of `tokens`, behind those that the slot holds."""
        self.model.restore(slot, state)
        self.held(slot).extend(tokens)

    def greedy(self, slot: int, logits: Logits, n_tokens: int) -> Iterator[Logits]:
        """Go on from `logits` by the likeliest token each time; yield the logits after each."""
        for _ in range(n_tokens):
            logits = self.put(slot, [int(logits[-1].argmax())])
            yield logits

    def fill(self, plain: PlainTokens, *, n_free: int, first_slot: int = 0) -> int:
        """Fill the slots from `first_slot` on, one after another, until `n_free` cells are left.

        Returns the slot that was last filled: there, and in one pool everywhere else too, one row more than `n_free` is no room.
        """
        n_owed, slot = self._n_fillable(first_slot) - n_free, first_slot
        while n_owed > 0:
            if slot >= self.model.n_slots:
                pytest.skip("its slots cannot take all cells within the trained context")
            n = min(n_owed, n_tokens_max(self.model) - len(self.held(slot)))
            if n:
                self.put(slot, plain.draw(n, seed=slot), Outputs.NONE)
            n_owed -= n
            if n_owed:
                slot += 1
        return slot

    def _n_fillable(self, first_slot: int) -> int:
        model = self.model
        if model.n_cells > N_CELLS_TO_FILL_MAX:
            pytest.skip(f"{model.n_cells} cells are too many to fill")
        if model.capabilities.kv_layout is not KvLayout.STREAMS:
            return model.n_cells - self.n_held
        return sum(model.n_cells_slot - len(self.held(slot)) for slot in range(first_slot, model.n_slots))


def n_tokens_max(model: StepModel) -> int:
    """Tokens of one sequence at most."""
    return min(model.n_cells_slot, model.info.n_ctx_train)


def are_pythons_own(*numbers: float) -> bool:
    """Whether none of them is one of numpy's, say, which the server cannot write as JSON."""
    return all(type(number) in (int, float) for number in numbers)


def needs_slots(model: StepModel, n_slots: int) -> None:
    """Skip a test that takes more slots than there are."""
    if model.n_slots < n_slots:
        pytest.skip(f"needs {n_slots} slots, the model has {model.n_slots}")


class PlainTokens:
    """Draws tokens of a vocabulary that are text; the same seed gives the same ones."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def draw(self, n_tokens: int, seed: int = 0) -> list[int]:
        rng = np.random.default_rng(seed)
        drawn: list[int] = []
        while len(drawn) < n_tokens:
            token = int(rng.integers(self._vocabulary.n_tokens))
            if self._vocabulary.token_bytes(token):
                drawn.append(token)
        return drawn


class PlainText:
    """Draws text, for models without a vocabulary; about as many tokens as asked for."""

    def draw(self, n_tokens: int, seed: int = 0) -> str:
        rng = np.random.default_rng(seed)
        return " ".join(str(word) for word in rng.integers(100, 999, n_tokens))


@attrs.frozen
class Near:
    """Compares logits row by row."""

    tolerance: float  # of the expected row's standard deviation

    def check(self, actual: Logits, expected: Logits) -> None:
        """Assert that they are equal, but for what arithmetic does to them in batches of different shape."""
        __tracebackhide__ = True
        assert actual.shape == expected.shape
        for i, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
            apart = self._apart(got, wanted)
            assert apart <= self.tolerance, (
                f"row {i}: logits differ by {apart:.3g} of their standard deviation, more than {self.tolerance}; "
                f"likeliest token {got.argmax()}, not {wanted.argmax()}"
            )

    def differs(self, one: Logits, other: Logits) -> bool:
        """Say whether the last rows of two answers are not those of the same text."""
        return self._apart(one[-1], other[-1]) > 10 * self.tolerance

    @staticmethod
    def _apart(one: Any, other: Any) -> float:
        finite: npt.NDArray[np.bool_] = np.isfinite(other)
        assert np.array_equal(finite, np.isfinite(one)), "other tokens are impossible"
        return float(np.abs(one[finite] - other[finite]).max() / other[finite].std())


@contextmanager
def only_read(batch: Batch) -> Iterator[None]:
    """Hold a step to reading its batch: the engine makes the next one from the same columns, while it runs."""
    names = ("slots", "tokens", "positions", "outputs")
    before = {name: getattr(batch, name)[: batch.n_rows].copy() for name in names}, batch.n_rows, batch.n_outputs
    yield
    after = {name: getattr(batch, name)[: batch.n_rows] for name in names}, batch.n_rows, batch.n_outputs
    assert after[1:] == before[1:], "the step has written to its batch: n_rows or n_outputs"
    changed = [name for name in names if not np.array_equal(before[0][name], after[0][name])]
    assert not changed, f"the step has written to its batch: {', '.join(changed)}"


@contextmanager
def refused() -> Iterator[None]:
    """What a model cannot do raises StepFailed, or something that the engine takes for it: any exception without a meaning of its own."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - that is the contract
        yield
    assert not isinstance(caught.value, NoRoom | Aborted | ModelDied), f"{caught.value!r} means something else"


@contextmanager
def denied() -> Iterator[None]:
    """What `Capabilities` rule out raises StepFailed by its name: the server tells it from a fault by what it said about itself."""
    with pytest.raises(StepFailed):
        yield
