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
    columns = [dict(rows(summary)) for _, summary in passes]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(Text(column.get(name, "")) for column in columns))
    console.print(table)
    for title, summary in passes:
        for reason, n in summary.failures.items():
            console.print(Text(f"{title}: {n} failed: {reason}", style="red"))
        for line in summary.warnings():
            console.print(Text(f"{title}: {line}", style="yellow"))


def rows(summary: Summary) -> list[tuple[str, str]]:
    """The table's rows: a name with its unit, and the figure."""
    found = [
        ("generated tokens/s", f"{summary.tokens_per_s:.1f}"),
        ("requests/s", f"{summary.requests_per_s:.2f}"),
        ("requests", f"{summary.n_requests}"),
        ("failed", f"{summary.n_failed}"),
        ("exactly the asked tokens", "all" if summary.is_exact else f"{summary.n_requests - summary.n_inexact} of {summary.n_requests}"),
        ("prompt / cached / generated tokens", f"{summary.n_prompt} / {summary.n_cached} / {summary.n_generated}"),
        ("first text, ms: p50 / p90 / p99 / max", _ms(summary.ttft_s)),
        ("between texts, ms: p50 / p90 / p99 / max", _ms(summary.itl_s)),
        ("whole answer, ms: p50 / p90 / p99 / max", _ms(summary.e2e_s)),
        (
            f"good requests/s (first {summary.goal.ttft_s:g} s, tokens {summary.goal.itl_s:g} s)",
            f"{summary.goodput_per_s:.2f} ({summary.goodput_share:.0%})",
        ),
    ]
    if summary.late_gap_max_s is not None:
        found.append(("longest wait of the others, ms", f"{1000 * summary.late_gap_max_s:.0f}"))
    if summary.late_ttft_s is not None:
        found.append(("first text of the late one, ms", f"{1000 * summary.late_ttft_s:.0f}"))
    found.append(("wall / client CPU, s", f"{summary.wall_s:.2f} / {summary.client_cpu_s:.2f}"))
    if summary.server_cpu_s is not None:
        found.append(("server CPU, s", f"{summary.server_cpu_s:.2f}"))
    if summary.server_rss_peak_mb is not None:
        found.append(("server peak memory, MiB", f"{summary.server_rss_peak_mb:.0f}"))
    return found


def _ms(spread: Spread) -> str:
    return " / ".join("-" if value is None else _short(1000 * value) for value in (spread.p50, spread.p90, spread.p99, spread.max))


def _short(ms: float) -> str:
    return f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"
