"""What keys are counted to have been served: what was computed for them, and what keeps who comes late from making up for it."""

from __future__ import annotations

from collections import Counter

import pytest

from cllm.engine.waiting.fairness import Account, Accounts, Work

WORK = 100.0
URGENT, LATER = 0, 1


class Service:
    """One place, and what each key was charged."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.charged: Counter[str] = Counter()

    def come(self, key: str, priority: int = URGENT) -> Account:
        account = self.accounts.of(key)
        self.accounts.wait(account, Work(WORK), priority)
        return account

    def serve(self, key: str, priority: int = URGENT) -> None:
        account = self.accounts.of(key)
        self.accounts.wait_no_more(account, Work(WORK), priority)
        account.charge(WORK)
        self.charged[key] += int(WORK)

    @property
    def served(self) -> dict[str, float]:
        return {account.key: account.served for account in self.accounts}


def test_who_comes_late_joins_at_the_level_of_the_least_served_who_wait() -> None:
    service = Service()
    for key in ("one", "other", "other"):
        service.come(key)
        service.serve(key)
    service.come("one")
    service.come("other")
    assert service.come("late").served == service.served["one"] == WORK


def test_who_waits_less_urgently_is_lifted_as_much_but_not_beyond_the_newcomers_level() -> None:
    service = Service()
    service.come("patient", LATER)
    for _ in range(3):
        service.come("busy")
        service.serve("busy")
    service.come("busy")
    service.come("late")
    assert service.served == {"patient": 3 * WORK, "busy": 3 * WORK, "late": 3 * WORK}
    service.serve("late")
    service.come("another")
    assert service.served["patient"] == 3 * WORK, "it stands where the newcomer joins, and is not lifted as if it stood at nothing"


@pytest.mark.parametrize("n", [40, 400])
def test_counters_never_part_from_what_was_charged_however_often_keys_come_by_turns(n: int) -> None:
    service = Service()
    service.come("batch", LATER)
    for i in range(n):
        key = "ab"[i % 2]
        service.come(key)
        service.serve("batch", LATER)  # its place became free before
        service.come("batch", LATER)
        service.serve(key)
    assert max(service.served.values()) <= max(service.charged.values())


def test_who_is_never_served_is_not_counted_as_if_he_were() -> None:
    service = Service()
    service.come("flood")
    service.come("batch", LATER)
    for i in range(200):
        service.come("flood")
        service.serve("flood")
        service.come(f"key {i % 8}")
        service.serve(f"key {i % 8}")
    assert service.served["batch"] <= service.served["flood"]
