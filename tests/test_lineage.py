"""The failures of the first cLLM, one test for each: its authors' reports are where this project comes from.

A docstring quotes what was reported. What concerns scheduling is tried on the scheduler and a fake model, step by step and without a
clock; what concerns requests and text through the HTTP application.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import trio
from structlog.testing import capture_logs

from cllm.backend import Batch, Logits
from cllm.engine.batch.compute import compute
from cllm.engine.batch.plan import Plan
from cllm.engine.events import Event, Finished
from cllm.engine.limits import Limits
from cllm.engine.stepping import StepScheduler
from cllm.errors import NoRoom, StepFailed
from cllm.testing.fake import FakeModel
from tests.api.conftest import Answer as HttpAnswer
from tests.api.conftest import Api
from tests.api.conftest import serving as serving_http
from tests.clock import tick
from tests.serve.conftest import Answer, make_spec, text_alone


class Server:
    """A scheduler and a fake model, driven step by step; the invariants hold after every step."""

    def __init__(
        self, *, n_cells: int = 4096, n_slots: int = 64, n_live_max: int = 64, n_rows_max: int = 512, row_budget: int = 512, **model: Any
    ) -> None:
        self.model = FakeModel(n_cells=n_cells, n_slots=n_slots, n_rows_max=n_rows_max, **model)
        limits = Limits(
            n_cells=n_cells,
            n_slots=n_slots,
            n_ctx=n_cells,
            n_rows_max=n_rows_max,
            row_budget=row_budget,
            n_live_max=n_live_max,
            n_waiting_max=1000,
        )
        self.scheduler = StepScheduler(limits, self.model.vocabulary)
        self.answers: dict[int, Answer] = {}
        self.batches: list[list[tuple[int, int]]] = []  # (slot, position) of the rows of each step
        self.n_failed_steps = 0

    def submit(self, prompt: str, n_tokens: int, **fields: Any) -> int:
        seq_id = self.scheduler.submit(make_spec(prompt, n_tokens, **fields), 0.0)
        assert seq_id not in self.answers
        self.answers[seq_id] = Answer()
        return seq_id

    def step(self) -> bool:
        """Do one step; False when nothing is owed."""
        plan = self.scheduler.plan(0.0)
        if plan is None:
            return False
        for event in plan.events + (self._compute(plan) if plan.is_step else []):
            self.answers[event.seq_id].add(event)
        self.scheduler.check()
        return True

    def run(self, n_steps_max: int = 10_000) -> int:
        """Do steps until nothing is owed; return how many had rows."""
        n_before = len(self.batches)
        for _ in range(n_steps_max):
            if not self.step():
                return len(self.batches) - n_before
        raise AssertionError(f"not done after {n_steps_max} steps: {self.scheduler.views()}")

    def _compute(self, plan: Plan) -> list[Event]:
        batch = plan.batch
        if plan.n_rows:
            self.batches.append(list(zip(batch.slots[: batch.n_rows].tolist(), batch.positions[: batch.n_rows].tolist(), strict=True)))
        try:
            output = compute(self.model, plan, tick)
        except Exception as error:
            self.n_failed_steps += 1
            return self.scheduler.apply_failure(plan, error, 0.0)
        return self.scheduler.apply(plan, output, 0.0)

    @property
    def n_ended(self) -> int:
        return sum(bool(answer.ends) for answer in self.answers.values())

    def assert_all_given_back(self) -> None:
        cells = self.scheduler.cells
        assert (cells.n_held, cells.n_free, cells.n_free_slots) == (0, cells.n_total, cells.n_slots)
        assert self.model.n_cells_used == 0


def prompts(n: int) -> list[str]:
    """Prompts of mixed length."""
    return [f"{i} " + "x" * (7 * i % 23) for i in range(n)]


# --- the queue --------------------------------------------------------------------------------------------------------


def test_no_request_stalls_when_more_come_than_run_at_once() -> None:
    """Stall at request 12 (batched requests never left the queue)."""
    server = Server(n_live_max=4)
    for prompt in prompts(40):
        server.submit(prompt, 10)
    server.run(n_steps_max=40 * 10 // 4 + 40)
    assert server.n_ended == 40
    assert server.scheduler.n_waiting == 0


def test_what_has_ended_is_counted_neither_as_running_nor_as_waiting() -> None:
    """Completed requests counted as running."""
    server = Server(n_live_max=3)
    for i, prompt in enumerate(prompts(10)):
        server.submit(prompt, 3 + i)
    while server.step():
        scheduler = server.scheduler
        assert scheduler.n_running + scheduler.n_waiting == scheduler.n_sequences == 10 - server.n_ended
    assert (server.scheduler.n_sequences, server.n_ended) == (0, 10)


def test_72_requests_at_concurrency_8_all_finish_however_few_run_at_once() -> None:
    """20 of 72 failed at concurrency 32 (limit 8, backlog)."""
    server = Server(n_live_max=8)
    for prompt in prompts(72):
        server.submit(prompt, 12)
    server.run()
    assert all(isinstance(answer.end, Finished) for answer in server.answers.values())
    assert all(len(answer.tokens) == 12 for answer in server.answers.values())


# --- slots and cells --------------------------------------------------------------------------------------------------


def test_a_slot_is_given_away_only_with_its_cells_freed() -> None:
    """Sequence id reused before its cells were freed (position mismatch, "inconsistent sequence positions")."""
    server = Server(n_slots=2)
    for prompt in prompts(20):
        server.submit(prompt, 4)
    for i in range(40):  # some leave in the middle, so that slots change hands in every way
        server.step()
        in_slots = [view.seq_id for view in server.scheduler.views() if view.slot is not None]
        if i % 5 == 4 and in_slots:
            server.scheduler.cancel(in_slots[-1])
    server.run()
    assert server.n_failed_steps == 0, "the fake model refuses a position that does not go on from the slot's cells"
    assert server.scheduler.totals.n_cancelled >= 3
    assert server.n_ended == 20
    server.assert_all_given_back()


def test_the_second_and_the_third_request_are_as_good_as_the_first() -> None:
    """Second request failed, third crashed (positions shared between sequences)."""
    one_by_one, at_once = Server(), Server()
    for prompt in ("first", "second", "third"):
        one_by_one.submit(prompt, 8)
        one_by_one.run()
        at_once.submit(prompt, 8)
    at_once.run()
    for server in (one_by_one, at_once):
        assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 8) for prompt in ("first", "second", "third")]
        assert server.n_failed_steps == 0
    assert {position for batch in one_by_one.batches[:8] for _, position in batch} == set(range(len("first") + 7)), "each has its own"


def test_the_hundredth_request_costs_what_the_first_did() -> None:
    """Requests slower and slower (stale cells)."""
    server = Server()
    costs = []
    for _ in range(100):
        server.batches.clear()
        server.submit("the same again", 10)
        server.run()
        costs.append((len(server.batches), sum(map(len, server.batches)), max(slot for batch in server.batches for slot, _ in batch)))
        server.assert_all_given_back()
    assert set(costs) == {(10, len("the same again") + 9, 0)}, "as many steps and rows each time, in the lowest slot"


def test_slots_are_never_exhausted_nor_handed_out_twice() -> None:
    """Id pool exhausted, duplicates handed out."""
    server = Server(n_slots=3)
    for prompt in prompts(50):
        server.submit(prompt, 5)
    while server.step():
        slots = [view.slot for view in server.scheduler.views() if view.slot is not None]
        assert len(set(slots)) == len(slots) <= 3
        assert all(0 <= slot < 3 for slot in slots)
    assert server.n_ended == len(set(server.answers)) == 50
    server.assert_all_given_back()


def test_more_demand_than_cells_makes_requests_wait_and_fails_none() -> None:
    """ "No memory slot": demand over n_ctx failed the batch."""
    server = Server(n_cells=128)
    texts = prompts(10)
    for prompt in texts:
        server.submit(prompt, 50)
    server.run()
    assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 50) for prompt in texts]
    assert server.scheduler.totals.n_preempted > 0, "else there was no shortage"
    assert server.n_failed_steps == 0, "cells are counted before rows are planned"
    server.assert_all_given_back()


def test_when_the_model_finds_no_room_all_the_same_nobody_fails() -> None:
    """ "No memory slot", said by the backend itself."""
    server = Server()
    n_steps = 0

    def find_no_room(batch: Batch) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps % 4 == 0 and len(set(batch.slots[: batch.n_rows].tolist())) > 1:
            raise NoRoom("failed to find a memory slot")

    server.model.before_step = find_no_room
    texts = prompts(6)
    for prompt in texts:
        server.submit(prompt, 20)
    server.run()
    assert server.n_failed_steps > 0
    assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 20) for prompt in texts]


# --- the batch --------------------------------------------------------------------------------------------------------


def test_the_slowest_member_holds_up_nobody() -> None:
    """Latency tail: the slowest member held the batch. A batch ran to completion, and its efficiency fell to 20 %."""
    server = Server(n_live_max=5)
    lengths = [3, 5, 8, 13, 60]
    first = {server.submit(f"request {n}", n): n for n in lengths}
    waiting = [server.submit(f"later {i}", 4) for i in range(4)]
    for n_steps in range(1, 61):
        server.step()
        ended = {first[seq_id] for seq_id in first if server.answers[seq_id].ends}
        assert ended == {n for n in lengths if n <= n_steps}, "each ends when it is done"
    assert all(server.answers[seq_id].ends for seq_id in waiting), "and who waited was served beside the slowest"
    assert len(server.batches) == 60


def test_batching_costs_no_steps_and_waits_for_nobody() -> None:
    """Adaptive batching made it 41-75 % slower: it held requests back for a fuller batch, and batches were of 1 to 4."""
    server = Server()
    server.submit("alone", 50)
    assert server.step(), "the first one starts at once"
    assert len(server.batches[0]) == len("alone")
    for i in range(7):
        server.submit(f"number {i}", 50)
    n_steps = server.run()
    assert n_steps == 50, "eight need no more steps than one"
    assert {len(batch) for batch in server.batches[2:50]} == {8}, "and all are in every step"


def test_only_new_tokens_are_computed() -> None:
    """Inputs were rebuilt from the whole history at every step: 4,050 token copies for 50 tokens."""
    server = Server()
    server.submit("x" * 32, 50)
    server.run()
    assert [len(batch) for batch in server.batches] == [32] + [1] * 49


def test_prompts_longer_than_a_step_are_computed_in_pieces() -> None:
    """Prompts longer than n_batch not chunked."""
    prompt = "".join(chr(ord("a") + i % 26) for i in range(300))
    server = Server(n_rows_max=32, row_budget=32)
    server.submit(prompt, 10)
    server.submit("short", 10)
    server.run()
    assert max(len(batch) for batch in server.batches) == 32
    assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 10), text_alone("short", 10)]


def test_every_answer_is_drawn_from_its_own_row_of_the_logits() -> None:
    """5 % empty answers (wrong logits row)."""
    server = Server(row_budget=11, n_live_max=9)
    texts = prompts(60)
    for i, prompt in enumerate(texts):  # prompts in pieces, outputs among rows that are none, in ever new company
        server.submit(prompt, 2 + i % 7)
        server.step()
    server.run()
    assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 2 + i % 7) for i, prompt in enumerate(texts)]
    assert all(answer.text for answer in server.answers.values())


@pytest.mark.parametrize("trouble", ["preemption", "failed steps"])
def test_a_limit_of_50_gives_50_tokens_however_often_a_request_is_queued_again(trouble: str) -> None:
    """745 tokens for a limit of 50 (requeued requests not rechecked)."""
    server = Server(n_cells=100) if trouble == "preemption" else Server()
    n_steps = 0

    def fail(_batch: Batch) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps % 15 == 0:
            raise StepFailed("as told")

    if trouble == "failed steps":
        server.model.before_step = fail
    for prompt in ("one", "two", "three", "four"):
        server.submit(prompt, 50)
    server.run()
    assert server.scheduler.totals.n_preempted > 0
    for answer in server.answers.values():
        assert len(answer.tokens) == answer.finished.usage.n_generated == 50


def test_nothing_is_decoded_after_the_client_has_left() -> None:
    """Decoding went on after the client left."""
    server = Server()
    stays = server.submit("stays", 20)
    leaves = server.submit("leaves", 4000)
    for _ in range(5):
        server.step()
    server.scheduler.cancel(leaves)
    n_steps = server.run()
    assert n_steps == 15
    assert {len(batch) for batch in server.batches[5:]} == {1}, "from the very next step on it has no row"
    assert server.answers[stays].text == text_alone("stays", 20)
    assert len(server.answers[leaves].tokens) == 5
    server.assert_all_given_back()


@pytest.mark.parametrize("always", [False, True], ids=["once", "always"])
def test_an_exception_in_the_forward_pass_strands_nobody(always: bool) -> None:
    """An exception in the forward pass stranded its batch."""
    server = Server()
    n_steps = 0

    def fail(_batch: Batch) -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 3 or (always and n_steps > 3):
            raise RuntimeError("in the forward pass")

    server.model.before_step = fail
    for prompt in ("one", "two", "three"):
        server.submit(prompt, 10)
    server.run()
    if always:
        assert [answer.error.code for answer in server.answers.values()] == ["step_failed"] * 3
    else:
        assert [answer.text for answer in server.answers.values()] == [text_alone(prompt, 10) for prompt in ("one", "two", "three")]
    server.assert_all_given_back()
    server.model.before_step = None
    after = server.submit("after it", 5)
    server.run()
    assert server.answers[after].text == text_alone("after it", 5)


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing is logged: as long as nobody has configured it, structlog prints."""
    with capture_logs():
        yield


