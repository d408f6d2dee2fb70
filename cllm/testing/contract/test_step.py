"""A step: which rows it takes, which logits it gives, in which order, and how long they last."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cllm.backend import Batch
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, Row, n_tokens_max, needs_slots


def alternating(*parts: list[Row]) -> list[Row]:
    """Mix the rows of several slots: one of each in turn, as long as they last."""
    mixed: list[Row] = []
    for i in range(max(map(len, parts))):
        mixed += [part[i] for part in parts if i < len(part)]
    return mixed


# --- shape ------------------------------------------------------------------------------------------------------------


def test_logits_are_float32_one_row_for_each_output(hand: Hand, plain: PlainTokens) -> None:
    batch = hand.write(hand.rows(0, plain.draw(5), Outputs.ALL))
    logits = hand.model.step(batch)
    assert isinstance(logits, np.ndarray)
    assert logits.dtype == np.float32
    assert logits.shape == (5, hand.model.vocabulary.n_tokens)


def test_logits_are_numbers(hand: Hand, plain: PlainTokens) -> None:
    logits = hand.alone(plain.draw(40))
    assert not np.isnan(logits).any()
    assert not np.isposinf(logits).any()
    assert np.isfinite(logits.max(axis=1)).all()


def test_a_step_without_outputs_gives_no_rows(hand: Hand, plain: PlainTokens) -> None:
    logits = hand.put(0, plain.draw(5), Outputs.NONE)
    assert logits.shape == (0, hand.model.vocabulary.n_tokens)


def test_a_step_without_outputs_computes_its_rows_all_the_same(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(10)
    expected = hand.alone(tokens)
    hand.put(0, tokens[:9], Outputs.NONE)
    near.check(hand.put(0, tokens[9:]), expected[9:])


def test_a_step_takes_as_many_rows_as_it_says(hand: Hand, plain: PlainTokens) -> None:
    n = hand.model.n_rows_max
    if n > n_tokens_max(hand.model):
        pytest.skip("one slot has no room for so many rows")
    assert hand.step(hand.rows(0, plain.draw(n))).shape[0] == 1


def test_every_row_of_a_full_step_may_be_an_output(hand: Hand, plain: PlainTokens, near: Near) -> None:
    n = min(hand.model.n_rows_max, n_tokens_max(hand.model), 256)
    tokens = plain.draw(n)
    expected = [hand.alone(tokens[: i + 1], Outputs.LAST)[-1] for i in range(0, n, max(n // 8, 1))]
    near.check(hand.step(hand.rows(0, tokens, Outputs.ALL))[:: max(n // 8, 1)], np.stack(expected))


# --- what logits depend on --------------------------------------------------------------------------------------------


def test_the_same_rows_give_the_same_logits(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(20)
    near.check(hand.alone(tokens), hand.alone(tokens))


def test_logits_depend_on_the_first_token_as_well_as_on_the_last(hand: Hand, plain: PlainTokens, near: Near) -> None:
    first, other, *rest = dict.fromkeys(plain.draw(12))
    expected = hand.alone([first, *rest])
    assert near.differs(hand.alone([other, *rest]), expected)
    assert near.differs(hand.alone([first, *rest[:-1], other]), expected)


def test_logits_depend_on_the_order_of_the_tokens(hand: Hand, plain: PlainTokens, near: Near) -> None:
    first, second, *rest = dict.fromkeys(plain.draw(12))
    assert near.differs(hand.alone([second, first, *rest]), hand.alone([first, second, *rest]))


def test_an_output_is_the_same_whether_or_not_other_rows_are_outputs(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(24)
    near.check(hand.alone(tokens, Outputs.LAST), hand.alone(tokens)[-1:])


@pytest.mark.parametrize("n_rows", [1, 3, 7, 20])
def test_a_prompt_in_pieces_gives_what_it_gives_whole(hand: Hand, plain: PlainTokens, near: Near, n_rows: int) -> None:
    tokens = plain.draw(40)
    expected = hand.alone(tokens)
    near.check(hand.put(0, tokens, Outputs.ALL, n_rows_max=n_rows), expected)


def test_generating_token_by_token_gives_what_the_whole_text_gives(hand: Hand, plain: PlainTokens, near: Near) -> None:
    prompt = plain.draw(24)
    logits = hand.put(0, prompt)
    steps = [logits, *hand.greedy(0, logits, 12)]
    tokens = list(hand.held(0))
    hand.drop(0)
    near.check(np.concatenate(steps), hand.alone(tokens)[len(prompt) - 1 :])


def test_a_second_turn_goes_on_from_the_first(hand: Hand, plain: PlainTokens, near: Near) -> None:
    logits = hand.put(0, plain.draw(24, seed=1))
    list(hand.greedy(0, logits, 6))
    hand.put(0, plain.draw(24, seed=2))
    second = hand.put(0, plain.draw(3, seed=3), Outputs.ALL)
    tokens = list(hand.held(0))
    hand.drop(0)
    near.check(second, hand.alone(tokens)[-3:])


# --- several slots in a step ------------------------------------------------------------------------------------------


def test_outputs_come_in_the_order_of_the_rows(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 3)
    texts = [plain.draw(n, seed=n) for n in (9, 4, 14)]
    expected = [hand.alone(text) for text in texts]
    rows = alternating(*(hand.rows(slot, text, Outputs.ALL) for slot, text in zip((2, 0, 1), texts, strict=True)))
    logits = hand.step(rows)
    near.check(logits, np.stack([expected[(2, 0, 1).index(row.slot)][row.position] for row in rows]))


def test_outputs_among_rows_that_are_none_keep_their_order(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 3)
    texts = [plain.draw(10, seed=seed) for seed in range(3)]
    expected = [hand.alone(text) for text in texts]
    rows = alternating(*(hand.rows(slot, text, Outputs.LAST) for slot, text in enumerate(texts)))
    rows = [Row(row.slot, row.token, row.position, row.is_output or (row.slot == 1 and row.position % 3 == 0)) for row in rows]
    near.check(hand.step(rows), np.stack([expected[row.slot][row.position] for row in rows if row.is_output]))


def test_a_prompts_rows_beside_a_generating_slot_change_neither(hand: Hand, plain: PlainTokens, near: Near) -> None:
    needs_slots(hand.model, 2)
    running, prompt = plain.draw(30, seed=1), plain.draw(21, seed=2)
    expected = hand.alone(running), hand.alone(prompt)
    hand.put(0, running[:20])
    for i in range(7):
        logits = hand.step(hand.rows(0, [running[20 + i]]) + hand.rows(1, prompt[3 * i : 3 * i + 3], Outputs.ALL))
        near.check(logits[:1], expected[0][20 + i : 21 + i])
        near.check(logits[1:], expected[1][3 * i : 3 * i + 3])


def test_slots_of_different_length_generate_together_as_each_does_alone(hand: Hand, plain: PlainTokens, near: Near) -> None:
    n = min(hand.model.n_slots, 4)
    texts = [plain.draw(5 + 9 * i, seed=i) for i in range(n)]
    expected = [hand.alone(text) for text in texts]
    for slot, text in enumerate(texts):
        hand.put(slot, text[:-4])
    for i in range(4):
        logits = hand.step([row for slot, text in enumerate(texts) for row in hand.rows(slot, [text[len(text) - 4 + i]])])
        near.check(logits, np.stack([expected[slot][len(text) - 4 + i] for slot, text in enumerate(texts)]))


def test_every_slot_may_be_in_one_step(hand: Hand, plain: PlainTokens, near: Near) -> None:
    n = min(hand.model.n_slots, hand.model.n_rows_max)
    texts = [plain.draw(1, seed=slot) for slot in range(n)]
    some = range(0, n, max(n // 6, 1))
    expected = [hand.alone(texts[slot])[0] for slot in some]
    logits = hand.step([row for slot in range(n) for row in hand.rows(slot, texts[slot])])
    near.check(logits[list(some)], np.stack(expected))


# --- the batch and the view -------------------------------------------------------------------------------------------


def test_only_the_first_rows_of_the_columns_count(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(6)
    expected = hand.alone(tokens)
    hand.write([Row(3, 1, 5, True)] * hand.model.n_rows_max)  # what an earlier step left there
    near.check(hand.put(0, tokens, Outputs.ALL), expected)


def test_a_batch_of_another_size_does_as_well(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(6)
    expected = hand.alone(tokens)
    small = Batch(6)
    near.check(hand.step(hand.rows(0, tokens[:3], Outputs.ALL), small), expected[:3])
    near.check(hand.step(hand.rows(0, tokens[3:], Outputs.ALL)), expected[3:])


def test_logits_may_be_written_to_without_consequence(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(6)
    expected = hand.alone(tokens)
    for token, row in zip(tokens, expected, strict=True):
        rows = hand.rows(0, [token])
        logits = hand.model.step(hand.write(rows))
        hand.held(0).append(token)
        near.check(logits, row[None])
        logits[:] = np.nan


def test_logits_last_until_the_next_call_whatever_the_vocabulary_is_asked(hand: Hand, plain: PlainTokens) -> None:
    logits = hand.model.step(hand.write(hand.rows(0, plain.draw(4), Outputs.ALL)))
    before = logits.copy()
    hand.model.vocabulary.tokenize("some text " * 500, add_special=True, parse_special=True)
    hand.model.vocabulary.token_bytes(0)
    assert np.array_equal(logits, before)


def test_steps_with_more_and_with_fewer_outputs_follow_each_other(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(40)
    expected = hand.alone(tokens)
    done = 0
    for n_rows, outputs in ((1, Outputs.ALL), (9, Outputs.ALL), (4, Outputs.NONE), (6, Outputs.LAST), (15, Outputs.ALL), (1, Outputs.ALL)):
        logits = hand.put(0, tokens[done : done + n_rows], outputs)
        done += n_rows
        near.check(logits, expected[done - len(logits) : done])


def test_calls_may_come_from_another_thread_each_time(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(8)
    expected = hand.alone(tokens)
    for i, token in enumerate(tokens):
        with ThreadPoolExecutor(1) as thread:
            near.check(thread.submit(hand.put, 0, [token]).result(), expected[i : i + 1])
