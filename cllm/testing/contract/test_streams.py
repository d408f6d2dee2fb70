"""A model that schedules itself: what it tells of its sequences, to their ends, and when they are given up at any moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final

import attrs
import pytest

from cllm.backend import StreamEnd, StreamEvent, StreamModel, StreamRequest, StreamToken
from cllm.testing.contract.hand import PlainTokens

TELL_S: Final = 60.0  # within which something must be told of a sequence
SILENCE_S: Final = 0.2  # for which nothing is told where nothing may be
N_TOKENS: Final = 12


class Ear:
    """Hears a model."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.errors: dict[int, str] = {}  # of those that have ended; empty for a good end
        self._queue: SimpleQueue[StreamEvent] = SimpleQueue()
        model.open(self._queue.put)

    def start(self, seq_id: int, prompt: list[int], n_tokens: int = N_TOKENS, **fields: object) -> None:
        request = StreamRequest(prompt=tuple(prompt), n_tokens_max=n_tokens, **fields)  # type: ignore[arg-type]
        self.model.start(seq_id, request)

    def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            try:
                self._take(self._queue.get(timeout=TELL_S))
            except Empty:
                pytest.fail(f"nothing was told for {TELL_S:.0f} s", pytrace=False)

    def until_ended(self, *seq_ids: int) -> None:
        self.until(lambda: self.errors.keys() >= set(seq_ids))

    def has_heard(self, seq_id: int, n_tokens: int) -> bool:
        return len(self.tokens[seq_id]) >= n_tokens

    def silence(self) -> None:
        """Hear what comes in a while."""
        try:
            while True:
                self._take(self._queue.get(timeout=SILENCE_S))
        except Empty:
            pass

    def _take(self, event: StreamEvent) -> None:
        assert event.seq_id not in self.errors, f"{event} after the end"
        if isinstance(event, StreamToken):
            self.tokens[event.seq_id].append(event.token)
        else:
            assert isinstance(event, StreamEnd)
            assert "\n" not in event.error
            self.errors[event.seq_id] = event.error


@pytest.fixture
def ear(streams: StreamModel) -> Ear:
    return Ear(streams)


@pytest.fixture
def words(streams: StreamModel) -> PlainTokens:
    return PlainTokens(streams.vocabulary)


def test_it_tells_what_it_can_take(streams: StreamModel) -> None:
    assert streams.n_live_max >= 1
    assert streams.n_ctx >= 2
    assert streams.info.name
    assert streams.heeds <= set(attrs.fields_dict(StreamRequest))


def test_a_sequence_gives_as_many_tokens_as_it_may_and_one_end(ear: Ear, words: PlainTokens) -> None:
    ear.start(7, words.draw(10))
    ear.until_ended(7)
    ear.silence()
    assert ear.errors == {7: ""}
    assert len(ear.tokens[7]) == N_TOKENS
    assert all(0 <= token < ear.model.vocabulary.n_tokens for token in ear.tokens[7])


def test_a_single_token_may_be_all(ear: Ear, words: PlainTokens) -> None:
    ear.start(0, words.draw(10), n_tokens=1)
    ear.until_ended(0)
    assert len(ear.tokens[0]) == 1


def test_a_sequence_ends_with_an_end_token_which_is_told_too(ear: Ear, words: PlainTokens) -> None:
    if "temperature" not in ear.model.heeds:
        pytest.skip("nobody knows what it will say")
    ear.start(0, words.draw(10), temperature=0.0)
    ear.until_ended(0)
    last = ear.tokens[0][5]
    ear.start(1, words.draw(10), temperature=0.0, end_tokens=frozenset({last}))
    ear.until_ended(1)
    assert ear.tokens[1] == ear.tokens[0][: ear.tokens[0].index(last) + 1]


def test_as_many_as_it_takes_run_at_once_and_each_has_its_end(ear: Ear, words: PlainTokens) -> None:
    seq_ids = range(min(ear.model.n_live_max, 64))
    for seq_id in seq_ids:
        ear.start(seq_id, words.draw(5 + seq_id, seed=seq_id))
    ear.until_ended(*seq_ids)
    assert set(ear.errors.values()) == {""}
    assert {len(ear.tokens[seq_id]) for seq_id in seq_ids} == {N_TOKENS}


@pytest.mark.parametrize("n_heard", [0, 1, 3])
def test_one_that_is_given_up_makes_room_at_once_and_the_others_go_on(ear: Ear, words: PlainTokens, n_heard: int) -> None:
    """Whenever it comes: before the first token, after it, in the middle."""
    n_live = min(ear.model.n_live_max, 8)
    for round_ in range(3):
        first = round_ * 2 * n_live
        for i in range(n_live):
            ear.start(first + i, words.draw(8, seed=i), n_tokens=N_TOKENS)
        ear.until(partial(ear.has_heard, first, n_heard))
        ear.model.cancel(first)
        ear.start(first + n_live, words.draw(8, seed=99))
        ear.until_ended(*range(first + 1, first + n_live + 1))


def test_giving_up_one_that_has_ended_or_never_was_has_no_effect(ear: Ear, words: PlainTokens) -> None:
    ear.start(0, words.draw(5))
    ear.until_ended(0)
    ear.model.cancel(0)
    ear.model.cancel(12345)
    ear.start(1, words.draw(5))
    ear.until_ended(1)
    assert ear.errors == {0: "", 1: ""}


def test_nothing_is_told_after_close_and_closing_twice_is_harmless(ear: Ear, words: PlainTokens) -> None:
    ear.start(0, words.draw(5), n_tokens=min(200, ear.model.n_ctx - 6))
    ear.model.close()
    ear.silence()
    n_told = len(ear.tokens[0])
    ear.silence()
    assert len(ear.tokens[0]) == n_told
    ear.model.close()
