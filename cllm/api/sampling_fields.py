"""The sampling fields that every generating surface shares: their types and limits, and what they mean to the engine.

The limits keep numbers where the arithmetic is sound and stop a request from costing without bound; they are wider than any sensible use.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import attrs
import msgspec
from msgspec import Meta

from cllm.backend import StreamForm
from cllm.config import Profile
from cllm.engine.sampling.params import SamplingParams, SamplingProfile, StopParams
from cllm.engine.sequence import SequenceSpec
from cllm.errors import InvalidRequest, NotHeeded
from cllm.serve.engine import ServedModel
from cllm.text.answers import AnswerFormat
from cllm.text.grammar import Grammar

SEED_MASK = (1 << 64) - 1
SEED_STRIDE = 0x9E3779B97F4A7C15  # odd: the seeds of a request's choices are all different
INT32_MAX = (1 << 31) - 1
TIMEOUT_S_MAX = 604_800.0
NO_LIMIT = -1  # as `n_predict`, llama-server's own word; `max_tokens` below 0 is a mistake and stays one
N_GROUP = 16  # bytes that nobody guesses

Share: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty: TypeAlias = Annotated[float, Meta(ge=-2.0, le=2.0)]
Factor: TypeAlias = Annotated[float, Meta(ge=0.0, le=100.0)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=INT32_MAX)]
CountOrAll: TypeAlias = Annotated[int, Meta(ge=-1, le=INT32_MAX)]  # -1: the whole context, as in llama-server
Limit: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 53)]
LimitOrPrompt: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]  # 0: only the prompt is computed
LimitOrNone: TypeAlias = Annotated[int, Meta(ge=-1, le=1 << 53)]  # -1: none, as in llama-server; 0: only the prompt is computed
StopString: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Bias: TypeAlias = Annotated[float, Meta(ge=-100.0, le=100.0)]
BiasByToken: TypeAlias = Annotated[dict[str, Bias], Meta(max_length=1024)]
BiasList: TypeAlias = Annotated[list[tuple[int, float | bool]], Meta(max_length=1024)]


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields by their wire names; None is "not given"."""

    temperature: Factor | None = None
    top_p: Share | None = None
    top_k: CountOrAll | None = None
    min_p: Share | None = None
    typical_p: Share | None = None
    top_n_sigma: Annotated[float, Meta(ge=-1.0, le=100.0)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=100.0)] | None = None
    repeat_last_n: CountOrAll | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    dry_multiplier: Factor | None = None
    dry_base: Factor | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: CountOrAll | None = None
    dry_sequence_breakers: Annotated[list[StopString], Meta(max_length=64)] | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    mirostat: Annotated[int, Meta(ge=0, le=2)] | None = None
    mirostat_tau: Factor | None = None
    mirostat_eta: Factor | None = None
    dynatemp_range: Factor | None = None
    dynatemp_exponent: Factor | None = None
    logit_bias: BiasByToken | BiasList | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n_predict: Limit | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    timeout_s: Annotated[float, Meta(gt=0.0, le=TIMEOUT_S_MAX)] | None = None
    priority: Annotated[int, Meta(ge=-INT32_MAX, le=INT32_MAX)] | None = None
    cache_prompt: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=1024)] | None = None


