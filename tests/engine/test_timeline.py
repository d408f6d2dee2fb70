"""What is noted of a sequence's life, and how much of it."""

from __future__ import annotations

from cllm.engine.timeline import N_MOMENTS_MAX, Timeline
from tests.engine.simulation import Simulation, ask
from tests.engine.test_scenarios import Conversation


def told(timeline: Timeline) -> list[str]:
    return [moment.what for moment in timeline.moments]


def test_a_sequence_is_queued_admitted_prefilled_piece_by_piece_and_ended() -> None:
    scheduler = Conversation().scheduler
    simulation = Simulation(scheduler)
    seq_id = scheduler.submit(ask(0.0, n_prompt=20, n_tokens=3).spec, 0.0)
    timeline = scheduler.timeline(seq_id)
    simulation.follow(seq_id, ask(0.0, n_prompt=20, n_tokens=3))
    simulation.run()
    assert told(timeline) == ["queued", "admitted", "prefill", "prefill", "first_token", "finished"]
    assert [moment.facts["n_rows"] for moment in timeline.moments if moment.what == "prefill"] == [16, 4]
    assert timeline.ended
    assert timeline.moments[-1].facts == {"reason": "length", "n_generated": 3}


RESTORED = """
limits keeps_prefixes=1 can_share=1 can_trim=1 can_save=1 can_save_part=1 host_pool_n_bytes=100000 n_cells=120 n_ctx=110 row_budget=64
submit 1 prompt=a60 max_tokens=3
step
step
step
submit 2 prompt=b80 max_tokens=3
step
step
step
step
submit 3 prompt=a60c10 max_tokens=2
step
step
"""


def test_what_comes_from_the_host_is_told_as_cached_when_it_has_come() -> None:
    conversation = Conversation()
    for command in RESTORED.split("\n")[1:-1]:
        conversation.tell(command)
    timeline = conversation.scheduler.timeline(3)
    assert told(timeline) == ["queued", "admitted", "restored", "prefill", "first_token"]
    admitted, restored = timeline.moments[1:3]
    assert "n_cached" not in admitted.facts
    assert restored.facts == {"n_cached": 60, "miss_from": 60, "miss": "differs"}


def test_its_key_pays_only_for_what_has_to_be_computed() -> None:
    conversation = Conversation()
    *before, submit, step, _ = RESTORED.split("\n")[1:-1]
    for command in before:
        conversation.tell(command)
    (account,) = conversation.scheduler._accounts
    conversation.tell(submit)
    n_before = account.served
    conversation.tell(step)
    assert account.served - n_before == 10


def test_times_do_not_go_back() -> None:
    scheduler = Conversation().scheduler
    request = ask(0.0, n_prompt=50, n_tokens=9)
    seq_id = scheduler.submit(request.spec, 0.0)
    timeline = scheduler.timeline(seq_id)
    simulation = Simulation(scheduler)
    simulation.follow(seq_id, request)
    simulation.run()
    times = [moment.at for moment in timeline.moments]
    assert times == sorted(times)
    assert times[-1] == simulation.now


def test_a_prompt_in_a_thousand_pieces_takes_no_more_room_than_the_bound() -> None:
    timeline = Timeline()
    timeline.note(0.0, "queued")
    for i in range(1000):
        timeline.prefill(float(i), 8)
    timeline.end(1000.0, "finished")
    assert len(timeline.moments) <= N_MOMENTS_MAX // 2 + 1
    assert sum(int(str(moment.facts["n_rows"])) for moment in timeline.moments if moment.what == "prefill") == 8000
    assert told(timeline)[-1] == "finished"


def test_the_end_is_noted_however_often_it_was_preempted() -> None:
    timeline = Timeline()
    for i in range(1000):
        timeline.note(float(i), "preempted")
    timeline.end(1000.0, "failed")
    assert len(timeline.moments) == N_MOMENTS_MAX + 1
    assert told(timeline)[-1] == "failed"
