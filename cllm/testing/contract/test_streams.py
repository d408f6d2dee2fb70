"""A model that schedules itself: what it tells of its sequences, to their ends, and when they are given up at any moment."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, get_args

import attrs
import numpy as np
import pytest

from cllm.backend import (
    Backend,
    FormKind,
    ModelSpec,
    StreamBeat,
    StreamChat,
    StreamEnd,
    StreamEvent,
    StreamForm,
    StreamModel,
    StreamRequest,
    StreamText,
    StreamToken,
    TellsLogits,
    n_logprobs_max_of,
)
from cllm.registry import vocabulary_of
from cllm.testing.contract.hand import N_CELLS_TO_FILL_MAX, PlainText, PlainTokens, are_pythons_own

TELL_S: Final = 60.0  # within which something must be told of a sequence
LONG_S: Final = 600.0  # the same of a prompt that fills the context
SILENCE_S: Final = 0.2  # for which nothing is told where nothing may be
NEAR_LOGITS: Final = 0.5  # the same of logits, where one text is computed at once and the other in an answer, by numbers of 16 bits
NEAR: Final = 1e-3  # logprobs that differ by no more are equal, but for arithmetic
N_TOKENS: Final = 12


class Ear:
    """Hears a model."""

    def __init__(self, model: StreamModel) -> None:
        self.model = model
        self.vocabulary = vocabulary_of(model)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.told: dict[int, list[StreamToken]] = defaultdict(list)  # the same, with their logprobs
        self.n_told: dict[int, int] = defaultdict(int)  # tokens, also of a model without a vocabulary
        self.errors: dict[int, str] = {}  # of those that have ended; empty for a good end
        self.refused: set[int] = set()  # of those, whose client is told why
        self.cut: set[int] = set()  # of those, which were told to be cut by their limit
        self._may_end_itself = self.vocabulary is None and "ignore_eos" not in model.heeds
        self._queue: SimpleQueue[StreamEvent] = SimpleQueue()
        model.open(self._queue.put)

    def start(self, seq_id: int, prompt: list[int] | str, n_tokens: int | None = N_TOKENS, **fields: object) -> None:
        said: dict[str, object] = {"text": prompt} if isinstance(prompt, str) else {"prompt": tuple(prompt)}
        if self.vocabulary is None and not self._may_end_itself:
            said["ignore_eos"] = True  # with one, no token is an end unless the request names it
        self.model.start(seq_id, StreamRequest(n_tokens_max=n_tokens, **said, **fields))  # type: ignore[arg-type]

    def until(self, enough: Callable[[], bool], tell_s: float = TELL_S) -> None:
        while not enough():
            try:
                self._take(self._queue.get(timeout=tell_s))
            except Empty:
                pytest.fail(f"nothing was told for {tell_s:.0f} s", pytrace=False)

    def until_ended(self, *seq_ids: int, tell_s: float = TELL_S) -> None:
        self.until(lambda: self.errors.keys() >= set(seq_ids), tell_s)

    def has_heard(self, seq_id: int, n_tokens: int) -> bool:
        """Or all of it, where nobody can keep the model from ending by itself."""
        return self.n_told[seq_id] >= n_tokens or (self._may_end_itself and seq_id in self.errors)

    def is_whole(self, seq_id: int) -> bool:
        """Whether it has all the tokens that were asked for, or some, where nobody can keep the model from ending by itself."""
        n_told = self.n_told[seq_id]
        return n_told == N_TOKENS or (self._may_end_itself and 1 <= n_told < N_TOKENS and seq_id not in self.cut)

    def silence(self) -> None:
        """Hear what comes in a while."""
        try:
            while True:
                self._take(self._queue.get(timeout=SILENCE_S))
        except Empty:
            pass

    def what_was_told(self) -> None:
        """Hear what has come already."""
        try:
            while True:
                self._take(self._queue.get_nowait())
        except Empty:
            pass

    def _take(self, event: StreamEvent) -> None:
        if isinstance(event, StreamBeat):
            return
        assert event.seq_id not in self.errors, f"{event} after the end"
        if isinstance(event, StreamToken):
            assert self.vocabulary is not None
            assert 0 <= event.token < self.vocabulary.n_tokens
            assert are_pythons_own(event.token), event
            self.tokens[event.seq_id].append(event.token)
            self.told[event.seq_id].append(event)
            self.n_told[event.seq_id] += 1
        elif isinstance(event, StreamText):
            assert self.vocabulary is None
            assert are_pythons_own(event.n_tokens, *(one.logprob for one in event.logprobs)), event
            self.n_told[event.seq_id] += event.n_tokens
        else:
            self._take_end(event)

    def _take_end(self, event: StreamEnd) -> None:
        assert "\n" not in event.error
        if event.refusal is not None:
            self.refused.add(event.seq_id)
        if event.is_cut:
            self.cut.add(event.seq_id)
        self.errors[event.seq_id] = event.error or ("" if event.refusal is None else str(event.refusal))
        if event.usage is not None:
            assert are_pythons_own(*attrs.astuple(event.usage)), event
            self.n_told[event.seq_id] = event.usage.n_generated


@pytest.fixture
def ear(streams: StreamModel) -> Ear:
    return Ear(streams)


@pytest.fixture
def words(ear: Ear) -> PlainTokens | PlainText:
    return PlainText() if ear.vocabulary is None else PlainTokens(ear.vocabulary)


def test_it_tells_what_it_can_take(streams: StreamModel) -> None:
    assert streams.n_live_max >= 1
    assert streams.n_ctx >= 2
    assert streams.info.name
    known = set(attrs.fields_dict(StreamRequest)) | set(get_args(FormKind))
    if vocabulary_of(streams) is None:
        known |= set(attrs.fields_dict(StreamChat))
    assert streams.heeds <= known


def test_a_sequence_gives_as_many_tokens_as_it_may_and_one_end(ear: Ear, words: PlainTokens | PlainText) -> None:
    ear.start(7, words.draw(10))
    ear.until_ended(7)
    ear.silence()
    assert ear.errors == {7: ""}
    assert ear.is_whole(7)
    counted_here = ear.vocabulary is not None or ear.n_told[7] < N_TOKENS
    assert counted_here or ear.cut == {7}, "half an answer would be told for a whole one: nobody else counts its tokens"


def test_a_single_token_may_be_all(ear: Ear, words: PlainTokens | PlainText) -> None:
    ear.start(0, words.draw(10), n_tokens=1)
    ear.until_ended(0)
    assert ear.n_told[0] == 1


def test_a_sequence_may_be_as_long_as_it_says(ear: Ear, words: PlainTokens | PlainText) -> None:
    """As every request without a limit is asked for: all tokens that have room behind its prompt."""
    n_ctx = ear.model.n_ctx
    if ear.vocabulary is None:
        pytest.skip("how many tokens fit, only this model knows")
    if not N_TOKENS < n_ctx <= N_CELLS_TO_FILL_MAX:
        pytest.skip(f"a context of {n_ctx} tokens is not filled here")
    ear.start(0, words.draw(n_ctx - N_TOKENS))
    ear.until_ended(0, tell_s=LONG_S)
    ear.start(1, words.draw(n_ctx - 1), n_tokens=1)
    ear.until_ended(1, tell_s=LONG_S)
    assert ear.errors == {0: "", 1: ""}
    assert ear.is_whole(0)
    assert ear.n_told[1] == 1


def test_who_tells_logits_tells_each_tokens_successor_and_gives_them_away(streams: StreamModel) -> None:
    if not isinstance(streams, TellsLogits):
        pytest.skip("this model tells no logits")
    vocabulary = vocabulary_of(streams)
    assert vocabulary is not None
    words = PlainTokens(vocabulary)
    prompt = words.draw(10)
    logits = streams.logits(prompt)
    assert logits.shape == (len(prompt), vocabulary.n_tokens)
    assert logits.dtype == np.float32
    kept = logits.copy()
    streams.logits(words.draw(10, seed=1))
    assert np.array_equal(logits, kept), "they are the caller's, and the next call has changed them"
    ear = Ear(streams)
    needs(ear, "temperature")
    ear.start(0, prompt, n_tokens=1, temperature=0.0)
    ear.until_ended(0)
    (token,) = ear.tokens[0]
    assert logits[-1, token] >= logits[-1].max() - NEAR_LOGITS, "the likeliest token is not the one that is said"


def test_a_text_without_a_limit_is_begun_and_can_be_given_up(ear: Ear, words: PlainTokens | PlainText) -> None:
    """As where a client names none: how many tokens a prompt leaves room for, only a model without a vocabulary knows. It may want one."""
    if ear.vocabulary is not None:
        pytest.skip("this model is always told how many tokens there may be")
    ear.start(0, words.draw(10), n_tokens=None)
    ear.until(lambda: ear.has_heard(0, 1) or 0 in ear.errors)
    ear.model.cancel(0)
    ear.start(1, words.draw(5))
    ear.until_ended(1)
    assert 0 in ear.refused or not ear.errors.get(0)
    assert not ear.errors[1]


def test_a_model_that_was_left_the_choice_of_its_sizes_answers(backend: Backend, spec: ModelSpec, streams: StreamModel) -> None:
    """As it is where the operator names none."""
    streams.close()
    model = backend.load(attrs.evolve(spec, n_cells=None, n_live=None), lambda _share: True)
    assert isinstance(model, StreamModel)
    try:
        ear = Ear(model)
        words = PlainText() if ear.vocabulary is None else PlainTokens(ear.vocabulary)
        ear.start(0, words.draw(5))
        ear.until_ended(0)
    finally:
        model.close()
    assert ear.errors == {0: ""}
    assert ear.is_whole(0)


def test_a_conversation_is_answered_by_who_reads_text(ear: Ear) -> None:
    if ear.vocabulary is not None:
        pytest.skip("this model reads tokens")
    chat = StreamChat(messages=[{"role": "user", "content": "Is anybody there?"}])
    ear.model.start(0, StreamRequest(chat=chat, n_tokens_max=N_TOKENS))
    ear.until_ended(0)
    assert ear.errors == {0: ""}
    assert 1 <= ear.n_told[0] <= N_TOKENS


def test_a_sequence_ends_with_an_end_token_which_is_told_too(ear: Ear, words: PlainTokens | PlainText) -> None:
    if ear.vocabulary is None or "temperature" not in ear.model.heeds:
        pytest.skip("nobody knows what it will say")
    ear.start(0, words.draw(10), temperature=0.0)
    ear.until_ended(0)
    last = ear.tokens[0][5]
    ear.start(1, words.draw(10), temperature=0.0, end_tokens=frozenset({last}))
    ear.until_ended(1)
    assert ear.tokens[1] == ear.tokens[0][: ear.tokens[0].index(last) + 1]


def test_as_many_as_it_takes_run_at_once_and_each_has_its_end(ear: Ear, words: PlainTokens | PlainText) -> None:
    seq_ids = range(min(ear.model.n_live_max, 64))
    for seq_id in seq_ids:
        ear.start(seq_id, words.draw(5 + seq_id, seed=seq_id))
    ear.until_ended(*seq_ids)
    assert set(ear.errors.values()) == {""}
    assert all(ear.is_whole(seq_id) for seq_id in seq_ids)


def test_each_of_several_at_once_gets_the_answer_to_its_own_prompt(ear: Ear, words: PlainTokens | PlainText) -> None:
    """Arithmetic may differ in company, so that an answer need not be what it is alone: it is to begin more like that than like others."""
    needs(ear, "temperature")
    n = min(ear.model.n_live_max, 8)
    if n < 2:
        pytest.skip("this model computes one sequence at a time")
    prompts = [words.draw(8, seed=seed) for seed in range(n)]
    for seq_id, prompt in enumerate(prompts):
        ear.start(seq_id, prompt, temperature=0.0)
        ear.until_ended(seq_id)
    for seq_id, prompt in enumerate(prompts, n):
        ear.start(seq_id, prompt, temperature=0.0)
    ear.until_ended(*range(n, 2 * n))
    assert not any(ear.errors.values())
    alone, at_once = ([ear.tokens[seq_id] for seq_id in seq_ids] for seq_ids in (range(n), range(n, 2 * n)))
    assert len(set(map(tuple, alone))) > 1, "the answer is the same to every prompt"
    alike = [[n_alike(one, other) for other in alone] for one in at_once]
    n_begun = sum(each[place] > 0 for place, each in enumerate(alike))
    assert n_begun >= n // 2, f"{n - n_begun} of {n} answers at once do not even begin like those alone"
    n_own = sum(each[place] == max(each) for place, each in enumerate(alike))
    assert n_own >= n - n // 4, f"{n - n_own} of {n} answers at once begin like that to another one's prompt"


def n_alike(one: list[int], other: list[int]) -> int:
    """How many tokens two begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("n_heard", [0, 1, 3, N_TOKENS - 1, N_TOKENS])
