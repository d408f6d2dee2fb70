"""The engine as the API sees it: what it refuses, how it tokenises, whether it is well."""

from __future__ import annotations

import threading
from functools import partial

import attrs
import pytest
import trio
import trio.testing

from cllm.backend import Vocabulary
from cllm.config import Settings
from cllm.engine.sequence import Phase
from cllm.engine.waiting.fairness import NO_WORK, Work
from cllm.engine.waiting.gate import Gate, Newcomer
from cllm.errors import ModelDied, Unavailable
from cllm.serve.engine import N_CHARS_INLINE, N_TOKENIZING_MAX, Engine, EnginePhase
from cllm.serve.metrics import Metrics
from cllm.testing.engine import running_engine
from cllm.testing.fake import FakeModel, FakeVocabulary
from tests.serve.conftest import TEST_S, Steps, make_spec, read_all, serving, until

WATCHDOG_S = 10.0


def loading_engine() -> Engine:
    return Engine(metrics=Metrics(), stream_n_bytes_max=1024, watchdog_s=WATCHDOG_S)


# --- while it cannot serve --------------------------------------------------------------------------------------------


async def test_while_loading_everything_is_refused_with_the_progress() -> None:
    engine = loading_engine()
    engine.progress = 0.4321
    for ask in (lambda: engine.open([make_spec()]), engine.check_accepting, lambda: engine.model):
        with pytest.raises(Unavailable) as caught:
            ask()
        assert (caught.value.code, caught.value.extra) == ("loading", {"progress": 0.432})
        assert caught.value.retry_after_s > 0
    with pytest.raises(Unavailable):
        await engine.tokenize("x", add_special=False, parse_special=False)
    assert (engine.phase, engine.sequences()) == (EnginePhase.LOADING, [])


async def test_while_loading_it_is_well() -> None:
    assert loading_engine().health().ok


async def test_while_draining_new_requests_are_refused_and_running_ones_go_on(steps: Steps) -> None:
    async with serving(FakeModel()) as running:
        stream = running.engine.open([make_spec()])
        running.engine.drain()
        with pytest.raises(Unavailable) as caught:
            running.engine.open([make_spec()])
        assert caught.value.code == "draining"
        assert (await read_all(stream))[0].finished
        assert running.engine.health().ok


async def test_a_stopped_engine_refuses_and_is_not_well(steps: Steps) -> None:
    async with serving(FakeModel()) as running:
        running.engine.stopped()
        running.engine.drain()
        with pytest.raises(Unavailable) as caught:
            running.engine.check_accepting()
        assert caught.value.code == "stopped"
        assert not running.engine.health().ok
        assert running.engine.phase is EnginePhase.STOPPED, "draining does not bring it back"


# --- the queue --------------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_early_with_a_time_to_come_back_and_takes_again_when_it_has_room(steps: Steps) -> None:
    async with serving(FakeModel(), Settings(queue_size=2, parallel=1)) as running:
        steps.hold()
        streams = [running.engine.open([make_spec("running", 2)])]
        await trio.testing.wait_all_tasks_blocked()
        streams += [running.engine.open([make_spec("waiting", 2)]) for _ in range(2)]
        with pytest.raises(Unavailable) as caught:
            running.engine.check_accepting()
        assert caught.value.code == "queue_full"
        assert 1 <= caught.value.retry_after_s <= 120
        steps.go_on()
        for stream in streams:
            await read_all(stream)
        running.engine.check_accepting(2)


async def test_who_was_let_pass_keeps_the_room_that_another_key_has_the_right_to_meanwhile(steps: Steps) -> None:
    steps.hold()
    async with serving(FakeModel(), Settings(parallel=1, queue_size=2)) as running:
        engine = running.engine
        streams = [engine.open([make_spec(key="a")])]
        await until(lambda: steps.n_begun > 0)
        streams.append(engine.open([make_spec(key="a")]))
        give_up_room = engine.expect(key="a")  # its prompt is read now
        streams.append(engine.open([make_spec(key="b")]))
        give_up_room()
        with pytest.raises(Unavailable):
            engine.open([make_spec(key="a")])
        streams.append(engine.open([make_spec(key="a")], is_expected=True))
        steps.go_on()
        for stream in streams:
            assert (await read_all(stream))[0].finished


