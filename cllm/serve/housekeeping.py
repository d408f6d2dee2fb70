"""The life of all models of a process: loaded at the start and on demand, unloaded to make room, drained and ended together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import trio

from cllm.config import Settings, api_keys, settings_of_models, with_keys_read
from cllm.errors import BackendUnavailable, LoadAborted, LoadFailed
from cllm.serve.engine import new_engine
from cllm.serve.garbage import find_what_has_ended
from cllm.serve.house import House, State, Tenant, n_bytes_of_files
from cllm.serve.http.requests import leaves
from cllm.serve.lifecycle import EngineLife
from cllm.serve.loading import check_beforehand
from cllm.serve.modelthread import ModelThread, open_model_thread
from cllm.serve.progress import Progress

log = structlog.get_logger("cllm.models")

MakeProgress = Callable[[str], Progress]


class Housekeeper:
    """Loads and runs the models that `house` shows to the API. One task runs `run`; the others call what they need.

    One load goes on at a time, in the order in which models were asked for. What has to make room answers first what it was asked.
    """

    def __init__(self, settings: Settings, make_progress: MakeProgress, on_death: Callable[[Exception], None] = lambda error: None) -> None:
        """`on_death` is told of what ends the process as soon as it is known, before anything is closed."""
        self.settings = settings = with_keys_read(settings)  # for all that serves
        key_weights = {key.name: key.weight for key in api_keys(settings)}
        tenants = [Tenant(each) for each in settings_of_models(settings)]
        self.house = House(tenants, load_wait_s=settings.load_wait_s, key_weights=key_weights)
        self.house.wanted = self._want
        self.house.unload = self.unload
        self.ready = trio.Event()  # all that is loaded at the start is loaded
        self._n_bytes_max = math.inf if settings.models_memory_mb is None else settings.models_memory_mb << 20
        self._make_progress = make_progress
        self._on_death = on_death
        self._progress: Progress | None = None
        self._lives: dict[Tenant, EngineLife] = {}
        self._wanted: list[Tenant] = []
        self._has_unloaded = False  # since the last load began
        self._work = trio.Event()
        self._loading = trio.CancelScope()
        self._thread: ModelThread
        self._nursery: trio.Nursery

    # --- its life -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Load what there is room for, then work until drained.

        Raises: what the first loads raise, ModelDied, or what is our own mistake. Every model is closed.
        """
        try:
            async with open_model_thread() as self._thread:
                with _alone():
                    async with trio.open_nursery() as self._nursery:
                        with self._loading:
                            await self._load_first()
                            await self._load_on_demand()
        finally:
            for tenant in self.house.tenants:
                tenant.engine.stopped()

    def drain(self) -> None:
        """Accept nothing more; `run` returns when the running sequences have ended. Loads under way are given up."""
        self.house.is_draining = True
        self._loading.cancel()
        for tenant in self.house.tenants:
            tenant.engine.drain()
            tenant.settle()
            tenant.tell()
        for life in self._lives.values():
            life.drain()

    async def finish(self, grace_s: float) -> None:
        """Drain, and end with an error what has not ended by itself after `grace_s`."""
        self.drain()
        async with trio.open_nursery() as nursery:
            for life in list(self._lives.values()):
                nursery.start_soon(life.finish, grace_s)

    async def wait_ended(self) -> None:
        """After `drain`, wait until what is cached is on disk, loads are given up and models closed, or the time for that is over."""
        async with trio.open_nursery() as nursery:
            for tenant, life in list(self._lives.items()):
                with structlog.contextvars.bound_contextvars(model=tenant.name):
                    nursery.start_soon(life.wait_ended)

    @property
    def n_embedding_requests(self) -> int:
        """Requests that wait for vectors, of all models."""
        return sum(life.n_embedding_requests for life in self._lives.values())

    def stop_progress(self) -> None:
        """Show no load any more."""
        if self._progress is not None:
            self._progress.stop()

    async def unload(self, tenant: Tenant) -> None:
        """Let a model answer what it was asked, and give its memory back. Returns when it has; at once if it is not loaded.

        Whoever asked may lose patience; what is begun is done, and so is what waits for a load.
        """
        if tenant not in self._lives and (tenant.state is not State.LOADING or self.house.is_draining):
            return
        is_done = trio.Event()
        self._nursery.start_soon(self._unload, tenant, is_done)
        await is_done.wait()

    async def _unload(self, tenant: Tenant, is_done: trio.Event) -> None:
        await tenant.until(lambda: tenant.state is not State.LOADING or self.house.is_draining)
        life = self._lives.get(tenant)
        if life is not None:
            if tenant.state is State.LOADED:
                log.info("unload", model=tenant.name, n_users=tenant.n_users)
                tenant.become(State.UNLOADING)
                await tenant.until(lambda: not tenant.n_users or self.house.is_draining)
                life.drain()
            await tenant.until(lambda: self._lives.get(tenant) is not life)
        is_done.set()

    # --- loading ------------------------------------------------------------------------------------------------------

    def _want(self, tenant: Tenant) -> None:
        if tenant not in self._wanted:
            self._wanted.append(tenant)
            self._work.set()

    async def _load_first(self) -> None:
        """Load the models in order as far as there is room, the first in any case."""
        for tenant in self.house.tenants[1:]:
            await trio.to_thread.run_sync(check_beforehand, tenant.settings, abandon_on_cancel=True)
        for tenant in self.house.tenants:
            # The hub's cache is looked through. Whoever drains meanwhile is heard: nobody would tell a life that began after that.
            tenant.n_bytes = await trio.to_thread.run_sync(n_bytes_of_files, tenant.settings, abandon_on_cancel=True)
            if tenant is not self.house.first and self._n_bytes_loaded() + tenant.n_bytes > self._n_bytes_max:
                tenant.become(State.UNLOADED)
                continue
            await self._load(tenant)
            if tenant is not self.house.first and self._n_bytes_loaded() > self._n_bytes_max:  # it takes more than its file's size
                await self.unload(tenant)
        self.house.is_open = True
        self.ready.set()

    async def _load_on_demand(self) -> None:
        while True:
            while self._wanted:
                await self._load_wanted(self._wanted[0])
            self._work = trio.Event()
            await self._work.wait()

    async def _load_wanted(self, tenant: Tenant) -> None:
        """Load who is wanted, if that can be. While others make room for it, it may be loaded, unloaded, wanted again or forgotten."""
        if tenant.state is State.UNLOADING:
            await self.unload(tenant)
        is_loaded = tenant.state is State.LOADED
        if not is_loaded and self._is_known(tenant) and await self._can_be(tenant):
            await self._make_room(tenant)
            if self._is_known(tenant):
                await self._load(tenant)
        self._wanted.remove(tenant)  # it may be unloaded while others make room, and who wants it then is to be heard
        if tenant.waiting and self._is_known(tenant):  # since it was loaded, or was not: nobody has heard them
            self._want(tenant)
        if not self._is_known(tenant):  # it was forgotten meanwhile: loaded, it could be named and unloaded by nobody
            tenant.settle()
            self._nursery.start_soon(self.unload, tenant)
        elif not is_loaded and tenant in self._lives:
            await self._make_room(tenant)  # for its cells, too

    async def _can_be(self, tenant: Tenant) -> bool:
        """Whether nothing is known to be wrong with it beforehand: nobody is to make room for what has no file any more."""
        try:
            await trio.to_thread.run_sync(check_beforehand, tenant.settings, abandon_on_cancel=True)
        except (BackendUnavailable, LoadFailed) as error:
            log.error("load.failed", model=tenant.name, why=str(error))
            tenant.become(State.FAILED)
            return False
        except RuntimeError:  # the system has no thread left, which the load meets too, and tells
            pass
        return True

    def _is_known(self, tenant: Tenant) -> bool:
        return tenant in self.house.tenants

    async def _load(self, tenant: Tenant) -> None:
        if self.house.is_draining:
            await trio.lowlevel.checkpoint()  # the cancelling came when this was about to run: a life that began now would hear of nothing
        tenant.become(State.LOADING)
        if self._has_unloaded:
            self._has_unloaded = False
            find_what_has_ended()  # here, since every stream stands still meanwhile, and a load takes long in any case
        with structlog.contextvars.bound_contextvars(model=tenant.name):
            self._progress = self._make_progress(tenant.settings.model or "the default model")
        life = self._lives[tenant] = EngineLife(
            tenant.settings,
            self._progress,
            tenant.engine,
            on_ready=lambda n_bytes: self._moved_in(tenant, n_bytes),
            until_left=lambda: tenant.until(lambda: not tenant.n_users),
            promised=lambda: sum(other.promised_bytes for each, other in self._lives.items() if each is not tenant),
            on_death=self._on_death,
        )
        self._nursery.start_soon(self._live, tenant, life)
        await tenant.until(lambda: tenant.state is not State.LOADING)
        self._progress.stop()  # also where nothing came of it

    async def _live(self, tenant: Tenant, life: EngineLife) -> None:
        is_failed = False
        try:
            with structlog.contextvars.bound_contextvars(model=tenant.name):  # every line that it has to do with
                await life.run_on(self._thread, beside_others=len(self._lives) > 1)
        except LoadAborted:  # told to stop while loading
            pass
        except (BackendUnavailable, LoadFailed) as error:
            if not self.house.is_open and not self.house.is_draining:  # at the start somebody looks on
                raise
            log.error("load.failed", model=tenant.name, why=str(error))
            is_failed = True
        except BaseException:
            for other in self._lives.values():  # the process ends: it is not to wait until another model is loaded, which nothing cancels
                other.drain()
            raise
        finally:
            del self._lives[tenant]
            self._has_unloaded = True
        self._moved_out(tenant, is_failed=is_failed)

    def _moved_in(self, tenant: Tenant, n_bytes: int) -> None:
        """Raises: LoadFailed where another model has a name that this one has told when it was loaded."""
        others = {name for other in self.house.tenants if other is not tenant for name in other.aliases}
        if twice := others.intersection(tenant.engine.model.aliases):
            raise LoadFailed(f"two models are called {min(twice)}: give one another name with --alias MODEL=NAME")
        tenant.n_bytes = n_bytes
        tenant.used_at = trio.current_time()
        tenant.become(State.LOADED)

    def _moved_out(self, tenant: Tenant, *, is_failed: bool) -> None:
        """The life of a model is over; unless the process ends too, it may be loaded again."""
        if self.house.is_draining:
            tenant.tell()
            return
        tenant.engine = new_engine(tenant.settings)
        tenant.become(State.FAILED if is_failed else State.UNLOADED)  # which tells

    # --- room ---------------------------------------------------------------------------------------------------------

    def _n_bytes_loaded(self) -> int:
        return sum(tenant.n_bytes for tenant in self._lives)

    async def _make_room(self, tenant: Tenant) -> None:
        """Unload others, the least recently used first, until `tenant` fits or is alone."""
        while True:
            others = [other for other in self._lives if other is not tenant and other.n_bytes]
            if not others or sum(other.n_bytes for other in others) + tenant.n_bytes <= self._n_bytes_max:
                return
            await self.unload(min(others, key=lambda other: (other.n_users > 0, other.used_at)))


@contextmanager
def _alone() -> Iterator[None]:
    """An exception that comes alone comes as it would without a nursery; of several the first."""
    try:
        yield
    except BaseExceptionGroup as group:
        reasons = [error for error in leaves(group) if not isinstance(error, trio.Cancelled)]
        if not reasons:
            raise
        raise reasons[0] from None
