"""What every handler needs: the engine, the settings, the counters."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast
from weakref import WeakKeyDictionary

import attrs
import structlog
from quart import g, has_app_context, request

from cllm.api.metrics import HttpMetrics
from cllm.api.operations import Operation
from cllm.api.room import Room
from cllm.api.sampling_fields import SamplingFields, Wanted, base_params, wanted
from cllm.config import Profile, Settings
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.streaming import heeded
from cllm.errors import RequestError, Unavailable
from cllm.serve.engine import Engine, ServedModel
from cllm.serve.house import RETRY_AFTER_S, House, State, Tenant
from cllm.serve.keythreads import KeyThreads

log = structlog.get_logger("cllm.api")

CLEANUP_KEY, KEY_NAME = "cllm.cleanup", "cllm.key"  # in the ASGI scope
N_DECODING_MAX = 2  # long bodies at a time: nothing else runs in Python meanwhile, and what is made of one is ten times as large


def cleanup() -> ExitStack:
    """The stack that is unwound when the current exchange ends: answered, failed, or its client gone."""
    return cast(ExitStack, cast(dict[str, Any], request.scope)[CLEANUP_KEY])


def route_path() -> str:
    """The path of the current request as its route has it: a request may add a slash. Without a route, as it came, less the slash."""
    rule = request.url_rule
    return rule.rule if rule is not None else request.path.removesuffix("/") or "/"


def _defaults_of(model: ServedModel, profile: Profile) -> SamplingParams:
    """What holds for parameters that a request leaves out. Nobody asked for it, so what the model cannot do of it refuses no request."""
    defaults = base_params(profile, model.info.metadata, model.n_ctx)
    if model.heeds is None:
        return defaults
    defaults, left_out = heeded(defaults, model.heeds, model.n_ctx)
    if left_out:
        log.warning("defaults.left_out", model=model.name, fields=left_out, why="the model's backend cannot do that")
    return defaults


@attrs.define(eq=False)
class Context:
    """Made once for an app."""

    house: House
    settings: Settings
    metrics: HttpMetrics
    operations: tuple[Operation, ...] = ()  # of every surface
    bodies: Room = attrs.field(factory=Room)  # that are long
    decoding: KeyThreads = attrs.field(factory=lambda: KeyThreads(N_DECODING_MAX))

    _defaults: WeakKeyDictionary[Engine, SamplingParams] = attrs.field(factory=WeakKeyDictionary)

    @property
    def engine(self) -> Engine:
        """The engine of the model that the current request asks for, after `served` or `held`; before, that of the first."""
        chosen: Engine | None = g.get("engine")
        return self.house.first.engine if chosen is None else chosen

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What holds for parameters that the current request leaves out. Raises: Unavailable while its model is being loaded."""
        engine = self.engine
        defaults = self._defaults.get(engine)
        if defaults is None:
            model = engine.model
            defaults = self._defaults[engine] = _defaults_of(model, self.settings.sampling_defaults)
        return defaults

    def wanted(
        self, fields: SamplingFields, model: ServedModel, *, max_tokens: int | None, defaults: SamplingParams | None = None
    ) -> Wanted:
        """What the current request asks of each of its completions; `defaults` are those of its surface, if it has its own.

        Raises: InvalidRequest · Unavailable while its model is being loaded.
        """
        if defaults is None:
            defaults = self.sampling_defaults
        elif model.heeds is not None:  # what nobody asked for refuses nobody
            defaults, _ = heeded(defaults, model.heeds, model.n_ctx)
        timeout_s, priority_least = self.settings.timeout_s, g.priority_least
        return wanted(fields, model, defaults, max_tokens=max_tokens, timeout_s=timeout_s, priority_least=priority_least)

    async def served(self, name: str | None = None) -> ServedModel:
        """The model that the current request names, loaded if need be; the first when it names none. Raises: Unavailable · NotFound."""
        return (await self.held(self.house.find(name))).model

    async def told(self, name: str | None, what: str, tell: Callable[[ServedModel], dict[str, Any]]) -> dict[str, Any]:
        """What `tell` says of a model. Of one that is not loaded now what it said before: to ask loads none, and unloads no other for it.

        Raises: Unavailable · NotFound.
        """
        tenant = self.house.find(name)
        known = tenant.told.get(what)
        if known is None and tenant.state is State.FAILED:
            raise Unavailable(
                f"{tenant.name} could not be loaded; the server's log says why", retry_after_s=RETRY_AFTER_S, code="load_failed"
            )
        if known is None and tenant.state in (State.UNLOADED, State.UNLOADING):
            raise Unavailable(
                f"{tenant.name} is not loaded, and asking for this does not load it", retry_after_s=RETRY_AFTER_S, code="unloaded"
            )
        if known is None or tenant.state is State.LOADED:
            known = tenant.told[what] = tell(await self.served(name))
        return known

    async def held(self, tenant: Tenant) -> Engine:
        """The engine of a model that is not unloaded before the current exchange has ended.

        Raises: Unavailable · NotFound · DeadlineExceeded when the request's `timeout_s` passes while the model is loaded.
        """
        held: Engine | None = g.get("engine")
        if held is not None and held is tenant.engine:  # who asked for it once more while it is to be unloaded would wait for himself
            return held
        waited_from = None if tenant.state is State.LOADED else time.perf_counter()
        try:
            hold = await self.house.hold(tenant, key=current_key(), timeout_s=self._time_left_s())
        except RequestError as error:
            tenant.engine.metrics.refused(error)
            raise
        cleanup().callback(hold.release)
        g.engine = tenant.engine
        if waited_from is not None:
            g.load_s = time.perf_counter() - waited_from
        return tenant.engine

    def _time_left_s(self) -> float:
        """Of the current request's own `timeout_s`, or that of the settings; of one that has no such field, as long as anybody likes."""
        timeout_s: float | None = g.get("timeout_s", math.inf)
        if timeout_s is None:
            timeout_s = math.inf if self.settings.timeout_s is None else self.settings.timeout_s
        so_far_s: float = time.perf_counter() - g.started_at
        return timeout_s - so_far_s


def current_key() -> str:
    """Whose the current request is, by the key's name; "" where there is none."""
    return str(g.get("key", "")) if has_app_context() else ""
