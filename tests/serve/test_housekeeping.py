"""Several models in one process: loaded at the start and on demand, unloaded to make room, and what becomes of who uses them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import pytest
import structlog
import trio
import trio.testing
from structlog.testing import capture_logs

from cllm.backend import Batch, ModelSpec, OnProgress, StepModel, StreamEvent
from cllm.config import Settings
from cllm.engine.memory.hostpool import Piece
from cllm.errors import InvalidRequest, LoadAborted, LoadFailed, ModelDied, NotFound, StepFailed, Unavailable
from cllm.serve import lifecycle, loading
from cllm.serve.garbage import spare_what_stays
from cllm.serve.house import FAILED_FOR_S_MAX, Hold, House, State, Tenant, n_bytes_of_files
from cllm.serve.housekeeping import Housekeeper
from cllm.serve.loading import limits_of
from cllm.serve.modelthread import NoThread
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_streams import FakeStreamModel
from cllm.testing.mortal import Panic
from tests.serve.conftest import TEST_S, make_spec, read_all, text_alone, until

SIZE = 100 << 20  # of every model here


def wait_for(event: threading.Event) -> None:
    assert event.wait(TEST_S)


class Quiet:
    """A Progress that says nothing."""

    def update(self, share: float) -> None:
        pass

    def done(self, model: object) -> None:
        pass

    def stop(self) -> None:
        pass


class Sized(FakeModel):
    """Takes 100 MiB."""

    def __init__(self, before_step: Callable[[Batch], None] | None) -> None:
        super().__init__(before_step=before_step)
        self.info = attrs.evolve(self.info, size_bytes=SIZE)
        self.n_closed = 0

    def close(self) -> None:
        self.n_closed += 1


class Backend(FakeBackend):
    """Gives models of 100 MiB by any name, and knows what was loaded in which order."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, Sized]] = []
        self.failing: set[str] = set()
        self.during_load: Callable[[str], None] = lambda name: None
        self.before_step: Callable[[str, Batch], None] = lambda name, batch: None

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.loaded]

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        self.during_load(spec.path)
        if spec.path in self.failing:
            raise LoadFailed(f"{spec.path} is no model")
        if not on_progress(0.5):
            raise LoadAborted("told to stop")
        model = Sized(lambda batch: self.before_step(spec.path, batch))
        self.loaded.append((spec.path, model))
        return model


def waiting_with(model: str) -> tuple[Backend, threading.Event, threading.Event]:
    """A backend whose load of `model` sets the first event, and waits for the second."""
    backend, begun, go_on = Backend(), threading.Event(), threading.Event()

    def during_load(name: str) -> None:
        if name == model:
            begun.set()
            assert go_on.wait(TEST_S)

    backend.during_load = during_load
    return backend, begun, go_on


@attrs.frozen
class Kept:
    """A keeper under test."""

    keeper: Housekeeper
    backend: Backend
    ends: list[BaseException | None]

    @property
    def house(self) -> House:
        return self.keeper.house

    def tenant(self, name: str) -> Tenant:
        return self.house.find(name)

    def states(self) -> str:
        return " ".join([tenant.state.value for tenant in self.house.tenants])

    async def ask(self, name: str, n_tokens: int = 8) -> str:
        """What the model of that name answers."""
        hold = await self.house.hold(self.tenant(name))
        try:
            (answer,) = await read_all(hold.tenant.engine.open([make_spec(n_tokens=n_tokens)]))
            return answer.text
        finally:
            hold.release()


