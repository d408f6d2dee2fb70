"""The models of a server as the API sees them: what each is called, how it stands, and a hold on one for as long as it is used."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs
import trio
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from cllm import hub
from cllm.config import Settings, embedding_names_of, names_of
from cllm.engine.views import SequenceView
from cllm.engine.waiting.fairness import finds_room
from cllm.errors import DeadlineExceeded, InvalidRequest, NotFound, NotSupported, SettingsError, Unavailable
from cllm.serve.engine import Engine, EnginePhase, Health, new_engine
from cllm.serve.loading import N_LIVE_DEFAULT_MAX
from cllm.serve.metrics import PluginMetric, own_first
from cllm.serve.records import Record

N_TENANTS_MAX = 64
LATEST = ":latest"  # the tag that Ollama's clients add to a name without one
RETRY_AFTER_S = 5.0  # for whoever came while a model was loaded or unloaded for longer than a request waits
FILES_OF_THE_START: Any = {"config": None, "ssl_certfile": None, "ssl_keyfile": None}  # which may be gone when a model is added
FAILED_FOR_S = 30.0  # a model that could not be loaded is tried again after this time, not at every request, then after twice that
N_DOUBLINGS_MAX = 10
FAILED_FOR_S_MAX = 900.0  # and so on: for each try others may have to make room


class State(Enum):
    """How a model stands; the words are llama-server's."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"  # finishes what it has
    FAILED = "failed"  # could not be loaded


