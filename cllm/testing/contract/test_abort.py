"""Aborts: from any thread, at any moment, before a step, in it and after it, and beside every other call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

import pytest

from cllm.backend import StepModel
from cllm.errors import Aborted
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, Row, n_tokens_max, needs_slots

N_ABORTS: Final = 10
N_TRIES: Final = 100  # to meet a step that may be a short one


def test_an_abort_when_nothing_runs_has_no_effect(model: StepModel, hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(8)
    model.abort()
    expected = hand.alone(tokens)
    model.abort()
    near.check(hand.alone(tokens), expected)


def test_an_abort_ends_a_step_with_aborted_or_comes_too_late_and_other_slots_are_as_they_were(
    hand: Hand, plain: PlainTokens, near: Near
) -> None:
    needs_slots(hand.model, 2)
    tokens = plain.draw(N_ABORTS + 10)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:10])
    for i in range(N_ABORTS):
        step_and_abort(hand, 1, plain.draw(_n_rows(hand.model), seed=i))
        near.check(hand.put(0, [tokens[10 + i]]), expected[10 + i : 11 + i])


def test_what_an_aborted_step_had_can_be_computed_again(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(_n_rows(hand.model))
    expected = hand.alone(tokens, Outputs.LAST)
    for _ in range(3):
        step_and_abort(hand, 0, tokens)
        near.check(hand.alone(tokens, Outputs.LAST), expected)


def test_an_aborted_step_leaves_its_slot_the_cells_that_it_had(hand: Hand, plain: PlainTokens, near: Near) -> None:
    can = hand.model.capabilities
    if not (can.can_abort and can.can_trim):
        pytest.skip("this model's steps run to their end, or its slots cannot be trimmed to what they had")
    tokens = plain.draw(_n_rows(hand.model))
    n_before = len(tokens) // 4
    expected = hand.alone(tokens, Outputs.LAST)
    for _ in range(N_ABORTS):
        hand.put(0, tokens[:n_before])
        if step_and_abort(hand, 0, tokens[n_before:], drops=False):
            near.check(hand.put(0, tokens[n_before:], Outputs.LAST), expected)
        hand.drop(0)


def test_an_aborted_step_of_several_slots_leaves_each_the_cells_that_it_had(hand: Hand, plain: PlainTokens, near: Near) -> None:
    can = hand.model.capabilities
    if not (can.can_abort and can.can_trim):
        pytest.skip("this model's steps run to their end, or its slots cannot be trimmed to what they had")
    needs_slots(hand.model, 3)
    n = min(_n_rows(hand.model) // 3, hand.model.n_cells // 4)
    prompts = [plain.draw(n, seed=slot) for slot in range(3)]
    expected = [hand.alone(tokens, Outputs.LAST) for tokens in prompts]
    for _ in range(N_ABORTS):
        for slot, tokens in enumerate(prompts):
            hand.put(slot, tokens[: n // 4])
        rows = [row for slot, tokens in enumerate(prompts) for row in hand.rows(slot, tokens[n // 4 :])]
        if aborted(hand, rows):
            for slot, tokens in enumerate(prompts):
                near.check(hand.put(slot, tokens[n // 4 :], Outputs.LAST), expected[slot])
        for slot in range(3):
            hand.drop(slot)


def test_a_model_that_says_that_it_can_be_aborted_can(hand: Hand, plain: PlainTokens) -> None:
    if not hand.model.capabilities.can_abort:
        pytest.skip("this model's steps run to their end")
    tokens = plain.draw(_n_rows(hand.model))
    assert any(step_and_abort(hand, 0, tokens) for _ in range(N_TRIES)), f"none of {N_TRIES} steps was"


def test_a_step_after_an_aborted_one_is_not_aborted_too(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(_n_rows(hand.model))
    expected = hand.alone(tokens, Outputs.LAST)
    for _ in range(N_ABORTS):
        step_and_abort(hand, 0, tokens)
        hand.model.abort()  # and once more, when it is over
        near.check(hand.alone(tokens, Outputs.LAST), expected)


def test_aborts_are_nothing_to_the_moves_of_memory(hand: Hand, plain: PlainTokens, near: Near) -> None:
    """A step alone can be aborted: whatever else runs, is done wholly."""
    needs_slots(hand.model, 3)
    can, tokens = hand.model.capabilities, plain.draw(30)
    expected = hand.alone(tokens)
    for slot in (0, 1):
        hand.put(slot, tokens[:20])
    with aborting(hand.model):
        hand.drop(1)
        if can.can_save:
            hand.restore(1, hand.model.save(0), tokens[:20])
        if can.can_share:
            hand.share(0, 2, 20)
        if can.can_trim:
            hand.trim(0, 12)
    for slot in range(3):
        n = len(hand.held(slot))
        near.check(hand.put(slot, tokens[n:], Outputs.ALL), expected[n:])


def step_and_abort(hand: Hand, slot: int, tokens: list[int], *, drops: bool = True) -> bool:
    """Abort a step while it runs, as far as that can be arranged; return whether it was aborted. With `drops`, its slot is empty then."""
    is_aborted = aborted(hand, hand.rows(slot, tokens))
    if drops:
        hand.drop(slot)
    return is_aborted


def aborted(hand: Hand, rows: list[Row]) -> bool:
    """The same of any rows, whose slots have what they have then."""
    batch = hand.write(rows)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(hand.model.step, batch)
        while not running.done():
            hand.model.abort()
        error = running.exception()
    assert error is None or isinstance(error, Aborted)
    assert error is None or hand.model.capabilities.can_abort, "it says that it cannot be aborted"
    return error is not None


@contextmanager
def aborting(model: StepModel) -> Iterator[None]:
    """Abort without end, in a thread."""
    done = threading.Event()

    def abort_on() -> None:
        while not done.is_set():
            model.abort()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(abort_on)
        try:
            yield
        finally:
            done.set()
        running.result()


def _n_rows(model: StepModel) -> int:
    return min(model.n_rows_max, n_tokens_max(model))
