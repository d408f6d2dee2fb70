"""How often what was left is asked for again."""

from __future__ import annotations

import random

from cllm.engine.memory.demand import N_AT_FIRST, N_BRANCHES_MAX, SHARE_AT_FIRST, Demand

KEY = ("", "")


def tokens_of(number: int, n_tokens: int = 80) -> list[int]:
    return random.Random(number).choices(range(50_000), k=n_tokens)


def test_before_anything_is_known_the_share_is_the_guess() -> None:
    assert Demand().share == SHARE_AT_FIRST


def test_where_every_prompt_is_new_the_share_falls_towards_nothing() -> None:
    demand = Demand()
    for number in range(200):
        demand.came(KEY, tokens_of(number, 32))
        demand.left(KEY, tokens_of(number))
    assert demand.share < 0.01


def test_where_conversations_go_on_the_share_rises_to_nearly_all() -> None:
    demand = Demand()
    histories = [tokens_of(number) for number in range(8)]
    for turn in range(12):
        for number, history in enumerate(histories):
            demand.came(KEY, history)
            history += tokens_of(1000 * turn + number, 40)
            demand.left(KEY, history)
    assert demand.share > 0.8


def test_a_change_of_the_work_is_noticed_within_some_fifty_branches() -> None:
    demand = Demand()
    for number in range(500):
        demand.left(KEY, tokens_of(number))
    for number in range(450, 500):
        demand.came(KEY, tokens_of(number))
        demand.left(KEY, tokens_of(1000 + number))
    assert demand.share > 0.4


def test_one_branch_counts_once_however_many_begin_with_it() -> None:
    demand = Demand()
    demand.left(KEY, tokens_of(1))
    before = demand.share
    demand.came(KEY, tokens_of(1))
    once = demand.share
    demand.came(KEY, tokens_of(1))
    assert before < once == demand.share


def test_what_another_tenant_left_is_nobodys() -> None:
    demand = Demand()
    demand.left(("salt", ""), tokens_of(1))
    before = demand.share
    demand.came(KEY, tokens_of(1))
    assert demand.share == before


def test_a_beginning_in_common_is_not_the_branch() -> None:
    demand = Demand()
    common = tokens_of(0, 20)
    demand.left(KEY, common + tokens_of(1))
    before = demand.share
    demand.came(KEY, common + tokens_of(2))
    assert demand.share == before


def test_what_is_remembered_is_bounded() -> None:
    demand = Demand()
    for number in range(N_BRANCHES_MAX + 10):
        demand.left(KEY, [number] * 16)
    demand.came(KEY, [0] * 16)
    assert demand.share < N_AT_FIRST * SHARE_AT_FIRST / 40
