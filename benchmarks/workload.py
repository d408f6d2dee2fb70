"""The requests of the benchmarks, by the names under which they have been here; `cllm.bench.workloads` makes them."""

from cllm.bench.workloads import GREEDY, PLAIN, USUAL, Ask, Sampling, seed_workload

__all__ = ["GREEDY", "PLAIN", "USUAL", "Ask", "Sampling", "seed_workload"]
