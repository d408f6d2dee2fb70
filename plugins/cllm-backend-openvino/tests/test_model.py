"""The backend on a tiny model: what it says is what llama.cpp says, and what it cannot do it refuses."""

from __future__ import annotations

import math
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import gguf
import numpy as np
import pytest

from cllm.backend import Batch, FlashAttention, ModelSpec, StreamEnd, StreamEvent, StreamRequest, StreamToken
from cllm.errors import BackendUnavailable, LoadFailed, NotHeeded, StepFailed
from cllm.registry import load_backend
from cllm.testing.tiny import make_tiny_gguf
from cllm_backend_openvino import OpenVinoBackend, loading
from cllm_backend_openvino.header import Header, Tensor, read_model
from cllm_backend_openvino.loading import Options, _check_readable, facts_of
from cllm_backend_openvino.model import OpenVinoModel

TELL_S = 60.0
EXACT = {"precision": "f32", "kv_precision": "f32"}
PROMPT = (72, 101, 108, 108, 111, 32)
N_CELLS = 512


def load(path: Path, options: dict[str, str] | None = None, **fields: Any) -> OpenVinoModel:
    spec = ModelSpec(
        path=str(path), n_cells=N_CELLS, n_live=4, n_rows_physical=64, n_threads=1, options=EXACT if options is None else options, **fields
    )
    model = OpenVinoBackend().load(spec, lambda share: True)
    assert isinstance(model, OpenVinoModel)
    return model


class Told:
    """What a model told, sequence by sequence."""

    def __init__(self, model: OpenVinoModel) -> None:
        self.model = model
        self.tokens: dict[int, list[StreamToken]] = defaultdict(list)
        self.ends: dict[int, StreamEnd] = {}
        self._queue: SimpleQueue[StreamEvent] = SimpleQueue()
        model.open(self._queue.put)

    def until(self, enough: Callable[[], bool]) -> None:
        while not enough():
            event = self._queue.get(timeout=TELL_S)
            if isinstance(event, StreamToken):
                self.tokens[event.seq_id].append(event)
            elif isinstance(event, StreamEnd):
                self.ends[event.seq_id] = event

    def ask(self, seq_id: int, **fields: Any) -> list[int]:
        """The tokens of one answer."""
        self.model.start(seq_id, StreamRequest(**{"prompt": PROMPT, "n_tokens_max": 12, "temperature": 0.0, **fields}))
        self.until(lambda: seq_id in self.ends)
        assert self.ends[seq_id].error == ""
        return [told.token for told in self.tokens[seq_id]]


@pytest.fixture
def told(tiny: Path) -> Iterator[Told]:
    model = load(tiny)
    yield Told(model)
    model.close()


