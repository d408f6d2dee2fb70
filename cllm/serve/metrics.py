"""What `/metrics` tells of the engine, gathered so that a step pays next to nothing for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import structlog
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cllm.backend import Measure, Measures
from cllm.engine.batch.plan import Plan, StepOutput
from cllm.engine.events import Failed, Finished, FinishReason
from cllm.engine.memory.hostpool import HostPool
from cllm.engine.scheduler import Scheduler
from cllm.engine.stepping import StepScheduler
from cllm.errors import (
    Aborted,
    DeadlineExceeded,
    GenerationFailed,
    ModelDied,
    NoRoom,
    RateLimited,
    RequestError,
    StepFailed,
    Unavailable,
    call_foreign,
)
from cllm.serve.disktier import DiskTier

log = structlog.get_logger("cllm.metrics")

_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_LABELS_TAKEN: Final = ("model", "le")  # the server says by them of which model a number is, and the text format, of which bucket
N_STEPS_PENDING_MAX = 512  # an observation costs 2 us, an append 0.05: steps are counted in heaps
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WAITS = (*SECONDS, 120.0, 300.0, 600.0)  # as long as a place is waited for, and as long prompts take
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)
# What there is from the start, at 0: a series that begins with its first event did not grow, for whoever watches what grows.
ENDS: Final = (
    *(reason.value for reason in FinishReason),
    *(kind.type for kind in (GenerationFailed, Unavailable, DeadlineExceeded, RateLimited)),
)
FAILURES: Final = tuple(kind.__name__ for kind in (StepFailed, NoRoom, Aborted, ModelDied))
REFUSALS: Final = ("queue_full", "wait_too_long", "quota_exceeded", "loading", "load_failed", "draining")
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


class Metrics:
    """The engine's counters and histograms. `registry` is open for others to add theirs."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self._steps = _Steps()
        registry.register(self._steps)
        self._ended = _counter("cllm_sequences_ended", "Sequences that ended", "how", ENDS, registry)
        self._failures = _counter("cllm_steps_failed", "Steps that raised", "error", FAILURES, registry)
        self._aborted = Counter("cllm_steps_aborted", "Steps ended early, since nobody waited for them any more", registry=registry)
        self._invalid = Counter("cllm_invalid_logits", "Sequences that ended since logits of theirs were not numbers", registry=registry)
        self._refusals = _counter("cllm_refusals", "Requests that were not let in, by why", "why", REFUSALS, registry)
        self.grammars = Counter("cllm_grammars", "Schemas and grammars asked for", ["outcome"], registry=registry)
        self.grammar_s = Histogram("cllm_grammar_compile_seconds", "Time to compile one", buckets=SECONDS, registry=registry)
        self._queue_s = Histogram("cllm_queue_seconds", "Arrival to admission", buckets=WAITS, registry=registry)
        self._prefill_s = Histogram("cllm_prefill_seconds", "Admission to first token", buckets=WAITS, registry=registry)

        self._embedded = Counter("cllm_embedding_tokens", "Tokens computed for embeddings", registry=registry)
        self._embedding_s = Histogram("cllm_embedding_step_seconds", "Time of an embedder's step", buckets=SECONDS, registry=registry)
        self._n_embedded_of: defaultdict[str, int] = defaultdict(int)  # tokens, by key

    def watch(self, scheduler: Scheduler, disk: DiskTier | None = None) -> None:
        """Show the scheduler's own counters too, and the disk tier's."""
        self.registry.register(_SchedulerCollector(scheduler, self._n_embedded_of))
        if disk is not None:
            self.registry.register(_DiskCollector(disk))

    def watch_model(self, model: object) -> None:
        """Show the numbers that a model keeps of itself, if it does."""
        if isinstance(model, Measures):
            self.registry.register(_ModelCollector(model))

    def step(self, plan: Plan, output: StepOutput) -> None:
        """Count a step that went well."""
        if plan.n_rows:  # moves alone are no step of the model's
            self._steps.add(plan, output)

    def embedded(self, n_tokens_of: Mapping[str, int], seconds: float) -> None:
        """Count a step of the embedder, with so many tokens of each key."""
        self._embedded.inc(sum(n_tokens_of.values()))
        for key, n_tokens in n_tokens_of.items():
            self._n_embedded_of[key] += n_tokens
        self._embedding_s.observe(seconds)

    def step_failed(self, error: Exception) -> None:
        """Count a step that raised."""
        self._failures.labels(type(error).__name__).inc()

    def step_aborted(self) -> None:
        """Count a step that was ended since nobody waited for it any more."""
        self._aborted.inc()

    def refused(self, error: RequestError) -> None:
        """Count a request that was not let into the queue."""
        self._refusals.labels(error.code or error.type).inc()

    def end(self, event: Finished | Failed) -> None:
        """Count a terminal event."""
        if isinstance(event, Failed):
            self._ended.labels(event.error.type).inc()
            if event.error.code == "invalid_logits":
                self._invalid.inc()
            return
        self._ended.labels(event.reason.value).inc()
        if event.usage.is_admitted:
            self._queue_s.observe(event.usage.queue_s)
        if event.usage.has_begun:
            self._prefill_s.observe(event.usage.prefill_s)

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