class Parrot(FakeModel):
    """Says one text, byte by byte, after any prompt of `n_prompt` tokens."""

    def __init__(self, text: str, n_prompt: int) -> None:
        super().__init__()
        self._bytes = text.encode()
        self._n_prompt = n_prompt

    def step(self, batch: Batch) -> Logits:
        logits = super().step(batch)
        for i, row in enumerate(np.flatnonzero(batch.outputs[: batch.n_rows])):
            place = int(batch.positions[row]) + 1 - self._n_prompt
            logits[i, self._bytes[place % len(self._bytes)]] = 100.0
        return logits


GENERATE = {"prompt": "once", "max_tokens": 6, "temperature": 0}


async def generate_all(api: Api, n_requests: int, concurrency: int, path: str = "/generate") -> list[HttpAnswer]:
    limiter = trio.CapacityLimiter(concurrency)
    answers: dict[int, HttpAnswer] = {}

    async def ask(i: int) -> None:
        async with limiter:
            answers[i] = await api.post(path, {**GENERATE, "prompt": f"number {i}"})

    async with trio.open_nursery() as nursery:
        for i in range(n_requests):
            nursery.start_soon(ask, i)
    return [answers[i] for i in range(n_requests)]


@pytest.mark.parametrize(("concurrency", "n_live"), [(24, 64), (32, 8)])
async def test_of_72_requests_at_once_each_gets_200_and_its_text(concurrency: int, n_live: int) -> None:
    """One of 72 requests at concurrency 24 returned nothing with 200; 20 of 72 failed at concurrency 32 (limit 8)."""
    async with serving_http(FakeModel(), parallel=n_live) as api:
        answers = await generate_all(api, 72, concurrency)
        await api.idle()
    assert [answer.status for answer in answers] == [200] * 72
    assert [answer.json["data"]["generated_tokens"] for answer in answers] == [6] * 72
    assert all(len(answer.json["data"]["text"]) == 6 for answer in answers)
    assert len({answer.json["data"]["text"] for answer in answers}) > 60, "each its own"


