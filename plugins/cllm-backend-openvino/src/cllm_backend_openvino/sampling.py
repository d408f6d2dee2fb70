"""What is asked of sampling, in OpenVINO's words; what it would do otherwise than asked is refused."""

from __future__ import annotations

from typing import Any, Final

from cllm.backend import StreamRequest
from cllm.errors import NotHeeded
from cllm_backend_openvino.forms import KINDS, Grammar

HEEDS: Final = frozenset(
    {
        "n_tokens_min",
        "n_logprobs",
        "seed",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repeat_penalty",
        "repeat_last_n",
        "presence_penalty",
        "frequency_penalty",
        *KINDS,
    }
)
UNSHARED: Final = frozenset({"cache_salt", "cache_prompt"})  # heeded where no request finds what was computed for another
PENALTY_MAX: Final = 2.0
SMALLEST: Final = 1e-6  # what is below is as good as this, and OpenVINO wants more than 0
BELOW_ONE: Final = 1.0 - 1e-6


def config_of(request: StreamRequest, grammar: Grammar | None = None) -> Any:
    """Return OpenVINO's configuration for a request, whose answer is held to `grammar`. Raises: NotHeeded for what it cannot say.

    End tokens are barred until a number of tokens; there is no other way to bar any, so that those that may never come are barred until the
    last one, and `ends_here` are looked for by the caller.
    """
    import openvino_genai

    if request.barred_tokens and request.n_tokens_min and request.end_tokens:
        raise NotHeeded("this model's backend cannot do min_tokens together with ignore_eos and stop_token_ids", param="min_tokens")
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = request.n_tokens_max
    config.ignore_eos = not request.end_tokens or bool(request.barred_tokens)
    if request.barred_tokens:
        config.stop_token_ids = set(request.barred_tokens)
        config.min_new_tokens = request.n_tokens_max
    else:
        config.stop_token_ids = set(request.end_tokens)
        config.min_new_tokens = request.n_tokens_min
    config.logprobs = 0 if request.n_logprobs is None else 1
    if grammar is not None:
        config.structured_output_config = grammar.config()
    _set_sampling(config, request)
    _set_penalties(config, request)
    return config


def ends_here(request: StreamRequest) -> frozenset[int]:
    """The tokens that end a sequence without OpenVINO's knowing."""
    return request.end_tokens if request.barred_tokens else frozenset()


def _set_sampling(config: Any, request: StreamRequest) -> None:
    config.do_sample = request.temperature > SMALLEST
    if not config.do_sample:
        return
    config.rng_seed = request.seed
    config.temperature = request.temperature
    config.top_p = max(request.top_p, SMALLEST)
    config.min_p = min(request.min_p, BELOW_ONE)
    if request.top_k > 0:
        config.top_k = request.top_k


def _set_penalties(config: Any, request: StreamRequest) -> None:
    for name in ("presence_penalty", "frequency_penalty"):
        if not 0 <= getattr(request, name) <= PENALTY_MAX:  # below 0 OpenVINO draws some logits the other way
            raise NotHeeded(f"this model's backend takes {name} from 0 to 2", param=name)
        setattr(config, name, getattr(request, name))
    if request.repeat_penalty != 1 and not _looks_at_all(request):
        raise NotHeeded("this model's backend looks at the whole sequence for repeat_penalty: repeat_last_n -1", param="repeat_last_n")
    config.repetition_penalty = max(request.repeat_penalty, SMALLEST)


def _looks_at_all(request: StreamRequest) -> bool:
    """Whether the window asked for, if any, is as long as the sequence may become, so that OpenVINO's is no other."""
    n_most = len(request.prompt) + (request.n_tokens_max or 0)
    return request.repeat_last_n is None or request.repeat_last_n >= n_most
