"""What a model tells of itself in `/metrics`."""

from __future__ import annotations

import pytest

from cllm.backend import Measure
from cllm.serve.metrics import Metrics


class Counting:
    def __init__(self, *measures: Measure) -> None:
        self._measures = measures

    def measures(self) -> list[Measure]:
        return list(self._measures)


def told(model: object) -> list[str]:
    metrics = Metrics()
    metrics.watch_model(model)
    return [line for line in metrics.text().decode().splitlines() if "_doors" in line and not line.startswith("#")]


def test_its_numbers_stand_beside_the_servers() -> None:
    doors = [Measure(name="doors", help="Doors", value=n, labels={"side": side}) for side, n in (("left", 2), ("right", 3))]
    model = Counting(*doors, Measure(name="open_doors", help="Open", value=1.5, is_count=False))
    assert told(model) == ['cllm_doors_total{side="left"} 2.0', 'cllm_doors_total{side="right"} 3.0', "cllm_open_doors 1.5"]


def test_a_model_that_keeps_none_tells_none() -> None:
    assert told(object()) == []


@pytest.mark.parametrize("name", ["Doors", "a b", "x{}", ""])
def test_nonsense_is_left_out_and_the_rest_is_told(name: str) -> None:
    metrics = Metrics()
    metrics.watch_model(Counting(Measure(name=name, help="", value=1.0)))
    assert b"cllm_queue_seconds" in metrics.text()