CHINESE = "你好世界\N{FULLWIDTH COMMA}今天天气很好。"


async def test_chinese_comes_out_as_it_went_in() -> None:
    """Garbled Chinese (byte-level pieces)."""
    n_tokens = len(CHINESE.encode())
    async with serving_http(Parrot(CHINESE, n_prompt=2)) as api:
        answer = await api.complete([65, 66], max_tokens=n_tokens)
        stream = await api.complete([65, 66], max_tokens=n_tokens, stream=True)
        tokens = (await api.post("/encode", {"text": CHINESE})).json["data"]["tokens"]
        decoded = await api.post("/decode", {"tokens": tokens})
    assert answer.text() == stream.text() == decoded.json["data"]["text"] == CHINESE


async def test_a_stream_survives_a_character_that_is_cut_at_any_byte() -> None:
    """Stream crash on a split UTF-8 character."""
    text = "aé你🌍"
    async with serving_http(Parrot(text, n_prompt=2)) as api:
        for n_tokens in range(1, len(text.encode()) + 1):
            stream = await api.complete([65, 66], max_tokens=n_tokens, stream=True)
            assert stream.status == 200
            assert stream.lines[-1] == "[DONE]"
            whole = await api.complete([65, 66], max_tokens=n_tokens)
            assert stream.text() == whole.text() == text.encode()[:n_tokens].decode("utf-8", "replace")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [-1, -50])
