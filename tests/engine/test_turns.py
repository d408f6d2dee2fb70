"""Keys take turns by what they were served, the lists of one key item by item, and what is put back goes first."""

from __future__ import annotations

import random

from cllm.engine.embedding.turns import Turns
from cllm.engine.waiting.fairness import Accounts


def taken(turns: Turns[str], n: int = 1000, cost: float = 1.0) -> list[str]:
    """Take so many items, if there are so many, each at `cost`."""
    items: list[str] = []
    while len(items) < n and (item := turns.first()) is not None:
        turns.take(cost)
        items.append(item)
    return items


def test_lists_of_one_key_take_turns_item_by_item() -> None:
    turns: Turns[str] = Turns(Accounts())
    turns.add("", ["a1", "a2", "a3"])
    turns.add("", ["b1"])
    assert taken(turns) == ["a1", "b1", "a2", "a3"]
    assert not turns


def test_keys_take_turns_by_what_their_items_cost_over_their_weights() -> None:
    turns: Turns[str] = Turns(Accounts({"heavy": 3.0}))
    turns.add("light", ["l"] * 40)
    turns.add("heavy", ["h"] * 40)
    first = taken(turns, 40)
    assert abs(first.count("h") - 30) <= 1
    assert len(turns) == 40


def test_what_is_put_back_goes_before_all_and_is_not_charged_again() -> None:
    turns: Turns[str] = Turns(Accounts())
    turns.add("one", ["a1", "a2"])
    turns.add("other", ["b1", "b2"])
    assert taken(turns, 1) == ["a1"]
    turns.put_back("a1")
    assert list(turns) == ["a1", "a2", "b1", "b2"]
    assert taken(turns) == ["a1", "b1", "a2", "b2"]


def test_lists_that_nobody_wants_any_more_go_and_cost_nothing() -> None:
    accounts = Accounts()
    turns: Turns[str] = Turns(accounts)
    turns.add("one", ["a1", "a2"])
    turns.add("one", ["b1"])
    turns.add("other", ["c1"])
    turns.put_back("d1")
    turns.keep(lambda item: item[0] in "bc")
    assert taken(turns) == ["b1", "c1"]
    assert all(account.n_waiting == 0 for account in accounts)


def test_whatever_comes_and_goes_every_item_has_one_turn() -> None:
    rng = random.Random(4)
    accounts = Accounts({"a": 2.0})
    turns: Turns[str] = Turns(accounts)
    added, had = [], []
    for n in range(300):
        key = rng.choice("abc")
        items = [f"{n}.{i}" for i in range(rng.randrange(1, 4))]
        turns.add(key, items)
        added += items
        had += taken(turns, rng.randrange(4), cost=rng.random())
    had += taken(turns)
    assert sorted(had) == sorted(added)
    assert all(account.n_waiting == 0 for account in accounts)
