"""Tokens that a model draws where its logits are, if it does."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from cllm.backend import Draw, Drawn, DrawsTokens
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, Row, needs_slots, only_read

WIDE = Draw(temperature=1.0, truncation_temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
LIKELIEST = Draw(temperature=1.0, truncation_temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
HOT = 1e4  # at which what is left is as good as equally likely
N_KEYS = 64


@pytest.fixture(autouse=True)
def _draws(hand: Hand) -> None:
    if not isinstance(hand.model, DrawsTokens):
        pytest.skip("this model draws no tokens")


def step_and_draw(hand: Hand, rows: list[Row], draws: Sequence[Draw | None], keys: Sequence[int]) -> Drawn:
    assert isinstance(hand.model, DrawsTokens)
    batch = hand.write(rows)
    with only_read(batch):
        drawn = hand.model.step_and_draw(batch, draws, np.array(keys, np.uint64))
    for row in rows:
        hand.held(row.slot).append(row.token)
    return drawn


def drawn_behind(hand: Hand, tokens: list[int], draw: Draw, keys: Sequence[int]) -> list[int]:
    """Draw with each key what follows `tokens`."""
    found = []
    for key in keys:
        drawn = step_and_draw(hand, hand.rows(0, tokens), [draw], [key])
        assert drawn.valid.tolist() == [True]
        assert drawn.logits.shape == (0, hand.model.vocabulary.n_tokens)
        found += drawn.tokens.tolist()
        hand.drop(0)
    return found


def some_keys(seed: int, n: int = N_KEYS) -> list[int]:
    keys: list[int] = np.random.default_rng(seed).integers(0, 1 << 64, n, np.uint64).tolist()
    return keys


def test_of_top_k_1_the_likeliest_token_is_drawn_whatever_the_key(hand: Hand, plain: PlainTokens) -> None:
    tokens = plain.draw(12)
    likeliest = int(hand.alone(tokens)[-1].argmax())
    assert set(drawn_behind(hand, tokens, LIKELIEST, some_keys(1, 8))) == {likeliest}


def test_outputs_without_a_draw_give_their_logits_in_order(hand: Hand, plain: PlainTokens, near: Near) -> None:
    tokens = plain.draw(6)
    expected = hand.alone(tokens)
    drawn = step_and_draw(hand, hand.rows(0, tokens, Outputs.ALL), [None, WIDE, None, LIKELIEST, WIDE, None], some_keys(2, 6))
    assert drawn.tokens.dtype == np.int32
    assert drawn.valid.dtype == np.bool_, "of bytes, ~ is no not"
    assert drawn.valid.tolist() == [True] * 3
    assert drawn.tokens[1] == expected[3].argmax()
    near.check(drawn.logits, expected[[0, 2, 5]])
    assert drawn.logits.dtype == np.float32
    assert drawn.logits.flags.writeable, "before a token is drawn from them, penalties and grammars are written into them"
    drawn.logits[:] = np.nan
    hand.drop(0)
    near.check(hand.alone(tokens), expected)


def test_a_key_draws_the_same_token_again_and_other_keys_draw_others(hand: Hand, plain: PlainTokens) -> None:
    tokens = plain.draw(12)
    drawn = drawn_behind(hand, tokens, attrs.evolve(WIDE, temperature=HOT), some_keys(3))
    assert drawn_behind(hand, tokens, attrs.evolve(WIDE, temperature=HOT), some_keys(3)) == drawn
    assert len(set(drawn)) > N_KEYS // 4


def test_the_temperature_says_how_often_the_likeliest_token_is_drawn(hand: Hand, plain: PlainTokens) -> None:
    ranked = []
    for seed in range(8):
        tokens = plain.draw(12, seed=seed)
        logits = np.sort(hand.alone(tokens)[-1].astype(np.float64))[::-1]
        ranked.append((float(logits[0] - logits[1]), tokens, logits - logits[0]))
    gap, tokens, below = max(ranked, key=lambda one: one[0])
    likeliest = int(hand.alone(tokens)[-1].argmax())
    assert set(drawn_behind(hand, tokens, attrs.evolve(WIDE, temperature=gap / 30), some_keys(6))) == {likeliest}
    low, high = gap / 30, HOT * max(gap, 1.0)
    for _ in range(100):  # half of all draws
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(below / middle).sum() < 2 else (low, middle)
    n = drawn_behind(hand, tokens, attrs.evolve(WIDE, temperature=low), some_keys(7)).count(likeliest)
    assert 0.2 * N_KEYS < n < 0.8 * N_KEYS, "five standard deviations"


def test_a_token_does_not_depend_on_what_else_is_in_the_batch(hand: Hand, plain: PlainTokens) -> None:
    needs_slots(hand.model, 3)
    tokens, keys = plain.draw(12), some_keys(4, 3)
    alone = drawn_behind(hand, tokens, WIDE, keys[1:2])
    rows = [*hand.rows(0, plain.draw(7)), *hand.rows(1, tokens), *hand.rows(2, plain.draw(9))]
    assert step_and_draw(hand, rows, [LIKELIEST, WIDE, WIDE], keys).tokens[1:2].tolist() == alone


def test_top_k_top_p_and_min_p_leave_the_likeliest_that_they_say(hand: Hand, plain: PlainTokens) -> None:
    tokens = plain.draw(12)
    logits = hand.alone(tokens)[-1].astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order] - logits[order[0]])
    hot = attrs.evolve(WIDE, temperature=HOT)
    cuts = {
        5: attrs.evolve(hot, top_k=5),
        4: attrs.evolve(hot, min_p=float(weights[3:5].mean())),
        3: attrs.evolve(hot, top_p=float((weights[:2].sum() + weights[2] / 2) / weights.sum())),
    }
    for n_left, draw in cuts.items():
        assert set(drawn_behind(hand, tokens, draw, some_keys(5))) == set(order[:n_left].tolist())


def test_tokens_are_cut_by_the_truncations_own_temperature(hand: Hand, plain: PlainTokens) -> None:
    """What is left at one temperature is drawn from at the other: by default clients set both, others the drawing's alone."""
    tokens = plain.draw(12)
    logits = hand.alone(tokens)[-1].astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    below = logits[order] - logits[order[0]]
    warmth = 4.0 * max(float(below[0] - below[4]), 1.0)  # at which five tokens are nearly alike
    weights = np.exp(below / warmth)
    hot = attrs.evolve(WIDE, temperature=HOT, truncation_temperature=warmth)
    cuts = {
        4: attrs.evolve(hot, min_p=float(weights[3:5].mean())),
        3: attrs.evolve(hot, top_p=float((weights[:2].sum() + weights[2] / 2) / weights.sum())),
        2: attrs.evolve(hot, top_k=5, top_p=float((weights[0] + weights[1] / 2) / weights[:5].sum())),  # the share is of what top_k leaves
    }
    for n_left, draw in cuts.items():
        assert set(drawn_behind(hand, tokens, draw, some_keys(5))) == set(order[:n_left].tolist())
