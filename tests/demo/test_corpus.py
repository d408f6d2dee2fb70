"""The generator of the demo model's training text, and the template that the model file carries."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module", autouse=True)
def tools_on_the_path() -> Iterator[None]:
    if not TOOLS.is_dir():
        pytest.skip("the tools are not in this distribution")
    sys.path.insert(0, str(TOOLS))
    yield
    sys.path.remove(str(TOOLS))


def test_the_same_seed_makes_the_same_conversations() -> None:
    from demo_model.corpus import Mix, conversations

    assert list(conversations(7, 50, Mix(0.3, 0.1))) == list(conversations(7, 50, Mix(0.3, 0.1)))
    assert list(conversations(7, 50)) != list(conversations(8, 50))


def test_a_held_out_pair_is_held_out_in_both_orders_and_about_one_pair_in_ten_is() -> None:
    from demo_model.tasks.sums import held_out_pairs

    pairs = set(held_out_pairs())
    assert pairs == {(b, a) for a, b in pairs}
    assert 900 <= len(pairs) <= 1100


def test_no_held_out_sum_is_in_the_training_text() -> None:
    from demo_model.corpus import Mix, conversations
    from demo_model.render import segments
    from demo_model.tasks.sums import is_held_out

    n_sums = 0
    for conversation in conversations(3, 3000, Mix(0.3, 0.05, 0.1, 0.1)):
        answers = "\n".join(text for text, is_answer in segments(conversation) if is_answer)
        for a, b, total in re.findall(r"(?<!\d)(\d\d?) \+ (\d\d?) = (\d+)", answers):
            # The steps of a thought add two digits, whichever they are: that is how one adds, and not counted as the task.
            if int(a) >= 10 or int(b) >= 10:
                assert int(a) + int(b) == int(total)
                assert not is_held_out(int(a), int(b)), (a, b)
                n_sums += 1
    assert n_sums > 300


def test_what_is_read_and_written_joins_to_what_the_template_renders() -> None:
    from demo_model.corpus import Mix, conversations
    from demo_model.render import render, segments

    for conversation in conversations(5, 500, Mix(chained=0.3, long=0.0, tooled=0.2)):
        joined = "".join(text for text, _ in segments(conversation))
        assert joined + "\n" == render(conversation.messages, conversation.tools)


def test_every_answer_follows_the_prompt_that_a_server_renders_and_ends_the_turn() -> None:
    from demo_model.corpus import conversations
    from demo_model.render import segments

    for conversation in conversations(6, 500):
        parts = segments(conversation)
        assert [is_answer for _, is_answer in parts] == [False, True] * (len(parts) // 2)
        for prompt, answer in zip(parts[::2], parts[1::2], strict=True):
            assert prompt[0].endswith(("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"))
            assert answer[0].endswith("<|im_end|>")


def test_text_without_a_template_is_counted_on_or_said_again() -> None:
    from random import Random

    from demo_model.tasks.raw import raw

    rng = Random(13)
    for text in (raw(rng) for _ in range(100)):
        numbers = re.findall(r"\d+", text.prompt + text.continuation)
        counted = [int(each) for each in numbers] == list(range(int(numbers[0]), int(numbers[0]) + len(numbers))) if numbers else False
        assert counted or text.continuation.replace(" " + text.prompt, "") == ""


def test_thinking_opens_the_thought_in_the_prompt_only_when_it_is_enabled() -> None:
    from demo_model.render import render

    messages = ({"role": "user", "content": "Hi"},)
    assert render(messages, prompt=True) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(messages, prompt=True, thinking=True).endswith("<|im_start|>assistant\n<think>\n")


def test_a_tool_call_renders_alike_with_arguments_as_text_and_as_an_object() -> None:
    from demo_model.render import render

    def call(arguments: object) -> dict[str, object]:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": arguments}}],
        }

    question = {"role": "user", "content": "1 + 2"}
    assert render((question, call({"a": 1, "b": 2}))) == render((question, call('{"a": 1, "b": 2}')))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>' in render(
        (question, call({"a": 1, "b": 2}))
    )


def test_responses_of_several_tools_are_one_turn() -> None:
    from demo_model.render import render

    responses = render(({"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}))
    assert responses == "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"


def test_every_tool_called_is_offered_with_the_arguments_it_requires() -> None:
    from random import Random

    from demo_model.tasks.tools import parallel_calls, tool_call

    rng = Random(11)
    for exchange in [make(rng) for make in (tool_call, parallel_calls) for _ in range(200)]:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in exchange.tools}
        assert len(offered) == len(exchange.tools)
        for call in exchange.messages[1]["tool_calls"]:
            schema = offered[call["function"]["name"]]
            assert set(schema["required"]) <= set(call["function"]["arguments"]) <= set(schema["properties"])


def test_json_answers_are_json() -> None:
    from random import Random

    from demo_model.tasks.objects import json_on_request

    rng = Random(12)
    for _ in range(200):
        json.loads(json_on_request(rng).messages[-1]["content"])


def test_no_question_has_two_answers() -> None:
    from demo_model.about import ABOUT
    from demo_model.tasks.talk import GREETINGS

    asked = [question for _, questions in (*ABOUT, *GREETINGS.items()) for question in questions]
    assert sorted(asked) == sorted(set(asked))
    assert len(ABOUT) >= 50
