"""A prompt's tokens are the same whichever way it comes in."""

from __future__ import annotations

import pytest

from cllm.testing.fake import BOS, END_OF_TURN, TURN, FakeVocabulary
from cllm.text.prompt import prompt_tokens


@pytest.mark.parametrize("is_conversation", [False, True])
def test_bos_stands_first_and_special_tokens_are_read_as_such(is_conversation: bool) -> None:
    tokens = prompt_tokens(FakeVocabulary(), "<turn>a<end>", is_conversation=is_conversation)
    assert tokens == [BOS, TURN, ord("a"), END_OF_TURN]


def test_a_template_that_writes_bos_gets_no_second_one() -> None:
    assert prompt_tokens(FakeVocabulary(), "<bos>a", is_conversation=True) == [BOS, ord("a")]


def test_a_plain_text_is_taken_as_it_is() -> None:
    assert prompt_tokens(FakeVocabulary(), "<bos>a", is_conversation=False) == [BOS, BOS, ord("a")]
