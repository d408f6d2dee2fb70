"""GET /v1/requests/{id}."""

from __future__ import annotations

from typing import Any

COMPLETION = {"prompt": "hello there", "max_tokens": 3, "temperature": 0}


async def test_a_requests_timeline_is_told_by_the_id_of_its_answer(serve: Any) -> None:
    async with serve() as api:
        done = await api.post("/v1/completions", {**COMPLETION, "n": 2})
        answer = await api.get(f"/v1/requests/{done.headers['x-request-id']}")
        assert answer.status == 200
        told = answer.json
        assert (told["id"], told["object"], told["state"]) == (done.headers["x-request-id"], "request", "ended")
        assert [one["index"] for one in told["sequences"]] == [0, 1]
        first = told["sequences"][0]
        assert [event["event"] for event in first["events"]] == ["queued", "admitted", "prefill", "first_token", "finished"]
        times = [event["at_ms"] for event in first["events"]]
        assert times == sorted(times)
        assert times[0] >= 0
        assert first["events"][-1]["reason"] == "length"


async def test_what_is_cached_and_where_the_rest_began_is_part_of_it(serve: Any) -> None:
    async with serve() as api:
        prompt = "the same beginning of what is asked, and then "
        await api.post("/v1/completions", {**COMPLETION, "prompt": prompt + "one end"})
        await api.post("/v1/completions", {**COMPLETION, "prompt": prompt + "another"}, X_Request_Id="second")
        told = (await api.get("/v1/requests/second")).json
        (admitted,) = [event for event in told["sequences"][0]["events"] if event["event"] == "admitted"]
        assert (admitted["n_cached"], admitted["miss_from"], admitted["miss"]) == (len(prompt) + 1, len(prompt) + 1, "differs")


async def test_only_the_key_that_made_a_request_sees_it(serve: Any) -> None:
    async with serve(api_key=("one", "other")) as api:
        await api.post("/v1/completions", COMPLETION, X_Request_Id="mine", X_Api_Key="one")
        assert (await api.get("/v1/requests/mine", X_Api_Key="one")).status == 200
        assert (await api.get("/v1/requests/mine", X_Api_Key="other")).status == 404
        assert (await api.get("/v1/requests/mine")).status == 401


async def test_an_unknown_request_is_404(serve: Any) -> None:
    async with serve() as api:
        answer = await api.get("/v1/requests/nobody/knows")
        assert (answer.status, answer.error["code"]) == (404, "request_not_found")
