"""llama-server's answers: a completion in full, or the pieces of a stream of which the last one says how it ended."""

from __future__ import annotations

from typing import Any

from cllm.api.openai.shapes import Account, TokenNames, token_logprobs
from cllm.api.sse import TextFrame, data
from cllm.engine.events import Delta, Finished, FinishReason, TokenLogprob


class AnswerStream:
    """See `cllm.api.sse.Shape`."""

    def __init__(self, model: str, n_completions: int = 1, names: TokenNames | None = None) -> None:
        self._model = model
        self._names = names
        self._frames = [TextFrame(_piece(i, TextFrame.MARK)) for i in range(n_completions)]

    def first(self) -> bytes:
        """Nothing."""
        return b""

    def delta(self, index: int, event: Delta) -> bytes:
        """New text, and the logprobs of new tokens where asked for, even of those that have no text yet."""
        if event.logprobs is None or self._names is None:
            return self._text(index, event.text)
        told = probabilities(event.logprobs, self._names)
        return data(_piece(index, event.text) | told) if event.text or told["completion_probabilities"] else b""

    def finished(self, index: int, event: Finished) -> bytes:
        """The rest of the text, then the end."""
        return self._text(index, event.text) + data(ended(index, self._model, "", event))

    def last(self) -> bytes:
        """Nothing: the ends said it all."""
        return b""

    def _text(self, index: int, text: str) -> bytes:
        return self._frames[index](text) if text else b""


def _piece(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "content": text, "stop": False}


def ended(index: int, model: str, content: str, finished: Finished) -> dict[str, Any]:
    """A completion that has ended."""
    usage, word = finished.usage, finished.stop_reason
    by_word = isinstance(word, str) and finished.reason is FinishReason.STOP
    return {
        "index": index,
        "content": content,
        "stop": True,
        "model": model,
        "tokens_predicted": usage.n_generated,
        "tokens_evaluated": usage.n_prompt,
        "tokens_cached": usage.n_cached,
        "truncated": False,
        "stop_type": "word" if by_word else "limit" if finished.reason is FinishReason.LENGTH else "eos",
        "stopping_word": word if by_word else "",
        "timings": Account([finished]).timings(),
    }


def probabilities(logprobs: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """What `n_probs` asks for: the tokens of the text, each with the likeliest ones at its place."""
    return {"completion_probabilities": token_logprobs(logprobs, names, with_ids=True)}
