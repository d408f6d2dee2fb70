"""`cllm calibrate`: measures what a model's steps cost, keeps it for the server, and shows it to a person."""

from __future__ import annotations

import attrs
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from cllm.bench import plot
from cllm.bench.outputs import check_output
from cllm.config import Settings
from cllm.engine.cost.curve import Curve
from cllm.engine.cost.model import CostModel
from cllm.errors import BackendUnavailable
from cllm.serve.loading import load
from cllm.serve.logs import configure_logging
from cllm.serve.progress import shown

N_COLUMNS_BAR = 24


def run(settings: Settings, *, plot_path: str | None) -> int:
    """Measure, keep and show; return the process's exit code. Raises: SettingsError · BackendUnavailable · LoadFailed · BenchFailed."""
    if plot_path is not None:
        check_output("plot", plot_path)  # before anything is loaded
        plot.check(plot_path)
    if settings.log_level == "info":
        settings = attrs.evolve(settings, log_level="warning")
    configure_logging(settings)
    with shown(settings.model or "the default model") as on_progress:
        loaded = load(attrs.evolve(settings, calibrate="again", embeddings=False, embedding_model=None), on_progress)
    cost = loaded.cost
    loaded.close()
    if not cost.is_grounded:
        raise BackendUnavailable("there is nothing to measure: this model makes its steps by itself, or gives vectors alone")
    show(cost, title=f"{loaded.served.name} on {loaded.served.backend}")
    if plot_path is not None:
        draw(cost.curve, plot_path, title=loaded.served.name)
    return 0


def show(cost: CostModel, *, title: str) -> None:
    """Print the curve: what was measured, and what follows for a cell."""
    curve, outputs_s = cost.curve, dict(cost.curve.outputs)
    table = Table(title=title, title_justify="left")
    for name in ("rows of a step", "ms", "ms when all are outputs", "ms for each row"):
        table.add_column(name, justify="right")
    table.add_column()
    dearest_s = max(seconds / n for n, seconds in curve.rows)
    for n, seconds in curve.rows:
        all_ms = f"{1000 * (seconds + outputs_s[n]):.3g}" if n in outputs_s else ""
        bar = Bar(dearest_s, 0, seconds / n, width=N_COLUMNS_BAR)
        table.add_row(str(n), f"{1000 * seconds:.3g}", all_ms, f"{1000 * seconds / n:.3g}", bar)
    console = Console()
    console.print(table)
    console.print(f"a cell in use adds {1e6 * curve.cell_s:.2g} us to a step and {1e6 * curve.row_cell_s:.2g} us for each row")
    together = " · ".join(f"{n}: {1e6 * seconds:.2g} us" for n, seconds in curve.attended)
    console.print(f"rows of one sequence take, for each cell of it before them, {together}")
    if curve.save_cell_s is not None and curve.restore_cell_s is not None:
        console.print(f"a cell is saved in {1e6 * curve.save_cell_s:.2g} us and restored in {1e6 * curve.restore_cell_s:.2g} us")
        if curve.save_fixed_s or curve.restore_fixed_s:
            console.print(f"every state takes {1e6 * curve.save_fixed_s:.2g} and {1e6 * curve.restore_fixed_s:.2g} us more, however short")
    if curve.apart_gain_cell_s:
        console.print(f"apart, a generating row is spared {1e6 * curve.apart_gain_cell_s:.2g} us for each cell of another sequence")


def draw(curve: Curve, path: str, *, title: str) -> None:
    """Draw the curve as SVG. Raises: BenchFailed."""
    figure, axes = plot.pyplot().subplots(1, 2, figsize=(9, 3))
    outputs_s = dict(curve.outputs)
    both = [(n, seconds + outputs_s[n]) for n, seconds in curve.rows if n in outputs_s]
    for name, points in (("no outputs", curve.rows), ("all outputs", both)):
        counts = [n for n, _ in points]
        axes[0].plot(counts, [1000 * seconds for _, seconds in points], marker=".", label=name)
        axes[1].plot(counts, [1000 * seconds / n for n, seconds in points], marker=".", label=name)
    for axis, label in zip(axes, ("a step, ms", "each row, ms"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("rows of a step")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
    axes[1].legend(frameon=False)
    figure.suptitle(title)
    plot.save(figure, path)
