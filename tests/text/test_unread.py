"""Prompts whose tokens nobody knows."""

from __future__ import annotations

import pytest

from cllm.text.unread import UnreadPrompt


def test_a_prompt_is_as_long_as_its_text_suggests_and_as_the_context_takes() -> None:
    assert len(UnreadPrompt.of("", 40, 100)) == 10
    assert len(UnreadPrompt.of("", 400, 100)) == 99
    assert len(UnreadPrompt.of("", 0, 100)) == 1


def test_its_tokens_are_zeros() -> None:
    prompt = UnreadPrompt.of("", 40, 100)
    assert (prompt[0], prompt[-1], prompt[2:5], prompt[:0]) == (0, 0, [0, 0, 0], [])
    assert list(prompt) == [0] * 10
    with pytest.raises(IndexError):
        prompt[10]


def test_a_long_one_is_listed_without_being_looked_up_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_up(*_: object) -> int:
        raise AssertionError

    monkeypatch.setattr(UnreadPrompt, "__getitem__", looked_up)
    assert list(UnreadPrompt.of("", 400_000, 1 << 20)) == [0] * 100_000
