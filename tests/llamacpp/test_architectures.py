"""A sequence gets the same tokens alone and in company, whatever kind of memory the model has."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.testing.tiny import ARCHITECTURES

N_SEQUENCES = 4
N_TOKENS = 24


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sequences_that_come_and_go_get_the_tokens_they_get_alone(load, drive, some_tokens, layout, architecture):
    n_rows_physical = 64 if architecture == "gemma3" else 16  # a step is one piece where a window slides, else several here
    settings = {"kv_layout": layout, "n_live": N_SEQUENCES, "n_rows_physical": n_rows_physical}
    prompts = {slot: some_tokens(slot, 5 + 13 * slot) for slot in range(N_SEQUENCES)}
    alone = drive(load(architecture, **settings))
    expected = {}
    for slot, prompt in prompts.items():
        expected[slot] = alone.greedy({0: prompt}, N_TOKENS)[0]
        alone.drop(0)

    assert _continuous(drive(load(architecture, **settings)), prompts) == expected


def _continuous(driver, prompts):
    """Let sequence k enter at step 3k, its prompt in chunks of 7 beside the others' single rows, and leave when it is done."""
    pending = {slot: list(prompt) for slot, prompt in prompts.items()}
    found = {slot: [] for slot in prompts}
    for step in range(200):
        new = {}
        for slot in prompts:
            if step < 3 * slot or len(found[slot]) == N_TOKENS:
                continue
            new[slot], pending[slot] = pending[slot][:7], pending[slot][7:]
        if not new:
            return found
        for slot, row in zip(new, driver.feed(new), strict=True):
            if not pending[slot]:
                pending[slot] = [int(row.argmax())]
                found[slot] += pending[slot]
                if len(found[slot]) == N_TOKENS:
                    driver.drop(slot)
    raise AssertionError("the sequences did not end")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_follows_depends_on_what_came_first(load, drive, some_tokens, architecture):
    # Else the other tests would show nothing: the tiny models must look back.
    driver = drive(load(architecture, n_live=2))
    tail = some_tokens(1, 10)

    one, other = driver.feed({0: [3, *tail], 1: [4, *tail]})

    assert np.abs(one - other).max() > 0.01 * one.std()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_choices_stand_well_above_rounding(load, drive, some_tokens, architecture):
    logits = np.sort(drive(load(architecture, n_live=1)).feed({0: some_tokens(1, 300)}, outputs="all"), axis=1)
    margins = (logits[:, -1] - logits[:, -2]) / logits.std(axis=1)

    assert np.quantile(margins, 0.05) > 1e-3


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_default_settings_agree_with_exact_ones_up_to_rounding(load, drive, some_tokens, architecture):
    from cllm.backend import FlashAttention

    defaults = {"cache_type_k": "f16", "cache_type_v": "f16", "flash_attention": FlashAttention.AUTO, "n_live": 2}
    exact = drive(load(architecture, n_live=2)).feed({0: some_tokens(1, 100)}, outputs="all")

    found = drive(load(architecture, **defaults)).feed({0: some_tokens(1, 100)}, outputs="all")

    assert np.abs(found - exact).mean() < 0.02 * exact.std()