def _counter(name: str, help_: str, label: str, known: Iterable[str], registry: CollectorRegistry) -> Counter:
    """A counter of what may have other labels too, in which the `known` ones are from the start."""
    counter = Counter(name, help_, [label], registry=registry)
    for value in known:
        counter.labels(value)
    return counter


class _Steps(Collector):
    """The histograms of steps, brought up to date when they are read: by whichever way, so they are in no registry of their own."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, int, int, float, float, float]] = []
        self._rows = Histogram("cllm_step_rows", "Rows of a step", buckets=COUNTS, registry=None)
        self._outputs = Histogram("cllm_step_outputs", "Rows of a step whose logits were wanted", buckets=COUNTS, registry=None)
        self._members = Histogram("cllm_step_sequences", "Sequences in a step", buckets=COUNTS, registry=None)
        self._seconds = Histogram("cllm_step_seconds", "Time of a step by phase", ["phase"], buckets=SECONDS, registry=None)
        self._off = Histogram(
            "cllm_step_prediction_error",
            "How far a step was from its expected time, as a share of the time that it took",
            buckets=SHARES,
            registry=None,
        )

    def add(self, plan: Plan, output: StepOutput) -> None:
        n_members = len(plan.decoding) + len(plan.prefilling)
        self._pending.append((plan.n_rows, plan.batch.n_outputs, n_members, output.model_s, output.sample_s, plan.expected_s))
        if len(self._pending) >= N_STEPS_PENDING_MAX:
            self._flush()

    def collect(self) -> Iterator[Metric]:
        self._flush()
        for histogram in (self._rows, self._outputs, self._members, self._seconds, self._off):
            yield from histogram.collect()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        model_s, sample_s = self._seconds.labels("model"), self._seconds.labels("sample")
        for n_rows, n_outputs, n_members, step_model_s, step_sample_s, expected_s in pending:
            self._rows.observe(n_rows)
            self._outputs.observe(n_outputs)
            self._members.observe(n_members)
            model_s.observe(step_model_s)
            sample_s.observe(step_sample_s)
            if step_model_s > 0:
                self._off.observe(abs(expected_s - step_model_s) / step_model_s)


class _SchedulerCollector(Collector):
    def __init__(self, scheduler: Scheduler, n_embedded_of: Mapping[str, int]) -> None:
        self._scheduler = scheduler
        self._n_embedded_of = n_embedded_of

    def collect(self) -> Iterator[Metric]:
        scheduler, cells, totals = self._scheduler, self._scheduler.cells, self._scheduler.totals
        cache = scheduler.memory.totals
        error = scheduler.cost.error()
        if error is not None:
            yield GaugeMetricFamily("cllm_step_prediction_error_median", "Median of that over the last steps", value=error)
        layout = GaugeMetricFamily("cllm_kv_apart", "1 while each slot has cells of its own, 0 while they are one pool")
        layout.add_metric([], int(scheduler.limits.apart))
        yield layout
        if isinstance(scheduler, StepScheduler):  # what schedules itself has its own, of which nothing is known
            by_state = GaugeMetricFamily("cllm_cells", "Cells of the KV cache", labels=["state"])
            by_state.add_metric(["free"], cells.n_free)
            by_state.add_metric(["held"], cells.n_held)
            by_state.add_metric(["cached"], cells.n_cached)
            yield by_state
        sequences = GaugeMetricFamily("cllm_sequences", "Sequences under way", labels=["state"])
        sequences.add_metric(["waiting"], scheduler.n_waiting)
        sequences.add_metric(["running"], scheduler.n_running)
        yield sequences
        yield from _counters(
            ("cllm_sequences_submitted", "Sequences accepted", totals.n_submitted),
            ("cllm_preemptions", "Sequences that gave their cells back, to be restored or computed again", totals.n_preempted),
            ("cllm_prompt_tokens", "Tokens of admitted prompts", totals.n_prompt_tokens),
            ("cllm_prefill_rows", "Prompt rows computed, again after a preemption included", totals.n_prefill_rows),
            ("cllm_generated_tokens", "Tokens drawn", totals.n_generated),
            ("cllm_prefix_hits", "Admissions that found cells of their first tokens", cache.n_hits),
            ("cllm_prefix_tokens", "Tokens that were not computed for that", cache.n_tokens_saved),
            ("cllm_prompt_tokens_cached", "Of prompts' tokens, those not computed when they came", cache.n_prompt_tokens_saved),
            ("cllm_filler_rows", "Rows that closed gaps between slots with cells of their own", totals.n_fillers),
            ("cllm_kv_layouts", "Times that the cells were laid out anew", totals.n_layouts),
            ("cllm_evicted_cells", "Cached cells that made room", cache.n_evicted_cells),
        )
        if scheduler.limits.key_weights:
            yield _of_keys(scheduler, self._n_embedded_of)
        if scheduler.memory.offload is not None:
            yield from _of_pool(scheduler.memory.offload.pool)


class PluginMetric(Metric):
    """A family that a plugin tells."""


def own_first(families: Iterable[Metric]) -> list[Metric]:
    """Return them without those of plugins that have a name of the server's own."""
    told = list(families)
    own = {name for one in told if not isinstance(one, PluginMetric) for name in _names(one)}

    def stays(one: Metric) -> bool:
        is_double = isinstance(one, PluginMetric) and not own.isdisjoint(_names(one))
        if is_double:
            log.error("metrics.failed", why=f"a plugin tells {one.name}, which is the server's own")
        return not is_double

    return list(filter(stays, told))