class Tenant:
    """A model that requests may name, loaded or not. Its engine is another one each time that it is loaded."""

    def __init__(self, settings: Settings, engine: Engine | None = None) -> None:
        self.settings = settings
        self.engine = engine if engine is not None else new_engine(settings)
        self.state = State.LOADING if engine is None or engine.phase is EnginePhase.LOADING else State.LOADED
        self.n_users = 0  # holds on it
        self.waiting: list[Hold] = []  # for it to be loaded
        self.used_at = 0.0  # Trio's clock
        self.n_bytes = 0  # what it takes, or would take, as far as it is known
        self.known_at = time.time()
        self.failed_at = 0.0
        self.n_failures = 0  # loads that failed, in a row
        self.told: dict[str, dict[str, Any]] = {}  # what was said of it while it was loaded
        self._learnt: tuple[str, ...] = ()  # what it was called when it was loaded
        self._learnt_of_vectors: tuple[str, ...] = ()
        self.is_adopted = False  # named at run time, and may be forgotten
        self.is_known_loaded = False  # to whoever had it adopted
        self._changed = trio.Event()

    @property
    def name(self) -> str:
        """What it is called first of all."""
        return self.aliases[0]

    @property
    def aliases(self) -> tuple[str, ...]:
        """All names that a request may use for its text."""
        return self.engine.model.aliases if self.state is State.LOADED else self._learnt or names_of(self.settings)

    @property
    def embedding_aliases(self) -> tuple[str, ...]:
        """All names that a request may use for its vectors, as far as they are known before it is loaded."""
        embedder = self.engine.embedder if self.state is State.LOADED else None
        if embedder is not None:
            return embedder.aliases
        return self._learnt_of_vectors or (*self.aliases, *embedding_names_of(self.settings))

    @property
    def may_give_vectors(self) -> bool:
        """Whether it does, or would if it were loaded, as far as that is known."""
        told = self._learnt_of_vectors if self._learnt else self.settings.embeddings or self.settings.embedding_model
        return self.engine.embedder is not None or bool(told)

    @property
    def failed_for_s(self) -> float:
        """How long it is not tried again after it failed."""
        n_doublings = min(max(self.n_failures - 1, 0), N_DOUBLINGS_MAX)  # of thousands there would be no float
        return min(FAILED_FOR_S * 2.0**n_doublings, FAILED_FOR_S_MAX)

    def try_again(self) -> None:
        """Do not wait any longer after a failure: who asks for it by name may have mended the file. Others wait as long, should it fail."""
        self.failed_at = -math.inf

    def become(self, state: State) -> None:
        """Change the state. Who waited for the model has a hold on it from the moment that it is loaded."""
        self.state = state
        if state is State.LOADED:
            self.n_failures = 0
            self._learnt = self.engine.model.aliases
            self._learnt_of_vectors = () if self.engine.embedder is None else self.engine.embedder.aliases
        elif state is State.FAILED:
            self.n_failures += 1
            self.failed_at = trio.current_time()
        if state in (State.LOADED, State.FAILED):
            self.settle()
        self.tell()

    def settle(self) -> None:
        """Let nobody wait any longer: those who wait get their hold if the model is loaded, and otherwise none."""
        waiting, self.waiting = self.waiting, []
        for hold in waiting:
            hold.settle(granted=self.state is State.LOADED)

    def tell(self) -> None:
        """Wake who waits for a change."""
        self._changed.set()
        self._changed = trio.Event()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` after one of its changes; not at all if it holds now."""
        while not holds():
            await self._changed.wait()


class Hold:
    """Keeps a model from being unloaded until `release`; before it is granted, it stands for the wish to have it loaded."""

    def __init__(self, tenant: Tenant, key: str = "") -> None:
        self.tenant = tenant
        self.key = key  # by its name, whose the request is
        self.is_granted = False
        self.settled = trio.Event()

    def settle(self, *, granted: bool) -> None:
        """Say whether the model is there."""
        self.settled.set()
        if granted:
            self.is_granted = True
            self.tenant.n_users += 1
            self.tenant.used_at = trio.current_time()

    def release(self) -> None:
        """Give it up. May be called again."""
        if self in self.tenant.waiting:
            self.tenant.waiting.remove(self)
        if self.is_granted:
            self.is_granted = False
            self.tenant.n_users -= 1
            self.tenant.used_at = trio.current_time()
            self.tenant.tell()


class House:
    """All models of a process; the first is meant where a request names none. To be called from the Trio thread."""

    def __init__(self, tenants: Sequence[Tenant], *, load_wait_s: float = 0.0, key_weights: Mapping[str, float] | None = None) -> None:
        self.tenants = tuple(tenants)
        self.first = self.tenants[0]
        self.registry = _Registry()
        self.registry.register(_EnginesCollector(self))
        self.is_open = False  # all that is loaded at the start is loaded
        self.is_draining = False
        self.wanted: Callable[[Tenant], None] = _nobody_loads
        self.unload: Callable[[Tenant], Awaitable[None]] = _nobody_unloads
        self._load_wait_s = load_wait_s
        self._key_weights = dict(key_weights or {})

    @classmethod
    def of(cls, engine: Engine, settings: Settings) -> House:
        """A house with one model that somebody else loads and runs."""
        return cls([Tenant(settings, engine)])

    @property
    def is_shared(self) -> bool:
        """Whether there are several models."""
        return len(self.tenants) > 1

    @property
    def names_models(self) -> bool:
        """Whether what is counted says of which model it is: all the time where there may be several, so that no series ends and begins."""
        settings = self.first.settings
        return self.is_shared or (settings.enable_admin and settings.lora_dir is not None)

    def find(self, name: str | None) -> Tenant:
        """The model of that name; the first for no name. Raises: NotFound."""
        if not name:
            return self.first
        found = self.lookup(name)
        if found is None:
            known = ", ".join([alias for tenant in self.tenants for alias in tenant.aliases])
            raise NotFound(f"there is no model {name[:200]!r} here, only {known}", param="model", code="model_not_found")
        return found

    def lookup(self, name: str) -> Tenant | None:
        """The model of that name, with the tag or without, if there is one."""
        return next((tenant for each in with_and_without_tag(name) for tenant in self.tenants if each in tenant.aliases), None)

    def find_embedder(self, name: str | None) -> Tenant:
        """The model that gives vectors under that name; for no name the first that gives some. Raises: NotFound."""
        able = [tenant for tenant in self.tenants if tenant.may_give_vectors]
        if not name:
            return next(iter(able), self.first)  # whichever is loaded: vectors of another one could not be compared
        giving = sorted(able, key=lambda tenant: tenant.engine.embedder is None)
        for each in with_and_without_tag(name):
            for tenant in (*giving, *self.tenants):
                if each in tenant.embedding_aliases:
                    return tenant
        if not giving:
            return self.first  # says that it gives none
        known = ", ".join([alias for tenant in giving for alias in tenant.embedding_aliases])
        raise NotFound(f"there is no model {name[:200]!r} for embeddings here, only {known}", param="model", code="model_not_found")

    async def hold(self, tenant: Tenant, *, key: str = "", timeout_s: float = math.inf) -> Hold:
        """A hold on a model, which is loaded for that and waited for. Returns at once if it is there; the caller releases it.

        Raises: Unavailable while the server starts or drains, when it takes longer than a request waits, cannot be loaded, or too many of
        this key wait for it · DeadlineExceeded when it takes longer than `timeout_s` · NotFound when it is unloaded for good meanwhile.
        """
        hold = Hold(tenant, key)
        if tenant.state is State.LOADED:
            hold.settle(granted=True)
        else:
            await self._wait_loaded(hold, timeout_s)
        return hold

    async def _wait_loaded(self, hold: Hold, timeout_s: float) -> None:
        tenant = hold.tenant
        if self.is_draining or not self.is_open:
            tenant.engine.check_ready()  # says how far it is, or that it drains
        self._check_worth(tenant)
        n_waiting_max = tenant.settings.queue_size + (tenant.settings.parallel or N_LIVE_DEFAULT_MAX)  # as once it is loaded
        if not finds_room(hold.key, Counter(each.key for each in tenant.waiting), n_waiting_max, self._key_weights):
            raise Unavailable("the queue is full", retry_after_s=RETRY_AFTER_S, code="queue_full")
        tenant.waiting.append(hold)
        try:
            self.wanted(tenant)
            with trio.move_on_after(max(min(self._load_wait_s, timeout_s), 0.0)):
                await hold.settled.wait()
            self._check_worth(tenant)
            if hold.settled.is_set() and not hold.is_granted and tenant not in self.tenants:
                raise NotFound(f"{tenant.name} was unloaded while it was waited for", param="model", code="model_not_found")
            if not hold.is_granted and timeout_s < self._load_wait_s:
                raise DeadlineExceeded("timeout_s passed while the model was being loaded", param="timeout_s")
            if not hold.is_granted:
                progress = round(tenant.engine.progress, 3)
                raise Unavailable(f"{tenant.name} is being loaded", retry_after_s=RETRY_AFTER_S, code="loading", progress=progress)
        except BaseException:
            hold.release()
            raise

    def _check_worth(self, tenant: Tenant) -> None:
        if self.is_draining and tenant.state is not State.LOADED:
            raise Unavailable("the server is draining", retry_after_s=RETRY_AFTER_S, code="draining")
        left_s = tenant.failed_at + tenant.failed_for_s - trio.current_time()
        if tenant.state is State.FAILED and left_s > 0:
            raise Unavailable(f"{tenant.name} could not be loaded; the server's log says why", retry_after_s=left_s, code="load_failed")

    def adopt(self, base: Tenant, adapter: str, path: str) -> Tenant:
        """Let requests name `base` with the LoRA adapter in the file `path` as BASE:ADAPTER.

        One that is so already is returned, unless it is loaded and whoever asked for that knows. Raises: InvalidRequest.
        """
        name = f"{base.name}:{adapter}"
        lora = (*base.settings.lora, f"{path}:1.0")
        found = self.lookup(name)
        if found is not None and found.is_adopted and found.state is State.FAILED and found.settings.lora != lora:
            self.forget(found)  # nobody was there any more who would have been told
            found = None
        if found is not None:
            is_news = found.state is not State.LOADED or not found.is_known_loaded
            if found.is_adopted and found.settings.lora == lora and is_news:
                return found  # who was told to come again waits for the same load, or begins another
            raise InvalidRequest(f"lora_name: there is a model {name} already", param="lora_name")
        if len(self.tenants) >= N_TENANTS_MAX:
            raise InvalidRequest(f"lora_name: this server has {N_TENANTS_MAX} models, and takes no more", param="lora_name")
        own: Any = {"lora": lora, "alias": (name,), "embedding_model": None, "embedding_alias": ()}
        try:
            tenant = Tenant(attrs.evolve(base.settings, **own, **FILES_OF_THE_START))
        except SettingsError as error:
            raise InvalidRequest(f"lora_path: {base.name} cannot be loaded with it: {error}", param="lora_path") from error
        tenant.is_adopted = True
        tenant.n_bytes = base.n_bytes or n_bytes_of_files(tenant.settings)
        tenant.become(State.UNLOADED)
        self.tenants = (*self.tenants, tenant)
        return tenant

    def forget(self, tenant: Tenant) -> None:
        """Let no request name it any more; it is not loaded."""
        self.tenants = tuple(other for other in self.tenants if other is not tenant)

    # --- all of them together -----------------------------------------------------------------------------------------

    def engines(self) -> list[Engine]:
        """The engines of the models that are loaded."""
        return [tenant.engine for tenant in self.tenants if tenant.state in (State.LOADED, State.UNLOADING)]

    def sequences(self) -> list[SequenceView]:
        """The sequences under way, of all models."""
        return [view for engine in self.engines() for view in engine.sequences()]

    def record(self, request_id: str, key: str) -> Record | None:
        """What is known of a request that `key` made: of the last one of that id."""
        found = [record for tenant in self.tenants if (record := tenant.engine.records.find(request_id, key)) is not None]
        return max(found, key=lambda record: record.received_at, default=None)

    def health(self) -> Health:
        """Whether every model makes progress."""
        states = [tenant.engine.health() for tenant in self.tenants]
        return next((state for state in states if not state.ok), states[0])

    def check_ready(self) -> None:
        """Raises: Unavailable unless a request would be taken: by the first model, or, where that is not loaded now, by its load."""
        if self.is_open and self.first.state is not State.LOADED:
            self._check_worth(self.first)
            return
        for tenant in (self.first,) if self.is_open else self.tenants:
            if tenant.state is not State.UNLOADED:
                tenant.engine.check_ready()


def n_bytes_of_files(settings: Settings) -> int:
    """The bytes of the files that are to be loaded, as far as they are here."""
    return sum(hub.size_of(model) for model in (settings.model, settings.embedding_model) if model is not None)


def with_and_without_tag(name: str) -> tuple[str, str]:
    """What a request may mean by a name: it itself, before the same without Ollama's tag."""
    return name, name.removesuffix(LATEST)


async def _nobody_unloads(tenant: Tenant) -> None:
    raise NotSupported(f"{tenant.name} cannot be unloaded here")


def _nobody_loads(tenant: Tenant) -> None:
    tenant.engine.check_ready()


class _Registry(CollectorRegistry):
    """What the whole server tells, in which a plugin takes no name of the server's own."""

    def collect(self) -> Iterable[Metric]:
        return own_first(super().collect())


class _EnginesCollector(Collector):
    """What every engine counts; where there are several models, each sample says of which it is."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterator[Metric]:
        if not self._house.names_models:
            yield from self._house.first.engine.metrics.registry.collect()
            return
        merged: dict[tuple[str, type[Metric]], Metric] = {}
        for tenant in self._house.tenants:
            for metric in tenant.engine.metrics.registry.collect():
                kind = PluginMetric if isinstance(metric, PluginMetric) else Metric
                into = merged.setdefault((metric.name, kind), kind(metric.name, metric.documentation, metric.type))
                into.samples += [one._replace(labels={**one.labels, "model": tenant.name}) for one in metric.samples]
        yield from merged.values()
