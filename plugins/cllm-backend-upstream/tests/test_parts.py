"""What needs no socket: options, events, statuses, and who is asked next."""

from __future__ import annotations

import json
from email.utils import formatdate
from pathlib import Path
from time import time
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock

from cllm.backend import ModelSpec, StreamCall, StreamChat, StreamForm, StreamLogprob, StreamRequest, StreamUsage
from cllm.errors import LoadFailed, NotHeeded, NotSupported
from cllm_backend_upstream.answers import DONE, Answer
from cllm_backend_upstream.asking import body_of, path_of
from cllm_backend_upstream.failures import Broken, Busy, Garbled, KeyRefused, Unreachable
from cllm_backend_upstream.health import check, watch
from cllm_backend_upstream.kinds import KINDS
from cllm_backend_upstream.lines import N_LINE_MAX, EventLines
from cllm_backend_upstream.options import KEY_VARIABLE, options_of
from cllm_backend_upstream.places import Places
from cllm_backend_upstream.pool import Pool
from cllm_backend_upstream.statuses import RETRY_AFTER_S, RETRY_AFTER_S_MAX, retry_after_s

# --- options ----------------------------------------------------------------------------------------------------------


def read(path: str = "http://a:1", **options: str) -> Any:
    return options_of(ModelSpec(path=path, options=options))


def test_urls_are_taken_with_and_without_their_version() -> None:
    assert read("http://a:1/v1/, https://b/openai/v1,http://a:1").urls == ("http://a:1", "https://b/openai")


