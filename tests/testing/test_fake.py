"""The fake model: what the contract suite does not ask, since only tests rely on it."""

from __future__ import annotations

import numpy as np
import pytest

from cllm.backend import Batch, KvLayout, ModelSpec
from cllm.errors import LoadAborted, LoadFailed, NoRoom, StepFailed
from cllm.testing.fake import END_OF_TURN, FakeModel, FakeVocabulary, make_backend


def fill(model: FakeModel, slot: int, tokens: list[int], start: int = 0) -> Batch:
    batch = Batch(model.n_rows_max)
    n = batch.n_rows = len(tokens)
    batch.tokens[:n], batch.positions[:n], batch.slots[:n] = tokens, range(start, start + n), slot
    batch.outputs[n - 1] = batch.n_outputs = 1
    return batch


def put(model: FakeModel, slot: int, tokens: list[int], start: int = 0) -> int:
    """Compute `tokens`; return the likeliest next one."""
    return int(model.step(fill(model, slot, tokens, start)).argmax())


def greedy(model: FakeModel, prompt: str, n_tokens: int, slot: int = 0) -> list[int]:
    tokens = list(prompt.encode())
    put(model, slot, tokens[:-1])
    for _ in range(n_tokens):
        tokens.append(put(model, slot, tokens[-1:], len(tokens) - 1))
    return tokens[len(prompt.encode()) :]


# --- its text ---------------------------------------------------------------------------------------------------------


def test_two_fakes_say_the_same() -> None:
    assert greedy(FakeModel(), "hello", 20) == greedy(FakeModel(), "hello", 20)


def test_it_says_the_same_in_every_slot_and_layout() -> None:
    expected = greedy(FakeModel(), "hello", 20)
    assert greedy(FakeModel(), "hello", 20, slot=7) == expected
    assert greedy(FakeModel(n_slots=4, kv_layout=KvLayout.STREAMS), "hello", 20, slot=3) == expected


def test_what_it_says_depends_on_the_whole_text_before() -> None:
    texts = {tuple(greedy(FakeModel(), prompt, 12)) for prompt in ("hello there", "jello there", "hello, there", "there", "hello therf")}
    assert len(texts) == 5


def test_it_says_mostly_what_a_person_can_read() -> None:
    assert bytes(greedy(FakeModel(), "hello", 100)).isascii()


def test_it_ends_its_turn_only_where_asked_to() -> None:
    assert END_OF_TURN not in greedy(FakeModel(), "hello", 300)
    assert END_OF_TURN in greedy(FakeModel(n_tokens_to_end=20), "hello", 300)


def test_logits_leave_one_token_above_the_others() -> None:
    model = FakeModel()
    logits = np.sort(model.step(fill(model, 0, [1, 2, 3])))[0]
    assert logits[-1] > logits[-2]


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 4, 6, 100, -1])
def test_a_wrong_position_is_refused_by_the_name_that_the_first_server_knew(start: int) -> None:
    model = FakeModel()
    put(model, 0, [1, 2, 3, 4, 5])
    with pytest.raises(StepFailed, match=r"^inconsistent sequence positions: slot 0 goes on at 5, not at"):
        put(model, 0, [6], start)
    assert model.slot_tokens(0) == [1, 2, 3, 4, 5]


def test_a_step_that_it_refuses_changes_nothing() -> None:
    model = FakeModel(n_cells=10)
    put(model, 0, [1, 2, 3])
    with pytest.raises(NoRoom):
        put(model, 1, [9] * 8)
    assert (model.n_cells_used, model.n_steps) == (3, 1)
    assert model.slot_tokens(1) == []


# --- its cells --------------------------------------------------------------------------------------------------------


def test_cells_are_counted_as_they_are_filled_and_freed() -> None:
    model = FakeModel(n_cells=20)
    put(model, 0, [1] * 5)
    put(model, 3, [2] * 6)
    assert model.n_cells_used == 11
    model.trim(3, 2)
    assert model.n_cells_used == 7
    model.drop(0)
    model.drop(0)
    assert model.n_cells_used == 2
    model.drop(3)
    assert model.n_cells_used == 0


def test_a_shared_cell_counts_once_until_the_last_that_has_it_lets_go() -> None:
    model = FakeModel(n_cells=20)
    put(model, 0, [1, 2, 3, 4])
    model.share(0, 1, 4)
    model.share(1, 2, 3)
    assert model.n_cells_used == 4
    put(model, 1, [5, 6], 4)
    assert model.n_cells_used == 6
    model.drop(0)
    model.drop(1)
    assert (model.n_cells_used, model.slot_tokens(2)) == (3, [1, 2, 3])
    model.drop(2)
    assert model.n_cells_used == 0


def test_in_streams_a_slot_has_an_equal_part_and_a_copy_takes_cells() -> None:
    model = FakeModel(n_cells=40, n_slots=4, kv_layout=KvLayout.STREAMS)
    assert model.n_cells_slot == 10
    put(model, 0, [1] * 10)
    with pytest.raises(NoRoom):
        put(model, 0, [1], 10)
    model.share(0, 1, 10)
    assert model.n_cells_used == 20
    with pytest.raises(StepFailed):
        model.share(0, 2, 5)