async def test_whether_it_is_ready_is_found_out_by_few_of_many_keys_and_opens_no_account(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_checks = 0
    check = Gate.check

    def counted(gate: Gate, newcomer: Newcomer, fresh_work: Work = NO_WORK) -> None:
        nonlocal n_checks
        n_checks += 1
        check(gate, newcomer, fresh_work)

    steps.hold()
    keys = tuple(f"secret{i}" for i in range(50))
    async with serving(FakeModel(), Settings(parallel=1, queue_size=2, api_key=keys)) as running:
        engine = running.engine
        streams = [engine.open([make_spec(key="key0")])]
        await until(lambda: steps.n_begun > 0)
        streams += [engine.open([make_spec(key=key)]) for key in ("key1", "key2")]
        monkeypatch.setattr(Gate, "check", counted)
        refused = _why_not_ready(engine)
        n_checks_full, accounts = n_checks, [account.key for account in running.scheduler.accounts]
        steps.go_on()
        for stream in streams:
            await read_all(stream)
        assert (refused, accounts, _why_not_ready(engine)) == ("queue_full", ["key0", "key1", "key2"], None)
        assert n_checks_full <= 5


def _why_not_ready(engine: Engine) -> str | None:
    try:
        engine.check_ready()
    except Unavailable as error:
        return error.code
    return None


async def test_where_all_keys_have_something_under_way_it_is_ready_as_long_as_one_of_them_is_let_in(steps: Steps) -> None:
    steps.hold()
    keys = ("secret name=much", "other name=little", "another name=capped cap=1")
    async with serving(FakeModel(), Settings(parallel=1, queue_size=6, api_key=keys)) as running:
        engine = running.engine
        streams = [engine.open([make_spec(key="capped")])]
        await until(lambda: steps.n_begun > 0)
        streams += [engine.open([make_spec(key="much")]) for _ in range(5)]
        refused = [_why_not_ready(engine)]
        for _ in range(3):  # as many as are its part
            streams.append(engine.open([make_spec(key="little")]))
            refused.append(_why_not_ready(engine))
        steps.go_on()
        for stream in streams:
            await read_all(stream)
        assert refused == [None, None, None, "queue_full"]


async def test_sequences_are_told_running_ones_first_in_order_of_service(steps: Steps) -> None:
    async with serving(FakeModel(), Settings(parallel=1)) as running:
        steps.hold()
        first = running.engine.open([make_spec("running", 2, request_id="a")])
        await trio.testing.wait_all_tasks_blocked()
        second = running.engine.open([make_spec("late", 2, request_id="b"), make_spec("urgent", 2, request_id="c", priority=-1)])
        views = running.engine.sequences()
        assert [view.request_id for view in views] == ["a", "c", "b"]
        assert [view.phase for view in views] == [Phase.PREFILL, Phase.WAITING, Phase.WAITING]
        assert [view.slot for view in views] == [0, None, None]
        steps.go_on()
        await read_all(first)
        await read_all(second)
        assert running.engine.sequences() == []


# --- tokenising -------------------------------------------------------------------------------------------------------


class WhereVocabulary(FakeVocabulary):
    """Remembers in which thread it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        self.threads.append(threading.current_thread())
        return super().tokenize(text, add_special=add_special, parse_special=parse_special)


@pytest.mark.parametrize(("n_chars", "inline"), [(1, True), (N_CHARS_INLINE, True), (N_CHARS_INLINE + 1, False), (1_000_000, False)])
async def test_long_texts_are_tokenised_in_a_thread_and_short_ones_at_once(n_chars: int, inline: bool) -> None:
    model = FakeModel()
    vocabulary = WhereVocabulary()
    model.vocabulary = vocabulary
    async with serving(model) as running:
        vocabulary.threads.clear()  # what was tokenised while it was loaded
        tokens = await running.engine.tokenize("x" * n_chars, add_special=True, parse_special=False)
    assert tokens == [vocabulary.bos] + [ord("x")] * n_chars
    assert (vocabulary.threads == [threading.current_thread()]) is inline


async def test_many_short_texts_let_everything_else_have_its_turn_and_a_list_of_them_is_one_long_text() -> None:
    model = FakeModel()
    vocabulary = WhereVocabulary()
    model.vocabulary = vocabulary
    n_turns = 0

    async def take_turns() -> None:
        nonlocal n_turns
        while True:
            await trio.lowlevel.checkpoint()
            n_turns += 1

    async with serving(model) as running, trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        for _ in range(20):
            await running.engine.tokenize("x" * N_CHARS_INLINE, add_special=True, parse_special=False)
        assert n_turns >= 10
        vocabulary.threads.clear()
        prompts = await running.engine.prompt_tokens(["x" * 300, "y" * 300] * 2, is_conversation=False)
        nursery.cancel_scope.cancel()
    assert [len(tokens) for tokens in prompts] == [301] * 4
    assert threading.current_thread() not in vocabulary.threads
    assert len(set(vocabulary.threads)) == 1


async def test_where_the_next_process_of_a_model_takes_too_long_to_come_one_may_come_back() -> None:
    class Waiting(FakeVocabulary):
        n_chars_inline = -1  # as that of a model in a process of its own

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise ModelDied("the model's process has ended")

    model = FakeModel()
    async with serving(model) as running:
        model.vocabulary = Waiting()
        running.engine._model = attrs.evolve(running.engine.model, vocabulary=model.vocabulary)
        with pytest.raises(Unavailable) as caught:
            await running.engine.tokenize("x", add_special=True, parse_special=False)
    assert (caught.value.code, caught.value.retry_after_s > 0) == ("loading", True)


async def test_what_is_tokenised_after_a_model_was_closed_is_told_that_the_server_drains() -> None:
    class Closed(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            raise ModelDied("the model is closed")

    model = FakeModel()
    async with serving(model) as running:
        running.engine._model = attrs.evolve(running.engine.model, vocabulary=Closed())
        running.engine.drain()
        with pytest.raises(Unavailable) as caught:
            await running.engine.tokenize("x", add_special=True, parse_special=False)
    assert caught.value.code == "draining"


async def test_however_many_long_texts_come_there_are_threads_for_everything_else() -> None:
    go_on = threading.Event()
    n_tokenizing: list[int] = []

    class Slow(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if len(text) < N_CHARS_INLINE:  # while it is loaded
                return []
            n_tokenizing.append(1)
            assert go_on.wait(TEST_S)
            return []

    model = FakeModel()
    model.vocabulary = Slow()
    async with serving(model) as running, trio.open_nursery() as nursery:
        try:
            for _ in range(100):  # more than Trio has threads
                nursery.start_soon(partial(running.engine.prompt_tokens, ["x" * 100_000], is_conversation=True))
            await until(lambda: len(n_tokenizing) == N_TOKENIZING_MAX)
            await trio.to_thread.run_sync(str)
            assert len(n_tokenizing) == N_TOKENIZING_MAX
        finally:
            go_on.set()
    assert len(n_tokenizing) == 100


async def test_short_texts_that_another_process_reads_do_not_wait_for_long_ones() -> None:
    go_on = threading.Event()
    n_tokenizing: list[int] = []

    class Elsewhere(FakeVocabulary):
        n_chars_inline = -1

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if len(text) > N_CHARS_INLINE:
                n_tokenizing.append(1)
                assert go_on.wait(TEST_S)
            return [1]

    model = FakeModel()
    model.vocabulary = Elsewhere()
    async with serving(model) as running, trio.open_nursery() as nursery:
        try:
            for _ in range(N_TOKENIZING_MAX + 1):
                nursery.start_soon(partial(running.engine.prompt_tokens, ["x" * 100_000], is_conversation=True))
            await until(lambda: len(n_tokenizing) == N_TOKENIZING_MAX)
            assert await running.engine.tokenize("x", add_special=False, parse_special=False) == [1]
        finally:
            go_on.set()


async def test_whether_a_text_is_short_is_a_matter_of_who_reads_it() -> None:
    threads: list[threading.Thread] = []

    class Elsewhere(FakeVocabulary):
        n_chars_inline = -1

    async with serving(FakeModel()) as running:
        await running.engine.tokenized(lambda: threads.append(threading.current_thread()), 1, "", Elsewhere())
        await running.engine.tokenized(lambda: threads.append(threading.current_thread()), 1)
    assert [thread is threading.current_thread() for thread in threads] == [False, True]


async def test_a_request_that_is_cancelled_does_not_wait_for_its_long_text() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(FakeVocabulary):
        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            if len(text) < N_CHARS_INLINE:  # while it is loaded
                return []
            begun.set()
            assert go_on.wait(TEST_S)
            return []

    model = FakeModel()
    vocabulary: Vocabulary = Slow()
    model.vocabulary = vocabulary
    async with serving(model) as running, trio.open_nursery() as nursery:

        async def tokenize() -> None:
            await running.engine.tokenize("x" * 100_000, add_special=False, parse_special=False)

        nursery.start_soon(tokenize)
        await until(begun.is_set)
        nursery.cancel_scope.cancel()
    go_on.set()


# --- health -----------------------------------------------------------------------------------------------------------


async def test_a_step_that_takes_longer_than_the_watchdog_allows_is_not_well(steps: Steps, mock_clock: trio.testing.MockClock) -> None:
    async with running_engine(FakeModel(), watchdog_s=WATCHDOG_S) as running:
        steps.hold()
        stream = running.engine.open([make_spec()])
        await trio.testing.wait_all_tasks_blocked()
        mock_clock.jump(WATCHDOG_S - 1)
        assert running.engine.health().ok
        mock_clock.jump(2)
        health = running.engine.health()
        assert (health.ok, health.reason) == (False, "no step has ended for 11 s")
        steps.go_on()
        await read_all(stream)
        assert running.engine.health().ok


async def test_an_engine_with_nothing_to_do_is_well_however_long(steps: Steps, mock_clock: trio.testing.MockClock) -> None:
    async with running_engine(FakeModel(), watchdog_s=WATCHDOG_S) as running:
        await read_all(running.engine.open([make_spec()]))
        mock_clock.jump(100 * WATCHDOG_S)
        assert running.engine.health().ok
        steps.hold()
        stream = running.engine.open([make_spec()])
        await trio.testing.wait_all_tasks_blocked()
        assert running.engine.health().ok, "the request has only just come"
        steps.go_on()
        await read_all(stream)
