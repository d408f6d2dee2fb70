"""What a backend is asked to load, and what is told of the loaded model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from cllm import demo
from cllm.backend import Batch, KvLayout, ModelSpec, OnProgress, StepModel, StreamModel
from cllm.config import DEMO_NAME, Settings, names_of
from cllm.errors import BackendUnavailable, DoesNotGenerate, LoadFailed, SettingsError, StepFailed
from cllm.registry import STEP_MODEL
from cllm.serve.loading import (
    _n_bytes_beside,
    check_beforehand,
    check_folder,
    limits_of,
    load,
    may_change_layout,
    served_model,
    what_is_kept,
)
from cllm.serve.stepless import StreamsOnly
from cllm.serve.worker.embedder import WorkerEmbedder
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.testing.fake_embedder import FakeEmbedder
from cllm.testing.fake_streams import FakeStreamBackend, FakeStreamModel
from cllm.testing.mortal import Panic


class Remembering(FakeBackend):
    """Remembers what it was asked for."""

    def __init__(self, *, knows_models: bool) -> None:
        self.knows_models = knows_models
        self.paths: list[str] = []

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        self.paths.append(spec.path)
        return super().load(spec, on_progress)


def load_with(backend: Remembering, model: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the path that the backend was given, and what the model is called."""
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("remembering", backend))
    loaded = load(Settings(model, calibrate="off"), lambda _share: True)
    loaded.step_model.close()
    return backend.paths[-1], loaded.served.name


@pytest.mark.parametrize("model", ["small", "meta/llama-3.1:8b"])
def test_a_backend_that_knows_its_models_is_given_the_name_as_it_was_written(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_with(Remembering(knows_models=True), model, monkeypatch) == (model, model)


@pytest.mark.parametrize("model", ["/srv/b-7b", "registry/library/small", "meta/llama-3.1:8b"])
def test_a_model_that_its_backend_knows_is_called_the_same_before_it_is_loaded_and_after(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, name = load_with(Remembering(knows_models=True), model, monkeypatch)
    assert (name,) == names_of(Settings(model))


def test_a_backend_that_knows_its_models_may_be_left_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_with(Remembering(knows_models=True), None, monkeypatch) == ("", "remembering")


def test_any_other_backend_is_given_the_demo_model_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_with(Remembering(knows_models=False), None, monkeypatch) == (str(demo.path()), DEMO_NAME)


def test_what_can_be_known_of_a_model_is_told_before_others_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match="no backend llama-cup"):
        check_beforehand(Settings("m", backend="llama-cup"))
    path = tmp_path / "there"
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name, **_more: ("files", Remembering(knows_models=False)))
    with pytest.raises(LoadFailed, match="there: no such file"):
        check_beforehand(Settings(str(path)))
    path.touch()
    for model in (str(path), "user/repo:Q4_K_M", None):
        check_beforehand(Settings(model))
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name, **_more: ("streams", FakeStreamBackend()))
    with pytest.raises(LoadFailed, match="loads no embedding models"):
        check_beforehand(Settings("small", embedding_model="vectors"))
    check_beforehand(Settings("small"))
    adapter = tmp_path / "a.gguf"
    adapter.write_bytes(b"")
    with_adapter = Settings("user/repo:Q4_K_M", lora=(f"{adapter}:0.5",))
    adapter.unlink()
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name, **_more: ("files", Remembering(knows_models=False)))
    with pytest.raises(LoadFailed, match=r"a\.gguf: no such file"):
        check_beforehand(with_adapter)


def test_one_request_may_have_less_than_the_models_own_context() -> None:
    model = FakeModel(n_cells=512, n_ctx_train=256)
    assert [limits_of(model, Settings(ctx_max=n)).n_ctx for n in (None, 1000, 50)] == [256, 256, 50]


class _ReadsText(FakeStreamModel):
    vocabulary = None


def test_what_a_model_that_reads_text_settles_itself_is_not_promised_for_it(tmp_path: Path, logged: list[Any]) -> None:
    model = StreamsOnly(_ReadsText(n_ctx=256))
    settings = Settings(ctx_max=50)
    limits = limits_of(model, settings)
    assert served_model(model, limits, settings, backend="b", name="n").n_ctx == 256
    assert [one["event"] for one in logged] == ["ctx_max.unused"]
    (template := tmp_path / "t.jinja").touch()
    with pytest.raises(LoadFailed, match="--chat-template-file: this model applies a template of its own"):
        served_model(model, limits, Settings(chat_template_file=str(template)), backend="b", name="n")
    model.close()