Keep: TypeAlias = Callable[..., AbstractAsyncContextManager[Kept]]


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> Keep:
    """Run a keeper of fake models by name; on leaving it is drained, and must end within a bound."""

    @asynccontextmanager
    async def keep(
        *names: str,
        backend: Backend | None = None,
        drains: bool = True,
        n_file_bytes: int = SIZE,
        calibrate: str = "off",
        beforehand: Callable[[Settings], None] = lambda _settings: None,
        **settings: Any,
    ) -> AsyncIterator[Kept]:
        backend = backend or Backend()
        monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", backend))
        monkeypatch.setattr("cllm.serve.housekeeping.check_beforehand", beforehand)
        monkeypatch.setattr("cllm.hub.size_of", lambda _model: n_file_bytes)
        kept = Kept(Housekeeper(Settings(names[0], names[1:], calibrate=calibrate, **settings), lambda _name: Quiet()), backend, [])

        async def run() -> None:
            try:
                await kept.keeper.run()
            except Exception as error:
                kept.ends.append(error)
            else:
                kept.ends.append(None)

        with trio.fail_after(TEST_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                if drains:
                    await kept.keeper.ready.wait()
                yield kept
                if drains:
                    kept.keeper.drain()

    return keep


async def test_without_a_limit_all_are_loaded_in_order_and_each_answers(keep: Keep) -> None:
    async with keep("a", "b", "c") as kept:
        assert kept.states() == "loaded loaded loaded"
        assert kept.backend.names == ["a", "b", "c"]
        assert [await kept.ask(name) for name in "abc"] == [text_alone("once upon a time", 8)] * 3
        assert kept.house.first.name == "a"
    assert kept.ends == [None]
    assert [model.n_closed for _, model in kept.backend.loaded] == [1, 1, 1]
    assert not kept.house.health().ok


async def test_whatever_is_logged_of_a_model_says_which_it_is(keep: Keep) -> None:
    said: list[tuple[str, Any]] = []

    def note(what: str, name: str) -> None:
        said.append((f"{what} {name}", structlog.contextvars.get_contextvars().get("model")))

    def before_step(name: str, _batch: Batch) -> None:
        note("step", name)
        raise StepFailed("as it was to")

    backend = Backend()
    backend.during_load, backend.before_step = partial(note, "load"), before_step
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as logged:
        async with keep("a", "b", backend=backend) as kept:
            for name in "ab":
                await kept.ask(name)
    assert set(said) == {("load a", "a"), ("load b", "b"), ("step a", "a"), ("step b", "b")}
    assert {line["model"] for line in logged if line["event"] == "step.failed"} == {"a", "b"}
    assert structlog.contextvars.get_contextvars() == {}


async def test_models_that_share_the_thread_take_turns_step_by_step(keep: Keep) -> None:
    steps: list[str] = []
    backend = Backend()
    backend.before_step = lambda name, batch: steps.append(name)
    async with keep("a", "b", backend=backend) as kept, trio.open_nursery() as nursery:
        nursery.start_soon(kept.ask, "a", 50)
        nursery.start_soon(kept.ask, "b", 50)
    begun = steps.index("b") if steps[0] == "a" else steps.index("a")
    both = steps[begun : begun + 40]
    # Not strictly one by one: whose turn comes late, by a machine that does other things, lets the other go twice.
    assert min(both.count("a"), both.count("b")) >= 10, steps


async def test_two_that_tell_the_same_name_when_they_are_loaded_are_refused(keep: Keep) -> None:
    backend = Backend()
    backend.knows_models = True  # type: ignore[attr-defined]  # so that what it says of them counts
    async with keep("http://a", "http://b", backend=backend, drains=False) as kept:
        await until(lambda: bool(kept.ends))
    (error,) = kept.ends
    assert isinstance(error, LoadFailed)
    assert str(error) == "two models are called fake: give one another name with --alias MODEL=NAME"
    assert [model.n_closed for _, model in backend.loaded] == [1, 1]


async def test_a_model_that_its_backend_knows_is_found_by_the_same_name_once_it_was_loaded_on_demand(keep: Keep) -> None:
    backend = Backend()
    backend.knows_models = True  # type: ignore[attr-defined]
    async with keep("/x/a", "/x/b", backend=backend, models_memory_mb=100) as kept:
        names = [tenant.name for tenant in kept.house.tenants]
        assert [await kept.ask("b") for _ in range(2)] == [text_alone("once upon a time", 8)] * 2
        await kept.ask("a")
        assert [tenant.name for tenant in kept.house.tenants] == names == ["a", "b"]
    assert backend.names == ["/x/a", "/x/b", "/x/a"]


async def test_a_model_is_closed_when_nobody_uses_it_any_more_and_not_much_later(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "LEAVE_S", TEST_S)
    async with keep("a") as kept:
        hold = await kept.house.hold(kept.tenant("a"))
        (_, model), *_ = kept.backend.loaded
        kept.keeper.drain()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert model.n_closed == 0, "what is shaped of an answer wants its vocabulary"
        hold.release()
        await until(lambda: model.n_closed == 1)
    monkeypatch.setattr(lifecycle, "LEAVE_S", 0.01)
    async with keep("a") as kept:
        await kept.house.hold(kept.tenant("a"))
        kept.keeper.drain()
        await until(lambda: kept.backend.loaded[-1][1].n_closed == 1)


async def test_an_unknown_name_is_told_which_there_are(keep: Keep) -> None:
    async with keep("a", "b", alias=("first", "b=second")) as kept:
        with pytest.raises(NotFound, match="only first, second"):
            kept.house.find("third")


async def test_what_has_no_room_is_loaded_on_demand_and_the_least_recently_used_makes_room(keep: Keep) -> None:
    async with keep("a", "b", "c", models_memory_mb=200) as kept:
        for name in "ab":
            await kept.ask(name)
        text = await kept.ask("c")
        assert text == text_alone("once upon a time", 8)
        assert kept.states() == "unloaded loaded loaded"
        await kept.ask("b")
        await kept.ask("a")
        assert kept.states() == "loaded loaded unloaded"
    assert kept.ends == [None]


async def test_what_takes_more_than_its_file_said_does_not_stay_at_the_start(keep: Keep) -> None:
    async with keep("a", "b", models_memory_mb=199, n_file_bytes=0) as kept:
        assert kept.states() == "loaded unloaded"
        await kept.ask("b")
        assert kept.states() == "unloaded loaded"


async def test_a_model_that_is_unloaded_while_others_make_room_for_it_is_loaded_again_for_who_asks(keep: Keep) -> None:
    async with keep("a", "b", models_memory_mb=150, n_file_bytes=0) as kept, trio.open_nursery() as nursery:
        user = await kept.house.hold(kept.tenant("a"))
        kept.tenant("b").n_bytes = 0  # it will take more than is known of it, so that `a` is to go as soon as nobody uses it
        await kept.ask("b")
        assert kept.states() == "unloading loaded"
        await kept.keeper.unload(kept.tenant("b"))
        nursery.start_soon(kept.ask, "b")
        await until(lambda: bool(kept.tenant("b").waiting))
        user.release()
    assert kept.backend.names == ["a", "b", "b", "b"]


async def test_a_model_that_makes_room_answers_first_what_it_was_asked(keep: Keep) -> None:
    go_on, computing = threading.Event(), threading.Event()

    def before_step(name: str, batch: Batch) -> None:
        if name == "a":
            computing.set()
            assert go_on.wait(TEST_S)

    backend = Backend()
    backend.before_step = before_step
    texts: dict[str, str] = {}
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept, trio.open_nursery() as nursery:

        async def ask(name: str) -> None:
            texts[name] = await kept.ask(name)

        nursery.start_soon(ask, "a")
        await until(computing.is_set)
        nursery.start_soon(ask, "b")
        await until(lambda: kept.tenant("a").state is State.UNLOADING)
        assert "b" not in kept.backend.names
        go_on.set()
    assert texts == dict.fromkeys("ab", text_alone("once upon a time", 8))


async def test_two_models_that_take_turns_in_the_room_of_one_both_answer(keep: Keep) -> None:
    texts: list[str] = []
    async with keep("a", "b", models_memory_mb=100) as kept, trio.open_nursery() as nursery:

        async def ask(name: str) -> None:
            texts.append(await kept.ask(name))

        for _ in range(5):
            nursery.start_soon(ask, "a")
            nursery.start_soon(ask, "b")
    assert texts == [text_alone("once upon a time", 8)] * 10
    assert all(tenant.n_users == 0 and not tenant.waiting for tenant in kept.house.tenants)


async def test_who_waits_for_a_load_longer_than_it_may_is_told_to_come_back(keep: Keep) -> None:
    go_on = threading.Event()
    backend = Backend()
    backend.during_load = lambda name: None if name == "a" else wait_for(go_on)
    async with keep("a", "b", models_memory_mb=100, load_wait_s=0.0, backend=backend) as kept:
        with pytest.raises(Unavailable) as caught:
            await kept.ask("b")
        assert (caught.value.code, caught.value.retry_after_s) == ("loading", 5.0)
        assert not kept.tenant("b").waiting
        go_on.set()
        await until(lambda: kept.tenant("b").state is State.LOADED)
        await kept.ask("b")


async def test_loads_on_demand_and_layouts_find_the_keys_of_the_start_whatever_became_of_their_file(keep: Keep, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one cap=2\nother\n")
    async with keep("a", "b", models_memory_mb=150, api_key_file=str(path)) as kept:
        await kept.keeper.ready.wait()
        path.unlink()
        assert await kept.ask("b") == text_alone("once upon a time", 8)
        assert kept.states() == "unloaded loaded"
        assert [limits_of(kept.backend.loaded[0][1], tenant.settings).key_caps for tenant in kept.house.tenants] == [{"key0": 2}] * 2


async def test_a_load_on_demand_that_fails_is_the_requests_misfortune_and_not_tried_at_once_again(keep: Keep) -> None:
    backend = Backend()
    backend.failing.add("b")
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept:
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                await kept.ask("b")
            assert caught.value.code == "load_failed"
        assert backend.names == ["a"]
        assert await kept.ask("a") == text_alone("once upon a time", 8)
        backend.failing.clear()
        kept.tenant("b").failed_at = -1000.0
        assert await kept.ask("b") == text_alone("once upon a time", 8)


async def test_what_is_known_to_be_wrong_with_a_model_unloads_no_other_for_it(keep: Keep) -> None:
    missing: set[str] = set()

    def look(settings: Settings) -> None:
        if settings.model in missing:
            raise LoadFailed(f"{settings.model}: no such file")

    async with keep("a", "b", models_memory_mb=100, beforehand=look) as kept:
        missing.add("b")
        engine = kept.tenant("a").engine
        for _ in range(2):
            with pytest.raises(Unavailable) as caught:
                await kept.ask("b")
            assert caught.value.code == "load_failed"
        assert kept.states() == "loaded failed"
        assert kept.tenant("a").engine is engine
        missing.clear()
        kept.tenant("b").failed_at = -1000.0
        assert await kept.ask("b") == text_alone("once upon a time", 8)


async def test_a_load_for_which_there_is_no_thread_is_no_more_than_that_either(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    async def no_thread(*_arguments: object) -> None:
        raise NoThread("the system has no thread left")

    async with keep("a", "b") as kept:
        await kept.keeper.unload(kept.tenant("b"))
        with monkeypatch.context() as some:
            some.setattr(lifecycle, "run_apart", no_thread)
            with pytest.raises(Unavailable) as caught:
                await kept.ask("b")
        assert caught.value.code == "load_failed"
        assert await kept.ask("a") == text_alone("once upon a time", 8)
        kept.tenant("b").failed_at = -1000.0
        assert await kept.ask("b") == text_alone("once upon a time", 8)
    assert kept.ends == [None]


async def test_what_fails_again_and_again_is_tried_less_and_less_and_is_not_ready_meanwhile(keep: Keep) -> None:
    backend = Backend()
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept:
        await kept.ask("b")
        backend.failing.add("a")
        waits = []
        for _ in range(3):
            kept.tenant("a").failed_at = -10_000.0
            with pytest.raises(Unavailable) as caught:
                await kept.ask("a")
            waits.append(round(caught.value.retry_after_s / 30))
            with pytest.raises(Unavailable):
                kept.house.check_ready()
        assert waits == [1, 2, 4]
        backend.failing.clear()
        kept.tenant("a").failed_at = -10_000.0
        kept.house.check_ready()
        await kept.ask("a")
        assert kept.tenant("a").n_failures == 0


async def test_the_wait_for_another_try_does_not_end_in_an_error_after_thousands_of_failures(keep: Keep) -> None:
    async with keep("a", "b", models_memory_mb=100) as kept:
        kept.tenant("b").n_failures = 5000
        assert kept.tenant("b").failed_for_s == FAILED_FOR_S_MAX


async def test_a_model_is_known_by_the_names_that_it_had_when_it_was_loaded(keep: Keep) -> None:
    async with keep("a", "b") as kept:
        tenant = kept.tenant("b")
        tenant._learnt = ("what its server calls it",)
        await kept.keeper.unload(tenant)
        assert kept.tenant("what its server calls it") is tenant
        assert (await kept.ask("what its server calls it")) == text_alone("once upon a time", 8)


async def test_an_adapter_that_is_asked_for_while_it_is_unloaded_is_not_left_to_nobody(keep: Keep, tmp_path: Path) -> None:
    path = tmp_path / "style.gguf"
    path.touch()
    async with keep("a") as kept:
        for n in range(4):
            adapter = kept.house.adopt(kept.tenant("a"), f"style{n}", str(path))
            assert adapter.n_bytes == SIZE
            held = await kept.house.hold(adapter)
            async with trio.open_nursery() as nursery:

                async def unload_and_forget(adapter: Tenant = adapter) -> None:
                    await kept.keeper.unload(adapter)
                    kept.house.forget(adapter)

                async def ask(adapter: Tenant = adapter) -> None:
                    with suppress(NotFound):
                        (await kept.house.hold(adapter)).release()

                nursery.start_soon(unload_and_forget)
                await until(lambda adapter=adapter: adapter.state is State.UNLOADING)  # type: ignore[misc]
                nursery.start_soon(ask)
                await until(lambda adapter=adapter: bool(adapter.waiting))  # type: ignore[misc]
                held.release()
            await until(lambda: set(kept.keeper._lives) <= set(kept.house.tenants))


async def test_an_adapter_needs_no_file_of_the_start(keep: Keep, tmp_path: Path) -> None:
    config = tmp_path / "cllm.toml"
    config.touch()
    async with keep("a", config=str(config)) as kept:
        config.unlink()
        assert kept.house.adopt(kept.tenant("a"), "style", __file__).settings.lora == (f"{__file__}:1.0",)
        with pytest.raises(InvalidRequest, match="lora_path: a cannot be loaded with it: lora: no such file"):
            kept.house.adopt(kept.tenant("a"), "other", str(tmp_path / "gone.gguf"))


async def test_an_adapter_that_could_not_be_loaded_leaves_its_name_to_another_file(keep: Keep, tmp_path: Path) -> None:
    good = tmp_path / "good.gguf"
    good.touch()
    async with keep("a") as kept:
        bad = kept.house.adopt(kept.tenant("a"), "style", __file__)
        bad.become(State.FAILED)  # after whoever asked for it had left
        assert kept.house.adopt(kept.tenant("a"), "style", str(good)).settings.lora == (f"{good}:1.0",)
        assert bad not in kept.house.tenants


async def test_an_adapter_of_a_model_that_is_not_loaded_yet_counts_as_much_as_its_file(keep: Keep) -> None:
    async with keep("a") as kept:
        kept.tenant("a").n_bytes = 0
        assert kept.house.adopt(kept.tenant("a"), "style", __file__).n_bytes == SIZE


def test_a_file_for_vectors_takes_room_too() -> None:
    assert n_bytes_of_files(Settings(model=__file__, embedding_model=__file__)) == 2 * Path(__file__).stat().st_size


async def test_what_takes_no_memory_makes_no_room(keep: Keep) -> None:
    async with keep("a", "b", "c", models_memory_mb=200) as kept:
        kept.tenant("a").n_bytes = 0  # as of a server elsewhere
        await kept.ask("c")
        await kept.ask("b")
        assert kept.tenant("a").state is State.LOADED


@pytest.mark.parametrize("error", [StepFailed("no memory"), Panic("no memory")])
async def test_a_load_on_demand_whose_steps_fail_while_they_are_measured_is_no_more_than_that(keep: Keep, error: BaseException) -> None:
    def fail(name: str, _batch: Batch) -> None:
        if name == "b":
            raise error

    backend = Backend()
    backend.before_step = fail
    async with keep("a", "b", models_memory_mb=100, backend=backend, calibrate="again") as kept:
        loading._measured_here.clear()  # both are of one shape, which is measured once by a process
        with pytest.raises(Unavailable) as caught:
            await kept.ask("b")
        assert caught.value.code == "load_failed"
        assert await kept.ask("a") == text_alone("once upon a time", 8)
    assert kept.ends == [None]
    assert [model.n_closed for name, model in backend.loaded if name == "b"] == [1]


async def test_a_load_that_fails_at_the_start_ends_the_process(keep: Keep) -> None:
    backend = Backend()
    backend.failing.add("b")
    async with keep("a", "b", backend=backend, drains=False) as kept:
        pass
    assert [type(end) for end in kept.ends] == [LoadFailed]
    assert not kept.keeper.ready.is_set()
    assert [model.n_closed for _, model in backend.loaded] == [1]


async def test_what_is_known_to_be_wrong_with_a_later_model_is_told_before_the_first_is_loaded(keep: Keep) -> None:
    def look(settings: Settings) -> None:
        if settings.model == "c":
            raise LoadFailed("c: no such file")

    async with keep("a", "b", "c", beforehand=look, drains=False) as kept:
        pass
    assert [str(end) for end in kept.ends] == ["c: no such file"]
    assert kept.backend.loaded == []


async def test_a_model_that_dies_ends_all(keep: Keep) -> None:
    def die(name: str, batch: Batch) -> None:
        raise ModelDied("gone")

    backend = Backend()
    async with keep("a", "b", backend=backend, drains=False) as kept:
        await kept.keeper.ready.wait()
        backend.before_step = die
        await kept.ask("b")
    assert [type(end) for end in kept.ends] == [ModelDied]
    assert [model.n_closed for _, model in backend.loaded] == [1, 1]


async def test_a_model_that_dies_gives_up_the_load_of_another(keep: Keep) -> None:
    begun, told = threading.Event(), threading.Event()

    class Slow(Backend):
        def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
            if spec.path != "b":
                return super().load(spec, on_progress)
            begun.set()
            n_left = 1000
            while n_left and on_progress(0.1):
                n_left -= 1
                time.sleep(0.005)
            if n_left:
                told.set()
            raise LoadAborted("told to stop")

    def die(name: str, batch: Batch) -> None:
        raise ModelDied("gone")

    backend = Slow()
    async with keep("a", "b", models_memory_mb=100, backend=backend, drains=False) as kept:
        await kept.keeper.ready.wait()
        kept.tenant("b").n_bytes = 0  # so that nobody has to make room
        kept.keeper._want(kept.tenant("b"))
        await until(begun.is_set)
        backend.before_step = die
        await kept.ask("a")
    assert told.is_set()
    assert [type(end) for end in kept.ends] == [ModelDied]


async def test_a_load_that_fails_while_the_server_is_told_to_end_is_no_failure_of_the_server(keep: Keep) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def during_load(name: str) -> None:
        begun.set()
        wait_for(go_on)

    backend = Backend()
    backend.during_load = during_load
    backend.failing.add("a")  # as one whose worker had the same signal
    async with keep("a", backend=backend, drains=False) as kept:
        await until(begun.is_set)
        kept.keeper.drain()
        go_on.set()
    assert kept.ends == [None]


async def test_a_model_that_cannot_be_opened_is_a_load_that_failed_and_the_others_answer(keep: Keep) -> None:
    class Closed(FakeStreamModel):
        def open(self, tell: Callable[[StreamEvent], None]) -> None:
            raise RuntimeError("no thread left")

    class Mixed(Backend):
        def load(self, spec: ModelSpec, on_progress: OnProgress) -> Any:
            return Closed() if spec.path == "b" else super().load(spec, on_progress)

    async with keep("a", "b", models_memory_mb=100, backend=Mixed()) as kept:
        with pytest.raises(Unavailable) as caught:
            await kept.ask("b")
        assert caught.value.code == "load_failed"
        assert await kept.ask("a") == text_alone("once upon a time", 8)
    assert kept.ends == [None]


@pytest.mark.parametrize("error", [RuntimeError("the driver is gone"), Panic("the driver is gone")])
async def test_a_model_whose_close_raises_is_unloaded_and_the_others_answer(keep: Keep, error: BaseException) -> None:
    def close() -> None:
        raise error

    async with keep("a", "b") as kept:
        kept.backend.loaded[1][1].close = close  # type: ignore[method-assign]
        await kept.keeper.unload(kept.tenant("b"))
        assert kept.states() == "loaded unloaded"
        assert await kept.ask("a") == text_alone("once upon a time", 8)
    assert kept.ends == [None]


async def test_a_model_that_takes_long_to_close_holds_up_no_other(keep: Keep) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def close() -> None:
        begun.set()
        may_end.wait(TEST_S)

    async with keep("a", "b") as kept, trio.open_nursery() as nursery:
        kept.backend.loaded[1][1].close = close  # type: ignore[method-assign]
        nursery.start_soon(kept.keeper.unload, kept.tenant("b"))
        await until(begun.is_set)
        assert await kept.ask("a") == text_alone("once upon a time", 8)
        assert kept.states() == "loaded unloading"
        may_end.set()
    assert kept.ends == [None]


async def test_a_model_may_be_unloaded_and_is_loaded_again_when_asked(keep: Keep) -> None:
    async with keep("a", "b") as kept:
        await kept.keeper.unload(kept.tenant("b"))
        assert kept.states() == "loaded unloaded"
        assert kept.backend.loaded[1][1].n_closed == 1
        assert kept.house.health().ok
        assert await kept.ask("b") == text_alone("once upon a time", 8)
        await kept.keeper.unload(kept.tenant("a"))
        kept.house.check_ready()  # a request would have it loaded
    assert kept.backend.names == ["a", "b", "b"]


async def test_what_an_unloaded_model_had_on_the_host_is_given_back_and_its_engine_too(keep: Keep) -> None:
    async with keep("a", "b") as kept:
        await kept.ask("b")
        engine = kept.tenant("b").engine
        assert engine._loop is not None
        offload = engine._loop.scheduler.memory.offload
        assert offload is not None
        offload.pool.put(Piece(("", ""), list(range(100)), 0, b"x" * 1000))
        gone, pool = weakref.ref(engine), offload.pool
        del engine, offload
        spare_what_stays()
        try:
            await kept.keeper.unload(kept.tenant("b"))
            assert pool.n_bytes == 0
            del pool
            await kept.ask("b")  # the next load finds what has ended
            assert gone() is None
        finally:
            gc.unfreeze()


async def test_a_model_that_is_forgotten_while_its_load_waits_for_its_turn_is_not_loaded(keep: Keep) -> None:
    begun, go_on = threading.Event(), threading.Event()
    backend = Backend()

    def wait(name: str) -> None:
        if name == "b":
            begun.set()
            wait_for(go_on)

    async with keep("a", "b", "c", models_memory_mb=100, backend=backend) as kept, trio.open_nursery() as nursery:
        backend.during_load = wait
        nursery.start_soon(kept.ask, "b")
        await until(begun.is_set)
        refused: list[NotFound] = []

        async def ask_forgotten() -> None:
            try:
                await kept.ask("c")
            except NotFound as error:
                refused.append(error)

        forgotten = kept.tenant("c")
        nursery.start_soon(ask_forgotten)
        await until(lambda: bool(forgotten.waiting))
        kept.house.forget(forgotten)
        go_on.set()
        await until(lambda: bool(refused))
        assert kept.states() == "unloaded loaded", "nobody had to make room for it"
    assert backend.names == ["a", "b"]


async def test_two_hundred_at_once_at_a_cold_model_are_one_load_and_as_many_answers_as_there_is_room_for(keep: Keep) -> None:
    go_on, backend = threading.Event(), Backend()
    backend.during_load = lambda name: None if name == "a" else wait_for(go_on)
    async with keep("a", "b", models_memory_mb=100, queue_size=90, parallel=10, backend=backend) as kept:
        refused: list[str | None] = []
        answered: list[str] = []

        async def ask() -> None:
            try:
                answered.append(await kept.ask("b"))
            except Unavailable as error:
                refused.append(error.code)

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(ask)
            await until(lambda: len(refused) == 100)
            assert len(kept.tenant("b").waiting) == 100
            go_on.set()
        assert 90 <= len(answered) <= 100, "those who may run at once have begun or not when the others come to its queue"
        assert set(answered) == {text_alone("once upon a time", 8)}
        assert refused == ["queue_full"] * (200 - len(answered))
        assert kept.backend.names == ["a", "b"]


def pools_mib(kept: Kept) -> list[int]:
    """What each model that is loaded may keep on the host."""
    loops = [life._loop for life in kept.keeper._lives.values()]
    return [loop.scheduler.limits.host_pool_n_bytes >> 20 for loop in loops if loop is not None]


async def test_what_one_model_may_still_take_of_the_free_memory_is_not_promised_to_the_next(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.machine.free_memory_bytes", lambda: 8 << 30)
    async with keep("a", "b", "c") as kept:
        assert pools_mib(kept) == [2048, 1536, 1152]
        await kept.keeper.unload(kept.tenant("a"))
        await kept.ask("a")
        assert pools_mib(kept) == [1536, 1152, 1376], "a quarter of what the others leave"
    async with keep("a", "b", host_cache_mb=500) as kept:
        assert pools_mib(kept) == [500, 500]


async def test_where_others_leave_no_memory_for_the_host_there_is_no_disk_either_and_that_is_told(
    keep: Keep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, logged: list[Any]
) -> None:
    monkeypatch.setattr("cllm.machine.free_memory_bytes", lambda: 8 << 30)
    monkeypatch.setattr("cllm.serve.lifecycle.EngineLife.promised_bytes", 8 << 30)
    async with keep("a", "b", cache_dir=str(tmp_path)) as kept:
        assert pools_mib(kept) == [2048, 0]
    (off,) = [entry for entry in logged if entry["event"] == "disk.off"]
    assert "what other models may still take counts first" in off["why"]


async def test_a_key_that_floods_a_cold_model_does_not_shut_another_out(keep: Keep) -> None:
    go_on, backend = threading.Event(), Backend()
    backend.during_load = lambda name: None if name == "a" else wait_for(go_on)
    keys = ("flooding-key", "quiet-key weight=3")
    async with keep("a", "b", models_memory_mb=100, queue_size=6, parallel=2, backend=backend, api_key=keys) as kept:
        codes: dict[str, list[str | None]] = {"key0": [], "key1": []}

        async def ask(key: str) -> None:
            try:
                (await kept.house.hold(kept.tenant("b"), key=key)).release()
                codes[key].append("answered")
            except Unavailable as error:
                codes[key].append(error.code)

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(ask, "key0")
            await until(lambda: codes["key0"] == ["queue_full"] * 12)
            for _ in range(20):
                nursery.start_soon(ask, "key1")
            await until(lambda: codes["key1"] == ["queue_full"] * 14)
            go_on.set()
    assert codes["key0"][12:] == ["answered"] * 8, "a queue of six and two that could run"
    assert codes["key1"][14:] == ["answered"] * 6, "three quarters of that, by its weight"


async def test_a_hold_that_is_given_up_while_it_waits_leaves_nothing(keep: Keep) -> None:
    async with keep("a", "b", models_memory_mb=100) as kept:
        held = await kept.house.hold(kept.tenant("a"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kept.ask, "b")
            await until(lambda: bool(kept.tenant("b").waiting))
            nursery.cancel_scope.cancel()
        assert not kept.tenant("b").waiting
        held.release()
        held.release()
        assert kept.tenant("a").n_users == 0
        await until(lambda: kept.tenant("b").state is State.LOADED)
        assert kept.tenant("b").n_users == 0


async def test_while_it_drains_it_is_not_ready_though_its_first_model_is_unloaded(keep: Keep) -> None:
    async with keep("a", "b") as kept:
        await kept.keeper.unload(kept.tenant("a"))
        kept.house.check_ready()
        kept.keeper.drain()
        with pytest.raises(Unavailable, match="draining"):
            kept.house.check_ready()


async def test_draining_lets_every_model_end_what_it_has_and_turns_away_who_waits_for_a_load(keep: Keep) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def during_load(name: str) -> None:
        if name == "c":
            begun.set()
            assert go_on.wait(TEST_S)

    backend = Backend()
    backend.during_load = during_load
    errors: list[Unavailable] = []
    async with keep("a", "b", "c", models_memory_mb=299, backend=backend) as kept:
        held: list[Hold] = [await kept.house.hold(kept.tenant(name)) for name in "ab"]
        kept.tenant("c").n_bytes = 0  # so that nobody has to make room
        streams = [hold.tenant.engine.open([make_spec(n_tokens=20)]) for hold in held]
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                try:
                    await kept.ask("c")
                except Unavailable as error:
                    errors.append(error)

            nursery.start_soon(ask)
            await until(begun.is_set)
            kept.keeper.drain()
            go_on.set()
        for stream in streams:
            (answer,) = await read_all(stream)
            assert len(answer.tokens) == 20
    assert [error.code for error in errors] == ["draining"]
    assert kept.ends == [None]


async def test_who_waits_to_unload_what_is_loading_does_not_hold_up_the_end(keep: Keep) -> None:
    backend, begun, go_on = waiting_with("b")
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept, trio.open_nursery() as nursery:
        kept.tenant("b").n_bytes = 0  # so that nobody has to make room
        kept.keeper._want(kept.tenant("b"))
        await until(begun.is_set)
        nursery.start_soon(kept.keeper.unload, kept.tenant("b"))
        await trio.testing.wait_all_tasks_blocked()
        kept.keeper.drain()
        go_on.set()
    assert kept.ends == [None]


async def test_the_wish_to_unload_what_is_loading_outlives_who_had_it(keep: Keep) -> None:
    backend, begun, go_on = waiting_with("b")
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept:
        kept.tenant("b").n_bytes = 0  # so that nobody has to make room
        kept.keeper._want(kept.tenant("b"))
        await until(begun.is_set)
        with trio.move_on_after(0.01):
            await kept.keeper.unload(kept.tenant("b"))
        assert kept.states() == "loaded loading"
        go_on.set()
        await until(lambda: kept.states().endswith("unloaded"))
    assert kept.backend.loaded[1][1].n_closed == 1


async def test_no_load_is_shown_any_more_once_it_is_over_whatever_came_of_it(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Quiet] = []
    stopped: list[Quiet] = []
    monkeypatch.setattr(Quiet, "update", lambda self, _share: shown.append(self))
    monkeypatch.setattr(Quiet, "stop", lambda self: stopped.append(self))
    backend = Backend()
    async with keep("a", "b", models_memory_mb=100, backend=backend) as kept:
        backend.failing.add("b")
        with pytest.raises(Unavailable):
            await kept.ask("b")
        await until(lambda: len({id(one) for one in stopped}) == 2)
        assert {id(one) for one in shown} <= {id(one) for one in stopped}
