"""Two hundred schemas against the demo model at temperature 1, over the API: whatever ends fits, and what cannot be held to is refused."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import pytest
import trio

from cllm import demo
from cllm.api.app import create_app
from cllm.backend import ModelSpec
from cllm.config import Settings
from cllm.registry import load_backend
from cllm.testing.engine import running_engine
from tests.api.conftest import Answer, Api
from tests.schemas import N_SCHEMAS, Case, cases

TEST_S = 300.0  # ten, on a machine that has nothing else to do
N_AT_ONCE = 16
N_TOKENS_MAX = 400
N_FINISHED_LEAST = 150  # of the 180 that can be held to; some go on in a tree or a string until they are cut


async def ask(api: Api, case: Case, seed: int) -> Answer:
    response_format = {"type": "json_schema", "json_schema": {"name": "case", "schema": case.schema}}
    return await api.chat("Give me JSON.", temperature=1, seed=seed, max_tokens=N_TOKENS_MAX, response_format=response_format)


def outcome(case: Case, answer: Answer) -> str:
    """How it ended, once it is seen to be right."""
    if not case.is_supported:
        assert answer.status == 400, case.schema
        assert answer.error["pointer"].startswith("#/properties/bad")
        return "refused"
    assert answer.status == 200, (answer.body, case.schema)
    reason, _ = answer.finish()
    if reason == "stop":
        jsonschema.Draft202012Validator(case.schema).validate(json.loads(answer.text()))
    return reason


@pytest.mark.slow
async def test_every_finished_answer_fits_and_the_unsupported_are_refused() -> None:
    outcomes: Counter[str] = Counter()
    limiter = trio.CapacityLimiter(N_AT_ONCE)
    model = load_backend("llama-cpu").load(ModelSpec(path=str(demo.path()), n_cells=N_AT_ONCE * 512, n_threads=1), lambda share: True)

    async def run(api: Api, case: Case, seed: int) -> None:
        async with limiter:
            outcomes[outcome(case, await ask(api, case, seed))] += 1

    try:
        with trio.fail_after(TEST_S):
            async with running_engine(model) as running, trio.open_nursery() as nursery:
                api = Api(create_app(running.engine, Settings()), running)
                for seed, case in enumerate(cases()):
                    nursery.start_soon(run, api, case, seed)
    finally:
        model.close()
    print(dict(outcomes))
    assert sum(outcomes.values()) == N_SCHEMAS
    assert outcomes["stop"] >= N_FINISHED_LEAST, outcomes
    assert set(outcomes) <= {"stop", "length", "refused"}