def test_a_file_for_vectors_that_a_backend_cannot_load_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_nothing(_spec: ModelSpec, _on_progress: OnProgress) -> StreamModel:
        raise AssertionError("it would take minutes")

    backend = FakeStreamBackend()
    monkeypatch.setattr(backend, "load", load_nothing)
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("streams", backend))
    with pytest.raises(LoadFailed, match="loads no embedding models"):
        load(Settings("small", embedding_model="vectors", calibrate="off"), lambda _share: True)


def test_a_folder_for_the_cache_that_cannot_be_used_is_told_at_once(tmp_path: Path) -> None:
    check_folder(str(tmp_path / "new"))
    (tmp_path / "file").touch()
    with pytest.raises(LoadFailed, match=r"--cache-dir .*file: File exists"):
        check_folder(str(tmp_path / "file"))


def test_whatever_a_fetch_raises_is_a_load_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def local_path(_model: str, _on_bytes: object) -> str:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("cllm.hub.local_path", local_path)
    with pytest.raises(LoadFailed, match="RuntimeError: on purpose"):
        load_with(Remembering(knows_models=False), "user/repo", monkeypatch)


class Particular(Remembering):
    """Has options of its own."""

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        raise SettingsError("on purpose", "backend_option")


def test_an_option_that_a_backend_does_not_take_is_a_load_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LoadFailed, match=r"^backend_option: on purpose$"):
        load_with(Particular(knows_models=True), "m", monkeypatch)


