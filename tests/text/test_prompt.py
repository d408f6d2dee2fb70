"""A prompt's tokens are the same whichever way it comes in."""

from __future__ import annotations

import pytest

from cllm.testing.fake import BOS, END_OF_TURN, TURN, FakeVocabulary
from cllm.text.prompt import prompt_tokens, without_bos


@pytest.mark.parametrize("is_conversation", [False, True])
def test_bos_stands_first_and_special_tokens_are_read_as_such(is_conversation: bool) -> None:
    tokens = prompt_tokens(FakeVocabulary(), "<turn>a<end>", is_conversation=is_conversation)
    assert tokens == [BOS, TURN, ord("a"), END_OF_TURN]


def test_a_template_that_writes_bos_gets_no_second_one() -> None:
    assert prompt_tokens(FakeVocabulary(), "<bos>a", is_conversation=True) == [BOS, ord("a")]


def test_a_plain_text_is_taken_as_it_is() -> None:
    assert prompt_tokens(FakeVocabulary(), "<bos>a", is_conversation=False) == [BOS, BOS, ord("a")]


@pytest.mark.parametrize("is_conversation", [False, True])
def test_nothing_stands_behind_a_prompt_that_is_to_be_gone_on_from(is_conversation: bool) -> None:
    class Closing(FakeVocabulary):
        """As one whose file asks for eos behind texts."""

        def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
            tokens = super().tokenize(text, add_special=add_special, parse_special=parse_special)
            return [*tokens, END_OF_TURN] if add_special else tokens

    assert prompt_tokens(Closing(), "a", is_conversation=is_conversation) == [BOS, ord("a")]


def test_a_rendered_conversation_is_told_without_the_bos_that_it_will_be_given() -> None:
    vocabulary = FakeVocabulary()
    assert without_bos(vocabulary, "<bos><bos>a") == "<bos>a"
    assert without_bos(vocabulary, "a<bos>") == "a<bos>"
    vocabulary.adds_bos = False
    assert without_bos(vocabulary, "<bos>a") == "<bos>a"