def _names(family: Metric) -> set[str]:
    return {family.name, *(sample.name for sample in family.samples)}


class _ModelCollector(Collector):
    """What a plugin says of itself; if that is nonsense, it is left out, and the rest is told."""

    def __init__(self, model: Measures) -> None:
        self._model = model

    def describe(self) -> Iterator[Metric]:
        return iter(())  # nothing is asked of it before it is time

    def collect(self) -> Iterator[Metric]:
        try:
            families = _families(call_foreign(self._model.measures))
        except Exception as error:
            log.error("metrics.failed", why=f"{type(error).__name__}: {error}")
            families = []
        yield from families


def _families(measures: Sequence[Measure]) -> list[Metric]:
    """What a plugin tells. The text of all is made later, where what cannot be written would take everything away.

    Raises: ValueError for what is no measure.
    """
    families: dict[str, Metric] = {}
    for measure in measures:
        if not _NAME.fullmatch(measure.name):
            raise ValueError(f"{measure.name!r} is no name of a measure")
        family = families.get(measure.name)
        if family is None:
            kind = "counter" if measure.is_count else "gauge"
            family = families[measure.name] = PluginMetric(f"cllm_{measure.name}", _text(measure.help), kind)
        suffix = "_total" if measure.is_count else ""
        labels = {str(name): _text(value) for name, value in measure.labels.items()}
        for name in labels:
            if not _LABEL.fullmatch(name) or name in _LABELS_TAKEN:
                raise ValueError(f"{name!r} is no label of a measure ({measure.name})")
        family.add_sample(family.name + suffix, labels, float(measure.value))
    return list(families.values())


def _text(value: object) -> str:
    """As text that can be written in UTF-8."""
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


class _DiskCollector(Collector):
    def __init__(self, disk: DiskTier) -> None:
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        disk, totals = self._disk, self._disk.totals
        yield GaugeMetricFamily("cllm_disk_cache_bytes", "Size of this model's files in --cache-dir", disk.n_bytes)
        yield from _counters(
            ("cllm_disk_cache_hits", "Requests for which something was read", totals.n_hits),
            ("cllm_disk_cache_reads", "Files read", totals.n_reads),
            ("cllm_disk_cache_writes", "Files written", totals.n_writes),
            ("cllm_disk_cache_failures", "Files that could not be read or written", totals.n_failures),
            ("cllm_disk_cache_lost", "States that came faster than they could be written, or while the disk took none", totals.n_lost),
            ("cllm_disk_cache_slow", "Requests that computed what was being read for them, which took as long", totals.n_slow),
        )


def _of_keys(scheduler: Scheduler, n_embedded_of: Mapping[str, int]) -> Metric:
    """What each key had computed; a key that has not asked yet is there, too, at 0."""
    accounts = {account.key: account for account in scheduler.accounts}
    tokens = Metric("cllm_key_tokens", "Tokens of a key's admitted prompts, drawn for it, and computed for its vectors", "counter")
    for key in scheduler.limits.key_weights:
        account = accounts.get(key)
        tokens.add_sample("cllm_key_tokens_total", {"key": key, "kind": "prompt"}, account.n_prompt_tokens if account else 0)
        tokens.add_sample("cllm_key_tokens_total", {"key": key, "kind": "generated"}, account.n_generated if account else 0)
        tokens.add_sample("cllm_key_tokens_total", {"key": key, "kind": "embedded"}, n_embedded_of.get(key, 0))
    return tokens


def _of_pool(pool: HostPool) -> Iterator[Metric]:
    totals = pool.totals
    yield GaugeMetricFamily("cllm_host_cache_bytes", "Saved states in the host's memory", pool.n_bytes)
    yield from _counters(
        ("cllm_host_cache_saves", "States saved to the host's memory", totals.n_saves),
        ("cllm_host_cache_saved_cells", "Cells of these", totals.n_cells_saved),
        ("cllm_host_cache_hits", "Sequences that began with restored cells", totals.n_restores),
        ("cllm_host_cache_restored_cells", "Cells of these", totals.n_cells_restored),
        ("cllm_host_cache_evictions", "States that made room for others", totals.n_evictions),
        ("cllm_host_cache_failures", "States that could not be saved or restored", totals.n_failures),
    )


def _counters(*counted: tuple[str, str, int]) -> Iterator[Metric]:
    """One counter for each name, help text and value."""
    for name, help_text, value in counted:
        metric = Metric(name, help_text, "counter")
        metric.add_sample(f"{name}_total", {}, value)
        yield metric
