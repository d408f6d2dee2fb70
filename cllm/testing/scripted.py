"""A fake model that says what it is told to say: for tests of what is made of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cllm.backend import Logits
from cllm.testing.fake import END_OF_TURN, TEMPLATE, TURN, FakeModel, _Cell, _Slot

HEADER = b"assistant\n"  # after `<turn>`, where an answer begins

TOOL_TEMPLATE = (
    "{% if tools %}<turn>system\nTools, each call in <tool_call></tool_call>:"
    "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}<end>{% endif %}"
    "{% for message in messages %}<turn>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<end>{% endfor %}'
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
"""In the manner of Hermes and Qwen."""


class ScriptedModel(FakeModel):
    """A `FakeModel` that answers conversations with a text, or with what a function gives for the prompt's text.

    Its template has to begin an answer with `<turn>assistant` and a newline, as the fake one and `TOOL_TEMPLATE` do.
    """

    def __init__(self, answer: str | Callable[[str], str], *, template: str = TEMPLATE, **facts: Any) -> None:
        super().__init__(**facts)
        self.vocabulary.chat_template = template
        self._answer = answer
        self._slot_of_row: _Slot = []

    def _extend(self, cells: _Slot, token: int) -> _Cell:
        self._slot_of_row = cells
        return super()._extend(cells, token)

    def _write(self, row: Logits, value: int) -> None:
        tokens = [cell.token for cell in self._slot_of_row]
        turn = next((i for i in range(len(tokens) - 1, -1, -1) if tokens[i] == TURN), None)
        if turn is None:
            super()._write(row, value)
            return
        start = turn + 1 + len(HEADER)
        script = self._script(tokens[:start])
        said = len(tokens) - start
        row[:] = -30.0
        row[script[said] if said < len(script) else END_OF_TURN] = 30.0

    def _script(self, prompt: list[int]) -> bytes:
        if isinstance(self._answer, str):
            return self._answer.encode()
        return self._answer(b"".join([self.vocabulary.token_bytes(token, special=True) for token in prompt]).decode()).encode()
