"""What sampling costs: ``python -m benchmarks.sampling`` prints milliseconds per call, beside llama.cpp's own chain.

Every call gets logits that are not in the cache from the last one, as a step's are not: several sets take turns. Peaked logits are like
a trained model's (few likely tokens above a bulk), flat ones like a random model's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from cllm.backend import Logits
from cllm.engine.sampling.params import SamplingParams
from cllm.engine.sampling.step import Sampler, Workspace, sample

N_VOCAB = 151_936
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(),
    "0.8 / top_k 40 / top_p 0.95": SamplingParams(temperature=0.8, top_k=40, top_p=0.95),
    "top_p 0.95": SamplingParams(top_p=0.95),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "penalties, temperature 1": SamplingParams(repeat_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5),
    "temperature 1, logprobs 5": SamplingParams(),
}
N_LOGPROBS = {"temperature 1, logprobs 5": 5}


@attrs.frozen
class Timing:
    """Milliseconds per call. CPU time leaves out what other processes took, which on a busy machine is most of a long call."""

    median: float
    minimum: float
    cpu: float  # the least


def flat(rng: np.random.Generator, n_rows: int) -> Logits:
    """Return logits as of random weights."""
    return rng.normal(0, 1.5, (n_rows, N_VOCAB)).astype(np.float32)


def peaked(rng: np.random.Generator, n_rows: int) -> Logits:
    """Return logits as of a trained model: a bulk, and a hundred tokens above it whose likelihood falls with their rank."""
    logits = rng.normal(0, 2, (n_rows, N_VOCAB)).astype(np.float32)
    for row in logits:
        ids = rng.choice(N_VOCAB, 100, replace=False)
        row[ids] = rng.uniform(18, 22) - rng.uniform(1, 2.5) * np.log(np.arange(1, 101)) + rng.normal(0, 0.5, 100)
    return logits


def measure(call: Callable[[Logits], object], sets: list[Logits], n_calls: int) -> Timing:
    """Time `call` on copies of the sets in turn; the copies are as warm as a step's output."""
    times, cpu_times = [], []
    copies = [logits.copy() for logits in sets]
    for i in range(n_calls + 3):
        copy = copies[i % len(sets)]
        copy[:] = sets[i % len(sets)]
        started_at, cpu_started_at = time.perf_counter(), time.thread_time()
        call(copy)
        cpu_times.append((time.thread_time() - cpu_started_at) * 1e3)
        times.append((time.perf_counter() - started_at) * 1e3)
    return Timing(statistics.median(times[3:]), min(times[3:]), min(cpu_times[3:]))


def samplers_of(name: str, n_rows: int) -> list[Sampler]:
    """Return samplers of sequences that have a history, as penalties want."""
    rng = np.random.default_rng(n_rows)
    histories = rng.integers(0, N_VOCAB, (n_rows, 600)).tolist()
    return [
        Sampler(CASES[name], seed=row, tokens=tokens, n_prompt=300, n_logprobs=N_LOGPROBS.get(name)) for row, tokens in enumerate(histories)
    ]


def our_call(samplers: list[Sampler]) -> Callable[[Logits], object]:
    """Return the call that draws one token for each sequence and takes note of it."""
    work = Workspace()

    def call(logits: Logits) -> object:
        sampled = sample(logits, samplers, work)
        for sampler, token in zip(samplers, sampled.tokens, strict=True):
            sampler.tokens.append(token)
            sampler.observe(token)
        return sampled

    return call


def llama_call(n_rows: int) -> Callable[[Logits], object] | None:
    """Return llama.cpp's chain for 0.8 / 40 / 0.95, as its server runs it: candidates built in C order, then the chain, row by row."""
    try:
        import llama_cpp
    except ImportError:
        return None
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for link in (
        llama_cpp.llama_sampler_init_top_k(40),
        llama_cpp.llama_sampler_init_top_p(0.95, 1),
        llama_cpp.llama_sampler_init_temp(0.8),
        llama_cpp.llama_sampler_init_dist(1),
    ):
        llama_cpp.llama_sampler_chain_add(chain, link)
    dtype = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    data = np.zeros(N_VOCAB, dtype)
    ids = np.arange(N_VOCAB, dtype=np.int32)
    pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(llama_cpp.llama_token_data))

    def call(logits: Logits) -> object:
        for row in logits:
            data["id"], data["logit"] = ids, row
            array = llama_cpp.llama_token_data_array(data=pointer, size=N_VOCAB, selected=-1, sorted=False)
            llama_cpp.llama_sampler_apply(chain, ctypes.byref(array))
        return chain

    return call


def results(n_calls: int, rows: list[int]) -> Iterator[tuple[str, int, str, Timing]]:
    """Measure every case."""
    rng = np.random.default_rng(1)
    for n_rows in rows:
        for shape, make in (("peaked", peaked), ("flat", flat)):
            sets = [make(rng, n_rows) for _ in range(2)]
            for name in CASES:
                yield name, n_rows, shape, measure(our_call(samplers_of(name, n_rows)), sets, n_calls)
            theirs = llama_call(n_rows)
            if theirs is not None:
                yield "llama.cpp: 0.8 / 40 / 0.95", n_rows, shape, measure(theirs, sets, n_calls)


def main() -> None:
    """Print the table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    options = parser.parse_args()
    print(f"{'ms per call, 152k tokens':32}{'rows':>6}{'logits':>8}{'median':>9}{'min':>9}{'cpu':>9}{'cpu a row':>11}")
    lines = []
    for name, n_rows, shape, timing in results(options.calls, options.rows):
        line = f"{name:32}{n_rows:6}{shape:>8}{timing.median:9.3f}{timing.minimum:9.3f}{timing.cpu:9.3f}{timing.cpu / n_rows:11.3f}"
        print(line, flush=True)
        lines.append({"case": name, "rows": n_rows, "logits": shape, **attrs.asdict(timing)})
    print(json.dumps(lines))


if __name__ == "__main__":
    main()
