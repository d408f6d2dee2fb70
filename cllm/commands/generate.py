"""`cllm generate`: one answer on the terminal, by the engine alone, without a server."""

from __future__ import annotations

import secrets
import sys
import time

import attrs

from cllm.config import Settings
from cllm.engine.batch.compute import compute
from cllm.engine.events import Delta, Event, Failed, Finished
from cllm.engine.sampling.params import SamplingParams, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.engine.stepping import StepScheduler
from cllm.errors import BackendUnavailable, LoadFailed, NotSupported, RequestError, SettingsError
from cllm.serve.engine import ServedModel
from cllm.serve.loading import Loaded, blaming, load
from cllm.serve.logs import configure_logging
from cllm.serve.progress import shown
from cllm.serve.stepless import StreamsOnly
from cllm.text.prompt import prompt_tokens

OK, FAILED = 0, 1


def run(
    settings: Settings, prompt: str, *, system: str | None, max_tokens: int | None, temperature: float, seed: int | None, raw: bool
) -> int:
    """Answer `prompt` on standard output as it is generated; return the process's exit code. Raises: SettingsError."""
    if settings.log_level == "info":  # that is for servers; here the answer is all that was asked for
        settings = attrs.evolve(settings, log_level="warning")
    # One answer is there before its steps were measured, and nobody asks for vectors.
    settings = attrs.evolve(settings, calibrate="off", embeddings=False, embedding_model=None)
    configure_logging(settings)
    try:
        with shown(settings.model or "the default model") as on_progress:
            loaded = load(settings, on_progress)
    except (BackendUnavailable, LoadFailed) as error:
        print(f"cllm: {error}", file=sys.stderr)
        return FAILED
    try:
        _check_generates(loaded)
        spec = SequenceSpec(
            prompt=_tokens(loaded.served, prompt, system, raw=raw),
            sampling=SamplingParams(temperature=temperature),
            stopping=StopParams(max_tokens=max_tokens),
            seed=secrets.randbits(63) if seed is None else seed,
        )
        return _answer(loaded, spec)
    except (RequestError, LoadFailed) as error:
        print(f"cllm: {error}", file=sys.stderr)
        return FAILED
    finally:
        loaded.close()


def _check_generates(loaded: Loaded) -> None:
    if isinstance(loaded.step_model, StreamsOnly):
        raise NotSupported("this backend's models have no steps, which is what this command computes; ask cllm serve")
    if not loaded.served.generates:
        raise NotSupported(f"{loaded.served.name} gives embeddings, and no text")


def _tokens(model: ServedModel, prompt: str, system: str | None, *, raw: bool) -> list[int]:
    messages = [{"role": "system", "content": system}] if system is not None else []
    text = prompt if raw else model.template.render([*messages, {"role": "user", "content": prompt}])
    tokens = prompt_tokens(model.vocabulary, text, is_conversation=not raw)
    if not tokens:  # a model that begins with bos has something to go on from
        raise SettingsError("PROMPT: there is nothing in it")
    return tokens


def _answer(loaded: Loaded, spec: SequenceSpec) -> int:
    scheduler = StepScheduler(loaded.limits, loaded.served.vocabulary)
    scheduler.submit(spec, time.monotonic())
    while scheduler.n_sequences:
        plan = scheduler.plan(time.monotonic())
        assert plan is not None, "a sequence that has not ended always has something to do"
        events = plan.events
        if plan.is_step:
            with blaming(loaded.served.backend, "compute"):
                output = compute(loaded.step_model, plan, time.perf_counter)
            events = events + scheduler.apply(plan, output, time.monotonic())
        for event in events:
            _print(event)
    return OK


def _print(event: Event) -> None:
    match event:
        case Failed(error=error):
            raise error
        case Delta(text=text):
            print(text, end="", flush=True)
        case Finished(text=text):
            print(text)
