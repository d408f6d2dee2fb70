"""What every handler needs: the engine, the settings, the counters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, cast
from weakref import WeakKeyDictionary

import attrs
from quart import g, request

from cllm.api.metrics import HttpMetrics
from cllm.api.operations import Operation
from cllm.api.sampling_fields import base_params
from cllm.config import Settings
from cllm.engine.params import SamplingParams
from cllm.serve.engine import Engine, ServedModel
from cllm.serve.house import House, Tenant

CLEANUP_KEY = "cllm.cleanup"  # in the ASGI scope


def cleanup() -> ExitStack:
    """The stack that is unwound when the current exchange ends: answered, failed, or its client gone."""
    return cast(ExitStack, cast(dict[str, Any], request.scope)[CLEANUP_KEY])


def route_path() -> str:
    """The path of the current request as its route has it: a request may add a slash. Without a route, as it came, less the slash."""
    rule = request.url_rule
    return rule.rule if rule is not None else request.path.removesuffix("/") or "/"


@attrs.define(eq=False)
class Context:
    """Made once for an app."""

    house: House
    settings: Settings
    metrics: HttpMetrics
    operations: tuple[Operation, ...] = ()  # of every surface

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
            defaults = self._defaults[engine] = base_params(self.settings.sampling_defaults, model.info.metadata, model.n_ctx)
        return defaults

    async def served(self, name: str | None = None) -> ServedModel:
        """The model that the current request names, loaded if need be; the first when it names none. Raises: Unavailable · NotFound."""
        return (await self.held(self.house.find(name))).model

    async def held(self, tenant: Tenant) -> Engine:
        """The engine of a model that is not unloaded before the current exchange has ended. Raises: Unavailable."""
        hold = await self.house.hold(tenant)
        cleanup().callback(hold.release)
        g.engine = tenant.engine
        return tenant.engine
