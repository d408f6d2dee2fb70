"""Makes sequences of what requests ask for."""

from __future__ import annotations

from cllm.backend import Vocabulary
from cllm.engine.limits import Limits
from cllm.engine.sampling.sampler import make_sampler
from cllm.engine.sequence import Sequence, SequenceSpec
from cllm.engine.waiting.fairness import Accounts
from cllm.text.detokenizer import TokenTexts
from cllm.text.transcript import Transcript


class SequenceMaker:
    """For one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, accounts: Accounts) -> None:
        self._vocabulary = vocabulary
        self._accounts = accounts
        self._texts: dict[frozenset[int], TokenTexts] = {}  # by the control tokens that they show

    def make(self, spec: SequenceSpec, seq_id: int, now: float, limits: Limits) -> Sequence:
        """Return the sequence, which waits."""
        stopping, vocabulary = spec.stopping, self._vocabulary
        tokens = list(spec.prompt)
        n_prompt = len(tokens)
        n_max = limits.n_ctx
        if stopping.max_tokens is not None:
            n_max = min(n_max, n_prompt + stopping.max_tokens)
        end_tokens = vocabulary.end_tokens
        transcript = self._transcript(spec)
        may_keep = spec.cache_prompt and limits.keeps_prefixes
        sequence = Sequence(
            seq_id=seq_id,
            spec=spec,
            account=self._accounts.of(spec.key),
            tokens=tokens,
            n_prompt=n_prompt,
            n_max=n_max,
            lines_s=stopping.lines_s,
            sampler=make_sampler(
                spec.sampling,
                stopping,
                vocabulary,
                seed=spec.seed,
                tokens=tokens,
                n_prompt=n_prompt,
                n_logprobs=spec.n_logprobs,
                dry_breakers=spec.dry_breakers,
                grammar=None if spec.grammar is None else spec.grammar.start(),
            ),
            transcript=transcript,
            final_tokens=stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | end_tokens,
            n_final_from=n_prompt + max(stopping.min_tokens, 1),
            arrived_at=now,
            deadline=None if spec.timeout_s is None else now + spec.timeout_s,
            order=(spec.priority, seq_id),
            may_share=may_keep or bool(spec.group),
            may_keep=may_keep,
        )
        sequence.sampler.grammar_waits = spec.grammar is not None and transcript.is_reasoning
        if due := transcript.due():  # a prompt may end within a reasoning that may not have any token
            sequence.sampler.force(due)
        return sequence

    def _transcript(self, spec: SequenceSpec) -> Transcript:
        shown = frozenset() if spec.answer is None else spec.answer.shown
        texts = self._texts.get(shown)
        if texts is None:
            texts = self._texts[shown] = TokenTexts(self._vocabulary, shown=shown)
        return Transcript(texts, stop=spec.stopping.stop, form=spec.answer)
