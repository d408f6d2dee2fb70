"""Whose prompt's rows go first, over many steps."""

from __future__ import annotations

from cllm.config import Settings
from cllm.engine.events import Finished
from cllm.engine.scheduler import Scheduler
from cllm.serve.loading import limits_of
from cllm.testing.fake import FakeModel
from tests.engine.test_machine import make_spec, run_step

N_PROMPT, N_ROWS = 300, 100


def test_a_prompt_of_a_key_with_many_places_goes_on_though_a_key_with_fewer_never_stops_asking() -> None:
    model = FakeModel(n_cells=4000, n_ctx_train=1000, n_slots=8)
    scheduler = Scheduler(limits_of(model, Settings(row_budget=N_ROWS, prefix_cache=False)), model.vocabulary)

    def submit(key: str) -> int:
        return scheduler.submit(make_spec(tuple(range(32, 32 + 64)) * 5, 0, 1, 0.0, key=key), 0.0)

    for _ in range(3):
        submit("many")
    of_few = {submit("few"), submit("few")}
    ended = set()
    for _ in range(1000):
        for event in run_step(model, scheduler, 0.0) or []:
            if isinstance(event, Finished):
                ended.add(event.seq_id)
                if event.seq_id in of_few:
                    of_few.add(submit("few"))
        if 1 in ended:
            break
    assert 1 in ended
