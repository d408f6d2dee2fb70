"""The scheduler's rules as text: each file in scenarios/ is a conversation with it, and what it answered is checked line by line.

A block is commands, a line `----`, and what they gave. `CLLM_REWRITE=1 pytest tests/engine` writes the answers anew, for a
reviewer to read in the diff, and fails: nothing was checked. Commands:

    limits NAME=N ...           a new scheduler (n_cells n_slots n_ctx n_rows_max row_budget n_live_max n_waiting_max patience_s)
                                (row_budget=auto leaves it to the costs, itl_target_ms=N to them and a target; itl_max_ms=N leaves to them
                                how many run)
    costs ROWS:MS ... [cell=US] [apart=US] [read=ROWS/US,...]   what steps of so many rows take, for the next `limits`; outputs cost
                                nothing, a cell in use so many microseconds in each step, a generating row gains so many for each cell of
                                the others apart, and rows of one sequence take so many together for each cell that it has
    weights KEY=N ...           a new scheduler with the same limits, whose keys count so much
    submit ID prompt=N [max_tokens=N] [min_tokens=N] [priority=N] [timeout_s=N] [stop=TEXT] [stop_token=N] [key=KEY] [scored]
           [regex=TEXT] [barred=TOKEN]
                                       [salt=SALT] [private]
                                       a prompt is a number of tokens, or beginnings of texts one after another: `a40b3` is 40 tokens
                                       of text a, then 3 of text b; `=2` stands for all tokens of sequence 2
    ask [n=N] [key=KEY] [priority=N] [timeout_s=N]   whether so many sequences may join the queue
    cancel ID
    now SECONDS
    step [at=SECONDS] [unfit] [ID=TOKEN ...]   plan, compute, apply, at the end of which it is SECONDS; every output draws "a" unless told
                                       otherwise (`end` ends the turn, `nan` is no number); `unfit`: what is on the host does not fit
    fail ERROR [with ID] [moves=N]   plan, and the step raises, after N of its moves if not all; `with`: only if ID has rows, else
                                       the step goes well
    die [with ID | idle]        plan, and the model dies in the step; `with`: only if ID has rows, else the step goes well; `idle`: it
                                       dies while nothing is computed
    sweep                       let those who only wait go, as while a step runs
    neighbours                  from now on others compute in the thread that its steps have
    evict                       forget what is cached
    state                       who is where, and the cells
    totals                      what was counted so far
    layout                      have the cells laid out anew if that is due

A row is written SEQUENCE:POSITION, with `!` where its logits are wanted; runs of rows as 1:0-4, with `?0-2` after them where rows are
scored. A row that closes a gap between slots is +SLOT:POSITION. What the model computes in several passes is said behind them.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

import attrs
import pytest

from cllm import errors
from cllm.backend import KvLayout
from cllm.engine.batch.plan import Drop, Move, Plan, Restore, Restored, Save, Share, StepOutput, Trim
from cllm.engine.cost.curve import DEFAULT_CURVE, Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Delta, Event, Failed, Finished, TokenLogprob
from cllm.engine.limits import Limits
from cllm.engine.memory.prices import Prices
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import Sequence, SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.testing.fake import END_OF_TURN, FakeVocabulary
from cllm.text.grammar import Grammars, GrammarSource, Kind

GRAMMARS = Grammars(FakeVocabulary())
FOLDER = Path(__file__).parent / "scenarios"
LIMITS = {"n_cells": 1000, "n_slots": 8, "n_ctx": 100, "n_rows_max": 64, "row_budget": 16, "n_live_max": 8, "n_waiting_max": 100}
FAILURES = {
    "NoRoom": errors.NoRoom("no room"),
    "StepFailed": errors.StepFailed("failed"),
    "Aborted": errors.Aborted("aborted"),
    "RuntimeError": RuntimeError("a mistake in the backend"),
}


class Conversation:
    """A scheduler, spoken to in words."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tokens: dict[int, list[int]] = {}  # of each sequence, those of its prompt first
        self.curve = DEFAULT_CURVE
        self.scheduler = self.new_scheduler([])

    def new_scheduler(self, words: list[str]) -> StepScheduler:
        changes: dict[str, str] = dict(map(_pair, words))
        times = {f"{name}_s": int(changes.pop(f"{name}_ms")) / 1000 for name in ("itl_target", "itl_max") if f"{name}_ms" in changes}
        numbers = {name: None if value == "auto" else int(value) for name, value in changes.items()}
        limits = Limits(**{**LIMITS, **numbers, **times})  # type: ignore[arg-type]
        scheduler = StepScheduler(limits, FakeVocabulary(), CostModel(self.curve, n_rows_max=limits.n_rows_max))
        if scheduler.memory.offload is not None:
            scheduler.memory.offload.prices = Prices(None if self.curve is DEFAULT_CURVE or not self.curve.cell_s else scheduler.cost)
        return scheduler

    def tell(self, command: str) -> list[str]:
        word, *rest = command.split()
        lines: list[str] = getattr(self, f"do_{word}")(rest)
        self.scheduler.check()
        return lines

    def do_limits(self, words: list[str]) -> list[str]:
        self.scheduler = self.new_scheduler(words)
        return []

    def do_costs(self, words: list[str]) -> list[str]:
        rows = [(int(n), int(ms) / 1000) for n, _, ms in (word.partition(":") for word in words if ":" in word)]
        named = dict(_pair(word) for word in words if "=" in word)
        reads = [(int(n), float(us) / 1e6) for n, _, us in (word.partition("/") for word in named.pop("read", "").split(",") if word)]
        seconds = {name: float(us) / 1e6 for name, us in named.items()}
        apart_s = seconds.get("apart", 0.0)
        cells = {"cell_s": seconds.get("cell", 0.0), "apart_gain_cell_s": apart_s, "attended": reads or [(1, 5 * apart_s)]}
        cells |= {f"{name}_cell_s": seconds[name] for name in ("save", "restore") if name in seconds}
        self.curve = Curve(rows=rows, outputs=[(1, 0.0)], **cells)  # type: ignore[arg-type]
        return []

    def do_weights(self, words: list[str]) -> list[str]:
        weights = {key: float(weight) for key, weight in map(_pair, words)}
        self.scheduler = StepScheduler(attrs.evolve(self.scheduler.limits, key_weights=weights), FakeVocabulary())
        return []

    def do_now(self, words: list[str]) -> list[str]:
        self.now = float(words[0])
        return []

    def do_submit(self, words: list[str]) -> list[str]:
        fields = dict(map(_pair, words[1:]))
        stopping = StopParams(
            max_tokens=int(fields["max_tokens"]) if "max_tokens" in fields else None,
            min_tokens=int(fields.get("min_tokens", 0)),
            stop=(fields["stop"],) if "stop" in fields else (),
            stop_token_ids=frozenset({int(fields["stop_token"])}) if "stop_token" in fields else frozenset(),
        )
        spec = SequenceSpec(
            prompt=self._prompt(fields["prompt"]),
            sampling=SamplingParams(temperature=0, logit_bias=((int(fields["barred"]), -math.inf),) if "barred" in fields else ()),
            stopping=stopping,
            priority=int(fields.get("priority", 0)),
            key=fields.get("key", ""),
            timeout_s=float(fields["timeout_s"]) if "timeout_s" in fields else None,
            n_prompt_logprobs=0 if "scored" in fields else None,
            grammar=GRAMMARS.compile(GrammarSource(Kind.REGEX, fields["regex"])) if "regex" in fields else None,
            cache_salt=fields.get("salt", ""),
            cache_prompt="private" not in fields,
            group=fields.get("group", ""),
            adapter=fields.get("adapter", ""),
        )
        try:
            seq_id = self.scheduler.submit(spec, self.now)
        except errors.RequestError as error:
            return [f"{type(error).__name__}: {error}"]
        assert seq_id == int(words[0]), "sequences are numbered in the order of their submission"
        self.tokens[seq_id] = list(spec.prompt)
        return []

    def do_ask(self, words: list[str]) -> list[str]:
        fields = dict(map(_pair, words))
        timeout_s = float(fields["timeout_s"]) if "timeout_s" in fields else None
        n, priority = int(fields.get("n", 1)), int(fields.get("priority", 0))
        try:
            self.scheduler.check_room(self.now, n_sequences=n, key=fields.get("key", ""), priority=priority, timeout_s=timeout_s)
        except errors.RequestError as error:
            again = f"; again after {error.retry_after_s:.0f} s" if isinstance(error, errors.QuotaExceeded | errors.Unavailable) else ""
            return [f"{error.status} {type(error).__name__}: {error}{again}"]
        return ["may come"]

    def _prompt(self, text: str) -> list[int]:
        if text.isdigit():
            return [98] * int(text)
        tokens: list[int] = []
        for name, n in re.findall(r"([a-z=])(\d+)", text):
            tokens += self.tokens[int(n)] if name == "=" else [33 + (ord(name) * 7 + i * i) % 90 for i in range(int(n))]
        return tokens

    def do_cancel(self, words: list[str]) -> list[str]:
        self.scheduler.cancel(int(words[0]))
        return []

    def do_step(self, words: list[str]) -> list[str]:
        plan = self.scheduler.plan(self.now)
        if plan is None:
            return ["nothing to do"]
        draws = dict(map(_pair, words))
        self.now = float(draws.pop("at", self.now))  # when the step ends
        _move(plan, len(plan.moves), fits="unfit" not in draws)
        return [*_plan_lines(plan), *self._apply(plan, draws)]

    def do_fail(self, words: list[str]) -> list[str]:
        plan = self.scheduler.plan(self.now)
        assert plan is not None
        culprit = int(words[2]) if words[1:2] == ["with"] else None
        plan.n_moves_done = next((int(word[6:]) for word in words if word.startswith("moves=")), len(plan.moves))
        if culprit is not None and culprit not in {sequence.seq_id for sequence in plan.members()}:
            return [*_plan_lines(plan), *self._apply(plan, {})]
        _move(plan, plan.n_moves_done, fits=True)
        lines = _plan_lines(plan)
        events = self.scheduler.apply_failure(plan, FAILURES[words[0]], self.now)
        return [*lines, f"raises {words[0]}", *_event_lines(events)]

    def do_die(self, words: list[str]) -> list[str]:
        plan = self.scheduler.plan(self.now) if words != ["idle"] else None
        culprit = int(words[1]) if words[:1] == ["with"] else None
        if plan is not None and culprit is not None and culprit not in {sequence.seq_id for sequence in plan.members()}:
            return [*_plan_lines(plan), *self._apply(plan, {})]
        lines = [] if plan is None else _plan_lines(plan)
        return [*lines, "dies", *_event_lines(self.scheduler.apply_death(plan, errors.ModelDied("killed"), self.now))]

    def do_sweep(self, _: list[str]) -> list[str]:
        return _event_lines(self.scheduler.sweep_waiting(self.now))

    def do_neighbours(self, _: list[str]) -> list[str]:
        self.scheduler.has_neighbours = True
        return []

    def do_evict(self, _: list[str]) -> list[str]:
        self.scheduler.evict_cached()
        return []

    def do_totals(self, _: list[str]) -> list[str]:
        totals, n_evicted = self.scheduler.totals, self.scheduler.memory.totals.n_evicted_cells
        ended = f"preempted={totals.n_preempted} cancelled={totals.n_cancelled} evicted={n_evicted}"
        return [f"{ended} prefill_rows={totals.n_prefill_rows} layouts={totals.n_layouts}"]

    def do_layout(self, _: list[str]) -> list[str]:
        layout, limits = self.scheduler.layout_due(), self.scheduler.limits
        if layout is None:
            return ["as it is"]
        lines = [f"to be {layout.value}"]
        self.scheduler.interrupt(self.now)
        while (plan := self.scheduler.plan_departure(self.now)) is not None:
            _move(plan, len(plan.moves), fits=True)
            lines += [*_plan_lines(plan), *self._apply(plan, {})]
        self.scheduler.vacate()
        is_apart = layout is KvLayout.STREAMS
        n_slots = (limits.n_slots_apart or 1) if is_apart else LIMITS["n_slots"]
        slots = {"n_slots": n_slots, "n_live_max": min(LIMITS["n_live_max"], n_slots)}  # as `limits_of` has it
        changes = {"apart": is_apart, "copies_slots": is_apart, "can_share": not is_apart, "can_save_part": not is_apart}
        self.scheduler.laid_out(attrs.evolve(limits, **changes, **slots), 0.1)
        return lines

    def do_state(self, _: list[str]) -> list[str]:
        cells = self.scheduler.cells
        lines = [f"cells free={cells.n_free} held={cells.n_held} cached={cells.n_cached}"]
        for view in self.scheduler.views():
            line = f"{view.seq_id} {view.phase.value} tokens={view.n_prompt}+{view.n_generated} computed={view.n_computed}"
            shared = (
                f" shared={view.n_shared} miss={view.miss.value}@{view.n_cached}"
                if view.miss and self.scheduler.limits.keeps_prefixes
                else ""
            )
            lines.append(line + shared)
        return lines

    def _apply(self, plan: Plan, draws: dict[str, str]) -> list[str]:
        tokens = [_token(draws.get(str(sequence.seq_id), "97")) for sequence in plan.outputs]
        invalid = [i for i, token in enumerate(tokens) if token is None]
        scores = [[TokenLogprob(target, -1.0, []) for target in one.targets] for one in plan.scorings]
        output = StepOutput([token or 0 for token in tokens], invalid, None, list(scores))
        events = self.scheduler.apply(plan, output, self.now)
        self.tokens.update((sequence.seq_id, list(sequence.tokens)) for sequence in plan.outputs)
        return _event_lines(events)