def test_one_that_is_given_up_makes_room_at_once_and_the_others_go_on(ear: Ear, words: PlainTokens | PlainText, n_heard: int) -> None:
    """Whenever it comes: before the first token, after it, in the middle, before the last one and after it."""
    n_live = min(ear.model.n_live_max, 8)
    for round_ in range(3):
        first = round_ * 2 * n_live
        for i in range(n_live):
            ear.start(first + i, words.draw(8, seed=i), n_tokens=N_TOKENS)
        ear.until(partial(ear.has_heard, first, n_heard))
        ear.model.cancel(first)
        ear.start(first + n_live, words.draw(8, seed=99))
        others = range(first + 1, first + n_live + 1)
        ear.until_ended(*others)
        assert [ear.errors[seq_id] for seq_id in others] == [""] * n_live
        assert all(ear.is_whole(seq_id) for seq_id in others)


def test_all_may_be_given_up_at_once_and_as_many_have_their_places(ear: Ear, words: PlainTokens | PlainText) -> None:
    n_live = min(ear.model.n_live_max, 16)
    for first in (0, n_live, 2 * n_live):
        for i in range(n_live):
            ear.start(first + i, words.draw(8, seed=i))
        if first < 2 * n_live:
            for i in range(n_live):
                ear.model.cancel(first + i)
    ear.until_ended(*range(2 * n_live, 3 * n_live))
    assert all(ear.is_whole(2 * n_live + i) for i in range(n_live))


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}], ids=["without chance", "by a seed"])
def test_what_it_heeds_it_heeds_the_same_request_begins_in_the_same_way_each_time(
    ear: Ear, words: PlainTokens | PlainText, fields: dict[str, object]
) -> None:
    if ear.vocabulary is None or not fields.keys() <= ear.model.heeds:
        pytest.skip("nobody knows what it will say")
    for seq_id in range(8):
        ear.start(seq_id, words.draw(8, seed=seq_id // 2), n_tokens=1, **fields)
        ear.until_ended(seq_id)
    assert [ear.tokens[seq_id] for seq_id in range(0, 8, 2)] == [ear.tokens[seq_id] for seq_id in range(1, 8, 2)]


def needs(ear: Ear, *fields: str) -> None:
    """Skip a test of tokens, or of what the model does not heed."""
    if ear.vocabulary is None:
        pytest.skip("this model reads text, and tells no tokens")
    if ignored := set(fields) - ear.model.heeds:
        pytest.skip(f"this model heeds no {' and no '.join(sorted(ignored))}")


def test_tokens_that_are_barred_never_come(ear: Ear, words: PlainTokens | PlainText) -> None:
    needs(ear, "temperature")
    prompt = words.draw(10)
    ear.start(0, prompt, temperature=0.0)
    ear.until_ended(0)
    barred = frozenset(ear.tokens[0])
    ear.start(1, prompt, temperature=0.0, barred_tokens=barred)
    ear.until_ended(1)
    assert ear.errors == {0: "", 1: ""}
    assert len(ear.tokens[1]) == N_TOKENS
    assert not barred & set(ear.tokens[1])


def test_who_heeds_logprobs_tells_each_tokens_own_and_as_many_likely_ones_as_asked_for(ear: Ear, words: PlainTokens | PlainText) -> None:
    needs(ear, "n_logprobs")
    n_max = n_logprobs_max_of(ear.model)
    wanted = [None, *sorted({0, min(1, n_max), n_max})]
    for seq_id, n_logprobs in enumerate(wanted):
        ear.start(seq_id, words.draw(10, seed=seq_id), n_logprobs=n_logprobs)
        ear.until_ended(seq_id)
        assert ear.errors[seq_id] == ""
        assert len(ear.told[seq_id]) == N_TOKENS
        for one in ear.told[seq_id]:
            check_logprobs(one, n_logprobs)


def test_logprobs_are_the_models_own_whatever_is_done_before_a_token_is_drawn(ear: Ear, words: PlainTokens | PlainText) -> None:
    needs(ear, "n_logprobs", "temperature", "top_k")
    plain: dict[str, Any] = {"temperature": 0.0}
    hows = (plain, plain, {"temperature": 4.0, "top_k": 1}, {"temperature": 0.2, "top_k": 1})
    for seq_id, how in enumerate(hows):  # the first alone computes the prompt: what is kept of it may be less exact
        ear.start(seq_id, words.draw(10), n_tokens=1, n_logprobs=0, **how)
        ear.until_ended(seq_id)
        assert ear.errors[seq_id] == ""
    told = [ear.told[seq_id][0] for seq_id in range(1, len(hows))]
    assert {one.token for one in told} == {told[0].token}
    assert [one.logprob for one in told] == pytest.approx([told[0].logprob] * len(told), abs=NEAR)


def check_logprobs(one: StreamToken, n_logprobs: int | None) -> None:
    assert (one.logprob is not None) == (n_logprobs is not None), f"{one}, where the logprobs asked for are {n_logprobs}"
    assert len(one.top) == (n_logprobs or 0), f"{one}, where the logprobs asked for are {n_logprobs}"
    if one.logprob is None:
        return
    tops = [logprob for _, logprob in one.top]
    assert are_pythons_own(one.logprob, *tops, *dict(one.top)), one
    assert all(logprob <= NEAR for logprob in (one.logprob, *tops))
    assert tops == sorted(tops, reverse=True)
    assert len(dict(one.top)) == len(tops), f"{one} tells one twice"
    if one.token in dict(one.top):
        assert dict(one.top)[one.token] == pytest.approx(one.logprob, abs=NEAR)
    else:
        assert all(logprob >= one.logprob - NEAR for logprob in tops), f"{one} was likelier than one of those"


def test_who_heeds_a_least_number_of_tokens_ends_with_none_before(ear: Ear, words: PlainTokens | PlainText) -> None:
    needs(ear, "temperature", "n_tokens_min")
    n_min = N_TOKENS // 2
    ear.start(0, words.draw(10), temperature=0.0)
    ear.until_ended(0)
    likely = frozenset(ear.tokens[0])  # with which it would end at once
    ear.start(1, words.draw(10), temperature=0.0, end_tokens=likely, n_tokens_min=n_min)
    ear.until_ended(1)
    assert ear.errors == {0: "", 1: ""}
    assert not likely & set(ear.tokens[1][:n_min])
    assert n_min < len(ear.tokens[1]) <= N_TOKENS
    assert not likely & set(ear.tokens[1][:-1]), "it went on behind an end token"


@pytest.mark.parametrize(("field", "least"), [("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)])
def test_who_heeds_it_says_the_likeliest_token_where_no_other_is_left(
    ear: Ear, words: PlainTokens | PlainText, field: str, least: float
) -> None:
    """Each time the first token, since what comes later may be computed in another company, and hang on less than arithmetic can tell."""
    needs(ear, "temperature", field)
    for seq_id in range(16):
        how: dict[str, Any] = {"temperature": 1.0, field: least, "seed": seq_id} if seq_id % 2 else {"temperature": 0.0}
        ear.start(seq_id, words.draw(8, seed=seq_id // 2), n_tokens=1, **how)
        ear.until_ended(seq_id)
    assert [ear.tokens[seq_id] for seq_id in range(1, 16, 2)] == [ear.tokens[seq_id] for seq_id in range(0, 16, 2)]


def test_who_heeds_a_penalty_of_repeats_repeats_nothing_where_it_is_great(ear: Ear, words: PlainTokens | PlainText) -> None:
    needs(ear, "temperature", "repeat_penalty")
    prompt = words.draw(10)
    ear.start(0, prompt, temperature=0.0, repeat_penalty=1000.0)
    ear.until_ended(0)
    assert ear.errors == {0: ""}
    assert len(ear.tokens[0]) == N_TOKENS
    assert len({*prompt, *ear.tokens[0]}) == len(set(prompt)) + N_TOKENS


@pytest.mark.parametrize("kind", ["choice", "regex", "json_schema"])
def test_an_answer_is_held_to_a_form_by_who_heeds_it(ear: Ear, words: PlainTokens | PlainText, kind: FormKind) -> None:
    if ear.vocabulary is None or kind not in ear.model.heeds:
        pytest.skip(f"this model heeds no {kind}, or nobody here knows its tokens")
    form = StreamForm(kind, {"choice": '["ab","ba"]', "regex": "ab|ba", "json_schema": '{"enum":[12,21]}'}[kind])
    fields: dict[str, Any] = {"form": form, "end_tokens": ear.vocabulary.end_tokens}
    for seq_id in range(4):
        ear.start(seq_id, words.draw(8, seed=seq_id), **fields)
    ear.model.cancel(0)
    ear.until_ended(1, 2, 3)
    for seq_id in (1, 2, 3):
        assert ear.errors[seq_id] == ""
        text = b"".join([ear.vocabulary.token_bytes(token) for token in ear.tokens[seq_id]])
        assert text in (b"ab", b"ba", b"12", b"21")


def test_giving_up_one_that_has_ended_or_never_was_has_no_effect(ear: Ear, words: PlainTokens | PlainText) -> None:
    ear.start(0, words.draw(5))
    ear.until_ended(0)
    ear.model.cancel(0)
    ear.model.cancel(12345)
    ear.start(1, words.draw(5))
    ear.until_ended(1)
    assert ear.errors == {0: "", 1: ""}


def test_nothing_is_told_after_close_and_closing_twice_is_harmless(ear: Ear, words: PlainTokens | PlainText) -> None:
    ear.start(0, words.draw(5), n_tokens=min(200, ear.model.n_ctx - 6))
    ear.model.close()
    ear.what_was_told()
    n_told = ear.n_told[0]
    ear.silence()
    assert ear.n_told[0] == n_told
    ear.model.close()
