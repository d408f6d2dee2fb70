"""Calls of llama_decode by their shape, and what is kept of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import passes
from benchmarks.passes import Shape, batch_of, shapes
from cllm import demo


@pytest.mark.parametrize("n_sequences", [1, 2, 3, 8, 16, 64])
def test_no_shape_needs_more_sequences_or_cells_than_there_are(n_sequences: int) -> None:
    for shape in shapes(n_sequences):
        assert 1 <= shape.n_sequences <= n_sequences, shape
        assert shape.n_prompt <= passes.N_SPARE, shape


def test_sixteen_sequences_are_asked_for_all_that_scheduling_chooses_between() -> None:
    names = [shape.name for shape in shapes(16)]
    assert len(names) == len(set(names))
    assert {
        "16 generate",
        "10 generate",
        "10 generate, gaps between them",
        "34 rows of a prompt",
        "10 generate + 34 rows of a prompt",
        "10 generate + a row of each of 5 prompts + 64 rows of a prompt",
    } <= set(names)


def test_beside_all_others_prompts_get_the_rows_that_fill_tiles() -> None:
    names = {shape.name for shape in shapes(8)}
    assert {
        "7 generate",
        "7 generate + 9 rows of a prompt",
        "7 generate + 25 rows of a prompt",
        "7 generate + 64 rows of a prompt",
    } <= names


def test_who_generates_has_an_output_behind_its_cells_and_a_prompts_rows_have_none() -> None:
    shape = Shape(n_generating=2, n_single=1, n_prompt=3)
    batch = batch_of(shape, 120, 30_000, random.Random(1))
    assert batch.slots.tolist() == [0, 1, 2, 3, 3, 3]
    assert batch.positions.tolist() == [120, 120, 120, 120, 121, 122]
    assert batch.outputs.tolist() == [1, 1, 0, 0, 0, 0]
    assert len(batch.tokens) == shape.n_rows == 6


def test_gaps_are_spread_among_those_who_generate() -> None:
    batch = batch_of(Shape(n_generating=10, n_gaps=6), 120, 30_000, random.Random(1))
    assert len(batch.slots) == 10
    assert max(batch.slots) - min(batch.slots) >= 13
    assert sum(b - a > 1 for a, b in zip(batch.slots, batch.slots[1:], strict=False)) >= 4


def test_every_shape_is_timed_in_both_memories_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--sequences=4", "--cells=8", "--calls=2", "--threads=1", f"--results={tmp_path}"]
    passes.main([f"--model={demo.path()}", *sizes])
    data = json.loads((tmp_path / "passes-4-sequences.json").read_text("utf-8"))["data"]
    told = capsys.readouterr().out
    assert [shape["name"] for shape in data["shapes"]] == [shape.name for shape in shapes(4)]
    for shape in data["shapes"]:
        assert shape["name"] in told
        assert {name: len(ms) for name, ms in shape["ms"].items()} == {"apart": 2, "pool": 2}
        assert all(one > 0 for ms in shape["ms"].values() for one in ms), shape