async def test_a_negative_max_tokens_is_refused(path: str, n: int) -> None:
    """Negative max_tokens became huge."""
    async with serving_http() as api:
        answer = await api.post(path, {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": n})
        assert answer.status == 400
        assert "max_tokens" in answer.body.decode()
        assert api.scheduler.totals.n_submitted == 0


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("body", [b'{"prompt": "x", "max_tokens": 5', b"prompt=x", b"", b'{"prompt": "x", "max_tokens": "5x"}'])
async def test_bad_json_is_refused_and_runs_with_no_defaults(path: str, body: bytes) -> None:
    """Bad JSON silently took defaults."""
    async with serving_http() as api:
        answer = await api.post(path, body)
        assert answer.status == 400
        assert api.scheduler.totals.n_submitted == 0


async def test_temperature_0_is_greedy_and_not_the_default() -> None:
    """Temperature 0 silently became 0.7."""
    async with serving_http() as api:
        texts = {(await api.post("/generate", {**GENERATE, "seed": seed, "max_tokens": 20})).json["data"]["text"] for seed in range(5)}
        warm = {(await api.post("/generate", {**GENERATE, "seed": seed, "temperature": 0.7})).json["data"]["text"] for seed in range(5)}
    assert len(texts) == 1
    assert len(warm) > 1


async def test_a_long_prompt_counts_to_its_last_token() -> None:
    """Prompts silently cut to 120 tokens."""
    prompt = "x" * 500
    async with serving_http() as api:
        answer = (await api.post("/generate", {**GENERATE, "prompt": f"{prompt}1"})).json["data"]
        other = (await api.post("/generate", {**GENERATE, "prompt": f"{prompt}2"})).json["data"]
        refused = await api.post("/generate", {**GENERATE, "prompt": "x" * 5000})
    assert answer["prompt_tokens"] == 502, "bos included"
    assert answer["text"] != other["text"]
    assert refused.status == 400, "one that does not fit is refused, not cut"


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/v1/chat/completions"])
async def test_a_client_that_leaves_cancels_its_request(path: str) -> None:
    """Disconnect never cancelled."""
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 3000}
    async with serving_http(FakeModel(step_s=lambda _batch: 0.002)) as api:
        async with api.asking(path, json.dumps(body).encode()) as exchange:
            await api.until(lambda: api.scheduler.totals.n_generated > 2)
            exchange.leave()
        await api.idle()
        assert api.scheduler.totals.n_cancelled == 1
        assert api.scheduler.totals.n_generated < 2000


async def test_a_request_whose_time_is_over_stops_computing() -> None:
    """408 never cancelled: the answer was given up, the work went on."""
    async with serving_http(FakeModel(step_s=lambda _batch: 0.002)) as api:
        answer = await api.post("/generate", {"prompt": "x", "max_tokens": 3000, "timeout_s": 0.1})
        assert answer.status in (200, 504), "a machine that is busy may not come to the first token"
        assert api.scheduler.n_sequences == 0
        await api.idle()
        assert api.scheduler.totals.n_generated < 1000


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Count what is planned while the block runs."""
    plan, n_plans = StepScheduler.plan, 0

    def counted(self: StepScheduler, now: float) -> Plan | None:
        nonlocal n_plans
        n_plans += 1
        return plan(self, now)

    with monkeypatch.context() as patch:
        patch.setattr(StepScheduler, "plan", counted)
        yield lambda: n_plans


async def test_the_scheduler_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler loop at 5-50 us intervals spun while a batch ran, and when there was nothing to do."""
    with counting(monkeypatch) as n_plans:
        async with serving_http(FakeModel(step_s=lambda _batch: 0.005)) as api:
            answer = await api.post("/generate", {**GENERATE, "max_tokens": 20})
            assert answer.status == 200
            await api.idle()
            assert n_plans() <= 20 + 4, "one for each step, and a few about them"
