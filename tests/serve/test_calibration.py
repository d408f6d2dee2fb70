"""What is measured of a model at load, on a fake whose steps take the time that a clock is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
import msgspec
import pytest

from cllm import threadtimes
from cllm.backend import Batch, KvLayout, Lora, ModelSpec
from cllm.config import Settings
from cllm.engine.cost.curve import Curve
from cllm.engine.cost.model import WALKED
from cllm.engine.memory.layout import N_FEW
from cllm.errors import LoadAborted, LoadFailed, StepFailed
from cllm.serve import curves, loading
from cllm.serve.calibration import APART_S_MAX, SECONDS_MAX, measure
from cllm.serve.loading import cost_of, keep_layout, load
from cllm.testing.fake import FakeBackend, FakeModel
from cllm.threadtimes import ThreadTimes, cpu_share
from tests.serve.timed import TimedModel, by_its_own_clock


def measured(model: TimedModel) -> Curve:
    return by_its_own_clock(model, lambda _share: True)


def test_the_curve_says_what_rows_outputs_and_cells_take() -> None:
    curve = measured(TimedModel(row_s=0.001, output_s=0.0005, cell_s=1e-6, n_cells=16384))
    assert {n: dict(curve.rows)[n] for n in (1, 15, 16, 64)} == pytest.approx({1: 0.006, 15: 0.020, 16: 0.021, 64: 0.069})
    assert dict(curve.outputs)[8] == pytest.approx(0.004)
    assert curve.cell_s == pytest.approx(1e-6)
    assert curve.row_cell_s == pytest.approx(0.0, abs=1e-12)
    assert curve.restore_cell_s == pytest.approx(0.01 / 128)


def test_the_curve_says_what_rows_take_for_each_cell_before_them_in_their_sequence() -> None:
    curve = measured(TimedModel(row_s=0.0001, attended_s=8e-6, n_cells=16384))
    assert dict(curve.attended) == pytest.approx({1: 8e-6, 16: 16 * 8e-6, 64: 64 * 8e-6}, rel=0.15)


def test_the_curve_says_whether_several_rows_of_a_sequence_take_longer_than_one() -> None:
    curve = measured(TimedModel(row_s=0.0001, attended_s=8e-6, tile=64, n_cells=16384))
    assert dict(curve.attended) == pytest.approx({1: 8e-6, 16: 8e-6, 64: 8e-6}, rel=0.15)


def test_where_there_is_no_time_for_many_of_them_the_curve_has_a_guess() -> None:
    curve = measured(TimedModel(row_s=0.004, attended_s=8e-6, n_cells=16384))
    assert dict(curve.attended)[64] == pytest.approx(1.5 * max(seconds for n, seconds in curve.attended if n < 64))


def test_where_a_row_hardly_takes_anything_for_those_the_curve_says_how_little_could_be_seen() -> None:
    """On a GPU, say, where a guess made for CPUs would be wrong by a thousand times."""
    curve = measured(TimedModel(first_s=0.005, row_s=1e-6, n_cells=16384))
    assert 0 < dict(curve.attended)[1] < 1e-6
    assert dict(curve.attended)[64] < 1e-6


@pytest.mark.parametrize("layout", list(KvLayout)[1:])
def test_afterwards_all_slots_are_empty(layout: KvLayout) -> None:
    model = TimedModel(kv_layout=layout, n_slots=8)
    measured(model)
    assert model.n_cells_used == 0


def test_a_model_that_is_flat_in_rows_is_seen_as_such() -> None:
    rows = dict(measured(TimedModel(first_s=0.008, row_s=1e-6)).rows)
    assert rows[128] == pytest.approx(rows[1], rel=0.02)


@pytest.mark.parametrize("row_s", [1e-6, 0.003])
def test_it_takes_bounded_time(row_s: float) -> None:
    model = TimedModel(row_s=row_s, output_s=row_s / 4)
    measured(model)
    assert model.now < 1.2 * SECONDS_MAX


@pytest.mark.parametrize(("row_s", "longer"), [(0.01, 2.5), (0.03, 3.0), (0.1, 3.0)])
def test_of_a_slow_model_it_takes_up_to_three_times_as_long_and_its_progress_goes_on(row_s: float, longer: float) -> None:
    model, shares = TimedModel(row_s=row_s, output_s=row_s / 4), []
    by_its_own_clock(model, lambda share: shares.append(share) or True)  # type: ignore[func-returns-value]
    assert SECONDS_MAX < model.now < 1.6 * longer * SECONDS_MAX
    assert shares == sorted(shares)


def test_of_a_slow_model_the_two_most_telling_sizes_are_known() -> None:
    model = TimedModel(first_s=5.0, row_s=0.2)
    curve = measured(model)
    assert [n for n, _ in curve.rows] == [1, 16]
    assert not curve.is_cut_short


class Streamed(TimedModel):
    """One whose weights go to where many rows are computed: from 32 rows on a step takes hardly longer the more it has."""

    def _take(self, batch: Batch) -> None:
        began_at = self.now
        super()._take(batch)
        if batch.n_rows >= 32:
            self.now = began_at + 0.8 + 0.001 * batch.n_rows


def test_of_a_slow_model_that_is_flat_in_rows_a_size_of_many_is_known_too() -> None:
    curve = measured(Streamed(first_s=0.5, row_s=0.0125, n_cells=16384))
    rows = dict(curve.rows)
    assert max(n for n in rows if n < 64) <= 16
    assert (rows[64], rows[256]) == pytest.approx((0.864, 1.056))
    assert curve.restore_cell_s is not None, "what so many rows take is known then"
    assert 256 not in dict(measured(TimedModel(first_s=0.05, row_s=0.1)).rows), "a row more takes what they take anyway"


class Tiled(TimedModel):
    """One that takes as long for one row as for sixteen."""

    def _take(self, batch: Batch) -> None:
        self.sizes.append(batch.n_rows)
        self.now += 0.05 + 0.75 * -(-batch.n_rows // 16)


def test_a_slow_model_that_only_seems_to_be_flat_takes_one_step_to_show_it() -> None:
    model = Tiled(n_cells=16384)
    assert max(dict(measured(model).rows)) == 64
    assert model.sizes.count(64) == 1
    assert model.now < 1.6 * 3.0 * SECONDS_MAX


class Slowing(TimedModel):
    """One whose machine is slower or faster from some time on."""

    factor = 5.0

    def _take(self, batch: Batch) -> None:
        began_at = self.now
        super()._take(batch)
        if began_at > 2.0:
            self.now = began_at + self.factor * (self.now - began_at)


@pytest.mark.parametrize(("factor", "is_cut_short"), [(5.0, True), (0.2, True), (1.2, False)])
def test_a_measurement_over_which_the_machine_changed_says_that_it_is_cut_short(factor: float, is_cut_short: bool) -> None:
    model = Slowing(first_s=0.005, row_s=0.006, output_s=0.001, n_slots=64)
    model.factor = factor
    assert measured(model).is_cut_short is is_cut_short


def held_up(**steps_s: float) -> TimedModel:
    """A model some of whose steps take longer, by their number: `step_5` is the fifth."""
    model = TimedModel(row_s=0.001, output_s=0.0005, cell_s=1e-6, n_cells=16384)
    model.held_up = {int(name.removeprefix("step_")): seconds for name, seconds in steps_s.items()}
    return model


def test_a_first_step_that_takes_long_costs_the_others_no_time() -> None:
    undisturbed, late = measured(held_up()), measured(held_up(step_1=60.0))
    assert dict(late.rows) == pytest.approx(dict(undisturbed.rows))
    assert not late.is_cut_short
    assert not undisturbed.is_cut_short


@pytest.mark.parametrize("at_step", [2, 9, 30])
def test_a_measurement_that_something_held_up_says_that_it_is_cut_short(at_step: int) -> None:
    undisturbed = measured(held_up())
    curve = measured(held_up(**{f"step_{at_step}": 3.0}))
    assert curve.is_cut_short
    assert dict(curve.rows).keys() < dict(undisturbed.rows).keys()


def test_one_that_something_held_up_while_there_is_time_to_spare_is_whole() -> None:
    flat = TimedModel(first_s=0.002)
    flat.held_up = {5: 0.2, 20: 0.2}
    curve = measured(flat)
    assert not curve.is_cut_short
    assert dict(curve.rows) == pytest.approx(dict(measured(TimedModel(first_s=0.002)).rows))


def test_one_for_which_there_were_no_cores_all_the_time_says_that_it_is_cut_short_too() -> None:
    """Then every step takes long, and nothing of it looks held up."""
    model = held_up()
    half_s = lambda: 0.5 * cpu_share() * model.now  # noqa: E731 - of all that there is
    assert measure(model, lambda _share: True, model.clock, lambda: ThreadTimes(cpu_s=half_s(), waiting_s=half_s())).is_cut_short


@pytest.mark.parametrize(("share_of_cores", "waiting"), [(0.5, 0.2), (1.0, 3.0)], ids=["disturbed a little", "more threads than cores"])
def test_one_that_had_the_cores_is_whole_although_its_threads_waited(share_of_cores: float, waiting: float) -> None:
    model = held_up()
    times = lambda: ThreadTimes(cpu_s=share_of_cores * cpu_share() * model.now, waiting_s=waiting * model.now)  # noqa: E731
    assert not measure(model, lambda _share: True, model.clock, times).is_cut_short


@pytest.mark.parametrize(("quota", "cpu", "waiting"), [(0.5, 0.5, 0.5), (1.5, 1.5, 0.5)])
def test_one_that_had_all_of_a_quota_is_whole_although_its_threads_waited_for_the_next(
    monkeypatch: pytest.MonkeyPatch, quota: float, cpu: float, waiting: float
) -> None:
    model = held_up()
    monkeypatch.setattr(threadtimes, "n_cpus", lambda: 64)
    monkeypatch.setattr(threadtimes, "cpu_quota", lambda: quota)
    times = lambda: ThreadTimes(cpu_s=cpu * model.now, waiting_s=waiting * model.now)  # noqa: E731
    assert not measure(model, lambda _share: True, model.clock, times).is_cut_short


@pytest.mark.parametrize(
    "small",
    [
        {"n_rows_max": 4},
        {"n_rows_max": 32},
        {"n_rows_max": 4, "lays_out": True},
        {"n_rows_max": 1, "lays_out": True},
        {"n_cells": 20, "n_slots": 2},
        {"n_slots": 1},
        {"n_cells": 2, "n_slots": 1},
    ],
)
def test_a_small_model_is_measured_as_far_as_it_goes(small: dict[str, int]) -> None:
    assert measured(TimedModel(row_s=0.001, **small)).rows[0][0] == 1


class Positioned(TimedModel):
    """One that has as many positions as it was trained for, as where they are rows of a table."""

    def _take(self, batch: Batch) -> None:
        if batch.positions[: batch.n_rows].max() >= self.info.n_ctx_train:
            raise IndexError("there is no such position")
        super()._take(batch)


@pytest.mark.parametrize("lays_out", [False, True])
@pytest.mark.parametrize("n_ctx_train", [2, 20, 40, 130, 256])
def test_no_position_is_measured_that_no_sequence_may_have(n_ctx_train: int, lays_out: bool) -> None:
    """Of 130, a slot that is as long as those that are copied has two more rows, and generates three times."""
    curve = measured(Positioned(row_s=0.0001, attended_s=8e-6, n_cells=16384, n_ctx_train=n_ctx_train, lays_out=lays_out))
    assert max(n for n, _ in curve.rows) <= n_ctx_train
    assert (curve.restore_cell_s is not None) == (n_ctx_train >= 32), "as much is measured as goes"
    assert (curve.apart_gain_cell_s is not None) == (lays_out and n_ctx_train > 3)


def test_of_parts_that_are_smaller_than_there_are_slots_as_many_outputs_are_measured_as_rows() -> None:
    curve = measured(TimedModel(row_s=0.0001, n_cells=4096, n_slots=128, kv_layout=KvLayout.STREAMS))
    assert max(n for n, _ in curve.rows) == max(n for n, _ in curve.outputs) == 32


def test_who_stops_the_load_stops_measuring() -> None:
    model = TimedModel()
    with pytest.raises(LoadAborted):
        measure(model, lambda _share: False, model.clock)
    assert model.n_cells_used == 0


def test_a_step_that_fails_leaves_empty_slots() -> None:
    model = TimedModel()

    def fail(batch: Batch) -> None:
        if batch.n_rows == 64:
            raise StepFailed("no")

    model.before_step = fail
    with pytest.raises(StepFailed):
        measured(model)
    assert model.n_cells_used == 0


# --- what is kept -----------------------------------------------------------------------------------------------------

CURVE = Curve(rows=[(1, 0.01), (16, 0.1)], outputs=[(1, 0.001)], cell_s=1e-6, save_cell_s=2e-5, restore_cell_s=3e-5)


def key(**fields: object) -> curves.Key:
    return curves.key_of(FakeModel(), ModelSpec(path="somewhere.gguf", **fields), "fake")  # type: ignore[arg-type]


def test_a_curve_that_is_kept_is_found_again(tmp_path: Path) -> None:
    curves.write(tmp_path / "new", key(), CURVE)
    assert curves.read(tmp_path / "new", key()) == CURVE


def test_other_settings_have_another_curve(tmp_path: Path) -> None:
    curves.write(tmp_path, key(n_threads=2), CURVE)
    assert curves.read(tmp_path, key(n_threads=4)) is None
    assert curves.read(tmp_path, key(n_threads=2)) == CURVE


@pytest.mark.parametrize(("what", "other"), [("_library_versions", ["llama-cpp-python 9.9"]), ("_cpu", "another one"), ("cpu_share", 1.5)])
def test_another_build_or_machine_has_another_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, other: object) -> None:
    curves.write(tmp_path, key(), CURVE)
    monkeypatch.setattr(curves, what, lambda: other)
    assert curves.read(tmp_path, key()) is None


def test_another_model_or_backend_has_another_curve(tmp_path: Path) -> None:
    curves.write(tmp_path, key(), CURVE)
    spec = ModelSpec(path="somewhere.gguf")
    compiled_otherwise = FakeModel()
    compiled_otherwise.info = attrs.evolve(compiled_otherwise.info, build="CUDA : ARCHS = 900")
    assert curves.read(tmp_path, curves.key_of(compiled_otherwise, spec, "fake")) is None
    assert curves.read(tmp_path, curves.key_of(FakeModel(n_tokens=300), spec, "fake")) is None
    assert curves.read(tmp_path, curves.key_of(FakeModel(n_cells=512), spec, "fake")) is None
    assert curves.read(tmp_path, curves.key_of(FakeModel(), spec, "another")) is None


def test_the_same_model_in_another_place_has_the_same_curve() -> None:
    assert key() == curves.key_of(FakeModel(), ModelSpec(path="elsewhere.gguf"), "fake")


def test_adapters_of_one_size_have_the_same_curve_wherever_they_are(tmp_path: Path) -> None:
    for name, n_bytes in (("v1", 10), ("v2", 10), ("large", 20)):
        (tmp_path / name).write_bytes(bytes(n_bytes))

    def with_adapter(name: str, scale: float = 1.0) -> curves.Key:
        return key(loras=(Lora(str(tmp_path / name), scale),))

    assert with_adapter("v1") == with_adapter("v2", 0.9)
    assert with_adapter("v1") != with_adapter("large")
    assert with_adapter("v1") != key()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"key": {}, "curve": {}}', b"\xff\xfe", b'{"key": 1}', b"x" * (2 << 20)], ids=lambda c: str(c[:12])
)
def test_a_file_that_is_not_ours_is_ignored(tmp_path: Path, content: bytes) -> None:
    curves.write(tmp_path, key(), CURVE)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert curves.read(tmp_path, key()) is None


@pytest.mark.parametrize("damage", [(b"0.01", b"-0.01"), (b"0.01", b'"x"'), (b"cell_s", b"cell_x")])
def test_a_damaged_curve_is_ignored(tmp_path: Path, damage: tuple[bytes, bytes]) -> None:
    curves.write(tmp_path, key(), CURVE)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes().replace(*damage, 1))
    assert curves.read(tmp_path, key()) is None


def test_a_folder_that_cannot_be_written_to_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    curves.write(tmp_path / "file", key(), CURVE)
    assert curves.read(tmp_path / "file", key()) is None


@pytest.fixture
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine cuts nothing short."""
    monkeypatch.setattr("cllm.serve.loading.measure", by_its_own_clock)