def scores_of_llama_cpp(path: Path, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The logits at each of the tokens."""
    spec = ModelSpec(
        path=str(path), n_cells=N_CELLS, n_threads=1, cache_type_k="f32", cache_type_v="f32", flash_attention=FlashAttention.OFF
    )
    model: Any = load_backend("llama-cpu").load(spec, lambda share: True)
    n = len(tokens)
    batch = Batch(n)
    batch.n_rows = batch.n_outputs = n
    batch.tokens[:], batch.positions[:], batch.outputs[:] = tokens, range(n), 1
    logits = model.step(batch).copy()
    model.close()
    return logits


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


# --- what it says ------------------------------------------------------------------------------------------------------


def test_it_says_what_llama_cpp_says_with_the_same_logprobs(told: Told, tiny: Path) -> None:
    tokens = told.ask(0, n_logprobs=0)
    rows = log_softmax(scores_of_llama_cpp(tiny, [*PROMPT, *tokens]))[len(PROMPT) - 1 : -1]
    assert tokens == rows.argmax(axis=1).tolist()
    logprobs = [one.logprob for one in told.tokens[0]]
    assert np.allclose(logprobs, rows[range(len(tokens)), tokens], atol=0.02)


def test_no_logprob_is_told_that_nobody_asked_for(told: Told) -> None:
    told.ask(0)
    assert {one.logprob for one in told.tokens[0]} == {None}


def test_the_logits_that_are_compared_are_llama_cpps_and_those_behind_the_tokens(told: Told, tiny: Path) -> None:
    tokens = [*PROMPT, *told.ask(0)]
    logits = told.model.logits(tokens)
    assert np.abs(logits - scores_of_llama_cpp(tiny, tokens)).max() < 0.1
    assert logits[len(PROMPT) - 1 : -1].argmax(axis=1).tolist() == tokens[len(PROMPT) :]


def test_a_seed_gives_the_same_text_and_another_one_another(told: Told) -> None:
    texts = [told.ask(i, temperature=1.5, seed=seed, n_tokens_max=24) for i, seed in enumerate((7, 7, 8))]
    assert texts[0] == texts[1] != texts[2]


def test_an_end_token_is_the_last_and_not_before_it_may_come(told: Told) -> None:
    whole = told.ask(0)
    last = whole[4]
    assert told.ask(1, end_tokens=frozenset({last})) == whole[: whole.index(last) + 1]
    later = told.ask(2, end_tokens=frozenset({last}), n_tokens_min=8)
    assert len(later) >= 8
    assert last not in later[:8]


def test_tokens_that_are_barred_never_come(told: Told) -> None:
    barred = frozenset(range(150))
    drawn = told.ask(0, temperature=100.0, barred_tokens=barred, n_tokens_max=100)
    assert len(drawn) == 100
    assert not barred.intersection(drawn)


def test_others_may_end_it_while_some_are_barred(told: Told) -> None:
    whole = told.ask(0)
    last = whole[4]
    barred = frozenset(range(300)) - set(whole)
    assert told.ask(1, barred_tokens=barred, end_tokens=frozenset({last})) == whole[: whole.index(last) + 1]


def test_who_is_given_up_leaves_his_cells_to_the_next(told: Told) -> None:
    """Two of these do not fit beside each other, and one that ran on would take the rest of the test's time."""
    long = {"prompt": tuple(range(30, 130)), "n_tokens_max": N_CELLS - 100, "temperature": 0.0}
    for i in range(8):
        told.model.start(i, StreamRequest(**long))
        told.until(lambda i=i: len(told.tokens[i]) > 2)  # type: ignore[misc]
        told.model.cancel(i)
    assert len(told.ask(99, prompt=long["prompt"], n_tokens_max=300)) == 300


# --- what it does not ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"repeat_penalty": 1.3, "repeat_last_n": len(PROMPT) + 11}, "repeat_last_n"),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, "repeat_last_n"),
        ({"barred_tokens": frozenset({1}), "end_tokens": frozenset({2}), "n_tokens_min": 3}, "min_tokens"),
    ],
)
def test_what_openvino_cannot_be_told_is_refused_by_name(told: Told, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(NotHeeded) as caught:
        told.ask(0, **fields)
    assert caught.value.param == param


def test_requests_are_kept_apart_only_where_none_finds_what_was_computed_for_another(told: Told, tiny: Path) -> None:
    alone = load(tiny, {**EXACT, "prefix_cache": "off"})
    assert alone.heeds - told.model.heeds == {"cache_salt", "cache_prompt"}
    alone.close()


def test_a_server_that_keeps_no_prefixes_has_openvino_keep_none(tiny: Path) -> None:
    alone = load(tiny, EXACT, keeps_prefixes=False)
    assert {"cache_salt", "cache_prompt"} <= alone.heeds
    alone.close()
    with pytest.raises(LoadFailed) as caught:
        load(tiny, {"prefix_cache": "on"}, keeps_prefixes=False)
    assert str(caught.value) == "--no-prefix-cache and --backend-option prefix_cache=on say opposite things"


def test_a_window_as_long_as_the_sequence_is_the_one_that_openvino_has(told: Told) -> None:
    usual = told.ask(0, repeat_penalty=1.3)
    assert told.ask(1, repeat_penalty=1.3, repeat_last_n=len(PROMPT) + 12) == usual
    assert told.ask(2, repeat_last_n=3) == told.ask(3)  # without a penalty it asks for nothing


@pytest.mark.parametrize("fields", [{"prompt": ()}, {"prompt": (100_000,)}, {"n_tokens_max": 0}, {"n_tokens_max": N_CELLS}])
def test_what_would_end_the_process_fails_alone(told: Told, fields: dict[str, Any]) -> None:
    with pytest.raises(StepFailed):
        told.ask(0, **fields)
    assert len(told.ask(1)) == 12


@pytest.mark.parametrize(
    ("quota", "n_threads", "told"),
    [(1.5, None, {"INFERENCE_NUM_THREADS": 2}), (math.inf, None, {}), (1.5, 7, {"INFERENCE_NUM_THREADS": 7})],
)
def test_where_a_quota_of_time_is_set_it_is_told_how_many_cores_that_is(
    monkeypatch: pytest.MonkeyPatch, quota: float, n_threads: int | None, told: dict[str, object]
) -> None:
    monkeypatch.setattr(loading, "cpu_quota", lambda: quota)
    monkeypatch.setattr(loading, "n_cores", lambda: 2)
    assert loading._properties(ModelSpec(path="model.gguf", n_threads=n_threads), loading.Options()) == told


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"precision": "f8"}, "the openvino backend's option precision is one of bf16, f16, f32, not f8"),
        ({"colour": "red"}, "the openvino backend has no option colour, only precision, kv_precision, prefix_cache, vocabulary"),
    ],
)
def test_unknown_options_are_refused(tiny: Path, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(LoadFailed) as caught:
        load(tiny, options)
    assert str(caught.value) == complaint


def test_without_openvino_a_load_says_what_to_install_as_the_probe_does(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server asks no probe of a backend whose models have a process of their own."""

    def version(_name: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr("cllm_backend_openvino.version", version)
    with pytest.raises(BackendUnavailable) as caught:
        load(tiny)
    assert str(caught.value) == OpenVinoBackend().probe().reason
    assert "-m pip install" in str(caught.value)


def test_an_openvino_that_cannot_be_imported_is_told_as_such(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where one of its libraries is missing: no other file would be any better."""
    monkeypatch.setattr("cllm_backend_openvino.version", lambda _name: "2026.4")
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(BackendUnavailable, match=r"^openvino-genai cannot be imported: import of openvino_genai halted"):
        load(tiny)


def test_a_file_of_another_architecture_is_refused_by_name_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    make_tiny_gguf(path, "gemma3")
    with pytest.raises(LoadFailed) as caught:
        load(path)
    told = f"{path}: OpenVINO reads GGUF files of llama, qwen2, qwen3, and this is gemma3; serve it with --backend llama-cpu"
    assert str(caught.value) == told


def test_weights_of_another_type_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "f32.gguf"
    make_tiny_gguf(path, "qwen3")
    with pytest.raises(LoadFailed, match=r"some are F32; quantise it anew, or serve it with --backend llama-cpu$"):
        load(path)


def test_of_a_split_model_all_parts_are_looked_at(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1)
    for name in ("a.weight", "b.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    first, second = sorted(tmp_path.iterdir())
    header = read_model(first)
    assert [tensor.name for tensor in header.tensors] == ["a.weight", "b.weight"]
    assert header.n_bytes == first.stat().st_size + second.stat().st_size
    with pytest.raises(LoadFailed, match="it is one of 2 parts of a model, and by its name not the first"):
        facts_of(str(second), Options())
    second.unlink()
    with pytest.raises(LoadFailed, match="No such file"):
        facts_of(str(first), Options())


@pytest.mark.parametrize(
    ("values", "tensors", "told"),
    [
        ({}, [Tensor("rope_freqs.weight", (32,), 0, 0)], "rope_freqs.weight"),
        ({}, [Tensor("rope_factors_long.weight", (32,), 0, 0)], "rope_factors_long.weight"),
        ({"llama.rope.scaling.type": "yarn"}, [], "rope.scaling.type"),
        ({"llama.rope.scaling.factor": 8.0}, [], "rope.scaling.factor"),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 1.0}, [], None),
        ({"llama.rope.freq_base": 500_000.0}, [Tensor("output_norm.weight", (32,), 0, 0)], None),
    ],
)
def test_positions_that_are_scaled_are_refused_since_openvino_would_leave_that_out(
    values: dict[str, object], tensors: list[Tensor], told: str | None
) -> None:
    header = Header({"general.architecture": "llama", **values}, tensors, 0)
    if told is None:
        _check_readable("x.gguf", header)
        return
    with pytest.raises(LoadFailed, match=rf"how its positions are scaled \({told}\); serve it with --backend llama-cpu$"):
        _check_readable("x.gguf", header)


# --- openvino's own format -----------------------------------------------------------------------------------------------


def test_a_folder_in_openvinos_format_says_the_same(tiny: Path, tmp_path: Path, told: Told) -> None:
    folder = folder_of(tiny, tmp_path)
    model = load(folder, {**EXACT, "vocabulary": str(tiny)})
    other = Told(model)
    try:
        assert other.ask(0) == told.ask(0)
        assert model.vocabulary.path == str(tiny)
        assert model.heeds == told.model.heeds
    finally:
        model.close()


def test_a_folder_without_openvinos_tokenizer_holds_no_answer_to_a_form(tiny: Path, tmp_path: Path, told: Told) -> None:
    folder = folder_of(tiny, tmp_path)
    (folder / "openvino_detokenizer.xml").unlink()
    (folder / "openvino_tokenizer.xml").unlink()
    model = load(folder, {**EXACT, "vocabulary": str(tiny)})
    assert told.model.heeds - model.heeds == {"json_schema", "regex", "choice"}
    model.close()


def test_a_folder_needs_a_file_for_its_tokens(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadFailed, match="--backend-option vocabulary=FILE"):
        load(folder_of(tiny, tmp_path), {})


def folder_of(gguf: Path, folder: Path) -> Path:
    """Have OpenVINO write the model in its own format, which it does beside the file."""
    import openvino_genai

    path = folder / gguf.name
    shutil.copy(gguf, path)
    openvino_genai.LLMPipeline(path, "CPU", enable_save_ov_model=True)
    path.unlink()
    (folder / "config.json").write_text(
        '{"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,'
        ' "head_dim": 16, "max_position_embeddings": 2048, "vocab_size": 342}'
    )
    return folder
