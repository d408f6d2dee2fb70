"""Who is let into the queue: quotas, parts of a full queue, waits that are too long, and when a refused one is to come back."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cllm.engine.waiting.fairness import N_RECENT, Accounts, Work
from cllm.engine.waiting.gate import Gate, Newcomer, Service
from cllm.errors import DeadlineExceeded, QuotaExceeded, Unavailable


def make_gate(accounts: Accounts, service: Service | None = None, **changes: Any) -> Gate:
    fields: dict[str, Any] = {"n_waiting_max": 10, "wait_max_s": None, "caps": {}, "cap": None, **changes}
    return Gate(accounts, Service() if service is None else service, **fields)


def let_wait(accounts: Accounts, key: str, n: int, work: float = 100.0) -> None:
    for _ in range(n):
        accounts.wait(accounts.of(key), Work(work))


def working_at(rate: float) -> Service:
    service = Service()
    for _ in range(100):
        service.step(int(rate), 0, 1.0)
    return service


# --- quotas -----------------------------------------------------------------------------------------------------------


def test_a_key_may_have_as_many_under_way_as_its_cap_says() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, cap=3)
    let_wait(accounts, "k", 1)
    accounts.of("k").n_running = 1
    gate.check(Newcomer(key="k"))
    with pytest.raises(QuotaExceeded) as caught:
        gate.check(Newcomer(key="k", n_sequences=2))
    assert caught.value.retry_after_s >= 1


def test_a_cap_of_its_own_goes_before_that_of_all_keys() -> None:
    gate = make_gate(Accounts(), caps={"large": 5}, cap=1)
    gate.check(Newcomer(key="large", n_sequences=5))
    with pytest.raises(QuotaExceeded):
        gate.check(Newcomer(key="other", n_sequences=2))


def test_who_is_over_his_quota_is_told_when_one_of_his_own_will_have_ended() -> None:
    accounts, service = Accounts(), working_at(100)
    for _ in range(100):
        service.answer(50)  # 100 in tokens of a prompt: one second each, four at once in four seconds
    accounts.of("k").n_running = accounts.of("other").n_running = 2
    with pytest.raises(QuotaExceeded) as caught:
        make_gate(accounts, service, cap=2).check(Newcomer(key="k"))
    assert caught.value.retry_after_s == pytest.approx(4 / 3)


# --- the queue's size -------------------------------------------------------------------------------------------------


def test_a_full_queue_refuses() -> None:
    accounts = Accounts()
    gate = make_gate(accounts)
    let_wait(accounts, "k", 9)
    gate.check(Newcomer(key="k"))
    with pytest.raises(Unavailable) as caught:
        gate.check(Newcomer(key="k", n_sequences=2))
    assert caught.value.code == "queue_full"


def test_who_was_let_in_has_room_in_the_queue_while_the_prompt_is_read() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, cap=20)
    let_wait(accounts, "k", 5)
    accounts.of("k").n_coming = 5
    with pytest.raises(Unavailable) as caught:
        gate.check(Newcomer(key="k"))
    assert caught.value.code == "queue_full"
    accounts.of("other").n_coming = 20
    with pytest.raises(QuotaExceeded):
        gate.check(Newcomer(key="other"))


def test_who_finds_the_queue_full_is_told_to_come_when_half_of_what_runs_is_done_too() -> None:
    accounts, service = Accounts(), working_at(100)
    for _ in range(100):
        service.answer(500)  # 1000 in tokens of a prompt: ten seconds
    gate = make_gate(accounts, service, n_waiting_max=1)
    let_wait(accounts, "k", 1, work=300.0)
    accounts.of("k").n_running = 2
    with pytest.raises(Unavailable) as caught:
        gate.check(Newcomer(key="k"))
    assert caught.value.retry_after_s == pytest.approx(3 + 2 * 10 / 2)


def test_keys_count_as_asking_as_long_as_one_of_the_last_sequences_is_theirs() -> None:
    accounts = Accounts()
    let_wait(accounts, "now and then", 1)
    let_wait(accounts, "always", N_RECENT - 1)
    assert accounts.n_recent == 2
    let_wait(accounts, "always", 1)
    assert accounts.n_recent == 1


def test_a_queue_that_one_key_has_filled_takes_from_another_up_to_its_part() -> None:
    accounts = Accounts()
    gate = make_gate(accounts)
    let_wait(accounts, "flood", 10)
    gate.check(Newcomer(key="quiet", n_sequences=5))
    with pytest.raises(Unavailable):
        gate.check(Newcomer(key="quiet", n_sequences=6))
    with pytest.raises(Unavailable):
        gate.check(Newcomer(key="flood"))


@pytest.mark.parametrize("weights", [{}, {f"k{i}": 10.0**i for i in range(20)}])
def test_however_many_keys_come_a_queue_never_has_more_than_twice_its_size(weights: dict[str, float]) -> None:
    accounts = Accounts(weights)
    gate = make_gate(accounts)
    n_waiting = 0
    for i in range(20):
        for _ in range(10):
            try:
                gate.check(Newcomer(key=f"k{i}"))
            except Unavailable:
                break
            let_wait(accounts, f"k{i}", 1)
            n_waiting += 1
    assert 10 < n_waiting <= 20


# --- the wait ---------------------------------------------------------------------------------------------------------


def test_what_would_wait_too_long_by_the_measured_rate_is_refused_and_told_when_it_would_not() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, working_at(100), wait_max_s=5.0)
    let_wait(accounts, "k", 5)
    gate.check(Newcomer(key="k"))
    let_wait(accounts, "k", 3)
    with pytest.raises(Unavailable) as caught:
        gate.check(Newcomer(key="k"))
    assert caught.value.code == "wait_too_long"
    assert caught.value.retry_after_s == pytest.approx(3.0)


def test_as_long_as_no_rate_is_known_nobody_is_refused_for_a_wait() -> None:
    accounts = Accounts()
    let_wait(accounts, "k", 9, work=1e6)
    make_gate(accounts, wait_max_s=1.0).check(Newcomer(key="k", timeout_s=0.1), Work(1e6))


def test_another_keys_queue_is_not_waited_for() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, working_at(100), wait_max_s=1.0)
    let_wait(accounts, "flood", 9)
    gate.check(Newcomer(key="quiet"))


def test_who_is_more_urgent_than_all_that_wait_does_not_wait_for_them() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, working_at(100), wait_max_s=1.0)
    let_wait(accounts, "k", 9)
    gate.check(Newcomer(key="k", is_urgent=True))


def test_a_deadline_is_refused_when_it_would_be_missed_at_twice_the_rate_too() -> None:
    accounts = Accounts()
    gate = make_gate(accounts, working_at(100))
    let_wait(accounts, "k", 9)
    gate.check(Newcomer(key="k", timeout_s=5.0), fresh_work=Work(900.0))
    with pytest.raises(DeadlineExceeded) as caught:
        gate.check(Newcomer(key="k", timeout_s=4.0), fresh_work=Work(900.0))
    assert caught.value.param == "timeout_s"


def test_a_deadline_counts_only_the_work_that_nobody_who_comes_later_goes_before() -> None:
    accounts = Accounts()
    let_wait(accounts, "k", 9)
    make_gate(accounts, working_at(100)).check(Newcomer(key="k", timeout_s=1.0), fresh_work=Work(200.0))


def test_where_few_generate_a_waiting_prompt_is_not_priced_like_their_answers() -> None:
    """Four places of a GPU: a step takes as long for their four rows as for a hundred of a prompt, and all that it has done of late are
    answers. By rows alone the prompt would seem to take as long as so many of those.
    """
    accounts, service = Accounts(), Service()
    for _ in range(1000):
        service.step(0, 4, 0.01, generated=25.0)
    gate = make_gate(accounts, service, wait_max_s=10.0)
    let_wait(accounts, "k", 1, work=30_000.0)
    gate.check(Newcomer(key="k", generated_token=25.0))
    accounts.wait(accounts.of("k"), Work(0, 5_200))
    with pytest.raises(Unavailable, match="about 16 s"):
        gate.check(Newcomer(key="k", generated_token=25.0))


def test_of_the_same_mix_the_wait_is_the_same_whatever_a_generated_token_takes() -> None:
    for generated_token in (1.0, 2.0, 25.0):
        accounts, service = Accounts(), Service()
        for _ in range(100):
            service.step(300, 10, 1.0, generated=generated_token)
        accounts.wait(accounts.of("k"), Work(6000, 200))
        with pytest.raises(Unavailable, match="about 20 s"):
            make_gate(accounts, service, wait_max_s=19.0).check(Newcomer(key="k", generated_token=generated_token))


def test_what_was_done_when_many_ran_is_not_priced_as_if_few_had() -> None:
    """Or who waits behind long prompts would be told that they go as fast as if each token of those answers had been as much."""
    accounts, service = Accounts(), Service()
    for _ in range(1000):
        service.step(0, 64, 0.01, generated=2.0)
    accounts.wait(accounts.of("k"), Work(600_000, 0))
    with pytest.raises(Unavailable, match="about 47 s"):
        make_gate(accounts, service, wait_max_s=1.0).check(Newcomer(key="k", generated_token=25.0))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_the_rate_follows_the_machine_within_its_memory() -> None:
    service = working_at(100)
    assert service.rate == pytest.approx(100)
    for _ in range(200):
        service.step(0, 100, 1.0)
    assert service.rate == pytest.approx(200, rel=0.01)


def test_an_answers_length_is_guessed_then_averaged_and_never_above_what_is_allowed() -> None:
    service = Service()
    assert service.work(10, 1000) == Work(10, 128)
    service.answer(40)
    assert service.work(10, 1000) == Work(10, 40)
    assert service.work(10, 5) == Work(10, 5)


def test_a_long_step_that_came_to_nothing_says_nothing_of_how_fast_work_is_done() -> None:
    accounts, service = Accounts(), Service()
    service.step(0, 0, 1000.0)
    let_wait(accounts, "k", 10)
    with pytest.raises(Unavailable) as caught:
        make_gate(accounts, service).check(Newcomer(key="k", timeout_s=1.0))
    assert caught.value.retry_after_s == 1


def test_after_one_long_step_the_rate_is_not_that_of_this_step_alone() -> None:
    service = working_at(100)
    service.step(300, 0, 30.0)
    assert 20 < (service.rate or 0.0) < 90


def test_after_hours_of_prompts_alone_the_rows_for_each_generated_token_are_many_and_not_infinite() -> None:
    service = Service()
    service.step(0, 1, 0.1)
    for _ in range(15_000):
        service.step(512, 0, 1.0)
    assert math.isfinite(service.prompt_rows)
    assert service.prompt_rows > 1000