def _pair(word: str) -> tuple[str, str]:
    name, _, value = word.partition("=")
    return name, value


def _token(word: str) -> int | None:
    return {"end": END_OF_TURN, "nan": None}.get(word) if not word.isdigit() else int(word)


def _move(plan: Plan, n_moves: int, *, fits: bool) -> None:
    """Note what is saved and restored, as `compute` does."""
    for move in plan.moves[:n_moves]:
        if isinstance(move, Save):
            plan.saved.append((move, bytes(100 * (len(move.tokens) - move.start)), 1e-6))
        elif isinstance(move, Restore):
            chain = move.chain
            plan.restored.append(
                Restored(move, chain.end, chain.end - chain.start, 1e-6) if fits else Restored(move, chain.start, 0, 0.0, chain.pieces[0])
            )


def _plan_lines(plan: Plan) -> list[str]:
    lines = [_move_line(move) for move in plan.moves]
    batch, pos = plan.batch, 0
    rows = []
    owners: list[tuple[Sequence | tuple[int, int], int]] = [(sequence, 1) for sequence in plan.decoding]
    owners += plan.prefilling
    if plan.passes and not plan.scorings:
        owners = sorted([*owners, *((filler, 1) for filler in plan.fillers)], key=lambda owner: _slot(owner[0]))
    for sequence, n_rows in owners:
        if isinstance(sequence, tuple):
            assert (batch.slots[pos], batch.positions[pos], batch.outputs[pos]) == (*sequence, 0)
            rows.append(f"+{sequence[0]}:{sequence[1]}")
            pos += 1
            continue
        start, end = int(batch.positions[pos]), int(batch.positions[pos + n_rows - 1])
        assert (batch.slots[pos : pos + n_rows] == sequence.slot).all()
        assert batch.tokens[pos : pos + n_rows].tolist() == sequence.tokens[start : end + 1]
        drawn = "!" if sequence in plan.outputs else ""
        scored = _scored_rows(plan, sequence)
        assert batch.outputs[pos : pos + n_rows].tolist() == [
            row in scored or (row == end and drawn != "") for row in range(start, end + 1)
        ]
        told = f"?{scored.start}-{scored.stop - 1}" if scored else ""
        rows.append(f"{sequence.seq_id}:{start}" + (f"-{end}" if end > start else "") + drawn + told)
        pos += n_rows
    assert pos == batch.n_rows
    assert int(batch.outputs[: batch.n_rows].sum()) == batch.n_outputs == len(plan.outputs) + sum(len(one.targets) for one in plan.scorings)
    if rows:
        sizes = f", in passes of {' '.join(map(str, plan.passes))}" if len(plan.passes) > 1 else ""
        lines.append(f"rows {' '.join(rows)}{sizes}")
    return lines + _event_lines(plan.events)


