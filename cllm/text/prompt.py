"""From the text of a prompt to its tokens: one way for all who answer prompts."""

from __future__ import annotations

from collections.abc import Sequence

from cllm.backend import InfillTokens, Vocabulary


def prompt_tokens(vocabulary: Vocabulary, text: str, *, is_conversation: bool) -> list[int]:
    """The token ids of `text`, with bos where the model wants it and special tokens read as such, in what users wrote too.

    So does llama-server. A conversation's template may write bos itself; it does not get a second one.

    Raises: TokenizeFailed.
    """
    tokens = vocabulary.tokenize(text, add_special=True, parse_special=True)
    if is_conversation and vocabulary.adds_bos and tokens[:2] == [vocabulary.bos, vocabulary.bos]:
        return tokens[1:]
    return tokens


def infill_tokens(vocabulary: Vocabulary, infill: InfillTokens, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
    """The token ids that ask for what stands between `prefix` and `suffix`: the prefix first, as most models were trained."""
    bos = [vocabulary.bos] if vocabulary.adds_bos and vocabulary.bos is not None else []
    return [*bos, infill.prefix, *prefix, infill.suffix, *suffix, infill.middle]
