"""Finding out whether a backend works, loading a model, stopping the load, closing it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs
import pytest

from cllm.backend import CONTRACT_VERSION, Backend, ModelInfo, ModelSpec, Probe, StepModel, StreamModel
from cllm.errors import LoadAborted, LoadFailed
from cllm.testing.contract.hand import Hand, Near, Outputs, PlainTokens, are_pythons_own

Load = Callable[[], StepModel]
N_PROBES: Final = 5


def go_on(_share: float) -> bool:
    return True


# --- the backend ------------------------------------------------------------------------------------------------------


def test_it_is_a_backend_of_this_version_of_the_contract(backend: Backend) -> None:
    assert isinstance(backend, Backend)
    assert backend.contract_version == CONTRACT_VERSION


def test_a_probe_is_quick_and_says_why_in_one_line(backend: Backend) -> None:
    probe = backend.probe()  # the first may import what it needs
    seconds = []
    for _ in range(N_PROBES):
        started_at = time.perf_counter()
        probe = backend.probe()
        seconds.append(time.perf_counter() - started_at)
    assert min(seconds) < 1.0  # the others may have been the machine's own pauses
    assert isinstance(probe, Probe)
    assert probe.reason
    assert "\n" not in probe.reason
    assert probe.preference >= 0


def test_a_backend_that_loads_models_probes_as_available(backend: Backend, info: ModelInfo) -> None:
    assert info.name
    assert backend.probe().available


# --- a load -----------------------------------------------------------------------------------------------------------


def test_a_load_tells_how_far_it_is_from_0_to_1_and_never_goes_back(backend: Backend, spec: ModelSpec) -> None:
    shares: list[float] = []
    backend.load(spec, lambda share: shares.append(share) or True).close()  # type: ignore[func-returns-value]
    assert shares, "nobody was told"
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1


def test_a_load_that_is_asked_to_stop_raises_load_aborted_and_another_one_goes_well(backend: Backend, spec: ModelSpec) -> None:
    with pytest.raises(LoadAborted):
        backend.load(spec, lambda _share: False)
    backend.load(spec, go_on).close()


def test_a_load_may_be_stopped_half_way(backend: Backend, spec: ModelSpec) -> None:
    shares: list[float] = []
    with pytest.raises(LoadAborted):
        backend.load(spec, lambda share: shares.append(share) or share < 0.5)  # type: ignore[func-returns-value]
    assert all(share < 0.5 for share in shares[:-1]), "it was told once to stop"


def test_a_model_file_that_is_missing_is_load_failed_in_one_line(backend: Backend, spec: ModelSpec, tmp_path: Path) -> None:
    path = tmp_path / f"missing{_file_of(spec).suffix}"
    with pytest.raises(LoadFailed) as caught:
        backend.load(attrs.evolve(spec, path=str(path)), go_on)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"this is no model\n" * 100, bytes(4096)], ids=["empty", "text", "zeros"])
def test_a_file_that_is_no_model_is_load_failed_in_one_line(backend: Backend, spec: ModelSpec, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / f"no_model{_file_of(spec).suffix}"
    path.write_bytes(content)
    with pytest.raises(LoadFailed) as caught:
        backend.load(attrs.evolve(spec, path=str(path)), go_on)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_model_file_that_was_cut_short_is_load_failed(backend: Backend, spec: ModelSpec, tmp_path: Path, share: float) -> None:
    source = _file_of(spec)
    path = tmp_path / f"cut{source.suffix}"
    with source.open("rb") as whole:
        path.write_bytes(whole.read(int(source.stat().st_size * share)))
    with pytest.raises(LoadFailed):
        backend.load(attrs.evolve(spec, path=str(path)), go_on)


def _file_of(spec: ModelSpec) -> Path:
    if not spec.path or not Path(spec.path).is_file():
        pytest.skip("its models are no single files")
    return Path(spec.path)


# --- what was loaded --------------------------------------------------------------------------------------------------


def test_a_loaded_model_tells_what_it_is(info: ModelInfo) -> None:
    assert info.name
    assert info.n_ctx_train >= 2
    assert min(info.n_params, info.size_bytes, info.n_embd) >= 0
    assert are_pythons_own(info.n_ctx_train, info.n_params, info.size_bytes, info.n_embd, info.cells_bytes, info.fixed_bytes)


def test_a_loaded_model_tells_what_it_can_take(model: StepModel) -> None:
    sizes = (model.n_cells, model.n_cells_slot, model.n_slots, model.n_rows_max)
    assert are_pythons_own(*sizes)
    assert min(sizes) >= 1
    assert model.n_cells_slot <= model.n_cells
    assert model.capabilities.kv_layout.value != "auto", "the layout in force, not the one asked for"


def test_a_model_has_no_fewer_cells_and_rows_than_were_asked_for(model: StepModel, spec: ModelSpec) -> None:
    assert spec.n_cells is not None
    assert model.n_cells >= min(spec.n_cells, model.info.n_ctx_train)
    assert model.n_rows_max >= min(spec.n_rows_max, spec.n_rows_physical, model.n_cells)


def test_a_model_that_was_left_the_choice_of_its_sizes_computes_the_same(
    backend: Backend, spec: ModelSpec, hand: Hand, plain: PlainTokens, near: Near
) -> None:
    """As it is where the operator names none."""
    tokens = plain.draw(12)
    expected = hand.alone(tokens)
    model = backend.load(attrs.evolve(spec, n_cells=None, n_live=None), go_on)
    assert not isinstance(model, StreamModel)
    try:
        assert min(model.n_cells, model.n_cells_slot, model.n_slots, model.n_rows_max) >= 1
        near.check(Hand(model).put(0, tokens, Outputs.ALL), expected)
    finally:
        model.close()


# --- its end ----------------------------------------------------------------------------------------------------------


def test_closing_twice_is_harmless(load: Load) -> None:
    model = load()
    model.close()
    model.close()


def test_a_model_may_be_closed_with_full_slots(load: Load, plain: PlainTokens) -> None:
    model = load()
    Hand(model).put(0, plain.draw(20))
    model.close()


def test_a_model_may_be_loaded_and_closed_while_another_computes(
    backend: Backend, spec: ModelSpec, hand: Hand, plain: PlainTokens, near: Near
) -> None:
    """As where several are served, and one is loaded for whoever asks for it."""
    tokens = plain.draw(24, seed=1)
    expected = hand.alone(tokens)
    faults: list[Exception] = []

    def come_and_go() -> None:
        try:
            backend.load(spec, go_on).close()
        except Exception as error:
            faults.append(error)

    visitor = threading.Thread(target=come_and_go)
    visitor.start()
    is_last = False
    while not is_last:
        is_last = not visitor.is_alive()
        hand.drop(0)
        near.check(hand.put(0, tokens, Outputs.ALL), expected)
    visitor.join()
    assert not faults, faults


def test_two_loaded_models_do_not_know_of_each_other(load: Load, plain: PlainTokens, near: Near) -> None:
    one, other = Hand(load()), Hand(load())
    tokens, more = plain.draw(12, seed=1), plain.draw(12, seed=2)
    expected = one.alone([*tokens, *more])
    other.put(0, plain.draw(30, seed=3))
    one.put(0, tokens)
    other.model.close()
    near.check(one.put(0, more, Outputs.ALL), expected[len(tokens) :])
