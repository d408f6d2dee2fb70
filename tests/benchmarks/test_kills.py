"""What is told of killed workers is what their clients saw."""

from __future__ import annotations

import os

import pytest

from benchmarks.kills import Round, Streamed, worker_of
from cllm.backend import ModelSpec
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


def test_the_worker_is_found_among_the_servers_children() -> None:
    model = WorkerBackend(FakeBackend(), "cllm.testing.fake:make_backend", 60.0).load(ModelSpec(path=""), lambda share: True)
    try:
        assert isinstance(model, WorkerModel)
        assert worker_of(os.getpid()) == model.pid
    finally:
        model.close()
    with pytest.raises(LookupError):
        worker_of(os.getpid())
