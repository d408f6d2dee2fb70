"""What stands for a prompt and for a vocabulary where a model reads text, and nobody here knows its tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NoReturn, overload

import attrs

from cllm.backend import StreamChat
from cllm.errors import GenerationFailed, NotSupported

N_CHARS_TOKEN: Final = 4  # of a usual text in a usual vocabulary: by this guess keys share the server
N_TOLD_MAX: Final = 1 << 20  # tokens; the largest vocabularies have a quarter of that
N_BYTES_MAX: Final = 1024  # of one


@attrs.frozen(eq=False)
class UnreadPrompt(Sequence[int]):
    """A prompt as long as its tokens probably are: the text to go on from, or the conversation to answer. Its tokens mean nothing."""

    said: str | StreamChat
    n_guessed: int

    @classmethod
    def of(cls, said: str | StreamChat, n_chars: int, n_ctx: int) -> UnreadPrompt:
        """Guess its length. Whether it is too long for the context is for the model to say."""
        return cls(said, max(1, min(n_chars // N_CHARS_TOKEN, n_ctx - 1)))

    def __len__(self) -> int:
        return self.n_guessed

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        places = range(self.n_guessed)[index]
        return 0 if isinstance(places, int) else [0] * len(places)

    def __iter__(self) -> Iterator[int]:
        return itertools.repeat(0, self.n_guessed)


class NoVocabulary:
    """Has no tokens but those that the model has told with their logprobs, numbered as they came. Who needs others is told so."""

    n_tokens = 0
    bos: int | None = None
    eos: int | None = None
    end_tokens: frozenset[int] = frozenset()
    adds_bos = False
    chat_template: str | None = None

    def __init__(self) -> None:
        self._told: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def number(self, token: bytes) -> int:
        """Return the number of a token that the model told. Raises: GenerationFailed for what no vocabulary has."""
        number = self._numbers.get(token)
        if number is not None:
            return number
        if len(self._told) >= N_TOLD_MAX or len(token) > N_BYTES_MAX:
            raise GenerationFailed("the model tells more tokens than there can be", code="tokens_overflow")
        self._told.append(token)
        number = self._numbers[token] = len(self._told) - 1
        return number

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """See `Vocabulary.tokenize`. Raises: NotSupported."""
        self._refuse()

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """See `Vocabulary.token_bytes`. Raises: NotSupported for all that was not told."""
        if not 0 <= token < len(self._told):
            self._refuse()
        return self._told[token]

    def _refuse(self) -> NoReturn:
        raise NotSupported("this model reads text: its tokens are not known here")
