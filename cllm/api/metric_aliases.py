"""Numbers of `/metrics` once more, under the names that boards made for vLLM and llama-server ask for (`--metrics-aliases`).

What here counts nothing of the kind has no alias: a board shows that it lacks it, and nothing that is something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

import attrs
from prometheus_client import Metric
from prometheus_client.samples import Sample


class Source(Protocol):
    """What is encoded as text: a registry."""

    def collect(self) -> Iterable[Metric]:
        """Return the metrics as they are now."""


@attrs.frozen
class Alias:
    """`name` says what `of` does, of the samples with the labels `where`, which it does not show. Counters are without `_total`."""

    name: str
    of: str
    where: Mapping[str, str] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)  # what it shows instead


_VLLM: Final = (
    Alias("num_requests_running", "cllm_sequences", {"state": "running"}),
    Alias("num_requests_waiting", "cllm_sequences", {"state": "waiting"}),
    Alias("prompt_tokens", "cllm_prompt_tokens"),
    Alias("generation_tokens", "cllm_generated_tokens"),
    Alias("num_preemptions", "cllm_preemptions"),
    Alias("prefix_cache_queries", "cllm_prompt_tokens"),
    Alias("prefix_cache_hits", "cllm_prompt_tokens_cached"),
    Alias("request_success", "cllm_sequences_ended", {"how": "stop"}, {"finished_reason": "stop"}),
    Alias("request_success", "cllm_sequences_ended", {"how": "tool_calls"}, {"finished_reason": "tool_calls"}),
    Alias("request_success", "cllm_sequences_ended", {"how": "length"}, {"finished_reason": "length"}),
    Alias("request_success", "cllm_sequences_ended", {"how": "cancelled"}, {"finished_reason": "abort"}),
    Alias("time_to_first_token_seconds", "cllm_time_to_first_token_seconds"),
    Alias("inter_token_latency_seconds", "cllm_inter_token_seconds"),
    Alias("time_per_output_token_seconds", "cllm_inter_token_seconds"),
    Alias("e2e_request_latency_seconds", "cllm_request_seconds"),
    Alias("request_queue_time_seconds", "cllm_queue_seconds"),
    Alias("request_prefill_time_seconds", "cllm_prefill_seconds"),
)
_LLAMA: Final = (
    Alias("requests_processing", "cllm_sequences", {"state": "running"}),
    Alias("requests_deferred", "cllm_sequences", {"state": "waiting"}),
    Alias("prompt_tokens", "cllm_prefill_rows"),
    Alias("prompt_tokens_cached", "cllm_prompt_tokens_cached"),
    Alias("tokens_predicted", "cllm_generated_tokens"),
)
_USAGES: Final = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # what vLLM calls it, and what it did


@attrs.frozen
class WithAliases:
    """A registry's metrics, and after them the same under other names.

    `model` is the one that samples are of which do not say it; empty, they are of several.
    """

    source: Source
    kinds: tuple[str, ...]  # of `cllm.checks.METRICS_OF`
    model: str

    def collect(self) -> Iterator[Metric]:
        """See `Source`."""
        metrics = {metric.name: metric for metric in self.source.collect()}
        yield from metrics.values()
        if "vllm" in self.kinds:
            yield from _renamed("vllm", _VLLM, metrics, self._of_vllm)
            yield from self._usages(metrics.get("cllm_cells"))
        if "llamacpp" in self.kinds:
            yield from _renamed("llamacpp", _LLAMA, metrics, dict)
            yield from _decodes(metrics.get("cllm_step_sequences"))

    def _of_vllm(self, labels: Mapping[str, str]) -> dict[str, str]:
        """Its boards choose by `model_name`."""
        model = labels.get("model", self.model)
        others = {name: value for name, value in labels.items() if name != "model"}
        return {"model_name": model, **others} if model else others

    def _usages(self, cells: Metric | None) -> Iterator[Metric]:
        """The share of the cells that are in use: what is cached for others may go at any time. Nothing where no cells are known.

        A plugin may tell cells of its own, which are of states of its own, or of none.
        """
        if cells is None:
            return
        by_model: dict[str, dict[str, float]] = {}
        for sample in cells.samples:
            by_model.setdefault(sample.labels.get("model", self.model), {})[sample.labels.get("state", "")] = sample.value
        by_model = {model: states for model, states in by_model.items() if "held" in states}
        for name in _USAGES:
            usage = Metric(f"vllm:{name}", "Share of the KV cache that is in use; 1 is all", "gauge")
            for model, states in by_model.items():
                usage.add_sample(usage.name, {"model_name": model}, states["held"] / max(sum(states.values()), 1.0))
            yield usage


class _Relabel(Protocol):
    def __call__(self, labels: Mapping[str, str], /) -> dict[str, str]: ...


def _renamed(kind: str, aliases: Iterable[Alias], metrics: Mapping[str, Metric], relabel: _Relabel) -> Iterator[Metric]:
    renamed: dict[str, Metric] = {}
    for alias in aliases:
        metric = metrics.get(alias.of)
        if metric is None:
            continue
        name = f"{kind}:{alias.name}"
        into = renamed.setdefault(name, Metric(name, metric.documentation, metric.type))
        for sample in metric.samples:
            if alias.where.items() <= sample.labels.items() and not sample.name.endswith("_created"):
                labels = {label: value for label, value in sample.labels.items() if label not in alias.where}
                into.samples.append(Sample(name + sample.name.removeprefix(alias.of), relabel({**labels, **alias.labels}), sample.value))
    yield from renamed.values()


def _decodes(members: Metric | None) -> Iterator[Metric]:
    """How many steps there were, and with how many sequences on average: of a histogram, its count, and its sum over that."""
    n_steps = Metric("llamacpp:n_decode", "Steps of the model", "counter")
    n_busy = Metric("llamacpp:n_busy_slots_per_decode", "Sequences in a step on average", "gauge")
    sums = {_key(one): one.value for one in members.samples if one.name.endswith("_sum")} if members else {}
    for one in members.samples if members else ():
        if one.name.endswith("_count"):
            n_steps.add_sample("llamacpp:n_decode_total", one.labels, one.value)
            n_busy.add_sample(n_busy.name, one.labels, sums[_key(one)] / max(one.value, 1.0))
    yield from (n_steps, n_busy)


def _key(sample: Sample) -> str:
    return sample.labels.get("model", "")
