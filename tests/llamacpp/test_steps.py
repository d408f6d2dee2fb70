"""What a step computes, in which order, and what it refuses."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import pytest

from cllm.backend import Batch, KvLayout
from cllm.errors import Aborted, NoRoom, StepFailed
from cllm.testing.tiny import make_tiny_gguf

N_TRIES = 50  # to meet a step that may be a short one


def test_logits_are_float32_of_the_outputs_by_the_vocabulary(load, drive, some_tokens):
    model = load()
    driver = drive(model)
    driver.fill([(0, i, token) for i, token in enumerate(some_tokens(1, 5))], outputs="all")

    logits = model.step(driver.batch)

    assert logits.shape == (5, model.vocabulary.n_tokens)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()
    logits[:] = 0  # a caller may write to them


def test_what_a_model_may_never_say_by_its_file_is_not_drawn(load, drive, some_tokens, tmp_path):
    prompt = {0: some_tokens(1, 5)}
    (plain,) = drive(load()).feed(prompt)
    suppressed = np.argsort(plain)[[-1, -3]].tolist()
    make_tiny_gguf(tmp_path / "x.gguf", "qwen3", suppressed=suppressed)
    (found,) = drive(load(path=str(tmp_path / "x.gguf"))).feed(prompt)
    assert np.isneginf(found[suppressed]).all()
    others = np.delete(np.arange(len(plain)), suppressed)
    assert np.array_equal(found[others], plain[others])
    assert found.argmax() == np.argsort(plain)[-2]


def test_a_step_without_outputs_gives_no_rows(load, drive, some_tokens):
    model = load()

    logits = drive(model).feed({0: some_tokens(1, 5)}, outputs="none")

    assert logits.shape == (0, model.vocabulary.n_tokens)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])
def test_outputs_come_in_the_order_of_the_batch_whatever_llama_cpp_makes_of_it(load, drive, some_tokens, layout, architecture):
    model = load(architecture, kv_layout=layout, n_live=4)
    prompts = {3: some_tokens(3, 7), 0: some_tokens(0, 2), 2: some_tokens(2, 11)}
    driver = drive(model)
    alone = {}
    for slot, tokens in prompts.items():
        alone[slot] = driver.feed({slot: tokens}, outputs="all")
        driver.drop(slot)

    together = driver.feed(prompts, outputs="all")

    np.testing.assert_allclose(together, np.concatenate([alone[slot] for slot in prompts]), atol=1e-3)


def test_rows_of_several_slots_may_stand_between_each_other(load, drive, some_tokens, layout):
    model = load(kv_layout=layout, n_live=4)
    prompts = {1: some_tokens(1, 4), 0: some_tokens(0, 4)}
    driver = drive(model)
    apart = driver.feed(prompts, outputs="all")
    for slot in prompts:
        driver.drop(slot)

    between = driver.feed(prompts, outputs="all", interleaved=True)

    np.testing.assert_allclose(between[0::2], apart[:4], atol=1e-3)
    np.testing.assert_allclose(between[1::2], apart[4:], atol=1e-3)


def test_more_rows_than_are_computed_at_a_time_are_as_good_as_few(load, drive, some_tokens):
    prompt = some_tokens(1, 100)
    whole = drive(load()).feed({0: prompt}, outputs="all")

    in_parts = drive(load(n_rows_physical=32)).feed({0: prompt}, outputs="all")

    np.testing.assert_allclose(in_parts, whole, atol=1e-3)


def test_as_many_outputs_as_rows_can_be_had_at_every_length(load, drive, some_tokens):
    model = load(n_rows_max=300)
    driver = drive(model)
    for n in (1, 257, 300, 2):
        assert len(driver.feed({0: some_tokens(n, n)}, outputs="all")) == n
        driver.drop(0)


def test_one_slot_less_rows_than_slots_does_not_stop_the_process(load, drive, some_tokens):
    # llama.cpp asserts that as many outputs are allowed as there are slots, and allows no more than n_batch by default.
    model = load(n_rows_max=8)

    assert model.n_slots == 255
    assert drive(model).feed({254: some_tokens(1, 8)}).shape[0] == 1


def test_two_batches_may_be_taken_in_turn(load, drive, some_tokens):
    model = load()
    one, other = drive(model), drive(model)
    expected = one.feed({0: some_tokens(1, 4)}), one.feed({0: some_tokens(2, 4)})
    model.drop(0)
    one.held.clear()

    first = one.feed({0: some_tokens(1, 4)})
    other.adopt(0, some_tokens(1, 4))
    second = other.feed({0: some_tokens(2, 4)})

    np.testing.assert_array_equal(first, expected[0])
    np.testing.assert_array_equal(second, expected[1])


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35", "gemma3"])
def test_no_room_leaves_memory_as_it_was(load, drive, some_tokens, layout, architecture):
    model = load(architecture, kv_layout=layout, n_live=2, n_cells=512)
    free, full = drive(model), drive(model)
    prompts = {0: some_tokens(0, 200), 1: some_tokens(1, 150)}
    free.feed(prompts)
    expected = free.feed({0: [5], 1: [6]})
    for slot in prompts:
        free.drop(slot)

    full.feed(prompts)
    with pytest.raises(NoRoom):
        full.feed({0: some_tokens(2, 200), 1: some_tokens(3, 200)})
    found = full.feed({0: [5], 1: [6]})

    np.testing.assert_allclose(found, expected, atol=1e-3)


def test_a_long_step_sees_all_of_a_window_though_its_cells_lie_anyhow(load, drive, some_tokens):
    # llama.cpp finds cells for a step's pieces before it computes any, and frees some for the last one that the first still attends to.
    prompt = some_tokens(9, 64)
    alone = drive(load("gemma3", n_live=2, n_rows_physical=16))
    expected = np.concatenate([alone.feed({0: [token]}, outputs="all") for token in prompt])[16:]
    driver = drive(load("gemma3", n_live=15, n_rows_physical=16, n_cells=4096))
    driver.feed({1: some_tokens(1, 8)})
    driver.feed({0: prompt[:8]})
    for slot in range(2, 15):
        driver.feed({slot: some_tokens(slot, 15)})
    driver.drop(1)
    driver.feed({0: prompt[8:16]})
    driver.feed({1: some_tokens(1, 15)})

    n = driver.model.n_rows_max
    found = np.concatenate([driver.feed({0: prompt[i : i + n]}, outputs="all") for i in range(16, 64, n)])

    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("n_cells", [256, 512])
def test_every_cell_can_be_filled(load, drive, some_tokens, n_cells):
    model = load(n_cells=n_cells)
    driver = drive(model)

    driver.feed({0: some_tokens(1, n_cells - 1)})
    driver.feed({1: [1]})

    with pytest.raises(NoRoom):
        driver.feed({2: [1]})


@pytest.mark.parametrize("others", [[], [(1, 0, 5)]], ids=["alone", "behind another"])
@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ((256, 0, 1), "slot"),
        ((-1, 0, 1), "slot"),
        ((0, 0, 1_000_000), "token"),
        ((0, 0, -1), "token"),
        ((0, 1, 1), "position"),
        ((0, -1, 1), "position"),
        ((7, 2, 1), "position"),
        ((7, 4, 1), "position"),
    ],
)
def test_a_row_that_would_stop_the_process_or_spoil_a_slot_is_refused(load, drive, some_tokens, row, complaint, others):
    model = load()
    driver = drive(model)
    driver.feed({7: some_tokens(7, 3)})
    driver.fill([*others, row])

    with pytest.raises(StepFailed, match=complaint):
        model.step(driver.batch)

    assert driver.feed({7: [1]}).shape[0] == 1  # and the slot is as it was


@pytest.mark.parametrize("architecture", ["qwen3", "qwen35"])  # llama.cpp lets positions jump in models with several a token
@pytest.mark.parametrize("positions", [(0, 2), (1, 0), (0, 0), (0, 1, 1), (0, 0, 3, 3)])
def test_positions_with_gaps_or_out_of_order_are_refused(load, drive, architecture, positions):
    model = load(architecture, n_live=2)
    driver = drive(model)
    driver.fill([(0, position, 5) for position in positions])

    with pytest.raises(StepFailed):
        model.step(driver.batch)


@pytest.mark.parametrize("n_rows", [1, 2])
def test_outputs_that_were_counted_wrongly_are_refused(load, drive, n_rows):
    model = load()
    driver = drive(model)
    driver.fill([(slot, 0, 5) for slot in range(n_rows)])
    driver.batch.n_outputs = n_rows + 1

    with pytest.raises(StepFailed, match="n_outputs"):
        model.step(driver.batch)


def test_a_batch_with_no_rows_or_too_many_is_refused(load):
    model = load(n_rows_max=8)
    batch = Batch(16)
    batch.positions[:] = range(16)
    for n in (0, 9, -1):
        batch.n_rows = n
        with pytest.raises(StepFailed, match="rows"):
            model.step(batch)


def test_a_wrong_count_of_outputs_is_refused(load, drive):
    model = load()
    driver = drive(model)
    driver.fill([(0, 0, 5)])
    driver.batch.n_outputs = 2

    with pytest.raises(StepFailed, match="n_outputs"):
        model.step(driver.batch)


@contextlib.contextmanager
def aborting(model):
    """Abort again and again, from another thread: an abort that comes before a step has begun is lost."""
    stop = threading.Event()

    def abort() -> None:
        while not stop.is_set():
            model.abort()
            time.sleep(0)

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_aborted(model, batch) -> bool:
    """Whether a step on slot 1 is aborted; a short one may end before a busy machine comes to say so, and leaves the slot empty too."""
    with aborting(model):
        try:
            model.step(batch)
        except Aborted:
            return True
    model.drop(1)
    return False


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3"])
def test_an_abort_ends_the_running_step_and_takes_the_slots_back(load, drive, some_tokens, layout, architecture):
    n_rows_physical = 1024 if architecture == "gemma3" else 512  # one piece, where a window slides
    model = load(architecture, kv_layout=layout, n_live=2, n_rows_max=1024, n_rows_physical=n_rows_physical, n_cells=2048)
    driver = drive(model)
    driver.feed({0: some_tokens(0, 20)})
    expected = driver.feed({0: [1]})
    driver.fill([(1, i, token) for i, token in enumerate(some_tokens(1, 1000))])

    assert any(is_aborted(model, driver.batch) for _ in range(N_TRIES)), "all steps went to their ends"

    assert driver.feed({1: some_tokens(1, 5)}).shape[0] == 1  # from position 0 again
    driver.drop(0)
    driver.feed({0: some_tokens(0, 20)})
    np.testing.assert_allclose(driver.feed({0: [1]}), expected, atol=1e-3)


def test_memory_that_cannot_be_aborted_goes_on(load, drive, some_tokens):
    # An aborted graph may leave other slots' recurrent states half moved.
    model = load("qwen35", n_live=2, n_rows_max=1024, n_cells=2048)
    assert not model.capabilities.can_abort

    with aborting(model):
        assert drive(model).feed({0: some_tokens(0, 1000)}).shape[0] == 1


def test_an_abort_between_steps_is_without_effect(load, drive, some_tokens):
    model = load()
    model.abort()

    assert drive(model).feed({0: some_tokens(0, 20)}).shape[0] == 1


def test_a_failed_computation_takes_the_batch_back_or_ends_a_recurrent_model(load, drive, some_tokens, monkeypatch):
    from cllm.errors import ModelDied

    for architecture, error in (("qwen3", StepFailed), ("gemma3", StepFailed), ("qwen35", ModelDied)):
        model = load(architecture, n_live=2)
        driver = drive(model)
        driver.feed({0: some_tokens(0, 20)})
        with monkeypatch.context() as patch:
            patch.setattr(model._lib, "llama_decode", lambda *_: -3)
            with pytest.raises(error):
                driver.feed({0: [1], 1: [2]})
        if error is StepFailed and model.capabilities.can_trim:
            assert driver.feed({0: [1], 1: [2]}).shape[0] == 2


def test_after_a_failed_computation_a_gpu_is_not_asked_again(load, drive, some_tokens, monkeypatch):
    """On some, every further one fails: requests would fail for ever, and nothing would be started anew."""
    from cllm.errors import ModelDied

    model = load("qwen3", n_live=2)
    driver = drive(model)
    driver.feed({0: some_tokens(0, 20)})
    monkeypatch.setattr(model, "_gpu", True)
    for code, error in ((-3, ModelDied), (-2, StepFailed)):
        with monkeypatch.context() as patch:
            patch.setattr(model._lib, "llama_decode", lambda *_, code=code: code)
            with pytest.raises(error):
                driver.feed({0: [1], 1: [2]})


def test_the_layout_in_force_is_never_auto(load, layout):
    assert load(kv_layout=layout, n_live=2).capabilities.kv_layout is layout
    assert load(kv_layout=KvLayout.AUTO).capabilities.kv_layout is KvLayout.UNIFIED


def test_one_row_at_a_time_is_enough_for_a_model(load, drive):
    assert drive(load(n_rows_max=1)).feed({0: [1]}).shape[0] == 1
