"""From a conversation to its prompt: what takes long holds nobody up."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from cllm.api import prompts
from cllm.errors import TemplateSlow
from tests.lines import n_lines

SAID = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "tools", "variables", "inline"),
    [
        ([SAID] * 50, None, {}, True),
        ([SAID] * 51, None, {}, False),
        ([SAID | {"content": "x" * 16_000}], None, {}, True),
        ([SAID | {"content": "x" * 17_000}], None, {}, False),
        ([SAID] * 1000, None, {}, False),
        ([SAID], [{"type": "function", "function": {"name": "f", "parameters": {}}}] * 500, {}, False),
        ([SAID], None, {"notes": "x" * 17_000}, False),
        ([SAID], None, {"notes": {"more": [1] * 1000}}, False),
    ],
)
async def test_what_takes_a_template_long_is_rendered_in_a_thread(messages: Any, tools: Any, variables: Any, inline: bool) -> None:
    threads: list[threading.Thread] = []

    def render(*_: Any, **__: Any) -> str:
        threads.append(threading.current_thread())
        return ""

    model: Any = SimpleNamespace(reads_text=False, template=SimpleNamespace(render=render))
    options = {"add_generation_prompt": True, "continue_final_message": False}
    await prompts.render(model, messages, tools=tools, variables=variables, **options)
    assert [thread is threading.main_thread() for thread in threads] == [inline]


def of_chat(n: int, text: str) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i in range(n)]
    return {"messages": turns, "max_tokens": 1}


def of_parts(n: int, text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": text}] * n}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", of_chat),
        ("/v1/chat/completions", of_parts),
        ("/v1/messages", of_chat),
        ("/v1/messages/count_tokens", of_chat),
        ("/v1/responses", lambda n, text: {"input": of_chat(n, text)["messages"]}),
        ("/api/chat", of_chat),
        ("/apply-template", of_chat),
    ],
)
async def test_many_turns_and_parts_are_made_a_conversation_where_that_holds_nobody_up(
    serve: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: Any
) -> None:
    threads: list[threading.Thread] = []

    def noted(check: Any) -> Any:
        def checked(*args: Any) -> None:
            threads.append(threading.current_thread())
            check(*args)

        return checked

    for name in ("check_turns", "check_texts_fit"):
        monkeypatch.setattr(prompts, name, noted(getattr(prompts, name)))
    async with serve() as api:
        for n, is_inline in ((3, True), (prompts.N_TURNS_INLINE + 101, False)):
            threads.clear()
            await api.post(path, body(n, "x"))
            assert len(threads) >= 2
            assert {thread is threading.main_thread() for thread in threads} == {is_inline}


@pytest.mark.parametrize("n_messages", [1, 100])
async def test_what_takes_a_template_too_long_is_done_anew_one_at_a_time_and_holds_up_no_other(n_messages: int) -> None:
    may_end = threading.Event()
    begun: list[threading.Thread] = []
    told: list[str] = []

    def render(messages: Any, timeout_s: float | None = None, /, **_: Any) -> str:
        if messages[0]["content"] == "slow":
            if timeout_s is not None:
                raise TemplateSlow("it took too long")
            begun.append(threading.current_thread())
            may_end.wait(60)
        return str(messages[0]["content"])

    async def tell(content: str) -> None:
        model: Any = SimpleNamespace(reads_text=False, template=SimpleNamespace(render=render))
        messages = [SAID | {"content": content}] * n_messages
        told.append(await prompts.render(model, messages, variables={}, add_generation_prompt=True, continue_final_message=False))

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(tell, "slow")
            while not begun:  # noqa: ASYNC110 - it happens in threads
                await trio.sleep(0.001)
            await tell("x")
            await trio.testing.wait_all_tasks_blocked()
            assert (len(begun), told) == (1, ["x"])
            may_end.set()
    assert told == ["x"] + ["slow"] * 8
    assert threading.main_thread() not in begun


def test_how_much_there_is_is_not_counted_to_the_end() -> None:
    assert n_lines(lambda: prompts._is_short([[0] * 100_000, [[0] * 100_000]])) < 50