def _slot(owner: Sequence | tuple[int, int]) -> int:
    return owner[0] if isinstance(owner, tuple) else owner.slot


def _scored_rows(plan: Plan, sequence: Sequence) -> range:
    """The positions of a sequence's rows that are scored in this step; the plan's own account of them is checked."""
    for one in plan.scorings:
        if one.sequence is sequence:
            assert one.targets == sequence.tokens[sequence.n_scored + 1 :][: len(one.targets)]
            n_before = plan.batch.outputs[: _first_row(plan, sequence) + sequence.n_scored - sequence.n_computed].sum()
            assert one.first == n_before
            return range(sequence.n_scored, sequence.n_scored + len(one.targets))
    return range(0)


def _first_row(plan: Plan, sequence: Sequence) -> int:
    n_before = len(plan.decoding)
    for one, n_rows in plan.prefilling:
        if one is sequence:
            return n_before
        n_before += n_rows
    raise AssertionError("only a prompt is scored")


def _move_line(move: Move) -> str:
    match move:
        case Drop(slot):
            return f"drop slot {slot}"
        case Trim(slot, n_keep):
            return f"trim slot {slot} to {n_keep}"
        case Share(slot, source, n_tokens):
            return f"slot {slot} shares {n_tokens} of slot {source}"
        case Save(slot, start, _, tokens):
            return f"save slot {slot} {start}-{len(tokens) - 1}"
        case Restore(slot, chain):
            return f"restore slot {slot} {chain.start}-{chain.end - 1}"


