"""What the whole stack costs: tokens/s over HTTP, streamed, against a bare loop of `llama_decode` over the same batches.

    python -m benchmarks against-native [--model FILE] [--pairs 5] [--concurrency 8] [--requests 40]

Both run in the same pass of the benchmark, turn by turn, with fresh prompts each turn. The ratio of a turn is what counts: the machine's
own speed cancels out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import attrs
import trio

from benchmarks.arguments import model_path, positive
from benchmarks.load import Pass, closed_loop
from benchmarks.models import model_file
from benchmarks.server import ServerProcess
from benchmarks.workload import GREEDY, PLAIN, USUAL, Ask, Sampling, seed_workload

SAMPLINGS = (GREEDY, PLAIN, USUAL)
N_PROMPT, N_GENERATED = 32, 50  # tokens of each request


@attrs.define(kw_only=True)
class Measured:
    """The turns of one way of sampling."""

    sampling: Sampling
    served: list[Pass] = attrs.field(factory=list)
    native_tokens_per_s: list[float] = attrs.field(factory=list)
    server_cpu_s: list[float] = attrs.field(factory=list)

    @property
    def ratios(self) -> list[float]:
        """Served over native, turn by turn."""
        return [served.tokens_per_s / native for served, native in zip(self.served, self.native_tokens_per_s, strict=True)]


class NativeProcess:
    """The bare loop in a process of its own."""

    def __init__(self, model: Path, n_cells: int, n_threads: int) -> None:
        command = [sys.executable, "-m", "benchmarks.native", str(model), str(n_cells), str(n_threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == "ready"

    def tokens_per_s(self, asks: list[Ask], concurrency: int, row_budget: int) -> float:
        """Run the batches of `asks` once."""
        assert self._process.stdin is not None
        order = {
            "prompts": [ask.prompt for ask in asks],
            "n_generated": asks[0].n_generated,
            "concurrency": concurrency,
            "row_budget": row_budget,
        }
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._answer())
        return sum(ask.n_generated for ask in asks) / float(answer["wall_s"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure(arguments: argparse.Namespace) -> list[Measured]:
    """Alternate: bare loop, server; for each way of sampling, as many turns as asked."""
    model = Path(arguments.model) if arguments.model else model_file("qwen3-0.6b", "Q4_K_M")
    native = NativeProcess(model, arguments.ctx_size, arguments.threads)
    # One pool, as many at once, and nothing kept, as in the bare loop; what steps cost is measured anew, as the machine is now.
    sizes = {"ctx-size": arguments.ctx_size, "threads": arguments.threads, "row-budget": arguments.row_budget}
    alike = {"parallel": arguments.concurrency, "kv": "unified", "host-cache-mb": 0}
    options = [part for name, value in {**sizes, **alike}.items() for part in (f"--{name}", str(value))]
    results = [Measured(sampling=sampling) for sampling in SAMPLINGS]
    with tempfile.TemporaryDirectory() as folder, ServerProcess(str(model), [*options, "--calibration-dir", folder]) as server:
        for turn in range(-1, arguments.pairs):  # the first turn warms up and does not count
            for number, result in enumerate(results):
                _turn(arguments, server, native, result, seed=1000 * (turn + 2) + 100 * number, number=turn)
    native.close()
    return results


def _turn(arguments: argparse.Namespace, server: ServerProcess, native: NativeProcess, result: Measured, *, seed: int, number: int) -> None:
    counts = number >= 0
    n = arguments.requests if counts else arguments.concurrency
    asks = seed_workload(n, n_prompt=N_PROMPT, n_generated=N_GENERATED, n_vocab=server.n_vocab, seed=seed)
    bare = partial(native.tokens_per_s, asks, arguments.concurrency, arguments.row_budget)
    is_bare_first = number % 2 == 0  # or what the machine does within a turn would always be to one's good
    native_tokens_per_s = bare() if is_bare_first else 0.0
    cpu_s = server.cpu_s()
    served = trio.run(_served, server.port, asks, arguments.concurrency, result.sampling, seed)
    cpu_s = server.cpu_s() - cpu_s
    served.check(asks)
    if not is_bare_first:
        native_tokens_per_s = bare()
    if not counts:
        return
    result.served.append(served)
    result.native_tokens_per_s.append(native_tokens_per_s)
    result.server_cpu_s.append(cpu_s)
    print(
        f"{result.sampling.name:16} native {native_tokens_per_s:7.1f}  served {served.tokens_per_s:7.1f} tokens/s  "
        f"ratio {result.ratios[-1]:.3f}",
        flush=True,
    )


async def _served(port: int, asks: list[Ask], concurrency: int, sampling: Sampling, seed: int) -> Pass:
    return await closed_loop(port, asks, concurrency, sampling, seed=seed)


def report(arguments: argparse.Namespace, results: list[Measured]) -> dict[str, object]:
    """Print the table; return what goes into the JSON line."""
    rows = []
    print(f"\n{'sampling':16} {'native':>8} {'served':>8} {'ratio: median':>14} {'min':>6} {'max':>6}   client CPU share")
    for result in results:
        ratios = result.ratios
        share = statistics.median(served.client_cpu_s / served.wall_s for served in result.served)
        row = {
            "sampling": result.sampling.name,
            "native_tokens_per_s": round(statistics.median(result.native_tokens_per_s), 2),
            "served_tokens_per_s": round(statistics.median(served.tokens_per_s for served in result.served), 2),
            "ratio_median": round(statistics.median(ratios), 4),
            "ratio_min": round(min(ratios), 4),
            "ratio_max": round(max(ratios), 4),
            "client_cpu_share": round(share, 4),
        }
        rows.append(row)
        print(
            f"{row['sampling']:16} {row['native_tokens_per_s']:8} {row['served_tokens_per_s']:8} {row['ratio_median']:14} "
            f"{row['ratio_min']:6} {row['ratio_max']:6}   {share:.1%}"
        )
    return {
        "benchmark": "against-native",
        "requests": arguments.requests,
        "concurrency": arguments.concurrency,
        "pairs": arguments.pairs,
        "threads": arguments.threads,
        "n_prompt": N_PROMPT,
        "n_generated": N_GENERATED,
        "rows": rows,
    }


def main(asked: list[str] | None = None) -> None:
    """Measure, print a table, end with one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks against-native", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=model_path, help="a GGUF file (default: the qwen3-0.6b shape in Q4_K_M, made on demand)")
    parser.add_argument("--pairs", type=positive, default=5)
    parser.add_argument("--concurrency", type=positive, default=8)
    parser.add_argument("--requests", type=positive, default=40)
    parser.add_argument("--ctx-size", type=positive, default=4096)
    parser.add_argument("--row-budget", type=positive, default=512)
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args(asked)
    if arguments.requests < arguments.concurrency:
        parser.error(f"--requests: {arguments.concurrency} at a time are more than {arguments.requests}")
    if (most := arguments.concurrency * (N_PROMPT + N_GENERATED)) > arguments.ctx_size:
        parser.error(f"--ctx-size: {arguments.concurrency} sequences of {N_PROMPT} and {N_GENERATED} tokens take {most} cells")
    print(json.dumps(report(arguments, measure(arguments))))


if __name__ == "__main__":
    main()
