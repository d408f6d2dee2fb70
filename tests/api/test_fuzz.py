"""Whatever the OpenAPI document allows, and what it does not, is sent to a running server: none fails, every status is one told there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from cllm.api.app import OPERATIONS
from cllm.api.openapi import document
from cllm.testing.fake import FakeModel
from cllm.testing.fake_embedder import FakeEmbedder
from cllm.testing.live import live_server

schemathesis = pytest.importorskip("schemathesis", reason="pip install --group test")

N_EXAMPLES = 25
ANSWER_S = 120.0
SCHEMA = schemathesis.openapi.from_dict(document([one for one in OPERATIONS if one.alias_of is None]))
CASES = [result.ok() for result in SCHEMA.get_all_operations()]
MODES = list(schemathesis.GenerationMode)


def _can_be(operation: Any, mode: Any) -> bool:
    """Whether there is a request of that mode: a path and its names can be any text, only a body can be wrong."""
    return mode is schemathesis.GenerationMode.POSITIVE or "requestBody" in operation.definition.raw


def _name(value: Any) -> str:
    return str(getattr(value, "label", None) or value.value)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose answers are short, whatever they are asked for."""
    with live_server(FakeModel(n_ctx_train=48, n_cells=8192), embedder=FakeEmbedder(), parallel=64) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "mode"), [(one, mode) for one in CASES for mode in MODES if _can_be(one, mode)], ids=_name)
def test_no_request_fails_the_server_or_has_an_untold_status(url: str, operation: Any, mode: Any) -> None:
    told = {int(status) for status in operation.definition.raw["responses"]}

    @seed(7)
    @settings(max_examples=N_EXAMPLES, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(base_url=url, timeout=ANSWER_S)
        assert response.status_code != 500, (case.as_curl_command(), response.text)
        assert response.status_code in told, (case.as_curl_command(), response.text)

    check()
