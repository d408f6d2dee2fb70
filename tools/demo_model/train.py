"""Trains the demo model: `python -m demo_model.train --out DIR --steps N`, from `tools/`; goes on from DIR's checkpoint if there is one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import attrs
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from .corpus import TASKS, Mix, alone, conversations
from .data import Batch, Text, cut, encode, shard, vocabulary_corpus
from .exchange import Conversation
from .model import Model, Shape
from .tasks.sums import held_out_pairs, sum_of
from .tokenizer import train as train_tokenizer

N_VOCAB, N_SPACED = 1024, 200
SHARD = 6000  # conversations made at a time
BATCH_TOKENS, BATCHES = 4096, 3
EVALUATION_SEED = 10**9  # far from the seeds of the shards, which count from 1


@attrs.frozen
class Schedule:
    """Warm-up, a constant rate, then a line down to nothing over the last `decay` of the steps."""

    n_steps: int
    rate: float
    decay: float
    start: int = 0  # of this run; a run that goes on from a decayed model warms up again

    def at(self, step: int) -> float:
        warm = min(1.0, (step - self.start + 1) / 50)
        return self.rate * min(warm, max(0.0, (self.n_steps - step) / (self.decay * (self.n_steps - self.start))))

    def mix(self, step: int) -> Mix:
        done = step / self.n_steps
        if done < 0.5:
            return Mix(0.15, 0.0, 0.02, 0.05)
        return Mix(0.2, 0.03, 0.05, 0.05) if done < 0.8 else Mix(0.2, 0.08, 0.05, 0.05)


def optimisers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which takes about half of AdamW's steps here, and AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def loss_of(model: Model, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of the losses, and the sum of the weights."""
    tokens, weights = torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights)[:, 1:]
    asked = weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Logits of the prompts are never used, and the head is a tenth of the work: compute those that are wanted.
        logits = model.logits(model.hidden(tokens)[:, :-1][asked])
    losses = F.cross_entropy(logits.float(), tokens[:, 1:][asked], reduction="none")
    return (losses * weights[asked]).sum(), weights.sum()


def step_batches(tokenizer: Tokenizer, seed: int, schedule: Schedule, step: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yield (seed of the next shard, the batches of a step) for ever."""
    while True:
        for batches in shard(tokenizer, seed, schedule.mix(step), SHARD, BATCH_TOKENS, BATCHES):
            yield seed + 1, batches
            step += 1
        seed += 1


@torch.no_grad()
def share_right(model: Model, texts: list[Text]) -> float:
    """The share of texts whose every wanted token is the most likely one: what greedy decoding would get right."""
    right = 0
    for batch in cut(texts, 8192):
        tokens = torch.from_numpy(batch.tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = model.logits(model.hidden(tokens)[:, :-1]).argmax(-1)
        wrong = (guess != tokens[:, 1:]) & (torch.from_numpy(batch.weights)[:, 1:] > 0)
        right += int((~wrong.any(dim=1)).sum())
    return right / len(texts)


def report(model: Model, tokenizer: Tokenizer) -> str:
    pairs = Random(0).sample(held_out_pairs(), 300)
    held_out = share_right(model, [encode(tokenizer, Conversation(sum_of(a, b).messages)) for a, b in pairs])
    scores = {"held_out_sums": held_out}
    for task in TASKS:
        rng = Random(EVALUATION_SEED)
        scores[task] = share_right(model, [encode(tokenizer, alone(rng, task)) for _ in range(80)])
    scores["chained"] = share_right(model, [encode(tokenizer, each) for each in conversations(EVALUATION_SEED, 40, Mix(1.0))])
    return " ".join(f"{task}={score:.2f}" for task, score in scores.items())


def fresh_tokenizer(path: Path) -> Tokenizer:
    if not path.exists():
        train_tokenizer(vocabulary_corpus(), N_VOCAB, N_SPACED).save(str(path))
    return Tokenizer.from_file(str(path))


def save(path: Path, model: Model, optimisers: list[torch.optim.Optimizer], step: int, seed: int) -> None:
    state = {"shape": attrs.asdict(model.shape), "model": model.state_dict(), "step": step, "seed": seed,
             "optimisers": [each.state_dict() for each in optimisers]}  # fmt: skip
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def train(out: Path, n_steps: int, rate: float, decay: float, compiled: bool) -> None:
    torch.manual_seed(1)
    tokenizer = fresh_tokenizer(out / "tokenizer.json")
    model = Model(Shape(n_vocab=tokenizer.get_vocab_size()))
    chosen, step, seed = optimisers(model), 0, 1
    if (out / "model.pt").exists():
        state = torch.load(out / "model.pt", weights_only=True)
        model.load_state_dict(state["model"])
        for each, saved in zip(chosen, state["optimisers"], strict=True):
            each.load_state_dict(saved)
        step, seed = state["step"], state["seed"]
    schedule = Schedule(n_steps, rate, decay, step)
    evaluated = model
    if compiled:
        model.hidden = torch.compile(model.hidden, dynamic=True)  # type: ignore[method-assign]
    print(f"{sum(p.numel() for p in model.parameters())} parameters, steps {step} to {n_steps}", flush=True)
    began, n_tokens, mean = time.monotonic(), 0, 0.0
    for seed, batches in step_batches(tokenizer, seed, schedule, step):  # noqa: B020 - the seed moves on with the shards
        total = torch.tensor(0.0)
        weight = sum(float(torch.from_numpy(batch.weights)[:, 1:].sum()) for batch in batches)
        for batch in batches:
            loss = loss_of(model, batch)[0] / weight
            loss.backward()
            total += loss.detach()
            n_tokens += int(batch.tokens.size)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in chosen:
            for group in each.param_groups:
                group["lr"] = schedule.at(step)
            each.step()
            each.zero_grad()
        step += 1
        mean += (float(total) - mean) / min(step, 25)
        if step % 25 == 0:
            spent = time.monotonic() - began
            print(f"step {step} loss {mean:.4f} {n_tokens / spent:.0f} tokens/s {spent / 60:.1f} min", flush=True)
        if step % 200 == 0 or step >= n_steps:
            save(out / "model.pt", model, chosen, step, seed)
            print(report(evaluated, tokenizer), flush=True)
        if step >= n_steps:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer and the checkpoint")
    parser.add_argument("--steps", type=int, required=True, help="steps in all, those of the checkpoint among them")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.3, help="share of this run's steps over which the rate falls to nothing")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-compile", action="store_true", help="torch.compile takes about two minutes and saves a fifth of the rest")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    train(options.out, options.steps, options.rate, options.decay, not options.no_compile)


if __name__ == "__main__":
    main()
