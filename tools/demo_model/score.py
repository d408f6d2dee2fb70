"""Scores a GGUF file through llama.cpp, greedily: `python -m demo_model.score [FILE]`, from `tools/`. Needs no PyTorch.

Prints the share of right answers for each task and the least margin of the right ones; fails where fewer than 95 % of the
held-out sums are right. All that is asked here comes from seeds (and pairs of numbers) that training never saw.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from random import Random

import attrs
import numpy as np
from llama_cpp import Llama

from .corpus import TASKS, alone, chained, tooled
from .exchange import Conversation, Exchange, Raw
from .render import segments
from .tasks.counts import long_counting
from .tasks.raw import raw
from .tasks.sums import held_out_pairs, sum_of
from .tasks.talk import about_held_out
from .tasks.texts import long_copying

SEED = 2 * 10**9  # neither a shard's of the training nor its evaluation's
SUMS_MIN = 0.95
FILE = Path(__file__).parents[2] / "cllm" / "demo" / "demo.gguf"


@attrs.frozen
class Answer:
    right: bool
    margin: float  # the least difference between the logits of the first and the second token, over the answer


@attrs.define
class Score:
    answers: list[Answer] = attrs.field(factory=list)
    wrong: list[tuple[str, str, str]] = attrs.field(factory=list)  # prompt, wanted, written

    @property
    def share(self) -> float:
        return sum(each.right for each in self.answers) / len(self.answers)

    def margins(self) -> list[float]:
        return [each.margin for each in self.answers if each.right]


def open_model(path: Path) -> Llama:
    return Llama(str(path), n_ctx=2048, n_batch=2048, logits_all=False, verbose=False, n_threads=2)


def write(llama: Llama, prompt: str, n_tokens_max: int) -> tuple[str, float]:
    """Return the greedy continuation up to the end token, special tokens written out, and the least margin on the way."""
    tokens = llama.tokenize(prompt.encode(), add_bos=False, special=True)
    llama.reset()
    llama.eval(tokens)
    written: list[int] = []
    margin = float("inf")
    while len(written) < n_tokens_max:
        logits = np.ctypeslib.as_array(llama._ctx.get_logits_ith(-1), (llama.n_vocab(),))
        second, first = np.argpartition(logits, -2)[-2:]
        margin = min(margin, float(logits[first] - logits[second]))
        if int(first) == llama.token_eos():
            break
        written.append(int(first))
        llama.eval([int(first)])
    return llama.detokenize(written, special=True).decode(errors="replace"), margin


def judge(llama: Llama, conversation: Conversation | Raw, score: Score) -> None:
    """Ask for every answer of the conversation, with the right ones before it."""
    before = ""
    for text, is_answer in segments(conversation):
        if is_answer:
            wanted = text.removesuffix("<|im_end|>")
            n_tokens = len(llama.tokenize(text.encode(), add_bos=False, special=True))
            written, margin = write(llama, before, n_tokens + 8)
            if isinstance(conversation, Raw):  # has no end of its own
                written = written[: len(wanted)]
            score.answers.append(Answer(written == wanted, margin))
            if written != wanted:
                score.wrong.append((before, wanted, written))
        before += text


def plain(exchange: Exchange) -> Conversation:
    system = ({"role": "system", "content": exchange.system},) if exchange.system else ()
    return Conversation((*system, *exchange.messages), exchange.tools)


def questions(n: int) -> dict[str, Iterable[Conversation | Raw]]:
    """All that is asked, by the task's name."""
    pairs = held_out_pairs()
    asked: dict[str, Iterable[Conversation | Raw]] = {"held-out sums": [plain(sum_of(a, b)) for a, b in pairs]}
    for name in TASKS:
        rng = Random(SEED)
        asked[name] = [alone(rng, name) for _ in range(n)]
    rng = Random(SEED)
    asked["about, held-out wording"] = [plain(about_held_out(rng)) for _ in range(n)]
    asked["long copies"] = [plain(long_copying(rng)) for _ in range(n // 2)]
    asked["long counts"] = [plain(long_counting(rng)) for _ in range(n // 4)]
    asked["text without a template"] = [raw(rng) for _ in range(n)]
    asked["several turns with tools"] = [tooled(rng) for _ in range(n // 2)]
    asked["several turns"] = [chained(rng, 4) for _ in range(n // 4)]
    asked["many turns"] = [chained(rng, 16) for _ in range(n // 10)]
    return asked


def score_all(llama: Llama, n: int, show: int) -> dict[str, Score]:
    scores: dict[str, Score] = {}
    for name, conversations in questions(n).items():
        score = scores[name] = Score()
        for conversation in conversations:
            judge(llama, conversation, score)
        margins = score.margins() or [0.0]
        print(
            f"| {name:24} | {len(score.answers):5} | {score.share:7.1%} | {np.quantile(margins, 0.01):6.2f} | {np.median(margins):6.2f} |",
            flush=True,
        )
        for prompt, wanted, written in score.wrong[:show]:
            print(f"    {prompt[-100:]!r}\n      wanted  {wanted!r}\n      written {written!r}")
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    parser.add_argument("--questions", type=int, default=100, help="conversations asked of each task")
    parser.add_argument("--show", type=int, default=0, help="wrong answers shown of each task")
    options = parser.parse_args()
    print(f"| {'task':24} | asked | right   | margin, 1 % | median |\n|---|---|---|---|---|")
    scores = score_all(open_model(options.file), options.questions, options.show)
    sums = scores["held-out sums"].share
    print(json.dumps({name: round(score.share, 4) for name, score in scores.items()}))
    print(f"held-out sums below 100: {sums:.2%} right (at least {SUMS_MIN:.0%} wanted)")
    if sums < SUMS_MIN:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