def n_steps_of(settings: Settings) -> int:
    model = TimedModel()
    cost_of(model, key(), settings, lambda _share: True)
    return model.n_steps


@pytest.mark.usefixtures("own_clock")
def test_a_model_is_measured_once(tmp_path: Path) -> None:
    settings = Settings(calibration_dir=str(tmp_path))
    assert n_steps_of(settings) > 0
    assert n_steps_of(settings) == 0


@pytest.mark.usefixtures("own_clock")
def test_again_measures_in_any_case_and_off_never(tmp_path: Path) -> None:
    n_steps_of(Settings(calibration_dir=str(tmp_path)))
    assert n_steps_of(Settings(calibration_dir=str(tmp_path), calibrate="again")) > 0
    assert n_steps_of(Settings(calibration_dir=str(tmp_path / "other"), calibrate="off")) == 0
    assert not (tmp_path / "other").exists()


@pytest.mark.usefixtures("own_clock")
@pytest.mark.parametrize("calibrate", ["auto", "again"])
def test_a_process_that_loads_a_model_again_measures_it_once_though_nothing_can_be_kept(
    tmp_path: Path, calibrate: Literal["auto", "again"]
) -> None:
    (tmp_path / "file").touch()
    settings = Settings(calibration_dir=str(tmp_path / "file"), calibrate=calibrate)
    assert n_steps_of(settings) > 0
    assert n_steps_of(settings) == 0
    loading._measured_here.clear()
    assert n_steps_of(settings) > 0


