"""Trains the demo model: `python -m demo_model.train --out DIR --minutes N`, from `tools/`; goes on from a checkpoint in DIR."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from random import Random

import attrs
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
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
BATCH_TOKENS, BATCHES = 2560, 4  # a step; the batches are dealt to the processes
SAVE_EVERY, REPORT_EVERY = 50, 300  # steps
EVALUATION_SEED = 10**9  # far from the seeds of the shards, which count from 1


def rate_at(done: float, n_steps: int, decay: float) -> float:
    """Warm-up, then 1, then a line down to nothing over the last `decay` of the time.

    By time and not by steps, because the machine may be shared: the training ends when it must, at whatever step that is.
    `n_steps` are those of this run; one that goes on from a decayed model warms up again.
    """
    return min(1.0, (n_steps + 1) / 50, max(0.0, (1 - done) / decay))


def mix_at(step: int) -> Mix:
    """Short conversations first: they teach more in the same time."""
    if step < 900:
        return Mix(chained=0.15, long=0.01, tooled=0.02, raw=0.05)
    return Mix(chained=0.18, long=0.05, tooled=0.05, raw=0.06)


def optimisers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, which takes about half of AdamW's steps here, and AdamW for the embedding and the norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embedding" in name]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def loss_of(model: Model, batch: Batch) -> torch.Tensor:
    """The weighted sum of the losses."""
    tokens, weights = torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights)[:, 1:]
    asked = weights > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # Logits of the prompts are never used, and the head is a tenth of the work: compute those that are wanted.
        logits = model.logits(model.hidden(tokens)[:, :-1][asked])
    losses = F.cross_entropy(logits.float(), tokens[:, 1:][asked], reduction="none")
    return (losses * weights[asked]).sum()


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


@attrs.define
class Run:
    """What a checkpoint keeps."""

    model: Model
    optimisers: list[torch.optim.Optimizer]
    tokenizer: Tokenizer
    step: int = 0
    seed: int = 1  # of the next shard

    def save(self, path: Path) -> None:
        state = {
            "shape": attrs.asdict(self.model.shape),
            "model": self.model.state_dict(),
            "optimisers": [each.state_dict() for each in self.optimisers],
            "step": self.step,
            "seed": self.seed,
        }
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)  # so that there is a whole checkpoint at any time

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        for each, saved in zip(self.optimisers, state["optimisers"], strict=True):
            each.load_state_dict(saved)
        self.step, self.seed = state["step"], state["seed"]

    def learn(self, batches: list[Batch], rate: float) -> float:
        """Take one step, together with the other processes; return its mean loss."""
        weight, total = sum(float(batch.weights[:, 1:].sum()) for batch in batches), torch.zeros(1)
        for batch in batches[dist.get_rank() :: dist.get_world_size()]:
            loss = loss_of(self.model, batch) / weight
            loss.backward()
            total += loss.detach()
        parameters = list(self.model.parameters())
        shared = torch.cat([total, *(p.grad.flatten() for p in parameters if p.grad is not None)])
        dist.all_reduce(shared)
        for p, gradient in zip(parameters, shared[1:].split([p.numel() for p in parameters]), strict=True):
            p.grad = gradient.view_as(p)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for each in self.optimisers:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()
            each.zero_grad()
        self.step += 1
        return float(shared[0])


def begin(out: Path) -> Run:
    torch.manual_seed(1)
    tokenizer = fresh_tokenizer(out / "tokenizer.json")
    model = Model(Shape(n_vocab=tokenizer.get_vocab_size()))
    run = Run(model, optimisers(model), tokenizer)
    if (out / "model.pt").exists():
        run.load(out / "model.pt")
    return run


def clock(began: float) -> float:
    """Seconds since `began`, the same for all processes, which must leave their loops together."""
    spent = torch.tensor([time.monotonic() - began])
    dist.broadcast(spent, 0)
    return float(spent)


def train(out: Path, minutes: float, rate: float, decay: float, compiled: bool) -> None:
    run = begin(out)
    if compiled:
        run.model.hidden = torch.compile(run.model.hidden, dynamic=True)  # type: ignore[method-assign]
    first, mean, n_tokens, began = run.step, 0.0, 0, time.monotonic()
    if dist.get_rank() == 0:
        print(f"{sum(p.numel() for p in run.model.parameters())} parameters, from step {first}", flush=True)
    while (done := clock(began) / (60 * minutes)) < 1:
        steps = shard(run.tokenizer, run.seed, mix_at(run.step), SHARD, BATCH_TOKENS, BATCHES)
        run.seed += 1
        for batches in steps:
            done = clock(began) / (60 * minutes)
            if done >= 1:
                break
            loss = run.learn(batches, rate * rate_at(done, run.step - first, decay))
            mean += (loss - mean) / min(run.step - first, 50)
            n_tokens += sum(batch.tokens.size for batch in batches)
            if run.step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                print(f"step {run.step} loss {mean:.4f}, {n_tokens} tokens, {done * minutes:.1f} min", flush=True)
                run.save(out / "model.pt")
            if run.step % REPORT_EVERY == 0 and dist.get_rank() == 0:
                print(report(run.model, run.tokenizer), flush=True)
    if dist.get_rank() == 0:
        run.save(out / "model.pt")
        print(report(run.model, run.tokenizer), flush=True)


def work(rank: int, options: argparse.Namespace) -> None:
    """One process of one thread: two of these meet once a step, where two threads of one would meet after every operation."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=(options.out / "meeting").resolve().as_uri(), rank=rank, world_size=options.processes)
    train(options.out, options.minutes, options.rate, options.decay, not options.no_compile)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the tokenizer and the checkpoint")
    parser.add_argument("--minutes", type=float, required=True, help="of this run")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--decay", type=float, default=0.4, help="share of this run over which the rate falls to nothing")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--no-compile", action="store_true", help="torch.compile takes about two minutes and saves a quarter of the rest")
    options = parser.parse_args()
    if not 1 <= options.processes <= BATCHES:
        parser.error(f"--processes: 1 to {BATCHES}, the batches of a step")
    options.out.mkdir(parents=True, exist_ok=True)
    fresh_tokenizer(options.out / "tokenizer.json")
    (options.out / "meeting").unlink(missing_ok=True)
    mp.spawn(work, (options,), options.processes)


if __name__ == "__main__":
    main()