@pytest.mark.parametrize(
    ("path", "options", "complaint"),
    [
        ("", {}, "which servers"),
        ("a:1", {}, "is no URL of a server"),
        ("ftp://a", {}, "is no URL of a server"),
        ("http://a:x", {}, "is no URL of a server"),
        ("http://a b", {}, "is no URL of a server"),
        ("http://me:secret@a", {}, "a URL has no user"),
        ("http://a", {"paralel": "4"}, "there is no option paralel"),
        ("http://a", {"parallel": "0"}, "expected a whole number"),
        ("http://a", {"token_s": "nan"}, "expected a number of seconds"),
        ("http://a", {"kind": "apache"}, "expected one of cllm"),
        ("http://a", {"key_file": "/nowhere"}, "key_file /nowhere"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(path: str, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(LoadFailed, match=complaint) as raised:
        read(path, **options)
    assert "\n" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_a_key_comes_from_a_file_or_from_the_environment_and_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    monkeypatch.setenv(KEY_VARIABLE, "other")
    assert (read().key, read(key_file=str(tmp_path / "key")).key) == ("other", "s3cret")
    assert "other" not in repr(read())


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 7, 1000])
def test_events_are_the_same_in_whatever_pieces_they_come(n: int) -> None:
    stream = b': hello\n\ndata:\n\ndata: {"a":1}\r\n\r\nevent: x\nid: 5\ndata:[DONE]\n\n'
    lines = EventLines()
    assert [data for i in range(0, len(stream), n) for data in lines.feed(stream[i : i + n])] == [b'{"a":1}', b"[DONE]"]


def test_no_more_than_a_line_is_kept() -> None:
    lines = EventLines()
    list(lines.feed(b"data: " + b"x" * (N_LINE_MAX - 10)))
    with pytest.raises(Garbled):
        list(lines.feed(b"x" * 20))


def chunk(**choice: Any) -> bytes:
    return json.dumps({"choices": [choice]}).encode()


def test_pieces_of_several_calls_find_theirs() -> None:
    answer = Answer(0)
    begun = {"index": 3, "id": "a", "function": {"name": "look", "arguments": ""}}
    more = {"index": 3, "function": {"arguments": "{}"}}
    other = {"index": 3, "id": "b", "function": {"name": "go", "arguments": "{}"}}  # Ollama gives all the same index
    told = [answer.take(chunk(delta={"tool_calls": [call]})) for call in (begun, more, other)]
    assert [text.calls for text in told if text] == [(StreamCall(0, "look"),), (StreamCall(0, "", "{}"),), (StreamCall(1, "go", "{}"),)]


def test_a_call_that_comes_without_a_list_is_one() -> None:
    answer = Answer(0)
    functions = ({"name": "look", "arguments": "{"}, {"name": None, "arguments": "}"})
    told = [answer.take(chunk(delta={"tool_calls": {"index": 0, "id": "", "function": function}})) for function in functions]
    assert [text.calls for text in told if text] == [(StreamCall(0, "look", "{"),), (StreamCall(0, "", "}"),)]


def test_an_answer_is_whole_only_if_its_end_was_told() -> None:
    answer = Answer(0)
    answer.take(chunk(delta={"content": "a"}))
    answer.take(DONE)
    with pytest.raises(Broken):
        answer.end()
    answer.take(chunk(delta={}, finish_reason="length"))
    assert answer.end().is_cut


def test_what_a_filter_has_cut_is_not_whole() -> None:
    answer = Answer(0)
    answer.take(chunk(delta={"content": "a"}))
    answer.take(chunk(delta={}, finish_reason="content_filter"))
    assert answer.end().is_cut


def test_an_end_without_a_reason_is_none() -> None:
    answer = Answer(0)
    answer.take(chunk(delta={"role": "assistant", "content": ""}, finish_reason=""))
    assert not answer.is_finished
    answer.take(chunk(delta={"content": "a"}, finish_reason=""))
    answer.take(DONE)
    with pytest.raises(Broken):
        answer.end()
    answer.take(chunk(delta={}, finish_reason="stop"))
    answer.take(chunk(delta={}, finish_reason=""))
    assert not answer.end().is_cut


@pytest.mark.parametrize("usage", [{}, {"prompt_tokens": None}, {"prompt_tokens": 9}, {"completion_tokens": 9}], ids=str)
def test_a_usage_that_says_but_a_part_is_none_and_takes_nothing_back(usage: dict[str, Any]) -> None:
    answer = Answer(0)
    for said in (usage, {"prompt_tokens": 7, "completion_tokens": 3}, usage):
        assert answer.take(json.dumps({"choices": [{"delta": {"content": "a"}}], "usage": said}).encode()) is not None
    answer.take(chunk(delta={}, finish_reason="stop"))
    assert answer.end().usage == StreamUsage(n_prompt=7, n_generated=3)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_known_by_both_its_names(name: str) -> None:
    text = Answer(0).take(chunk(delta={name: "hm", "content": None}))
    assert text is not None
    assert (text.reasoning, text.content) == ("hm", "")


@pytest.mark.parametrize("data", [b"", b"null", b"[]", b"{}", b'{"choices":5}', b"\xff", b'{"usage":{"prompt_tokens":-1}}', b"[" * 100_000])
def test_what_is_no_chunk_is_garbage(data: bytes) -> None:
    with pytest.raises(Garbled):
        Answer(0).take(data)


OLD = {"tokens": ["a", "bytes:\\xe2\\x82"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"b": -3.0, "a": -1.0}, None]}


def test_logprobs_are_read_in_both_shapes() -> None:
    likely = {"token": "b", "logprob": -3.0, "bytes": [98]}
    new = {"content": [{"token": "\ufffd", "bytes": [226, 130], "logprob": -2.0, "top_logprobs": [likely]}]}
    told = [Answer(0, n_logprobs=2).take(chunk(text="a", logprobs=logprobs)) for logprobs in (OLD, new)]
    assert told[0] is not None
    assert told[1] is not None
    assert told[0].logprobs == (
        StreamLogprob(b"a", -1.0, ((b"a", -1.0), (b"b", -3.0))),
        StreamLogprob(b"\xe2\x82", -2.0),
    )
    assert told[1].logprobs == (StreamLogprob(b"\xe2\x82", -2.0, ((b"b", -3.0),)),)
    assert told[0].n_tokens == 2


@pytest.mark.parametrize("change", [{"token_logprobs": [-1.0]}, {"token_logprobs": [None, -1.0]}, {"top_logprobs": [{}]}], ids=str)
def test_logprobs_that_do_not_fit_are_garbage(change: dict[str, Any]) -> None:
    with pytest.raises(Garbled):
        Answer(0, n_logprobs=2).take(chunk(text="a", logprobs={**OLD, **change}))


# --- statuses and the pool --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("-5", 0.0),
        (None, RETRY_AFTER_S),
        ("soon", RETRY_AFTER_S),
        ("nan", RETRY_AFTER_S),
        ("1e99", RETRY_AFTER_S_MAX),
    ],
)
def test_how_long_to_stay_away(text: str | None, seconds: float) -> None:
    assert retry_after_s(text) == seconds


