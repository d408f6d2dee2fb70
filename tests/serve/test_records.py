"""Which requests are remembered, for whom and how many."""

from __future__ import annotations

from cllm.engine.timeline import Timeline
from cllm.serve.records import Record, Records


def record(request_id: str, key: str = "", n: int = 1) -> Record:
    return Record(request_id, key, created=0, received_at=0.0, timelines=tuple(Timeline() for _ in range(n)))


def test_a_request_is_found_by_its_id_for_the_key_that_made_it() -> None:
    records = Records()
    mine = record("a", "key0")
    records.add(mine)
    assert records.find("a", "key0") is mine
    assert records.find("a", "key1") is None
    assert records.find("b", "key0") is None


def test_the_same_id_of_another_key_is_another_request() -> None:
    records = Records()
    mine, theirs = record("a", "key0"), record("a", "key1")
    records.add(mine)
    records.add(theirs)
    assert (records.find("a", "key0"), records.find("a", "key1")) == (mine, theirs)


def test_of_requests_with_the_same_id_the_last_one_is_known() -> None:
    records = Records(n_sequences_max=2)
    last = record("a")
    for one in (record("a"), record("a"), last, record("b")):
        records.add(one)
    assert records.find("a", "") is last


def test_the_oldest_make_room_for_as_many_sequences_as_come() -> None:
    records = Records(n_sequences_max=4)
    for request_id in "abcd":
        records.add(record(request_id))
    records.add(record("large", n=3))
    assert [bool(records.find(request_id, "")) for request_id in ("a", "b", "c", "d", "large")] == [False, False, False, True, True]


def test_the_requests_of_one_key_leave_those_of_another_alone() -> None:
    records = Records(n_sequences_max=6)
    mine = record("a", "few")
    records.add(mine)
    for i in range(20):
        records.add(record(str(i), "many", n=2))
    assert records.find("a", "few") is mine
    assert [bool(records.find(str(i), "many")) for i in range(16, 20)] == [False, False, True, True]


def test_the_request_that_comes_is_known_however_many_its_key_has_beside_others() -> None:
    records = Records(n_sequences_max=100)
    for letter in "abcdefghij":
        records.add(record(letter, letter, n=10))
    records.add(record("new", "another", n=16))
    assert records.find("new", "another") is not None
    assert sum(records.find(letter, letter) is not None for letter in "abcdefghij") == 8


def test_a_request_larger_than_the_bound_is_known_alone() -> None:
    records = Records(n_sequences_max=2)
    records.add(record("a"))
    records.add(record("large", n=5))
    assert records.find("a", "") is None
    assert records.find("large", "") is not None
