"""The incremental detokeniser against decoding everything at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cllm.text.detokenizer import Detokenizer, TokenTexts


class ListedVocabulary:
    """A vocabulary that is a list of byte strings; those in `names` are control tokens."""

    bos = eos = None
    end_tokens: frozenset[int] = frozenset()
    adds_bos = False
    chat_template = None

    def __init__(self, pieces: list[bytes], names: dict[int, bytes] | None = None) -> None:
        self.pieces = pieces
        self.names = names or {}
        self.n_tokens = len(pieces)
        self.n_lookups = 0

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        raise NotImplementedError

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        self.n_lookups += 1
        if not 0 <= token < self.n_tokens:
            raise IndexError(token)
        if token in self.names:
            return self.names[token] if special else b""
        return self.pieces[token]


def pushed(pieces: list[bytes]) -> list[str]:
    detokenizer = Detokenizer(TokenTexts(ListedVocabulary(pieces)))
    return [*map(detokenizer.push, range(len(pieces))), detokenizer.flush()]


# Bytes that begin, continue and break characters: surrogates, overlong forms, beyond U+10FFFF, truncated.
AWKWARD = [b"\xc0\xaf", b"\xc3", b"\xa9", b"\xe0\x80", b"\xed", b"\x95", b"\x9c", b"\xed\xa0\x80", b"\xf0\x9f", b"\xf4\x90", b"\xff"]
characters = st.text(max_size=3).map(lambda text: text.encode("utf-8"))
pieces_of_bytes = st.lists(st.one_of(st.sampled_from(AWKWARD), st.binary(max_size=6), characters))


@given(pieces_of_bytes)
def test_any_bytes_in_any_pieces_give_what_decoding_them_at_once_gives(pieces: list[bytes]) -> None:
    assert "".join(pushed(pieces)) == b"".join(pieces).decode("utf-8", "replace")


@given(st.text(max_size=20))
def test_single_bytes_of_valid_text_come_out_as_whole_characters_only(text: str) -> None:
    data = text.encode("utf-8")
    out = pushed([data[i : i + 1] for i in range(len(data))])
    assert "".join(out) == text
    assert [piece for piece in out if piece] == list(text)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"\xed\x95", b"\x9c"], ["", "\ud55c", ""]),
        ([b"\xed\x95"], ["", "\ufffd"]),
        ([b"\xed", b"a"], ["", "\ufffda", ""]),
        ([b"\xf0\x9f", b"\x98", b"\x80!"], ["", "", "\U0001f600!", ""]),
        ([b"\xed\xa0", b"b"], ["", "\ufffd\ufffdb", ""]),
    ],
)
def test_text_is_released_as_soon_as_it_is_decided(pieces: list[bytes], expected: list[str]) -> None:
    assert pushed(pieces) == expected


def test_a_leading_space_is_the_models_answer_and_stays() -> None:
    assert "".join(pushed([b" Hello", b" world"])) == " Hello world"


def test_control_tokens_are_silent_unless_they_are_shown() -> None:
    vocabulary = ListedVocabulary([b"a", b"", b""], names={1: b"<|tool|>", 2: b"<|end|>"})
    silent = Detokenizer(TokenTexts(vocabulary))
    shown = Detokenizer(TokenTexts(vocabulary, shown={1}))
    assert "".join(map(silent.push, [0, 1, 2])) == "a"
    assert "".join(map(shown.push, [0, 1, 2])) == "a<|tool|>"


def test_sequences_share_what_was_looked_up() -> None:
    vocabulary = ListedVocabulary([b"a", b"\xc3", b"\xa9"])
    texts = TokenTexts(vocabulary)
    for _ in range(3):
        detokenizer = Detokenizer(texts)
        assert "".join(map(detokenizer.push, [0, 1, 2])) == "a\xe9"
    assert vocabulary.n_lookups == 3


def test_an_unknown_token_leaves_the_text_as_it_was() -> None:
    detokenizer = Detokenizer(TokenTexts(ListedVocabulary([b"\xc3", b"\xa9"])))
    assert detokenizer.push(0) == ""
    with pytest.raises(IndexError):
        detokenizer.push(2)
    assert detokenizer.push(1) == "\xe9"


@pytest.mark.parametrize("n_tokens", range(1, 65))
def test_a_stream_cut_at_any_token_is_valid_utf8_and_equals_the_whole(n_tokens: int) -> None:
    data = ("h\xe9llo \ud55c\uae00 \U0001f600 " * 8).encode("utf-8")[:n_tokens]
    text = "".join(pushed([data[i : i + 1] for i in range(len(data))]))
    assert text == data.decode("utf-8", "replace")
    text.encode("utf-8")