@pytest.mark.usefixtures("own_clock")
def test_what_another_process_has_kept_since_is_taken_before_what_was_cut_short_here(tmp_path: Path) -> None:
    def start(model: TimedModel) -> Curve:
        return cost_of(model, key(), Settings(calibration_dir=str(tmp_path)), lambda _share: True).curve

    assert start(held_up(step_5=3.0)).is_cut_short
    curves.write(tmp_path, key(), CURVE)
    assert start(held_up()) == CURVE


@pytest.mark.usefixtures("own_clock")
def test_what_was_cut_short_is_told_and_measured_again_and_takes_the_place_of_nothing(tmp_path: Path, logged: list[Any]) -> None:
    whole = measured(held_up())

    def start(model: TimedModel, calibrate: Literal["auto", "again"] = "auto") -> Curve:
        loading._measured_here.clear()  # in another process
        return cost_of(model, key(), Settings(calibration_dir=str(tmp_path), calibrate=calibrate), lambda _share: True).curve

    assert start(held_up(step_5=3.0)).is_cut_short
    assert [one["event"] for one in logged if one["log_level"] == "warning"] == ["calibration.cut_short"]
    assert start(held_up()) == whole
    assert start(held_up(step_5=3.0), "again").is_cut_short
    assert curves.read(tmp_path, key()) == whole


