"""What is told of killed workers is what their clients saw."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import trio

from benchmarks import kills
from benchmarks.kills import Round, Streamed, worker_of
from cllm.backend import ModelSpec
from cllm.bench.target import Target
from cllm.serve.worker.model import WorkerBackend, WorkerModel
from cllm.testing.fake import FakeBackend


def streamed(text: str, *arrivals: float, n_tokens: int = 4, finish_reason: str = "length") -> Streamed:
    return Streamed(text=text, n_tokens=n_tokens, finish_reason=finish_reason, arrivals=list(arrivals), ended_at=arrivals[-1])


def page_of(*streams: Streamed) -> dict[str, float]:
    return Round(streams=list(streams), killed_at=2.0, expected=[streamed("abcd", 1.0)] * len(streams), n_generated=4).page()


def test_a_pause_is_the_longest_after_the_kill_whatever_was_still_on_its_way() -> None:
    assert page_of(streamed("abcd", 0.5, 1.9, 2.1, 3.6, 3.7))["pause_s"] == pytest.approx(1.5)
    assert page_of(streamed("abcd", 0.1, 1.9))["pause_s"] == 0.0


def test_a_stream_that_is_short_or_other_is_not_counted_as_it_should_be() -> None:
    page = page_of(streamed("abcd", 1.0, 3.0), streamed("abxx", 1.0, 3.0), streamed("ab", 3.0, n_tokens=2), streamed("abcd", 1.0))
    assert (page["n_under_way"], page["n_complete"], page["n_same"]) == (3, 3, 2)


def test_with_nobody_killed_the_same_streams_run_in_smaller_companies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, here, each says something else."""
    companies: list[int] = []

    async def streams_of(_target: Target, asked: Sequence[bytes]) -> list[Streamed]:
        companies.append(len(asked))
        return [streamed("abcd" if len(asked) > 1 else "abxx", 1.0) for _ in asked]

    monkeypatch.setattr(kills, "streams_of", streams_of)
    expected = 8 * [streamed("abcd", 1.0)]
    unkilled = trio.run(kills._unkilled, Target(host="here", port=1), 4, expected)
    assert companies == [*8 * [1], *4 * [2], *2 * [4]]
    assert unkilled == {"n_streams_unkilled": 24, "n_same_unkilled": 16}
    assert kills.data_of([page_of(expected[0])], 1.0, unkilled)["n_same_unkilled"] == 16


def test_the_worker_is_found_among_the_servers_children() -> None:
    model = WorkerBackend(FakeBackend(), "cllm.testing.fake:make_backend", 60.0).load(ModelSpec(path=""), lambda share: True)
    try:
        assert isinstance(model, WorkerModel)
        assert worker_of(os.getpid()) == model.pid
    finally:
        model.close()
    with pytest.raises(LookupError):
        worker_of(os.getpid())