_PLAIN = (  # fields that mean the same, by the same name, to the engine
    *("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "xtc_probability", "xtc_threshold"),
    *("mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"),
)


@attrs.frozen(kw_only=True)
class Wanted:
    """What a request asks of each of its completions."""

    sampling: SamplingParams
    stopping: StopParams
    seed: int | None  # None: each prompt gets one of its own
    n: int
    timeout_s: float | None
    priority: int
    cache_prompt: bool
    cache_salt: str

    def specs(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        n_logprobs: int | None,
        key: str,
        request_id: str,
        grammar: Grammar | None = None,
        form: StreamForm | None = None,
        answer: AnswerFormat | None = None,
    ) -> list[SequenceSpec]:
        """The sequences of a request: `n` for each prompt, those of a prompt together.

        A choice's seed depends on its place among its prompt's choices alone, so a prompt's texts do not depend on its neighbours. Where
        none was asked for, equal prompts draw by different ones.
        """
        group = secrets.token_hex(N_GROUP) if self.n > 1 else ""
        seeds = [secrets.randbits(64) if self.seed is None else self.seed for _ in prompts]
        return [
            SequenceSpec(
                prompt=prompt,
                sampling=self.sampling,
                stopping=self.stopping,
                seed=(seed + i * SEED_STRIDE) & SEED_MASK,
                n_logprobs=n_logprobs,
                grammar=grammar,
                form=form,
                answer=answer,
                priority=self.priority,
                timeout_s=self.timeout_s,
                key=key,
                request_id=request_id,
                cache_prompt=self.cache_prompt,
                cache_salt=self.cache_salt,
                group=group,
            )
            for prompt, seed in zip(prompts, seeds, strict=True)
            for i in range(self.n)
        ]


def wanted(
    fields: SamplingFields,
    model: ServedModel,
    defaults: SamplingParams,
    *,
    max_tokens: int | None,
    timeout_s: float | None,
    priority_least: int | None,
) -> Wanted:
    """Check what types cannot say, and fill in the defaults. `priority_least` is the most urgent that this client may name.

    Raises: InvalidRequest.
    """
    return Wanted(
        sampling=_sampling(fields, model, defaults),
        stopping=_stopping(fields, model, max_tokens),
        seed=_seed(fields.seed),
        n=fields.n or 1,
        timeout_s=fields.timeout_s or timeout_s,
        priority=priority_of(fields.priority, priority_least),
        cache_prompt=fields.cache_prompt is not False,
        cache_salt=fields.cache_salt or "",
    )


def priority_of(given: int | None, least: int | None) -> int:
    """A request's priority, of which `given` names one and `least` is the most urgent that it may be, None any. Raises: InvalidRequest."""
    if least is None:
        return given or 0
    if given is not None and given < least:
        raise InvalidRequest(f"priority: {given} is more urgent than this key may be: {least} at the least", param="priority")
    return max(least, 0) if given is None else given


def _sampling(fields: SamplingFields, model: ServedModel, defaults: SamplingParams) -> SamplingParams:
    params = _given(fields, defaults, model.n_ctx)
    if fields.logit_bias:
        return attrs.evolve(params, logit_bias=_logit_bias(fields.logit_bias, model.vocabulary.n_tokens))
    return params


def _given(fields: SamplingFields, defaults: SamplingParams, n_ctx: int) -> SamplingParams:
    given = {name: value for name in _PLAIN if (value := getattr(fields, name)) is not None}
    if fields.repetition_penalty is not None:
        given.setdefault("repeat_penalty", fields.repetition_penalty)
    if fields.top_k is not None:
        given["top_k"] = max(fields.top_k, 0)
    if fields.top_n_sigma is not None:
        given["top_n_sigma"] = max(fields.top_n_sigma, 0.0)
    if fields.repeat_last_n is not None:
        given["repeat_last_n"] = n_ctx if fields.repeat_last_n == -1 else fields.repeat_last_n
    if fields.dry_penalty_last_n is not None:
        given["dry_penalty_last_n"] = None if fields.dry_penalty_last_n == -1 else fields.dry_penalty_last_n
    if fields.dry_sequence_breakers is not None:
        given["dry_sequence_breakers"] = tuple(dict.fromkeys(fields.dry_sequence_breakers))
    return attrs.evolve(defaults, **given) if given else defaults


def _stopping(fields: SamplingFields, model: ServedModel, max_tokens: int | None) -> StopParams:
    asked = next((n for n in (fields.max_completion_tokens, fields.max_tokens, fields.n_predict) if n is not None), None)
    if asked == NO_LIMIT:
        asked, max_tokens = None, None
    limit = max_tokens if asked is None else asked
    if limit is not None and fields.min_tokens is not None and fields.min_tokens > limit:
        of = "tokens that an answer has here where no more are asked for" if asked is None else "tokens asked for at most"
        raise InvalidRequest(f"min_tokens: {fields.min_tokens} is more than the {limit} {of}", param="min_tokens")
    stop_token_ids = fields.stop_token_ids or []
    check_tokens(stop_token_ids, model.vocabulary.n_tokens, "stop_token_ids")
    stop = fields.stop
    return StopParams(
        max_tokens=limit,
        min_tokens=fields.min_tokens or 0,
        stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=frozenset(stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
    )


def _seed(seed: int | None) -> int | None:
    if seed is None or seed == -1:  # -1 is how llama-server's clients ask for a random one
        return None
    if not -(1 << 63) <= seed <= SEED_MASK:
        raise InvalidRequest("seed: expected an integer of 64 bits", param="seed")
    return seed & SEED_MASK


def check_tokens(tokens: Sequence[int], n_vocabulary: int, param: str) -> None:
    """Raises: InvalidRequest unless every token is one of the model's · NotHeeded where nobody knows these."""
    if tokens and not n_vocabulary:
        raise NotHeeded(f"{param}: this model reads text, its tokens are not known here", param=param)
    if tokens and not (min(tokens) >= 0 and max(tokens) < n_vocabulary):
        wrong = next(token for token in tokens if not 0 <= token < n_vocabulary)
        raise InvalidRequest(f"{param}: {wrong!s:.40} is not a token id, which are 0 to {n_vocabulary - 1}", param=param)


def _logit_bias(given: dict[str, float] | list[tuple[int, float | bool]], n_vocabulary: int) -> tuple[tuple[int, float], ...]:
    pairs = [(_token_id(name), bias) for name, bias in given.items()] if isinstance(given, dict) else given
    biases = {token: _bias(bias) for token, bias in pairs}
    check_tokens(list(biases), n_vocabulary, "logit_bias")
    if len(biases) != len(pairs):
        raise InvalidRequest("logit_bias: a token comes twice", param="logit_bias")
    return tuple(sorted(biases.items()))


def _token_id(name: str) -> int:
    if not (name.isascii() and name.isdigit() and len(name) <= 10):
        raise InvalidRequest(f"logit_bias: {name[:40]!r} is not a token id", param="logit_bias")
    return int(name)


def _bias(bias: float | bool) -> float:
    if bias is False:  # llama-server's way of forbidding a token
        return -math.inf
    if bias is True or not -100.0 <= bias <= 100.0:
        raise InvalidRequest("logit_bias: a bias is -100 to 100, or false in the list form", param="logit_bias")
    return float(bias)


# --- the profiles ------------------------------------------------------------------------------------------------------

_LLAMA = SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, profile=SamplingProfile.LLAMA)
_METADATA: Mapping[str, str] = {  # GGUF keys by the field they set
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "repeat_last_n": "penalty_last_n",
    "repeat_penalty": "penalty_repeat",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_TYPES: Mapping[str, Any] = {field.name: field.type for field in msgspec.structs.fields(SamplingFields)}


def base_params(profile: Profile, metadata: Mapping[str, str], n_ctx: int) -> SamplingParams:
    """The defaults that an operator chose: OpenAI's, llama-server's, or those that the model file recommends."""
    if profile == "llama":
        return _LLAMA
    if profile == "openai":
        return SamplingParams()
    recommended = {field: metadata.get(f"general.sampling.{key}") for field, key in _METADATA.items()}
    given = {field: value.encode() for field, value in recommended.items() if value is not None}
    try:  # by the same limits as a request: a file is no more to be trusted. Each by itself, or a value could bring other fields
        fields = SamplingFields(**{field: msgspec.json.decode(value, type=_TYPES[field]) for field, value in given.items()})
    except msgspec.MsgspecError:
        return SamplingParams()
    return _given(fields, SamplingParams(), n_ctx)