@pytest.mark.parametrize("layout", [KvLayout.UNIFIED, KvLayout.STREAMS])
def test_how_the_cells_lay_last_is_kept_beside_the_curve(tmp_path: Path, layout: KvLayout) -> None:
    curves.write(tmp_path, key(), CURVE)
    assert curves.read_layout(tmp_path, key()) is None
    curves.write_layout(tmp_path, key(), layout)
    assert curves.read_layout(tmp_path, key()) is layout
    assert curves.read_layout(tmp_path, key(n_threads=4)) is None
    assert curves.read(tmp_path, key()) == CURVE


@pytest.mark.parametrize("content", [b"", b"[]", b'{"key": {}, "layout": "streams"}', b"\xff"])
def test_a_layout_that_is_not_ours_is_ignored(tmp_path: Path, content: bytes) -> None:
    curves.write_layout(tmp_path, key(), KvLayout.STREAMS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert curves.read_layout(tmp_path, key()) is None
    file.write_bytes(content.replace(b"{}", msgspec.json.encode(key())).replace(b"streams", b"heaps"))
    assert curves.read_layout(tmp_path, key()) is None


def test_the_next_load_knows_the_layout_unless_nothing_is_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", FakeBackend()))
    settings = Settings(calibration_dir=str(tmp_path))
    loaded = load(settings, lambda _share: True)
    assert not loaded.limits.begins_apart
    keep_layout(loaded.curve_key, settings, KvLayout.STREAMS)
    assert load(settings, lambda _share: True).limits.begins_apart
    off = attrs.evolve(settings, calibrate="off")
    keep_layout(loaded.curve_key, off, KvLayout.UNIFIED)
    assert not load(off, lambda _share: True).limits.begins_apart
    assert load(settings, lambda _share: True).limits.begins_apart


def test_who_says_that_many_will_run_begins_apart_until_it_was_the_pool_that_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", FakeBackend()))
    few, many = (Settings(calibration_dir=str(tmp_path), parallel=n) for n in (N_FEW, N_FEW + 1))
    assert not load(few, lambda _share: True).limits.begins_apart
    loaded = load(many, lambda _share: True)
    assert loaded.limits.begins_apart
    keep_layout(loaded.curve_key, many, KvLayout.UNIFIED)
    assert not load(many, lambda _share: True).limits.begins_apart


@pytest.mark.usefixtures("own_clock")
def test_a_user_without_a_home_directory_is_served_and_told_that_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    def nobody(_uid: int) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert curves.default_folder() is None
    assert n_steps_of(Settings(calibrate="off")) == 0
    assert [one["event"] for one in logged] == []
    assert n_steps_of(Settings()) > 0
    keep_layout(key(), Settings(), KvLayout.STREAMS)
    told = [(one["event"], one["why"]) for one in logged if one["log_level"] == "warning"]
    assert told == [("calibration.not_kept", "this user has no home directory; --calibration-dir names another folder")] * 2


class DearInAPool(TimedModel):
    """A row takes `GAIN_S` for each cell of others in a pool; something has the machine when the cells lie apart for the first time."""

    GAIN_S = 1e-5
    n_layouts = 0

    def _take(self, batch: Batch) -> None:
        super()._take(batch)
        if self.capabilities.kv_layout is KvLayout.UNIFIED:
            n_own = int(batch.positions[: batch.n_rows].sum())
            self.now += self.GAIN_S * max(batch.n_rows * self.n_cells_used - n_own, 0)
        elif self.n_layouts == 1:
            self.now += 0.1

    def lay_out(self, layout: KvLayout, n_slots: int) -> None:
        super().lay_out(layout, n_slots)
        self.n_layouts += layout is KvLayout.STREAMS


def test_what_cells_gain_apart_is_measured_in_turns_since_the_machine_changes_meanwhile() -> None:
    curve = measured(DearInAPool(row_s=0.0001, n_cells=16384, lays_out=True))
    assert curve.apart_gain_cell_s == pytest.approx(DearInAPool.GAIN_S, rel=0.05)


def test_of_two_slow_cores_it_is_known_what_cells_cost_and_gain_apart() -> None:
    """A row takes 10 ms, as with 0.6 billion parameters, and an output as long."""
    curve = measured(DearInAPool(first_s=0.02, row_s=0.01, output_s=0.01, cell_s=4e-6, n_cells=4096, n_slots=16, lays_out=True))
    assert curve.cell_s == pytest.approx(4e-6, rel=0.05)
    assert curve.restore_cell_s is not None
    assert curve.apart_gain_cell_s == pytest.approx(DearInAPool.GAIN_S, rel=0.05)
    assert not curve.is_cut_short


def test_cells_that_were_to_lie_apart_stay_so_though_they_could_be_pooled() -> None:
    model = TimedModel(row_s=0.0001, n_slots=8, kv_layout=KvLayout.STREAMS, lays_out=True)
    assert measured(model).apart_gain_cell_s is None
    assert (model.capabilities.kv_layout, model.n_cells_slot) == (KvLayout.STREAMS, 4096 // 8)


def test_where_something_holds_that_up_one_turn_is_enough() -> None:
    class HeldUp(DearInAPool):
        def lay_out(self, layout: KvLayout, n_slots: int) -> None:
            super().lay_out(layout, n_slots)
            self.now += APART_S_MAX

    model = HeldUp(row_s=0.0001, n_cells=16384, lays_out=True)
    curve = measured(model)
    assert model.n_layouts == 1
    assert model.capabilities.kv_layout is KvLayout.UNIFIED
    assert curve.is_cut_short
    assert None not in (curve.apart_gain_cell_s, curve.restore_cell_s)


def test_what_is_lost_in_noise_is_at_least_what_walking_by_others_cells_costs() -> None:
    curve = measured(TimedModel(row_s=0.0001, attended_s=8e-6, n_cells=16384, lays_out=True))
    assert curve.apart_gain_cell_s == pytest.approx(WALKED * min(seconds / n for n, seconds in curve.attended))


def test_where_that_is_nothing_beside_a_step_as_on_a_gpu_nothing_is_gained() -> None:
    assert measured(TimedModel(first_s=0.005, row_s=1e-6, n_cells=16384, lays_out=True)).apart_gain_cell_s == 0.0


def test_a_pool_that_is_hardly_large_enough_has_room_for_all_that_is_measured() -> None:
    """512 cells and steps of 64 rows: with the deepest steps of all, the copies would not have gone in any more."""
    curve = measured(TimedModel(row_s=0.0001, attended_s=8e-6, n_cells=512, n_rows_max=64))
    assert curve.restore_cell_s is not None
    assert dict(curve.attended)[16] == pytest.approx(16 * 8e-6, rel=0.15)


def test_of_copies_the_first_does_not_count() -> None:
    class ColdAtFirst(TimedModel):
        n_saves = 0

        def save(self, slot: int) -> bytes:
            self.now += 0.001 if self.n_saves else 1.0
            self.n_saves += 1
            return super().save(slot)

    assert measured(ColdAtFirst(row_s=0.0001, n_cells=16384)).save_cell_s == pytest.approx(0.001 / 128)


def test_of_memory_that_cannot_be_cut_a_move_has_a_part_that_all_states_have() -> None:
    """A recurrent model's states, say, with as many bytes for all that was read as 384 cells would have."""

    class Recurrent(TimedModel):
        def __init__(self) -> None:
            super().__init__(row_s=0.0001, n_cells=16384)
            self.capabilities = attrs.evolve(self.capabilities, can_trim=False)

        def save(self, slot: int) -> bytes:
            self.now += 0.001
            n_bytes = 4 * (384 + len(self._slot(slot)))
            return super().save(slot).ljust(n_bytes, b"-")[:n_bytes]

        def restore(self, slot: int, state: bytes) -> None:
            self.now += 0.01

    curve = measured(Recurrent())
    assert curve.save_fixed_s == pytest.approx(0.001 * 384 / 512)
    assert curve.save_cell_s == pytest.approx(0.001 / 512)
    assert curve.restore_fixed_s == pytest.approx(0.01 * 384 / 512)
    assert curve.restore_cell_s == pytest.approx(0.01 / 512)


def test_where_there_is_no_memory_for_parts_it_is_not_known_what_they_gain_and_no_more() -> None:
    def before_lay_out(layout: KvLayout, n_slots: int) -> None:
        if layout is KvLayout.STREAMS:
            raise LoadFailed("no memory")

    def curve(**fields: object) -> Curve:
        return measured(TimedModel(row_s=0.0001, n_cells=16384, lays_out=True, **fields))  # type: ignore[arg-type]

    assert curve().apart_gain_cell_s is not None
    without = curve(before_lay_out=before_lay_out)
    assert without.apart_gain_cell_s is None
    assert without.rows


def test_loading_and_measuring_share_one_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cllm.serve.loading.choose_backend", lambda _name: ("fake", FakeBackend()))
    shares: list[float] = []

    def on_progress(share: float) -> bool:
        shares.append(share)
        return True

    load(Settings(calibration_dir=str(tmp_path)), on_progress)
    assert shares == sorted(shares)
    assert 0.8 in shares
    assert shares[-1] <= 1.0
