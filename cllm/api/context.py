"""What every handler needs: the engine, the settings, the counters."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from typing import Any, cast

import attrs
from quart import request

from cllm.api.metrics import HttpMetrics
from cllm.api.operations import Operation
from cllm.api.sampling_fields import base_params
from cllm.config import Settings
from cllm.engine.params import SamplingParams
from cllm.errors import NotFound
from cllm.serve.engine import Engine, ServedModel

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

    engine: Engine
    settings: Settings
    metrics: HttpMetrics
    operations: tuple[Operation, ...] = ()  # of every surface

    @functools.cached_property
    def sampling_defaults(self) -> SamplingParams:
        """What holds for parameters that a request leaves out. Raises: Unavailable while the model is being loaded."""
        model = self.engine.model
        return base_params(self.settings.sampling_defaults, model.info.metadata, model.n_ctx)

    def served(self, name: str | None) -> ServedModel:
        """The model that a request names; the only one when it names none. Raises: Unavailable · NotFound."""
        model = self.engine.model
        if name and name not in model.aliases:
            known = ", ".join(model.aliases)
            raise NotFound(f"there is no model {name[:200]!r} here, only {known}", param="model", code="model_not_found")
        return model
