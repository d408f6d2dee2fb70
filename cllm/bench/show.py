"""What a person sees: progress while a pass runs, a table at its end."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import trio
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cllm.bench.load import Progress as Done
from cllm.bench.metrics import Spread, Summary

REFRESH_S: Final = 0.25  # drawing costs the machine that is measured
N_REASONS: Final = 5  # that are told: some name what is left of a quota, or the request, so that none is like another


@asynccontextmanager
async def shown(title: str, done: Done) -> AsyncIterator[None]:
    """Show how far a pass is, on standard error, where somebody looks."""
    if not sys.stderr.isatty():
        yield
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[more]}"),
    )
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), auto_refresh=False, transient=True)
    with bar:
        task = bar.add_task(title, total=None, more="")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_redraw, bar, task, done)
            yield
            nursery.cancel_scope.cancel()


async def _redraw(bar: Progress, task: TaskID, done: Done) -> None:
    n_before = 0
    while True:
        await trio.sleep(REFRESH_S)
        more = f"{(done.n_pieces - n_before) / REFRESH_S:6.0f} chunks/s"
        n_before = done.n_pieces
        if done.n_failed:
            more += f"  {done.n_failed} failed"
        bar.update(task, completed=done.n_ended, total=done.n_requests or None, more=more)
        bar.refresh()


def print_table(passes: Sequence[tuple[str, Summary]], console: Console) -> None:
    """One column for each pass."""
    table = Table("", box=None, header_style="bold")
    for title, _ in passes:
        table.add_column(Text(title), justify="right")
    columns = [rows(summary) for _, summary in passes]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(Text(column.get(name, "")) for column in columns))
    console.print(table)
    for title, summary in passes:
        reasons = list(summary.failures.items())  # the most common first
        for reason, n in reasons[:N_REASONS]:
            console.print(Text(f"{title}: {n} failed: {reason}", style="red"))
        if rest := reasons[N_REASONS:]:
            console.print(Text(f"{title}: {sum(n for _, n in rest)} failed for {len(rest)} other reasons (--json has them)", style="red"))
        for line in summary.warnings():
            console.print(Text(f"{title}: {line}", style="yellow"))


def rows(summary: Summary) -> dict[str, str]:
    """The table's rows: a name with its unit, and the figure."""
    goal = summary.goal
    return {
        "generated tokens/s": f"{summary.tokens_per_s:.1f}",
        "requests/s": f"{summary.requests_per_s:.2f}",
        f"good requests/s (first {goal.ttft_s:g} s, then {goal.itl_s:g} s)": f"{summary.goodput_per_s:.2f}",
        "good requests": f"{summary.goodput_share:.0%}",
        **({} if summary.rate is None else {"requests/s that were to come": f"{summary.rate:.2f}"}),
        **({} if summary.arrived_per_s is None else {"requests/s that came": f"{summary.arrived_per_s:.2f}"}),
        "requests": f"{summary.n_requests}",
        "failed": f"{summary.n_failed}",
        **({} if summary.n_under_way is None else {"under way when it was cut": f"{summary.n_under_way}"}),
        "with exactly the asked tokens": f"{summary.n_requests - summary.n_inexact - summary.n_uncounted}",
        **({"with tokens that nobody counted": f"{summary.n_uncounted}"} if summary.n_uncounted else {}),
        **({"prompt tokens": f"{summary.n_prompt}"} if summary.n_prompt else {}),  # where the server tells of them
        **({} if summary.n_cached is None else {"of these not computed": f"{summary.n_cached}"}),
        "generated tokens": f"{summary.n_generated}",
        **_spread_rows("first text", summary.ttft_s),
        **_spread_rows("between texts", summary.itl_s),
        **_spread_rows("whole answer", summary.e2e_s),
        **_known("longest wait of the others, ms", summary.late_gap_max_s, 1000),
        **_known("first text of the late one, ms", summary.late_ttft_s, 1000),
        **_known("whole answer of the late one, ms", summary.late_e2e_s, 1000),
        "wall time, s": f"{summary.wall_s:.2f}",
        "client CPU, s": f"{summary.client_cpu_s:.2f}",
        "client CPU, of a core": f"{summary.client_cpu_share:.0%}",
        **_known("server CPU, s", summary.server_cpu_s),
        **_known("server peak memory, MiB", summary.server_rss_peak_mb),
        **({} if summary.server_process is None else {"process of these two": summary.server_process}),
    }


def _spread_rows(name: str, spread: Spread) -> dict[str, str]:
    found: dict[str, str] = {}
    for key in ("p50", "p90", "p99", "max"):
        found |= _known(f"{name} {key}, ms", getattr(spread, key), 1000)
    return found


def _known(name: str, value: float | None, factor: float = 1) -> dict[str, str]:
    """One row, if there is a figure for it."""
    return {} if value is None else {name: f"{factor * value:.{1 if factor * value < 100 else 0}f}"}
