"""Tokens and text: what a vocabulary gives, from any thread, for any text."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cllm import bigstack
from cllm.backend import ModelSpec
from cllm.errors import TokenizeFailed
from cllm.testing import tiny
from cllm.testing.tiny import CHAT_TEMPLATE, make_tiny_gguf
from cllm_llamacpp import make_cpu_backend, names
from cllm_llamacpp import vocabulary as module


@pytest.fixture
def vocabulary(load):
    return load(n_cells=256).vocabulary


def tokens(vocabulary, text, *, add_special=False, parse_special=False):
    return vocabulary.tokenize(text, add_special=add_special, parse_special=parse_special)


def text_of(vocabulary, ids, *, special=False):
    return b"".join(vocabulary.token_bytes(token, special=special) for token in ids)


def test_a_vocabulary_knows_its_special_tokens(vocabulary):
    (end_of_turn,) = tokens(vocabulary, "<|im_end|>", parse_special=True)
    (end_of_text,) = tokens(vocabulary, "<|endoftext|>", parse_special=True)

    assert vocabulary.eos == end_of_turn
    assert vocabulary.bos == end_of_text
    assert vocabulary.end_tokens == {end_of_turn, end_of_text}
    assert not vocabulary.adds_bos
    assert vocabulary.chat_template == CHAT_TEMPLATE
    assert 300 <= vocabulary.n_tokens <= 400


def test_it_knows_the_fill_in_the_middle_tokens_where_there_are_any(vocabulary, tmp_path):
    assert vocabulary.infill is None
    make_tiny_gguf(tmp_path / "infill.gguf", "qwen3", infills=True)
    model = make_cpu_backend().load(ModelSpec(path=str(tmp_path / "infill.gguf"), n_cells=256, n_threads=1), lambda _share: True)
    infill = model.vocabulary.infill
    assert [model.vocabulary.token_bytes(token, special=True) for token in (infill.prefix, infill.suffix, infill.middle)] == [
        b"<|fim_prefix|>",
        b"<|fim_suffix|>",
        b"<|fim_middle|>",
    ]
    model.close()


def test_it_has_the_template_for_tools_where_the_file_does(vocabulary, tmp_path):
    assert vocabulary.tool_template is None
    make_tiny_gguf(tmp_path / "tools.gguf", "qwen3", tool_template="{{ tools }}")
    model = make_cpu_backend().load(ModelSpec(path=str(tmp_path / "tools.gguf"), n_cells=256, n_threads=1), lambda _share: True)
    assert (model.vocabulary.chat_template, model.vocabulary.tool_template) == (CHAT_TEMPLATE, "{{ tools }}")
    model.close()


def test_words_are_single_tokens_and_other_text_is_bytes(vocabulary):
    assert [vocabulary.token_bytes(t) for t in tokens(vocabulary, "Hello world")] == [b"Hello", b" world"]
    assert len(tokens(vocabulary, "ö")) == 2


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=200)
@given(text=st.text(st.characters(), max_size=40), add_special=st.booleans())
def test_the_bytes_of_a_texts_tokens_are_the_text(vocabulary, text, add_special):
    expected = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)  # each half of a pair by itself

    ids = tokens(vocabulary, text, add_special=add_special)

    assert all(0 <= token < vocabulary.n_tokens for token in ids)
    assert text_of(vocabulary, ids).decode() == expected


def test_text_that_looks_like_a_control_token_is_text_unless_parsed(vocabulary):
    as_text = tokens(vocabulary, "<|im_end|>")
    as_token = tokens(vocabulary, "<|im_end|>", parse_special=True)

    assert len(as_text) > 1
    assert text_of(vocabulary, as_text) == b"<|im_end|>"
    assert len(as_token) == 1


def test_control_tokens_are_silent_and_user_defined_tokens_are_not(vocabulary):
    (control,) = tokens(vocabulary, "<|im_start|>", parse_special=True)
    (think,) = tokens(vocabulary, "<think>", parse_special=True)

    assert vocabulary.token_bytes(control) == b""
    assert vocabulary.token_bytes(control, special=True) == b"<|im_start|>"
    assert vocabulary.token_bytes(think) == vocabulary.token_bytes(think, special=True) == b"<think>"


def test_nul_characters_are_characters(vocabulary):
    ids = tokens(vocabulary, "a\0b\0")

    assert text_of(vocabulary, ids) == b"a\0b\0"


def test_lone_surrogates_are_replaced(vocabulary):
    assert text_of(vocabulary, tokens(vocabulary, "a\ud800b\udfff")).decode() == "a\ufffdb\ufffd"
    assert text_of(vocabulary, tokens(vocabulary, "\ud83d\ude00")).decode() == "\ufffd\ufffd"


def test_empty_text_has_no_tokens(vocabulary):
    assert tokens(vocabulary, "") == []


@pytest.mark.parametrize("token", [-1, 10_000, -(2**40), 2**40])
def test_a_token_that_is_none_is_an_index_error(vocabulary, token):
    with pytest.raises(IndexError):
        vocabulary.token_bytes(token)


def test_long_texts_have_the_tokens_of_their_parts(vocabulary):
    part = tokens(vocabulary, "Hello world!")

    assert tokens(vocabulary, "Hello world!" * 50_000) == part * 50_000


def test_texts_are_tokenised_on_many_threads_at_once(vocabulary):
    texts = [f"{i} Hello world\n" * (i * 40) for i in range(30)]
    expected = [tokens(vocabulary, text) for text in texts]

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: tokens(vocabulary, text), texts))

    assert found == expected


def test_a_step_and_a_tokenisation_do_not_disturb_each_other(load, drive, some_tokens):
    model = load()
    expected = drive(model).greedy({0: some_tokens(1, 50)}, 50)
    model.drop(0)
    stop = threading.Event()

    def tokenize() -> None:
        while not stop.is_set():
            tokens(model.vocabulary, "Hello world! " * 300)
            text_of(model.vocabulary, range(300))

    threads = [threading.Thread(target=tokenize) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert drive(model).greedy({0: some_tokens(1, 50)}, 50) == expected
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_threads_started_later_have_the_stack_they_had(vocabulary):
    before = threading.stack_size()

    tokens(vocabulary, "a" * 100_000)

    assert threading.stack_size() == before


def test_a_text_that_is_too_long_is_refused(vocabulary):
    with pytest.raises(TokenizeFailed, match="bytes"):
        tokens(vocabulary, "a" * (module._N_BYTES_MAX + 1))


def test_without_a_stack_for_it_a_text_is_refused(vocabulary, monkeypatch):
    def start(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)

    with pytest.raises(TokenizeFailed, match="no stack"):
        tokens(vocabulary, "a" * 5000)
    assert len(tokens(vocabulary, "a" * 1000)) == 1000  # short ones need none


def test_what_a_function_raises_comes_out_of_its_big_stack():
    with pytest.raises(ZeroDivisionError):
        bigstack.call_with_stack(lambda: 1 // 0, 1)


def sentencepiece(path, monkeypatch, *, with_bytes, named=()):
    """A vocabulary of letters, with which a text of others ends llama.cpp's process unless every byte has a token; `named` are tokens that
    texts may name.
    """

    def write(writer, _pre, _infill):
        of_bytes = [f"<0x{byte:02X}>" for byte in range(256)] if with_bytes else []
        words = ["\u2581", *"abc\u00e9", "ab"]
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", *of_bytes, *words, *named])
        writer.add_token_scores([0.0] * (3 + len(of_bytes)) + [-float(place) for place in range(len(words))] + [0.0] * len(named))
        writer.add_token_types([2, 3, 3] + [6] * len(of_bytes) + [1] * len(words) + [4] * len(named))
        return 3 + len(of_bytes) + len(words) + len(named)

    monkeypatch.setattr(tiny, "_write_vocabulary", write)
    make_tiny_gguf(path, "qwen3")
    return make_cpu_backend().load_vocabulary(str(path))


def test_a_character_for_which_there_is_no_token_is_refused_where_it_would_end_the_process(tmp_path, monkeypatch):
    vocabulary = sentencepiece(tmp_path / "letters.gguf", monkeypatch, with_bytes=False)
    assert text_of(vocabulary, tokens(vocabulary, "ab c\u00e9")).strip() == "ab c\u00e9".encode()
    for text in ("abd", "ab\n", "\N{GRINNING FACE}", "a\x00b"):
        with pytest.raises(TokenizeFailed, match="no token for"):
            tokens(vocabulary, text)


def test_with_a_token_for_every_byte_there_is_none_that_is_refused(tmp_path, monkeypatch):
    vocabulary = sentencepiece(tmp_path / "bytes.gguf", monkeypatch, with_bytes=True)
    assert text_of(vocabulary, tokens(vocabulary, "ab\nd\N{GRINNING FACE}")).strip() == "ab\nd\N{GRINNING FACE}".encode()


# --- names of special tokens in long texts -----------------------------------------------------------------------------

NAMED = ("\n", "\n\n", "\n\n\n", "<b>", "<b>b", "aba", "<turn>")  # rows, one that begins as another, one that overlaps itself
BITS = ["<b>", "<b>b", "aba", "ababa", "<turn>", "<turn", "\n", "\n\n\n\n", " ", "a", "b", "</s>", "<s>", "c c", "<"]


@pytest.fixture(params=["sentencepiece", "bpe"])
def of_long_texts(request, tmp_path, monkeypatch, load):
    """Vocabularies that cut texts of 40 bytes and more."""
    monkeypatch.setattr(module, "N_BYTES_PIECE", 40)
    monkeypatch.setattr(names, "N_BYTES_PIECE", 40)
    monkeypatch.setattr(module, "_N_BYTES_INLINE", 40)
    if request.param == "bpe":
        return load(n_cells=256).vocabulary
    return sentencepiece(tmp_path / "named.gguf", monkeypatch, with_bytes=True, named=NAMED)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.lists(st.sampled_from([*BITS, "<think>", "</think>", "<|im_start|>", "Hello world"]), min_size=20, max_size=80),
    add_special=st.booleans(),
    parse_special=st.booleans(),
)
def test_a_text_that_is_cut_behind_names_has_the_tokens_of_the_whole(of_long_texts, bits, add_special, parse_special):
    text = "".join(bits)
    whole = of_long_texts._tokenize(text.encode(), add_special, parse_special)
    assert tokens(of_long_texts, text, add_special=add_special, parse_special=parse_special) == whole


def test_a_text_full_of_names_is_tokenised_in_short_pieces(vocabulary):
    for text, parse_special in (("<think>a" * 20_000, False), ("<|im_start|>" * 20_000, True)):
        pieces = vocabulary._pieces(text.encode(), parse_special)
        assert b"".join(pieces) == text.encode()
        assert max(map(len, pieces)) <= names.N_BYTES_PIECE + 24  # a name begun before it, and the one that is cut behind
    assert len(vocabulary._pieces(b"<|im_start|>" * 20_000, False)) == 1  # which then are no names
    (think,) = tokens(vocabulary, "<think>")
    assert tokens(vocabulary, "<think>" * 20_000) == [think] * 20_000


def test_what_cannot_be_cut_is_refused_where_it_has_too_many_names(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "N_NAMES_MAX", 1000)
    vocabulary = sentencepiece(tmp_path / "named.gguf", monkeypatch, with_bytes=True, named=NAMED)
    at_first = "abac" * (names.N_BYTES_PIECE // 4)
    assert tokens(vocabulary, at_first + "abac" * 1000)
    with pytest.raises(TokenizeFailed, match="special tokens in a row"):
        tokens(vocabulary, at_first + "abac" * 1001)
    assert tokens(vocabulary, at_first + "abac\n" * 2000)


def test_the_longest_name_at_a_place_is_found_also_where_the_search_goes_on(monkeypatch):
    monkeypatch.setattr(names, "_N_BYTES_SEARCHED", 1)
    found = names.Names.of({name.encode(): 1 << 4 for name in ("<b>", "<b>bb", "x")})
    assert found is not None
    for n_before in range(20):
        match = found._next(b"." * n_before + b"<b>bb", 0)
        assert (match.start(), match[0]) == (n_before, b"<b>bb")
    assert found._next(b"." * 50, 0) is None


@pytest.mark.parametrize("strips", [1 << 7, 1 << 8])
def test_behind_blanks_that_a_name_may_take_away_no_text_is_cut(monkeypatch, strips):
    monkeypatch.setattr(names, "N_BYTES_PIECE", 4)
    of, plain = names.Names.of, 1 << 4
    for text in (b"<a>  <a>  <a>", b"xx<a>\n\n\nfoo\n\nbar", b"xxx\n<a>foo\n\n<a>"):
        assert list(of({b"<a>": plain | strips, b"\n": plain, b"\n\n": plain}).pieces(text, may_cut=True)) == [text]
        assert list(of({b"<a>": plain | strips, b"\n": plain}).pieces(text, may_cut=True)) == [text]
    assert list(of({b"<a>": plain | strips, b"<b>": plain}).pieces(b"<a> <b>  <b> x", may_cut=True)) == [b"<a> <b>", b"  <b> x"]


def test_a_text_full_of_the_shortest_names_is_cut_into_pieces_of_few(tmp_path, monkeypatch):
    vocabulary = sentencepiece(tmp_path / "named.gguf", monkeypatch, with_bytes=True, named=NAMED)
    pieces = vocabulary._pieces(b"\na" * 50_000, False)
    assert max(piece.count(b"\n") for piece in pieces) <= names.N_BYTES_PIECE // 2 + 1
    assert b"".join(pieces) == b"\na" * 50_000