def test_without_trimming_a_slot_is_kept_whole_or_dropped() -> None:
    model = FakeModel(can_trim=False)
    put(model, 0, [65, 66, 67])
    assert not model.capabilities.can_share
    assert not model.capabilities.can_trim
    with pytest.raises(StepFailed, match="cannot be trimmed"):
        model.trim(0, 2)
    assert model.slot_tokens(0) == [65, 66, 67]
    model.trim(0, 3)
    model.drop(0)
    assert model.slot_tokens(0) == []


def test_without_saving_a_slot_stays_where_it_is() -> None:
    state = FakeModel().save(0)
    model = FakeModel(can_save=False)
    put(model, 0, [65, 66, 67])
    assert not model.capabilities.can_save_part
    with pytest.raises(StepFailed, match="cannot be saved"):
        model.save(0)
    with pytest.raises(StepFailed, match="cannot be saved"):
        model.restore(1, state)
    assert model.slot_tokens(0) == [65, 66, 67]


def test_a_saved_slot_gives_back_its_tokens() -> None:
    model = FakeModel()
    put(model, 0, [5, 6, 7])
    state = model.save(0)
    model.drop(0)
    model.restore(9, state)
    assert model.slot_tokens(9) == [5, 6, 7]
    assert put(model, 9, [8], 3) == put(model, 0, [5, 6, 7, 8])


def test_it_is_laid_out_anew_only_where_asked_to() -> None:
    assert FakeModel().layouts == {KvLayout.UNIFIED}
    assert FakeModel(n_slots=2, kv_layout=KvLayout.STREAMS).layouts == {KvLayout.STREAMS}
    with pytest.raises(StepFailed, match="cannot be laid out as streams"):
        FakeModel().lay_out(KvLayout.STREAMS, 2)


def test_laid_out_anew_it_is_as_if_loaded_so() -> None:
    model, loaded = FakeModel(n_cells=40, lays_out=True), FakeModel(n_cells=40, n_slots=4, kv_layout=KvLayout.STREAMS)
    put(model, 7, [1, 2, 3])
    model.lay_out(KvLayout.STREAMS, 4)
    assert (model.capabilities, model.info, model.n_cells_slot, model.n_slots) == (
        loaded.capabilities, loaded.info, loaded.n_cells_slot, loaded.n_slots,
    )  # fmt: skip
    assert model.n_cells_used == 0
    with pytest.raises(NoRoom):
        put(model, 0, [1] * 11)
    model.lay_out(KvLayout.UNIFIED, 4)
    assert (model.n_slots, model.n_cells_slot, model.capabilities.can_share) == (256, 40, True)


def test_a_hook_may_make_it_fail_to_be_laid_out_and_its_slots_are_empty_then() -> None:
    def fail(_layout: KvLayout, _n_slots: int) -> None:
        raise LoadFailed("as told")

    model = FakeModel(lays_out=True, before_lay_out=fail)
    put(model, 0, [1, 2, 3])
    with pytest.raises(LoadFailed, match="as told"):
        model.lay_out(KvLayout.STREAMS, 4)
    assert (model.capabilities.kv_layout, model.n_slots, model.n_cells_used) == (KvLayout.UNIFIED, 256, 0)


# --- its handles ------------------------------------------------------------------------------------------------------


def test_a_hook_may_make_a_step_fail_before_anything_is_done() -> None:
    def fail(_batch: Batch) -> None:
        raise RuntimeError("as told")

    model = FakeModel(before_step=fail)
    with pytest.raises(RuntimeError, match="as told"):
        put(model, 0, [1])
    assert (model.n_cells_used, model.n_steps) == (0, 0)


def test_a_step_takes_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("cllm.testing.fake.time.sleep", slept.append)
    put(FakeModel(step_s=lambda batch: 0.5 * batch.n_rows), 0, [1, 2, 3])
    assert slept == [1.5]


# --- its vocabulary and its backend -----------------------------------------------------------------------------------


def test_a_token_is_a_byte_and_the_others_are_named() -> None:
    vocabulary = FakeVocabulary()
    assert vocabulary.tokenize("é<end>", add_special=True, parse_special=True) == [256, 0xC3, 0xA9, END_OF_TURN]
    assert vocabulary.tokenize("<end>", add_special=False, parse_special=False) == list(b"<end>")
    assert vocabulary.token_bytes(END_OF_TURN, special=True) == b"<end>"


def test_the_backend_takes_the_models_arguments_as_options() -> None:
    shares: list[float] = []
    spec = ModelSpec(path="", n_cells=77, n_rows_max=33, options={"n_tokens": "300", "n_slots": "5"})
    model = make_backend().load(spec, lambda share: shares.append(share) is None)
    assert (model.n_cells, model.n_rows_max, model.vocabulary.n_tokens, model.n_slots) == (77, 33, 300, 5)
    assert shares == [0.0, 0.5, 1.0]


def test_a_load_that_is_stopped_is_aborted() -> None:
    with pytest.raises(LoadAborted):
        make_backend().load(ModelSpec(path=""), lambda share: share < 0.5)
