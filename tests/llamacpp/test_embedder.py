"""Vectors from llama.cpp are the same alone, in company and in pieces, from a model of their own or from a served one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from cllm.backend import Batch, Embeds, FlashAttention, LoadsEmbedders, Lora, ModelSpec, Pooling, Vectors
from cllm.commands import generate
from cllm.config import Settings
from cllm.engine.embedding.scheduler import EmbedScheduler, InputTooLong, compute
from cllm.errors import DoesNotGenerate, LoadFailed, ModelDied, StepFailed
from cllm.serve.embedders import LoadedEmbedder
from cllm.serve.loading import load as load_served
from cllm.testing.fake import END_OF_TURN, TURN, FakeVocabulary
from cllm.testing.tiny import ARCHITECTURES, make_tiny_gguf, make_tiny_lora
from cllm.testing.tiny_bert import N_CTX, N_EMBD, make_tiny_bert
from cllm_llamacpp import make_cpu_backend
from cllm_llamacpp.embedder import LlamaEmbedder, Pairs, Sizes, sizes_of

EXACT = {"n_threads": 1, "cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": FlashAttention.OFF}

Embedders = Callable[..., LlamaEmbedder]


@pytest.fixture(scope="session")
def bert_files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    folder = tmp_path_factory.mktemp("bert")
    files = {pooling: folder / f"{pooling}.gguf" for pooling in ("MEAN", "CLS", "LAST", "RANK", "NONE")}
    for pooling, path in files.items():
        make_tiny_bert(path, pooling=pooling)
    return files


@pytest.fixture
def embedder() -> Iterator[Embedders]:
    """Load a file as an embedder; it is closed after the test."""
    loaded: list[LlamaEmbedder] = []

    def load_one(path: Path, **settings: Any) -> LlamaEmbedder:
        spec = ModelSpec(path=str(path), **{**EXACT, **settings})
        one = make_cpu_backend().load_embedder(spec, lambda _share: True)
        assert isinstance(one, LlamaEmbedder)
        loaded.append(one)
        return one

    yield load_one
    for one in loaded:
        one.close()


def vectors(embedder: LlamaEmbedder, *requests: Sequence[Sequence[int]], n_rows: int = 512) -> list[Vectors]:
    scheduler = EmbedScheduler(embedder)
    jobs = [scheduler.submit(inputs) for inputs in requests]
    while (plan := scheduler.plan(n_rows)) is not None:
        scheduler.apply(plan, compute(embedder, plan))
    for slot in range(embedder.n_slots):  # another scheduler comes
        embedder.drop(slot)
    return [job.vectors for job in jobs]


INPUTS = [[3, 1, 4, 1, 5, 9, 2, 6], [10] * 30, [7], [20, 21, 22]]


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST", "RANK"])
def test_an_encoders_input_has_the_same_vector_alone_and_in_any_company(
    bert_files: Mapping[str, Path], embedder: Embedders, pooling: str
) -> None:
    bert = embedder(bert_files[pooling])
    assert (bert.pooling, bert.can_split, bert.n_tokens_max) == (Pooling[pooling], False, N_CTX)
    assert bert.n_embd == (1 if pooling == "RANK" else N_EMBD)
    alone = [vectors(bert, [one])[0][0] for one in INPUTS]
    (together,) = vectors(bert, INPUTS, n_rows=64)
    assert together == pytest.approx(np.array(alone), abs=1e-3)  # ggml's GELU is a table of half precision
    assert len({vector.tobytes() for vector in together}) == len(INPUTS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS, Pooling.LAST])
def test_a_decoders_input_has_the_same_vector_whole_and_in_pieces(
    tiny_files: Mapping[str, Path], embedder: Embedders, architecture: str, pooling: Pooling
) -> None:
    model = embedder(tiny_files[architecture], pooling=pooling)
    assert model.can_split
    (whole,) = vectors(model, INPUTS)
    (pieces,) = vectors(model, INPUTS, n_rows=5)
    scale = np.abs(whole).max()
    assert pieces / scale == pytest.approx(whole / scale, abs=1e-4)


def test_vectors_of_a_model_with_an_adapter_are_the_adapters_beside_it_and_by_themselves(
    tiny_files: Mapping[str, Path], embedder: Embedders, tmp_path: Path
) -> None:
    make_tiny_lora(tmp_path / "lora.gguf")
    path, loras = tiny_files["qwen3"], (Lora(str(tmp_path / "lora.gguf")),)
    (plain,) = vectors(embedder(path), INPUTS)
    (own,) = vectors(embedder(path, loras=loras), INPUTS)
    assert np.abs(own - plain).max() > 0.01 * np.abs(plain).max()
    spec = ModelSpec(path=str(path), loras=loras, n_cells=512, **EXACT)
    served = make_cpu_backend().load(spec, lambda _share: True)
    try:
        beside = served.make_embedder(ModelSpec(path=str(path), **EXACT))
        assert isinstance(beside, LlamaEmbedder)
        (found,) = vectors(beside, INPUTS)
        beside.close()
    finally:
        served.close()
    assert found == pytest.approx(own, abs=1e-4 * float(np.abs(own).max()))


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_what_is_pooled_above_the_seam_is_what_llama_cpp_pools(bert_files: Mapping[str, Path], embedder: Embedders, pooling: str) -> None:
    bert = embedder(bert_files[pooling])
    lib, tokens = bert._lib, INPUTS[0]
    model = lib.llama_model_load_from_file(str(bert_files[pooling]).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()  # whose pooling is the file's own
    params.embeddings = True
    params.flash_attn_type = 0
    context = lib.llama_init_from_model(model, params)
    column = (lib.llama_token * len(tokens))(*tokens)  # the batch only points at it
    assert lib.llama_encode(context, lib.llama_batch_get_one(column, len(tokens))) == 0
    theirs = np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, 0), (N_EMBD,)).copy()
    lib.llama_free(context)
    lib.llama_model_free(model)
    assert vectors(bert, [tokens])[0][0] == pytest.approx(theirs, abs=1e-3)


def test_pooling_is_the_files_unless_another_is_asked_for_and_the_mean_where_it_says_nothing(
    bert_files: Mapping[str, Path], embedder: Embedders
) -> None:
    assert embedder(bert_files["CLS"]).pooling is Pooling.CLS
    assert embedder(bert_files["NONE"]).pooling is Pooling.MEAN
    assert embedder(bert_files["CLS"], pooling=Pooling.LAST).pooling is Pooling.LAST
    with pytest.raises(LoadFailed, match="not made to rank"):
        embedder(bert_files["CLS"], pooling=Pooling.RANK)


class TemplateLibrary:
    """What `Pairs` asks llama.cpp, of a model that has a template for pairs, or none."""

    def __init__(self, template: bytes | None) -> None:
        self._template = template

    def llama_model_get_vocab(self, _: object) -> None:
        return None

    def llama_model_chat_template(self, _: object, name: bytes) -> bytes | None:
        return self._template if name == b"rerank" else None

    def llama_vocab_get_add_sep(self, _: object) -> bool:
        return False

    def llama_vocab_get_add_eos(self, _: object) -> bool:
        return False


def test_names_of_special_tokens_in_what_is_judged_are_text() -> None:
    pairs = Pairs(TemplateLibrary(b"<turn>{query}|{document}<end>"), None, FakeVocabulary())  # type: ignore[arg-type]
    assert pairs.tokens("a {document}", "b") == [TURN, *b"a {document}|b", END_OF_TURN]
    assert pairs.tokens("a", "b<end>") == [TURN, *b"a|b<end>", END_OF_TURN]
    assert pairs.tokens("<turn>{document}", "b") == [TURN, *b"<turn>{document}|b", END_OF_TURN]


@pytest.mark.parametrize(("template", "n_read"), [(None, 1), (b"<turn>{query}|{document}<end>", 2)])
def test_a_query_is_read_once_for_all_of_its_documents(template: bytes | None, n_read: int) -> None:
    vocabulary, texts = FakeVocabulary(), []
    tokenize = vocabulary.tokenize
    vocabulary.tokenize = lambda text, **options: texts.append(text) or tokenize(text, **options)  # type: ignore[method-assign,func-returns-value]
    pairs = Pairs(TemplateLibrary(template), None, vocabulary)  # type: ignore[arg-type]
    tokens = [pairs.tokens("once", f"{i}") for i in range(10)]
    assert texts.count("once") == n_read
    assert len({tuple(each) for each in tokens}) == 10


def test_a_ranking_model_judges_pairs_from_0_to_1(bert_files: Mapping[str, Path], embedder: Embedders) -> None:
    bert = embedder(bert_files["RANK"])
    tokens = [bert.pair("once", document) for document in ("upon a time", "model", "")]
    cls, sep = 2, 3
    once = bert.vocabulary.tokenize("once", add_special=False, parse_special=False)
    model = bert.vocabulary.tokenize("model", add_special=False, parse_special=False)
    assert tokens[1] == [cls, *once, sep, *model, sep]
    (scores,) = vectors(bert, tokens)
    assert scores.shape == (3, 1)
    assert ((scores > 0) & (scores < 1)).all()
    assert len(set(scores[:, 0].tolist())) == 3


def test_what_an_encoder_cannot_take_in_one_step_is_refused_and_nothing_else_is(
    bert_files: Mapping[str, Path], embedder: Embedders
) -> None:
    bert = embedder(bert_files["MEAN"], n_rows_max=40)
    vectors(bert, [[5] * 40])
    with pytest.raises(InputTooLong):
        vectors(bert, [[5] * 41])


def test_what_llama_cpp_would_answer_with_an_assertion_is_a_failed_step(bert_files: Mapping[str, Path], embedder: Embedders) -> None:
    bert = embedder(bert_files["MEAN"])
    for column, value in (("tokens", 10_000), ("tokens", -1), ("slots", 64), ("positions", N_CTX)):
        batch = Batch(2)
        batch.n_rows = batch.n_outputs = 1
        batch.outputs[0] = 1
        getattr(batch, column)[0] = value
        with pytest.raises(StepFailed):
            bert.step(batch)
    batch = Batch(N_CTX + 1)
    batch.n_rows = N_CTX + 1
    with pytest.raises(StepFailed):
        bert.step(batch)
    vectors(bert, INPUTS)


def test_after_a_failed_computation_a_gpu_is_not_asked_again(
    bert_files: Mapping[str, Path], embedder: Embedders, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = embedder(bert_files["MEAN"])
    monkeypatch.setattr(bert._lib, "llama_decode", lambda *_: -3)
    for gpu, error in ((False, StepFailed), (True, ModelDied)):
        monkeypatch.setattr(bert, "_gpu", gpu)
        with pytest.raises(error):
            vectors(bert, INPUTS)


@pytest.mark.parametrize(("code", "error"), [(-3, ModelDied), (-2, ModelDied), (-1, StepFailed), (1, StepFailed)])
def test_recurrent_states_are_not_vouched_for_after_a_step_that_failed_while_it_computed(
    bert_files: Mapping[str, Path], embedder: Embedders, monkeypatch: pytest.MonkeyPatch, code: int, error: type[Exception]
) -> None:
    """Nor those of inputs that have no rows in it: they lie among each other."""
    bert = embedder(bert_files["MEAN"])
    monkeypatch.setattr(bert, "_has_recurrent_state", True)
    monkeypatch.setattr(bert._lib, "llama_decode", lambda *_: code)
    with pytest.raises(error):
        vectors(bert, [[7]])


def test_room_for_logits_that_nobody_reads_is_given_back_once_for_each_number_of_rows(
    bert_files: Mapping[str, Path], embedder: Embedders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm_llamacpp.embedder._N_SLOTS", 4)
    bert = embedder(bert_files["MEAN"])
    given_back: list[int] = []
    monkeypatch.setattr("cllm_llamacpp.embedder.give_back_zeros", lambda address, n_bytes: given_back.append(n_bytes) if address else None)
    monkeypatch.setattr(bert.vocabulary, "n_tokens", 250_000)
    for n_rows in (60, 60, 3, 4, 60):
        vectors(bert, [[5] * n_rows])
    assert given_back == [4 * 250_000 * n_rows for n_rows in (60, 4, 60)]  # for as many as slots there is room in any case


def test_vectors_that_lie_where_others_logits_had_room_are_not_given_back(
    bert_files: Mapping[str, Path], embedder: Embedders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm_llamacpp.embedder._N_SLOTS", 4)
    inputs = [[5] * 60, [6] * 30, [7]]
    alone = [vectors(embedder(bert_files["MEAN"]), [one])[0][0] for one in inputs]
    bert = embedder(bert_files["MEAN"])
    for _ in range(3):
        assert np.array([vectors(bert, [one])[0][0] for one in inputs]) == pytest.approx(np.array(alone), abs=1e-3)


def test_what_gives_vectors_counts_the_states_of_its_slots_and_none_where_nothing_is_kept(
    tiny_files: Mapping[str, Path], bert_files: Mapping[str, Path], embedder: Embedders
) -> None:
    hybrid = embedder(tiny_files["qwen35"])
    bytes_per_cell = 2 * 2 * (16 + 16) * 4  # every other layer of four, heads, key and value, f32
    assert hybrid.info.cells_bytes > hybrid.n_cells * bytes_per_cell
    assert embedder(bert_files["MEAN"]).info.cells_bytes == 0


def test_a_served_model_gives_vectors_beside_its_text(load: Any, drive: Any, embedder: Embedders, tiny_files: Mapping[str, Path]) -> None:
    model = load("qwen3")
    undisturbed = drive(load("qwen3")).greedy({0: [1, 2, 3]}, 8)
    assert isinstance(model, Embeds)
    own = model.make_embedder(ModelSpec(path="ignored", **EXACT))
    driver = drive(model)
    found = []
    new = {0: [1, 2, 3]}
    for _ in range(8):
        found.append(int(driver.feed(new)[0].argmax()))
        new = {0: found[-1:]}
        beside = vectors(own, INPUTS)[0]
    assert found == undisturbed[0]
    assert beside == pytest.approx(vectors(embedder(tiny_files["qwen3"]), INPUTS)[0], abs=1e-4)
    own.close()
    own.close()
    with pytest.raises(ModelDied):
        own.drop(0)
    driver.feed({0: [4]})  # the model does not need it


def test_a_file_that_gives_vectors_says_so_when_text_is_asked_of_it(bert_files: Mapping[str, Path], tmp_path: Path) -> None:
    backend = make_cpu_backend()
    assert isinstance(backend, LoadsEmbedders)
    make_tiny_gguf(tmp_path / "embedding.gguf", "qwen3", pooling="LAST")
    for path in (bert_files["MEAN"], bert_files["NONE"], tmp_path / "embedding.gguf"):
        with pytest.raises(DoesNotGenerate, match="does not generate"):
            backend.load(ModelSpec(path=str(path), n_threads=1), lambda _share: True)


@pytest.mark.parametrize("name", ["bert", "embedding"])
def test_an_embedding_model_can_be_the_served_one(bert_files: Mapping[str, Path], tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.gguf"
    if name == "bert":
        path.write_bytes(bert_files["MEAN"].read_bytes())
    else:
        make_tiny_gguf(path, "qwen3", pooling="LAST")
    make_tiny_lora(tmp_path / "lora.gguf")
    found = []
    for lora in ((), (f"{tmp_path}/lora.gguf:1.0",)) if name != "bert" else ((),):
        loaded = load_served(Settings(str(path), backend="llama-cpu", threads=1, lora=lora), lambda _share: True)
        assert isinstance(loaded.embedder, LoadedEmbedder)
        assert (loaded.served.generates, loaded.embedder.served.name) == (False, name)
        found += vectors(loaded.embedder.embedder, [[1, 2]])  # type: ignore[arg-type]
        assert found[-1].shape == (1, loaded.embedder.served.n_embd)
        loaded.step_model.close()
    assert len({one.tobytes() for one in found}) == len(found), "an adapter changes the vectors"


def test_no_answer_on_the_terminal_is_asked_of_a_model_that_gives_vectors(
    bert_files: Mapping[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(str(bert_files["MEAN"]), backend="llama-cpu", threads=1, log_level="error")
    assert generate.run(settings, "hi", system=None, max_tokens=4, temperature=0.0, seed=1, raw=False) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "cllm: MEAN gives embeddings, and no text"


def test_settings_choose_what_gives_vectors(bert_files: Mapping[str, Path], tiny_files: Mapping[str, Path]) -> None:
    chat = {"model": str(tiny_files["qwen3"]), "backend": "llama-cpu", "threads": 1, "ctx_size": 256}
    off = load_served(Settings(**chat), lambda _share: True)  # type: ignore[arg-type]
    assert isinstance(off.embedder, str)
    assert "--embeddings" in off.embedder
    off.step_model.close()
    for given, name in (({"embeddings": True}, "qwen3"), ({"embedding_model": str(bert_files["CLS"])}, "CLS")):
        loaded = load_served(Settings(**chat, **given), lambda _share: True)  # type: ignore[arg-type]
        assert isinstance(loaded.embedder, LoadedEmbedder)
        assert (loaded.served.generates, loaded.embedder.served.name) == (True, name)
        loaded.embedder.embedder.close()
        loaded.step_model.close()


def test_without_memory_for_vectors_the_model_is_served_all_the_same(
    tiny_files: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_context(*_: object, **__: object) -> None:
        raise LoadFailed("no memory")

    monkeypatch.setattr("cllm_llamacpp.model.make_embedder", no_context)
    settings = Settings(str(tiny_files["qwen3"]), backend="llama-cpu", threads=1, ctx_size=256, embeddings=True)
    loaded = load_served(settings, lambda _share: True)
    assert isinstance(loaded.embedder, str)
    assert "no memory" in loaded.embedder
    loaded.step_model.close()


def test_what_is_no_model_is_refused_with_a_reason(embedder: Embedders, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(LoadFailed, match=r"x\.gguf"):
        embedder(tmp_path / "x.gguf")
    with pytest.raises(LoadFailed, match="no such file"):
        embedder(tmp_path / "y.gguf")


def test_an_activated_adapter_is_refused(load: Any, tmp_path: Path) -> None:
    make_tiny_lora(tmp_path / "lora.gguf", invocation=(5, 6))
    with pytest.raises(LoadFailed, match=r"lora\.gguf: an activated LoRA"):
        load("qwen3", loras=(Lora(str(tmp_path / "lora.gguf")),))


def test_what_must_be_computed_whole_is_no_longer_than_memory_has_room_for(load: Any) -> None:
    facts = attrs.evolve(load("qwen3")._facts, sees_ahead=True)
    facts = attrs.evolve(facts, info=attrs.evolve(facts.info, n_ctx_train=8192))

    def n_tokens(free_bytes: int, **fields: int) -> int:
        spec = ModelSpec(path="x", n_rows_max=2048, **fields)  # type: ignore[arg-type]
        sizes = sizes_of(spec, facts, 262_144, n_usual=8192, free_bytes=free_bytes)
        assert (sizes.n_rows_max, sizes.can_split) == (sizes.n_tokens_max, False)
        return sizes.n_tokens_max

    assert n_tokens(32 << 30) == 2048
    assert n_tokens(8 << 30) == 1024
    assert n_tokens(0) == 512
    assert n_tokens(0, n_cells=1000) == 1000


def test_a_large_vocabulary_makes_steps_small_and_little_memory_contexts(load: Any) -> None:
    facts = load("qwen3")._facts

    def sizes(n_vocab: int, free_bytes: int = 1 << 34, **fields: int) -> Sizes:
        return sizes_of(ModelSpec(path="x", **fields), facts, n_vocab, n_usual=8192, free_bytes=free_bytes)  # type: ignore[arg-type]

    assert sizes(152_000).n_rows_max == 192
    assert sizes(1_000_000).n_rows_max == 32
    assert sizes(300).n_tokens_max == facts.info.n_ctx_train
    assert sizes(300, free_bytes=0).n_tokens_max == 512
    assert sizes(300, free_bytes=0, n_cells=700).n_tokens_max == 700


def test_cells_for_short_inputs_beside_the_longest_give_no_input_the_positions_of_longer_ones(load: Any) -> None:
    facts = load("qwen3")._facts
    told = facts.info.metadata | {"qwen3.rope.scaling.original_context_length": "4096"}
    scaled = attrs.evolve(facts, info=attrs.evolve(facts.info, n_ctx_train=16_384, metadata=told))
    assert scaled.n_ctx_unscaled == 4096

    def n_cells(n_tokens: int) -> int:
        return sizes_of(ModelSpec(path="x", n_cells=n_tokens), scaled, 300, n_usual=8192, free_bytes=1 << 34).n_cells

    assert [n_cells(n_tokens) for n_tokens in (2000, 4000, 4096, 4097)] == [2512, 4096, 4096, 4609]