def _event_lines(events: list[Event]) -> list[str]:
    return [_event_line(event) for event in events]


def _event_line(event: Event) -> str:
    match event:
        case Delta(seq_id=seq_id, prompt_logprobs=list(scores)):
            return f"{seq_id} scored {len(scores)}"
        case Delta(seq_id=seq_id, text=text, tokens=tokens):
            return f"{seq_id} token {tokens[0]} {text!r}"
        case Finished(seq_id=seq_id, reason=reason, stop_reason=stop_reason, text=text, usage=usage):
            cached = f" cached={usage.n_cached}" if usage.n_cached else ""
            held = f" text={text!r}" if text else ""
            return f"{seq_id} finished {reason.value} stop_reason={stop_reason!r} generated={usage.n_generated}{cached}{held}"
        case Failed(seq_id=seq_id, error=error):
            return f"{seq_id} failed {error.status} {type(error).__name__}: {error}"


def _blocks(text: str) -> list[tuple[list[str], list[str], list[str]]]:
    """(comments, commands, answers) of each block; blocks are separated by blank lines."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        comments = [line for line in lines if line.startswith("#")]
        rest = [line for line in lines if not line.startswith("#")]
        cut = rest.index("----") if "----" in rest else len(rest)
        blocks.append((comments, rest[:cut], rest[cut + 1 :]))
    return blocks


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_the_scheduler_answers_as_the_scenario_says(path: Path) -> None:
    conversation = Conversation()
    written = []
    for comments, commands, answers in _blocks(path.read_text("utf-8")):
        given = [line for command in commands for line in conversation.tell(command)]
        written.append("\n".join([*comments, *commands, *(["----", *given] if given or answers else [])]))
        if not os.environ.get("CLLM_REWRITE"):
            assert given == answers, f"{path.name}: after {commands}"
    if os.environ.get("CLLM_REWRITE"):
        path.write_text("\n\n".join(written) + "\n", "utf-8")
        pytest.fail(f"{path.name} was written anew, since CLLM_REWRITE is set")


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("*.txt"))) >= 10
