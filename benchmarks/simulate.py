"""What a rule for the row budget would bring, before anything is run: the scheduler itself on a machine that only counts time.

    python -m benchmarks simulate

The machine has the measured curve of two CPU cores, with AVX-512 or with AVX2 alone, and a model of 0.6 billion parameters (Q4_K_M). A rule
that looks well by one curve may stand at an edge by the other. Clients and shell take no time. `auto` is the rule as it is where
`--parallel` says how many run, `auto, 250 ms` with the time between tokens that it keeps where nobody says that. With a budget of 2048
rows a prompt is computed whole, as llama-server does as it comes.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import random
import statistics
from collections.abc import Iterator

import attrs

from cllm.bench.workloads import WORKLOADS, Ask, Work, with_load
from cllm.engine.batch import budget
from cllm.engine.batch.plan import StepOutput
from cllm.engine.cost.curve import Curve
from cllm.engine.cost.model import CostModel
from cllm.engine.events import Delta, Finished
from cllm.engine.limits import Limits
from cllm.engine.sampling.params import StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.serve.loading import ITL_MAX_S
from cllm.testing.fake import FakeVocabulary

HELP_PACE = (
    "how many times as long as a step without prompts one with them may take (PACE, PACE_APART and PACE_APART_MAX of the budget; PACE_KEYS "
    "and PACE_DEEP stay)"
)
ROWS_MS = {
    1: 8, 2: 18, 3: 29, 4: 38, 5: 44, 6: 50, 7: 52, 8: 60, 9: 60, 10: 64, 11: 73, 12: 74, 13: 75, 14: 78, 15: 88, 16: 71, 17: 81, 18: 87,
    19: 93, 20: 92, 22: 95, 23: 104, 24: 94, 26: 108, 28: 110, 31: 138, 32: 120, 33: 126, 40: 158, 48: 179, 56: 200, 63: 236, 64: 225,
    80: 283, 96: 327, 128: 432, 256: 825, 512: 1725,
}  # fmt: skip
OUTPUTS_MS = {1: 7, 2: 9, 4: 10, 8: 22, 12: 25, 16: 28, 32: 42, 64: 60}
TWO_CORES = Curve(
    rows=[(n, ms / 1000) for n, ms in ROWS_MS.items()],
    outputs=[(n, ms / 1000) for n, ms in OUTPUTS_MS.items()],
    cell_s=6e-7,
    row_cell_s=2e-8,
)
SLOW_ROWS_MS = {
    1: 22, 2: 40, 3: 54, 4: 62, 6: 90, 8: 131, 12: 178, 16: 179, 24: 281, 32: 316, 48: 406, 64: 580, 96: 782, 128: 1030, 256: 2270,
    512: 4687,
}  # fmt: skip
SLOW_OUTPUTS_MS = {1: 11, 2: 16, 4: 22, 8: 50, 16: 84, 32: 111}
MACHINES = {
    "AVX-512": TWO_CORES,
    "AVX2": Curve(
        rows=[(n, ms / 1000) for n, ms in SLOW_ROWS_MS.items()],
        outputs=[(n, ms / 1000) for n, ms in SLOW_OUTPUTS_MS.items()],
        cell_s=1e-6,
        row_cell_s=2.2e-7,
    ),
}
WORKED = (
    ("seed-40x8", 8, False),
    ("mixed-small", 8, False),
    ("mixed-small", 8, True),
    ("mixed-small", 16, False),
    ("mixed-small", 16, True),
    ("mixed", 8, True),
    ("long-among-short", 7, False),
    ("shared-prefix", 8, False),
)
SHARED = ("shared-prefix", "chat-turns")  # where requests go on from each other's cells
NOISE = 0.04
N_TOKENS = 200_000


@attrs.define
class Figures:
    """What one pass came to."""

    machine: str
    workload: str
    rule: str
    tokens_per_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float


@attrs.define
class Client:
    """Sends its asks one after the other and notes when tokens come."""

    asks: Iterator[Ask]
    sent_at: float = 0.0
    last_at: float | None = None
    ttft_s: list[float] = attrs.field(factory=list)
    gaps_s: list[float] = attrs.field(factory=list)

    def token(self, now: float) -> None:
        if self.last_at is None:
            self.ttft_s.append(now - self.sent_at)
        else:
            self.gaps_s.append(now - self.last_at)
        self.last_at = now


class Simulation:
    """One pass of a workload."""

    def __init__(
        self,
        work: Work,
        concurrency: int,
        *,
        curve: Curve,
        row_budget: int | None,
        itl_target_s: float | None,
        itl_max_s: float | None,
        apart: bool,
        seed: int,
        n_cells_kept: int | None = None,
    ) -> None:
        limits = Limits(
            n_cells=n_cells_kept or 65536, n_slots=256, n_ctx=n_cells_kept or 16384, n_rows_max=2048, row_budget=row_budget,
            itl_target_s=itl_target_s, itl_max_s=itl_max_s, n_live_max=concurrency if apart else 64, n_waiting_max=1000, apart=apart,
            keeps_prefixes=n_cells_kept is not None, can_share=True, can_trim=True,
        )  # fmt: skip
        self._machine = CostModel(curve, n_rows_max=2048, apart=apart)  # the truth, which never learns
        self._scheduler = StepScheduler(limits, FakeVocabulary(N_TOKENS), CostModel(curve, n_rows_max=2048, apart=apart))
        self._rng = random.Random(seed)
        self._asks = iter(ask for chain in work.chains for ask in chain)
        self._late = work.late
        self._clients = [Client(self._asks) for _ in range(concurrency)]
        self._sequences: dict[int, Client] = {}
        self.now = 0.0

    def run(self) -> list[Client]:
        """Work everything off; return the clients that came in time."""
        for client in self._clients:
            self._send(client)
        while (plan := self._scheduler.plan(self.now)) is not None:
            seconds = 0.0
            if plan.n_rows:
                seconds = self._machine.step_s(plan.n_rows, plan.batch.n_outputs, plan.n_cells, plan.passes, attended=plan.attended)
            seconds *= math.exp(self._rng.gauss(0.0, NOISE))
            self.now += seconds
            output = StepOutput([1000] * len(plan.outputs), [], None, model_s=seconds)
            for event in self._scheduler.apply(plan, output, self.now):
                client = self._sequences[event.seq_id]
                if isinstance(event, Delta):
                    client.token(self.now)
                if isinstance(event, Finished):
                    self._send(client)
            if self._late is not None and all(len(client.gaps_s) > 10 for client in self._clients):
                self._send(Client(iter([self._late])))
                self._late = None
        return self._clients

    def _send(self, client: Client) -> None:
        ask = next(client.asks, None)
        if ask is None:
            return
        client.sent_at, client.last_at = self.now, None
        stopping = StopParams(max_tokens=ask.n_generated, ignore_eos=True)
        self._sequences[self._scheduler.submit(SequenceSpec(prompt=ask.prompt, stopping=stopping), self.now)] = client


def simulate(
    name: str,
    concurrency: int,
    rule: str,
    *,
    machine: str,
    row_budget: int | None,
    itl_target_s: float | None = None,
    itl_max_s: float | None = None,
    apart: bool = False,
    seed: int = 1,
) -> Figures:
    """Return what a workload would come to on a machine under a rule; with `apart`, each slot has cells of its own."""
    workload = with_load(WORKLOADS[name], concurrency=concurrency)
    n_cells_kept = workload.cells() if name in SHARED else None
    simulation = Simulation(
        workload.make(N_TOKENS, seed),
        concurrency,
        curve=MACHINES[machine],
        row_budget=row_budget,
        itl_target_s=itl_target_s,
        itl_max_s=itl_max_s,
        apart=apart,
        seed=seed,
        n_cells_kept=n_cells_kept,
    )
    clients = simulation.run()
    ttft_s = [value for client in clients for value in client.ttft_s]
    gaps_s = [value for client in clients for value in client.gaps_s]
    return Figures(
        machine=machine,
        workload=f"{name} x{concurrency}{' apart' if apart else ''}",
        rule=rule,
        tokens_per_s=(len(ttft_s) + len(gaps_s)) / simulation.now,
        ttft_p50_s=statistics.median(ttft_s),
        ttft_p90_s=_quantile(ttft_s, 0.90),
        gap_p50_s=statistics.median(gaps_s),
        gap_p99_s=_quantile(gaps_s, 0.99),
        gap_max_s=max(gaps_s),
    )


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main(asked: list[str] | None = None) -> None:
    """Print a table, end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pace", type=float, nargs="*", default=[], help=HELP_PACE)
    parser.add_argument("--rows", type=int, nargs="*", default=[16, 32, 64, 128, 512, 2048], help="fixed budgets to stand beside")
    arguments = parser.parse_args(asked)
    rows = []
    print(f"{'machine':8} {'workload':24} {'rule':12} {'tok/s':>6} {'TTFT p50':>9} {'p90':>6} {'gap p50':>8} {'p99':>6} {'max':>6}")
    for machine, (name, concurrency, apart) in itertools.product(MACHINES, WORKED):
        show = functools.partial(_show, machine, name, concurrency, apart)
        rows += [show("auto", None), show("auto, 250 ms", None, itl_max_s=ITL_MAX_S)] if not arguments.pace else []
        for pace in arguments.pace:
            budget.PACE = budget.PACE_APART = budget.PACE_APART_MAX = pace
            rows.append(show(f"auto {pace:g}", None))
        rows += [show(f"{n} rows", n) for n in arguments.rows]
    print(json.dumps({"benchmark": "simulate", "rows": [attrs.asdict(row) for row in rows]}))


def _show(
    machine: str, name: str, concurrency: int, apart: bool, rule: str, row_budget: int | None, *, itl_max_s: float | None = None
) -> Figures:
    f = simulate(name, concurrency, rule, machine=machine, row_budget=row_budget, itl_max_s=itl_max_s, apart=apart)
    print(
        f"{f.machine:8} {f.workload:24} {f.rule:12} {f.tokens_per_s:6.1f} {f.ttft_p50_s:9.2f} {f.ttft_p90_s:6.2f} "
        f"{f.gap_p50_s:8.3f} {f.gap_p99_s:6.3f} {f.gap_max_s:6.3f}"
    )
    return f


if __name__ == "__main__":
    main()