def test_until_when_to_stay_away() -> None:
    assert 25 < retry_after_s(formatdate(time() + 30, usegmt=True)) <= 30


def test_one_that_failed_is_asked_last_until_it_has_answered_again() -> None:
    pool = Pool(["a", "b"])
    first, second = pool.upstreams
    first.failed(Broken("no"), now=0.0)
    second.n_live = 5
    assert pool.choose(0.5) is second
    assert pool.choose(0.5, [second]) is first
    first.failed(Broken("no"), now=2.0)
    assert pool.choose(3.9) is second  # twice as long
    first.answered()
    assert pool.choose(3.9) is first


def test_one_without_connection_is_not_asked_and_one_that_rests_is_not_either() -> None:
    pool = Pool(["a", "b"])
    first, second = pool.upstreams
    first.failed(Unreachable("no"), now=0.0)
    second.failed(Busy(429, 10.0), now=0.0)
    assert pool.choose(5.0) is None
    refusal = pool.why_not(5.0, None, health_s=2.0)
    assert (refusal.status, refusal.retry_after_s) == (429, 5.0)  # type: ignore[attr-defined]
    assert pool.choose(10.0) is second


def test_a_client_comes_again_when_the_first_of_them_may_be_asked_again() -> None:
    pool = Pool(["a", "b", "c"])
    first, second, third = pool.upstreams
    first.failed(Broken("no"), now=0.0)
    third.failed(Unreachable("no"), now=0.0)
    busy = Busy(429, 30.0)
    second.failed(busy, now=0.25)
    refusal = pool.why_not(0.25, busy, health_s=2.0)
    assert (refusal.status, refusal.retry_after_s) == (429, 0.75)  # type: ignore[attr-defined]  # the first one is asked last for a second
    first.failed(Busy(503, 20.0), now=2.0)
    refusal = pool.why_not(2.0, None, health_s=2.0)
    assert (refusal.status, refusal.retry_after_s) == (503, 20.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("status", [429, 503])
def test_one_that_wants_to_be_left_alone_for_no_time_is_busy_all_the_same(status: int) -> None:
    pool = Pool(["a"])
    busy = Busy(status, 0.0)
    pool.upstreams[0].failed(busy, now=1.0)
    refusal = pool.why_not(1.0, busy, health_s=2.0)
    assert (refusal.status, refusal.retry_after_s) == (status, 0.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("why", ["", "gone"])
async def test_a_check_says_nothing_of_one_that_a_request_finds_down_meanwhile(why: str, caplog: pytest.LogCaptureFixture) -> None:
    upstream = Pool(["a"]).upstreams[0]
    meanwhile = [lambda: upstream.failed(Unreachable("no"), now=0.0), lambda: None]

    class Scripted:
        async def get(self, url: str) -> bytes:
            meanwhile.pop(0)()
            if why:
                raise Unreachable(why)
            return b""

    await check(upstream, Scripted(), KINDS["vllm"])  # type: ignore[arg-type]
    assert (upstream.is_well, caplog.messages) == (False, [])
    await check(upstream, Scripted(), KINDS["vllm"])  # type: ignore[arg-type]
    assert (upstream.is_well, caplog.messages) == ((False, []) if why else (True, ["upstream a is up again"]))


@pytest.mark.parametrize("kind", KINDS)
async def test_only_those_are_asked_for_their_health_whom_it_costs_nothing(kind: str) -> None:
    asked: list[str] = []

    class Scripted:
        async def get(self, url: str) -> bytes:
            asked.append(url)
            return b""

    await check(Pool(["a"]).upstreams[0], Scripted(), KINDS[kind])  # type: ignore[arg-type]
    assert asked == ["a/health" if kind in ("vllm", "cllm", "llamacpp", "tgi") else "a/v1/models"]


@pytest.mark.parametrize(("kind", "paths"), [("vllm", ["a/health", "a/v1/models"]), ("other", ["a/v1/models"])])
async def test_one_that_is_asked_too_often_is_well_and_one_that_has_no_health_is_asked_otherwise(kind: str, paths: list[str]) -> None:
    asked: list[str] = []

    class Scripted:
        async def get(self, url: str) -> bytes:
            asked.append(url)
            raise Busy(429, 1.0) if url.endswith("models") else NotSupported("no such path")

    upstream = Pool(["a"]).upstreams[0]
    await check(upstream, Scripted(), KINDS[kind])  # type: ignore[arg-type]
    assert (upstream.is_well, asked) == (True, paths)


async def test_one_that_never_answers_holds_up_no_check_of_another(autojump_clock: MockClock) -> None:
    asked: list[float] = []

    class Scripted:
        async def get(self, url: str) -> bytes:
            if url.startswith("http://a"):
                await trio.sleep_forever()
            asked.append(trio.current_time())
            return b""

    pool = Pool(["http://a", "http://b"])
    with trio.move_on_after(12):
        await watch(pool, Places(pool), Scripted(), read("http://a,http://b"), KINDS["vllm"])  # type: ignore[arg-type]
    assert asked == [0.0, 5.0, 10.0]


@pytest.mark.parametrize("was_well", [True, False])
async def test_one_that_refuses_the_key_for_its_list_is_there(was_well: bool) -> None:
    class Scripted:
        async def get(self, url: str) -> bytes:
            raise KeyRefused("HTTP 403: it wants another key")

    upstream = Pool(["a"]).upstreams[0]
    upstream.is_well = was_well
    await check(upstream, Scripted(), KINDS["openai"])  # type: ignore[arg-type]
    assert upstream.is_well


# --- what is asked ----------------------------------------------------------------------------------------------------


def asked(request: StreamRequest, kind: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(body_of(request, "m", KINDS[kind]))
    return body


def test_each_kind_is_asked_in_its_own_words() -> None:
    request = StreamRequest(text="once", n_tokens_max=5, seed=(1 << 40) + 7, repeat_penalty=1.1, top_k=4, stop=("a",) * 6, ignore_eos=True)
    vllm, llamacpp = asked(request, "vllm"), asked(request, "llamacpp")
    assert (path_of(request), vllm["prompt"], vllm["max_tokens"], vllm["seed"], len(vllm["stop"])) == ("/v1/completions", "once", 5, 7, 4)
    assert (vllm["repetition_penalty"], llamacpp["repeat_penalty"]) == (1.1, 1.1)
    assert (vllm["temperature"], vllm["ignore_eos"]) == (1.0, True)  # said, since its own default may be another
    assert "top_p" not in asked(StreamRequest(text="once"), "tgi")


def test_the_likeliest_come_first_also_where_the_drawn_one_is_told_first_and_takes_anothers_place() -> None:
    request = StreamRequest(chat=StreamChat(messages=[{"role": "user", "content": "hello"}]), n_logprobs=2)
    assert asked(request, "vllm")["top_logprobs"] == 3
    assert asked(attrs.evolve(request, n_logprobs=20), "vllm")["top_logprobs"] == 20, "it tells no more"
    assert asked(request, "llamacpp")["top_logprobs"] == 2
    drawn, first, second = ({"token": letter, "logprob": logprob} for letter, logprob in (("c", -5.0), ("a", -1.0), ("b", -2.0)))
    told = {"content": [{**drawn, "top_logprobs": [drawn, first, second]}]}
    text = Answer(0, n_logprobs=2).take(chunk(delta={"content": "c"}, logprobs=told))
    assert text is not None
    assert [logprob.top for logprob in text.logprobs] == [((b"a", -1.0), (b"b", -2.0))]


def test_who_asks_for_no_likely_tokens_has_one_asked_for_that_is_left_out_again() -> None:
    request = StreamRequest(chat=StreamChat(messages=[{"role": "user", "content": "hello"}]), n_logprobs=0)
    body = asked(request, "llamacpp")
    assert (body["logprobs"], body["top_logprobs"]) == (True, 1)  # of 0 it tells none at all
    one = {"token": "a", "bytes": [97], "logprob": -1.0}
    text = Answer(0, n_logprobs=0).take(chunk(delta={"content": "a"}, logprobs={"content": [{**one, "top_logprobs": [one]}]}))
    assert text is not None
    assert [(logprob.logprob, logprob.top) for logprob in text.logprobs] == [(-1.0, ())]


def test_who_refuses_what_it_would_do_unasked_is_not_sent_it() -> None:
    chat = StreamChat(messages=[{"role": "user", "content": "hello"}])
    sampling = {"temperature", "top_p", "presence_penalty", "frequency_penalty"}
    assert not sampling & asked(StreamRequest(chat=chat), "openai").keys()
    assert sampling & asked(StreamRequest(chat=chat, top_p=0.5), "openai").keys() == {"top_p"}
    assert sampling <= asked(StreamRequest(chat=chat), "other").keys()


def test_a_conversation_is_passed_on_as_it_came() -> None:
    chat = StreamChat(
        messages=[{"role": "user", "content": "hello"}],
        tools=[{"type": "function"}],
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning_effort="low",
        template_variables={"a": 1},
    )
    body = asked(StreamRequest(chat=chat, n_tokens_max=3), "openai")
    expected = {"messages", "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs"}
    assert expected < body.keys()
    assert body["max_completion_tokens"] == 3


def test_a_tool_that_must_be_called_is_the_only_one_where_its_name_would_be_ignored() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    choice = {"type": "function", "function": {"name": "b"}}
    request = StreamRequest(chat=StreamChat(messages=[{"role": "user", "content": "hello"}], tools=tools, tool_choice=choice))
    names = ("tools", "tool_choice", "parallel_tool_calls")
    assert [asked(request, "llamacpp").get(name) for name in names] == [tools[1:], "required", False]
    assert [asked(request, "vllm").get(name) for name in names] == [tools, choice, None]


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_of_conversations_are_not_sent_to_who_looks_for_them_in_reasoning_and_calls(kind: str) -> None:
    chat = StreamChat(messages=[{"role": "user", "content": "hello"}])
    assert asked(StreamRequest(text="once", stop=("x",)), kind)["stop"] == ["x"]
    assert ("stop" in asked(StreamRequest(chat=chat, stop=("x",)), kind)) is (kind in ("openai", "cllm", "other"))


@pytest.mark.parametrize("kind", ["openai", "cllm", "vllm", "ollama", "other"])
@pytest.mark.parametrize(
    ("effort", "nearest"), [("none", "none"), ("minimal", "low"), ("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")]
)
def test_an_effort_that_is_not_known_everywhere_is_the_nearest_one_where_it_would_be_refused(kind: str, effort: str, nearest: str) -> None:
    chat = StreamChat(messages=[{"role": "user", "content": "hello"}], reasoning_effort=effort)
    told = effort if kind in ("openai", "cllm") else nearest
    assert asked(StreamRequest(chat=chat, n_tokens_max=3), kind)["reasoning_effort"] == told


@pytest.mark.parametrize(
    ("kind", "form", "expected"),
    [
        ("vllm", StreamForm("json_schema", '{"type":"object"}'), {"response_format": {"type": "json_object"}}),
        ("llamacpp", StreamForm("json_schema", '{"type":"object"}'), {"json_schema": {"type": "object"}}),
        ("vllm", StreamForm("regex", "a+"), {"structured_outputs": {"regex": "a+"}}),
        ("cllm", StreamForm("choice", '["a"]'), {"structured_outputs": {"choice": ["a"]}}),
        ("llamacpp", StreamForm("grammar", 'root ::= "a"'), {"grammar": 'root ::= "a"'}),
    ],
)
def test_a_form_goes_where_each_kind_looks_for_it(kind: str, form: StreamForm, expected: dict[str, Any]) -> None:
    assert expected.items() <= asked(StreamRequest(text="a", form=form), kind).items()


def test_tgi_has_a_schema_bare_and_holds_nothing_to_any_object() -> None:
    chat = StreamChat(messages=[{"role": "user", "content": "hello"}])
    body = asked(StreamRequest(chat=chat, form=StreamForm("json_schema", '{"type":"object","properties":{}}')), "tgi")
    assert body["response_format"] == {"type": "json", "value": {"type": "object", "properties": {}}}
    with pytest.raises(NotHeeded, match="response_format"):
        asked(StreamRequest(chat=chat, form=StreamForm("json_schema", '{"type":"object"}', field="response_format")), "tgi")


@pytest.mark.parametrize("kind", ["openai", "ollama", "tgi", "other"])
def test_a_schema_that_a_kind_ignores_in_completions_is_refused_there_by_its_field(kind: str) -> None:
    form = StreamForm("json_schema", '{"type":"object"}', field="response_format")
    with pytest.raises(NotHeeded) as refused:
        asked(StreamRequest(text="a", form=form), kind)
    assert refused.value.param == "response_format"
    chat = StreamChat(messages=[{"role": "user", "content": "hello"}])
    if kind != "tgi":
        assert asked(StreamRequest(chat=chat, form=form), kind)["response_format"] == {"type": "json_object"}


def test_salts_go_to_those_who_keep_prompts_apart() -> None:
    request = StreamRequest(text="a", cache_salt="mine", cache_prompt=False)
    assert {"cache_salt": "mine", "cache_prompt": False}.items() <= asked(request, "cllm").items()
    assert not {"cache_salt", "cache_prompt"} & asked(StreamRequest(text="a"), "cllm").keys()
    assert {kind for kind in KINDS if "cache_salt" in KINDS[kind].heeds} == {"vllm", "cllm"}
    assert {kind for kind in KINDS if "cache_prompt" in KINDS[kind].heeds} == {"cllm"}


def test_a_window_goes_to_those_who_have_one() -> None:
    request = StreamRequest(text="a", repeat_last_n=9)
    assert [kind for kind in KINDS if asked(request, kind).get("repeat_last_n") == 9] == ["cllm", "llamacpp"]
    assert "repeat_last_n" not in asked(StreamRequest(text="a"), "cllm")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_kind_heeds_are_fields_of_the_seam(kind: str) -> None:
    fields = {*attrs.fields_dict(StreamRequest), *attrs.fields_dict(StreamChat), "json_schema", "regex", "choice", "grammar"}
    assert KINDS[kind].heeds <= fields


def test_one_that_was_away_gets_no_more_than_its_part_when_it_is_back() -> None:
    pool = Pool(["http://a", "http://b"])
    first, second = pool.upstreams
    second.is_well = False
    for _ in range(100):
        chosen = pool.choose(0.0)
        assert chosen is first
        pool.asks(chosen)
    second.is_well = True
    asked = []
    for _ in range(10):
        chosen = pool.choose(0.0)
        assert chosen is not None
        pool.asks(chosen)
        asked.append(chosen)
    assert (asked.count(first), asked.count(second)) == (5, 5)
    assert (first.n_requests, second.n_requests) == (105, 5)