def test_a_model_of_the_hubs_that_is_loaded_again_is_the_same_file_and_asks_nobody(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []

    def local_path(model: str, _on_bytes: object) -> str:
        asked.append(model)
        path = tmp_path / f"{len(asked)}.gguf"
        path.touch()
        return str(path)

    monkeypatch.setattr("cllm.hub.local_path", local_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    backend = Remembering(knows_models=False)
    first, second = (load_with(backend, "user/repo", monkeypatch)[0] for _ in range(2))
    assert first == second == str(tmp_path / "1.gguf")
    (tmp_path / "1.gguf").unlink()
    assert load_with(backend, "user/repo", monkeypatch)[0] == str(tmp_path / "2.gguf")
    assert asked == ["user/repo"] * 2


class Finder(FakeStreamModel):
    """Finds every prompt again, whoever asks; unless it is told not to, where it `heeds_spec`."""

    def __init__(self, spec: ModelSpec, *, heeds_spec: bool) -> None:
        super().__init__()
        if spec.keeps_prefixes or not heeds_spec:
            self.heeds -= {"cache_salt", "cache_prompt"}


class FinderBackend(FakeStreamBackend):
    """Gives them."""

    def __init__(self, *, heeds_spec: bool) -> None:
        super().__init__()
        self.heeds_spec = heeds_spec
        self.given: list[Finder] = []

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StreamModel:
        self.given.append(Finder(spec, heeds_spec=self.heeds_spec))
        return self.given[-1]


@pytest.mark.parametrize(("kv", "may"), [("auto", True), ("unified", False), ("streams", False)])
def test_cells_are_laid_out_anew_where_their_layout_was_left_open(kv: Any, may: bool) -> None:
    model = FakeModel(kv_layout=KvLayout.UNIFIED if kv == "auto" else KvLayout(kv), n_slots=8, lays_out=True)
    settings = Settings(kv=kv, parallel=8)
    assert may_change_layout(model, settings) is may
    assert (limits_of(model, settings).n_slots_apart is not None) is may


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_model_that_shares_prefixes_by_itself_is_told_whether_to(prefix_cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FinderBackend(heeds_spec=True)
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("finder", backend))
    load(Settings(calibrate="off", prefix_cache=prefix_cache), lambda _share: True).close()
    assert ("cache_prompt" in backend.given[0].heeds) is not prefix_cache


def test_one_that_cannot_be_told_not_to_is_not_served_without_a_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FinderBackend(heeds_spec=False)
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("finder", backend))
    with pytest.raises(LoadFailed, match=r"^--no-prefix-cache: this backend's model finds by itself what it computed for others"):
        load(Settings(calibrate="off", prefix_cache=False), lambda _share: True)
    load(Settings(calibrate="off"), lambda _share: True).close()


@pytest.mark.parametrize(
    ("can", "settings", "kept"),
    [
        ({}, {}, "any beginning, shared by whoever has it"),
        ({"kv_layout": KvLayout.STREAMS}, {}, "the beginnings of ended sequences, in one slot at a time or copied"),
        ({"can_trim": False}, {}, "ended sequences, the ends of prompts, and where prompts part, whole: this memory cannot be cut"),
        ({"can_trim": False, "can_save": False}, {}, "ended sequences, whole: this memory cannot be cut"),
        ({"can_trim": False}, {"host_cache_mb": 0}, "ended sequences, whole: this memory cannot be cut"),
        ({}, {"prefix_cache": False}, "nothing"),
    ],
)
def test_it_is_said_what_a_models_memory_keeps(can: dict[str, Any], settings: dict[str, Any], kept: str) -> None:
    model = FakeModel(**can)
    assert what_is_kept(model, limits_of(model, Settings(**settings))) == kept


@pytest.mark.parametrize(
    ("settings", "itl_max_s"),
    [({}, 0.25), ({"parallel": 8}, None), ({"itl_max_ms": 100.0}, 0.1), ({"parallel": 8, "itl_max_ms": 100.0}, 0.1)],
)
def test_a_time_between_tokens_is_kept_that_was_asked_for_or_where_nobody_says_how_many_run(
    settings: dict[str, Any], itl_max_s: float | None
) -> None:
    assert limits_of(FakeModel(), Settings(**settings)).itl_max_s == itl_max_s


@pytest.mark.parametrize(("prefix_cache", "told"), [(True, "what the model keeps by itself, if anything"), (False, "nothing")])
def test_what_is_kept_is_the_models_own_where_it_schedules_itself(prefix_cache: bool, told: str) -> None:
    model = StreamsOnly(FakeStreamModel(), keeps_prefixes=prefix_cache)
    assert what_is_kept(model, limits_of(model, Settings(prefix_cache=prefix_cache))) == told


class Broken(FakeBackend):
    """Does what its contract knows nothing of."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self._do = do

    def load(self, spec: ModelSpec, on_progress: OnProgress) -> StepModel:
        model: StepModel = self._do()
        return model


def raising(error: BaseException) -> Callable[[], None]:
    def do() -> None:
        raise error

    return do


@pytest.mark.parametrize("kind", [ValueError, StepFailed, SystemExit, Panic])
def test_a_backend_that_raises_anything_else_than_it_may_is_told_by_name_in_one_line(
    monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    broken = Broken(raising(kind("tensor 7\nis upside down")))
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("broken", broken))
    with pytest.raises(LoadFailed, match=rf"^backend broken failed to load the model: {kind.__name__}: tensor 7 is upside down$"):
        load(Settings(calibrate="off"), lambda _share: True)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "a NoneType, which is no model: it has no vocabulary, info, "),
        (FakeModel, "the class FakeModel, which is no model: it has no vocabulary, info, "),
        (SimpleNamespace(**dict.fromkeys(STEP_MODEL[:-1])), "a SimpleNamespace, which is no model: it has no close$"),
    ],
)
def test_what_a_load_gives_and_is_no_model_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch, given: Any, complaint: str) -> None:
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("broken", Broken(lambda: given)))
    with pytest.raises(LoadFailed, match=rf"^the backend's load gave {complaint}"):
        load(Settings(calibrate="off"), lambda _share: True)


@pytest.mark.parametrize("error", [RuntimeError("the driver is gone"), Panic("the driver is gone")])
def test_a_close_that_raises_does_not_hide_why_a_load_failed(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("no memory")

    model = FakeModel(before_step=fail)
    model.close = raising(error)  # type: ignore[method-assign]
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("broken", Broken(lambda: model)))
    with pytest.raises(LoadFailed, match=r"^fake: its steps could not be measured: RuntimeError: no memory$"):
        load(Settings("fake", calibrate="again"), lambda _share: True)


def test_what_a_file_of_vectors_alone_gives_and_is_no_embedder_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    half = SimpleNamespace(n_closed=0)

    def close() -> None:
        half.n_closed += 1

    half.close = close

    class VectorsAlone(FakeBackend):
        def load(self, spec: ModelSpec, on_progress: OnProgress) -> FakeModel:
            raise DoesNotGenerate("it gives vectors only")

        def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Any:
            return half

    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", VectorsAlone()))
    with pytest.raises(LoadFailed, match="is no embedder: it has no info, vocabulary"):
        load(Settings(calibrate="off"), lambda _share: True)
    assert half.n_closed == 1


def test_a_model_is_closed_behind_an_embedder_whose_close_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    model, embedder = FakeModel(), FakeEmbedder()
    embedder.close = raising(RuntimeError("the driver is gone"))  # type: ignore[method-assign]
    model.make_embedder = lambda _spec: embedder  # type: ignore[method-assign]
    model.close = lambda: closed.append("model")  # type: ignore[method-assign]
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Broken(lambda: model)))
    load(Settings(calibrate="off", embeddings=True), lambda _share: True).close()
    assert closed == ["model"]


@pytest.mark.parametrize(
    ("can", "layout", "copies"),
    [
        ({"can_share": True}, KvLayout.UNIFIED, False),  # nobody needs to
        ({"can_share": False}, KvLayout.UNIFIED, False),  # there may be no room for the whole of a slot
        ({"can_share": False}, KvLayout.STREAMS, True),
        ({"can_share": False, "can_trim": False}, KvLayout.UNIFIED, True),
    ],
)
def test_slots_are_copied_where_a_copy_has_room(can: dict[str, bool], layout: KvLayout, copies: bool) -> None:
    model = FakeModel(kv_layout=layout)
    model.capabilities = attrs.evolve(model.capabilities, can_copy=True, **can)
    assert limits_of(model, Settings()).copies_slots is copies


def test_what_does_not_grow_with_cells_is_not_divided_among_them() -> None:
    model = FakeModel()
    model.info = attrs.evolve(model.info, cells_bytes=1000 * model.n_cells + 5, fixed_bytes=5)
    assert limits_of(model, Settings()).cell_n_bytes == 1000


def test_cells_for_vectors_count_and_weights_where_they_are_not_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vectors(FakeEmbedder):
        def __init__(self) -> None:
            super().__init__()
            self.info = attrs.evolve(self.info, size_bytes=1 << 20, cells_bytes=1 << 10)

    class Apart(FakeBackend):
        def load_embedder(self, spec: ModelSpec, on_progress: OnProgress) -> Vectors:
            return Vectors()

    monkeypatch.setattr(FakeModel, "make_embedder", lambda self, spec: Vectors())
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", Apart()))
    plain = Settings(model=__file__, calibrate="off")
    n_bytes = [
        load(settings, lambda share: True).n_bytes
        for settings in (plain, attrs.evolve(plain, embeddings=True), attrs.evolve(plain, embedding_model=__file__))
    ]
    assert [n - n_bytes[0] for n in n_bytes] == [0, 1 << 10, (1 << 20) + (1 << 10)]


def test_what_gives_vectors_in_a_process_of_its_own_has_the_weights_once_more_but_for_the_files_pages() -> None:
    model = FakeModel()
    model.info = attrs.evolve(model.info, size_bytes=1000, mapped_bytes=300)
    here = FakeEmbedder()
    here.info = attrs.evolve(here.info, size_bytes=1000, cells_bytes=10)
    apart = WorkerEmbedder.__new__(WorkerEmbedder)
    apart.info = here.info
    beside: list[Any] = [SimpleNamespace(embedder=one) for one in (here, apart)]
    assert [_n_bytes_beside(model, one, is_other=False) for one in beside] == [10, 10 + 700]


@pytest.mark.parametrize(("free_mib", "pool_mib"), [(100 << 10, 2048), (4 << 10, 1024), (8, 2), (0, 0)])
def test_what_is_saved_on_the_host_takes_a_quarter_of_what_is_free_unless_it_is_said(
    free_mib: int, pool_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    monkeypatch.setattr("cllm.machine.free_memory_bytes", lambda: free_mib << 20)
    assert limits_of(model, Settings()).host_pool_n_bytes == pool_mib << 20
    assert limits_of(model, Settings(host_cache_mb=3)).host_pool_n_bytes == 3 << 20
    assert limits_of(model, Settings(host_cache_mb=0)).host_pool_n_bytes == 0


def test_files_that_are_mapped_are_no_room_for_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    monkeypatch.setattr(model, "info", attrs.evolve(model.info, size_bytes=4 << 30, mapped_bytes=3 << 30))
    monkeypatch.setattr("cllm.machine.free_memory_bytes", lambda: 4 << 30)
    assert limits_of(model, Settings()).host_pool_n_bytes == 256 << 20
    monkeypatch.setattr("cllm.machine.free_memory_bytes", lambda: 2 << 30)
    assert limits_of(model, Settings()).host_pool_n_bytes == 0
