"""What the kept runs have shown, in words: each finding stands before the runs that it is of, and is said of these alone.

`WRITTEN_OF` names of each run the day and the revision that it measured. Who renews a run reads what is said of it here, and then renews
these. Numbers are in the results, but for what was tried on the way and is told as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import attrs

from benchmarks.reporting.forms import Run, of_kind

FAR: Final = 1_000  # the place of a run that no finding is of: behind those


@attrs.frozen(kw_only=True)
class Finding:
    """What is said of some runs of a kind. Without a title it is of all that the section shows; `quotes` are runs of other kinds."""

    kind: str
    title: str = ""
    of: tuple[str, ...]
    quotes: tuple[str, ...] = ()
    text: str

    @property
    def names(self) -> list[str]:
        """The runs whose numbers it has, as results call them."""
        return [*(f"{self.kind}-{name}" for name in self.of), *self.quotes]

    def holds_of(self, runs: Iterable[Run]) -> bool:
        """Whether the runs that it is of, and that it quotes, are there, and are those that it was written of."""
        measured = {f"{run['kind']}-{run['name']}": f"{run['date']} {run['machine'].get('revision')}" for run in runs}
        return all(measured.get(name) == WRITTEN_OF[name] for name in self.names)


def in_order(runs: Sequence[Run], kind: str) -> list[Run]:
    """The runs of a kind as the findings have them, then the others."""
    named = [name for finding in FOUND if finding.kind == kind for name in finding.of]
    places = {name: place for place, name in enumerate(named)}
    return sorted(of_kind(runs, kind), key=lambda run: places.get(run["name"], FAR))


def groups(shown: Sequence[Run], runs: Sequence[Run], kind: str) -> list[tuple[str, str, list[Run]]]:
    """Title, text and runs of each part of a section: what is `shown` under what is found of it, as far as that holds of `runs`; then,
    without any, the others.
    """
    parts, left = [], list(shown)
    for finding in FOUND:
        if finding.kind == kind and finding.title and finding.holds_of(runs):
            parts.append((finding.title, finding.text, [run for run in left if run["name"] in finding.of]))
            left = [run for run in left if run["name"] not in finding.of]
    return parts + ([("Others" if parts else "", "", left)] if left else [])


def of_all(runs: Sequence[Run], kind: str) -> list[str]:
    """What stands at the beginning of a section, as far as it holds."""
    return [finding.text for finding in FOUND if finding.kind == kind and not finding.title and finding.holds_of(runs)]


WRITTEN_OF: Final = {  # all that is kept, by kind and name, since README quotes what is not told here; and day and revision of each
    "kills-exact": "2026-11-22 7e66e6d9eb",
    "kills-qwen3-0.6b-Q4_K_M": "2026-11-22 7dd6df7a1f",
    "ladder-seed-c1-avx512": "2026-11-30 64a1e2019a",
    "ladder-seed-c16": "2026-11-28 4d22ae9f4e",
    "ladder-seed-c16-replay-avx512": "2026-11-30 2a827bf337",
    "ladder-seed-c16-replay": "2026-11-30 7317f9e40b",
    "ladder-seed-c16-served": "2026-11-28 c08fe9f147",
    "ladder-seed-c8": "2026-11-28 8e892bc749",
    "ladder-seed-c8-served": "2026-11-28 c08fe9f147",
    "peers-chat-turns-c32": "2026-11-27 42d3cda5f7",
    "peers-chat-turns-c8-row-budget": "2026-11-29 b3eb8e40c7",
    "peers-chat-turns-c8": "2026-12-01 a976107e69",
    "peers-long-among-short": "2026-11-29 8aaae89e0d",
    "peers-mixed-c8": "2026-12-01 45627ab0be",
    "peers-mixed-small-c16-default": "2026-11-30 0af562cb07",
    "peers-mixed-small-c16": "2026-12-01 a976107e69",
    "peers-mixed-small-c8": "2026-12-01 a976107e69",
    "peers-overload-0.5x-c8": "2026-11-27 3751b6e58f",
    "peers-overload-1x-c8": "2026-11-30 979d7ac996",
    "peers-overload-2x-c8": "2026-12-01 6cf6726745",
    "peers-overload-4x-c8": "2026-12-01 6cf6726745",
    "peers-seed-160x5": "2026-11-27 164e1040b0",
    "peers-seed-40x8-c1-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c1": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c16-openvino-Q4_K_M": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c16-openvino-Q8_0": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c16": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c24": "2026-11-28 96017e7e88",
    "peers-seed-40x8-c32-openvino-Q4_K_M": "2026-11-25 16be67a521",
    "peers-seed-40x8-c32-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c32": "2026-11-28 19f33e9fb8",
    "peers-seed-40x8-c8-openvino-Q4_K_M-matched": "2026-11-22 534e0ba3e8",
    "peers-seed-40x8-c8-openvino-Q4_K_M": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c8-openvino-Q8_0": "2026-12-01 45627ab0be",
    "peers-seed-40x8-c8": "2026-12-01 6cf6726745",
    "peers-seed-40x8-llama-cpp-python": "2026-11-28 4bb071c4dc",
    "peers-shared-prefix": "2026-11-29 da728bc734",
    "passes-16-sequences": "2026-11-22 5a58b82a2d",
    "passes-2-sequences-2048-cells": "2026-11-23 cb9962836e",
    "passes-8-sequences": "2026-11-23 3dd1cc35d4",
    "promises-chat-turns": "2026-12-01 e4766a5136",
    "promises-long": "2026-12-01 e4766a5136",
    "promises-over-commit": "2026-12-01 e4766a5136",
    "promises-overload": "2026-12-01 e4766a5136",
    "promises-planner": "2026-12-01 e4766a5136",
    "promises-two-keys": "2026-12-01 e4766a5136",
    "stack-gpu-draws": "2026-11-30 667a208188",
    "stack-gpu": "2026-11-30 667a208188",
    "stack-instant": "2026-11-30 b3f39a8121",
    "verify-openvino-qwen3-0.6b-Q4_K_M": "2026-11-22 ebf24af00f",
    "verify-openvino-qwen3-0.6b-Q8_0": "2026-11-22 534e0ba3e8",
}

FOUND: Final[tuple[Finding, ...]] = (
    Finding(
        kind="ladder",
        title="Eight at a time",
        of=("seed-c8-served", "seed-c8"),
        text="""\
- **The promise is kept** by `seed-c8-served`, which has the first and the served stage alone, in 36 turns of a start each: 0.979 by the
  mean (0.956 to 1.004). A step took 2.6 ms more of 116: 2.1 outside llama.cpp (0.8 in drawing, 0.3 in the scheduler, 1.0 in all the rest),
  and 0.6 in llama.cpp's calls, whose threads were without a core for 0.7 more.
- **All stages** are in `seed-c8`, in six turns, which tell nothing of 0.95, since turns of one stage differ by up to a third: 0.955 by
  their median, 0.941 by their mean.
- **Tried and mended**: in a pool attention walks by every cell up to the highest in use, and a server has cells of earlier passes there,
  where the stages up to `app` begin with none. By single calls 3,360 cached cells made a step of eight rows 1.21 times as long, of four
  1.24, of two 1.08, and of one no longer. What rests there goes now once carrying it has cost what it is worth; before, `sse` had 0.88 of
  `app`'s tokens/s in six turns, and in `seed-c8` it has 0.98 (0.86 to 1.22).
""",
    ),
    Finding(
        kind="ladder",
        title="One at a time",
        of=("seed-c1-avx512",),
        text="""\
- Nothing is lost that could be told: 1.033 by the mean (0.920 to 1.160). Passes of any stage had from 44 to 55 tokens/s, and which stage
  got the slow ones is chance: five of `engine`'s eight had less than 46, one of `sse`'s less than 50, which is why `engine` has 0.89 of
  `native` by the median and `sse` 1.02.
- What tells a layer's cost is the time outside llama.cpp: 0.1 ms of `native`'s steps of 20, and of `sse`'s 1.0, which is 0.2 in drawing,
  0.2 in the scheduler while nothing computes, and 0.6 in all the rest; `engine`, whose steps wait for the scheduler, spends 0.3 in that.
  Threads that compute were without a core for 0.4 ms more in `sse`.
- **Mended**: from `loop` on the next step begins by itself while what came of the last one is read and told.
""",
    ),
    Finding(
        kind="ladder",
        title="Sixteen at a time",
        of=("seed-c16-replay-avx512", "seed-c16-served", "seed-c16-replay", "seed-c16"),
        text="""\
- **The newest**, `seed-c16-replay-avx512`, has `native`, `sse` and `replay` in twelve turns of six starts: `sse` has 1.007 of `native` by
  the mean (0.991 to 1.022), its calls made again have 0.998 (0.958 to 1.039), and `sse` has 1.009 of these (0.972 to 1.047). Outside
  llama.cpp a step took 1.9 ms more of 167: 0.5 in drawing, 0.3 in the scheduler, 1.1 in all the rest.
- **The only loss for sure** is on the machine with AMX, at an earlier revision: `seed-c16-served`, `native` and `sse` alone in 22 turns of
  as many starts, 0.956 (0.928 to 0.985). A step took 7.9 ms more of 166: 2.8 outside llama.cpp (1.1 in drawing, 0.4 in the scheduler, 1.3
  in all the rest), and 5.2 in llama.cpp's calls (from 22 less to 24 more), whose threads were without a core for 0.9 more. What serves and
  the client took 2.0 ms of these two cores for each step. `replay` was not tried there.
- **With AVX2 alone**, `seed-c16-replay`, 16 turns of eight starts beside some of which single tests of a few seconds ran: `sse` has 0.968
  of `native` (0.881 to 1.063), its calls made again 0.975 (0.901 to 1.054), and `sse` 0.993 of these (0.872 to 1.131): neither a served
  pass's batches nor what runs beside them is told from the machine's own swings. Outside llama.cpp a step took 2.5 ms more of 250.
- **All stages** are in `seed-c16`, in four turns of an earlier revision, where `sse` goes from 0.78 to 1.14 of `native`: 0.929 by the mean,
  not told from none. That of `client` is: 0.916 (0.847 to 0.992). Outside llama.cpp a step of `sse` takes 2.2 ms of 199, and of `client`
  3.7 of 205. The rest of what is missing is in llama.cpp's calls: 183 ms of `native`'s steps, 197 and 202 of these, whose threads were
  without a core for 0.6 and 2.3 ms more; for what remains no cause was found. What `seed-c16` lacks is not there in the twelve newer turns.
""",
    ),
    Finding(
        kind="stack",
        of=("gpu-draws", "gpu", "instant"),
        text="""\
- **What a token costs** depends on how many share a step. With one stream a step of `instant` is a hop into the models' thread and back,
  and Trio's turn for what came of it: three quarters of what it takes up to there. With 64 a token takes 25 us over SSE: 1 to draw it, 4 in
  the scheduler, 3 in the loop and the hop, 4 in the API, 3 in HTTP and the server's process, 11 for an event and a packet of its own. The
  official client reads some 11,000 tokens/s and takes a core for that, so that `client` says what it bears, not what the server does.
- **What bounds `instant`** over SSE is one thread of Python. The kernel's send is 16 % of it under the profiler, which makes Python's part
  about twice as long and hardly the kernel's; of the time that a token takes without one it would be more than a quarter.
- **What bounds `gpu`** at 64 streams is sampling, at 7.2 times its floor, which is to read all logits once. Two threads for the rows, tried
  on the way, had 0.90 to 0.94 of the time for 64 of them, and 0.94 to 1.15 for 32, so that one draws them all.
- **Mended**: the next step of answers begins by itself where nothing is to be decided before it. When that was made, `gpu-draws` had, turn
  by turn with the revision before, 1.10, 1.07 and 1.11 times the steps/s with 1, 8 and 64 streams over SSE, in two or three turns, which
  are not kept. A step that takes no time has nothing to hide that behind: `instant` with 64 streams had 0.8 to 0.9 of the tokens/s so, and
  does without.
- **The aim of 475 steps/s is missed**: `gpu` makes 100. The aim leaves 0.1 ms of each step to everything but the model, and to read the
  logits takes ten times as long. Of `gpu-draws`, whose host draws nothing, the bare `engine`, which waits for itself, makes 448, and what
  is served 447 with 8 streams and 385 with 64. On a machine with AVX2 alone, at a revision before, these were 65, 402, 394 and 300, and
  `instant` carried 26,000 tokens/s at 64 streams, where it carries 40,000 here.
""",
    ),
    Finding(
        kind="promises",
        of=("chat-turns", "long", "over-commit", "overload", "planner", "two-keys"),
        text="""\
- **A long prompt.** As soon as it is 512 cells deeper than the others, there are two kinds of steps by turns, of answers and of the prompt,
  because one step with both would cost more: where each slot has cells of its own, a pass of llama.cpp walks as many cells of each as the
  deepest has. (Seven rows and nine of a prompt with 2,048 cells took 0.43 s in one step; by themselves the seven took 0.07 and the nine
  0.27.) A prompt's step and one of answers are to take 1.85 of the latter; with 2.2 the longest gaps were of 2.7 to 4.0 steps, with 2.0 of
  2.1 to 3.1. The price is the prompt's, whose first text comes after 82 to 104 s. Cells lie in one way throughout here; as the server
  comes, with 6,144 cells, they were laid apart while the first seven ran, and together again when the first long prompt had no room in a
  part: everybody waited 1.2 and 1.45 s for that, once each.
- **Two keys.** A quiet request waits for the rest of the step under way, and for the step of its own prompt. A step in which nobody
  generates takes a third of a second at most where several keys ask, and a prompt may end in a step a quarter longer, so that it is not cut
  into 28 and 4 rows. One or two longest waits decide: runs of 60 requests had 1.84 to 3.8 steps, so that 150 are made; a run of as many of
  the revision before, beside which short programs ran, had 2.12. The longest times between tokens of the flood are no steps: who gave up a
  place to the quiet key had 2.4 s between two tokens in a traced run, whose longest step took 0.44 s.
- **Overload.** Requests come at random times, whatever becomes of those before, and are counted as they end, once the load has settled, for
  a minute. What can be served is measured with as many requests at once as there are slots. In some runs up to 1.7 times as many were
  answered of an overload, so that four times that was a little over twice what was ever answered. A pass has some thirty good answers, and
  one of them is 0.03 of the figure: a run of the revision before, beside which short programs ran, had 0.71, and missed it, and one of a
  change to how cells are laid out, which was taken back, 0.81. In six runs of a minute of that revision, three with cells in a pool and
  three in parts, 19 of the 21 that were not good had their first text late, and two were told text too slowly. Parts had 0.98 of a pool's
  tokens/s there, as many good ones of those that were answered (0.91 and 0.93), and gaps 1.1 times as long.
- **The planner** with prompts in parts misses its bound.

What is told here of other runs than those in the table is of runs that are not kept.
""",
    ),
    Finding(
        kind="peers",
        title="Short prompts at the same time",
        of=("seed-40x8-c8", "seed-40x8-c16", "seed-40x8-c24", "seed-40x8-c32", "seed-160x5"),
        text="""\
- **Tokens/s are not told apart**: both servers spend a step in the same kernels, with little around them (the ladder, above). At 16 first
  texts at p50, gaps up to p99 and whole answers are within three percent of those of llama-server as it comes, too; at 24 gaps are 1.00
  times as long at p50 and 1.12 at p99, at 32 tokens/s and gaps are within three percent of the best settings'. In ten more pairs at 16,
  beside `-no-kvu` by that name, first texts at p90 come after 1.07 times the time (1.01 to 1.13).
- **First texts at p50 come later** than those of settings that compute one prompt after the other, while those who have begun wait. cLLM
  computes all prompts that come together in one step, if that takes no more than 48 steps of their answers and six seconds (thirty where
  they have all places), and then generates for all. At 8 they come after 1.20 times the time of `no prompt cache`, and `-b 64`,
  `-kvu -b 64` and `-b 32` have them after 0.54 to 0.61 of cLLM's time; its gaps are 0.30 to 0.45 times as long as theirs at p99, and it has
  1.03 (0.98 to 1.08), 1.09 and 1.09 times their tokens/s. At 16 `-b 64` has them after 0.56 of cLLM's time, with gaps three times as long
  at p99; `-kvu -b 64` after 0.60, with gaps 3.8 times as long, and cLLM has 1.20 times its tokens/s (1.14 to 1.27); `-b 32` after 0.76,
  with gaps twice as long at p90 and at p99, and cLLM has 1.21 times its tokens/s (1.16 to 1.26). At 24 they come after 1.81 times the time
  of `-b 64`, which has 0.89 of the tokens/s and gaps 1.8 times as long at p99; at 32 after 1.48 times that of `-kvu -b 64`, whose tokens/s
  are two thirds of cLLM's.
- **At 32** the first 32 come together after a median of 4.2 s, so that in eight of ten passes they miss the 4 s of a good request;
  `-no-kvu`'s come after 3.8, but who has more good ones is not told apart. First texts come after 1.13 times its time at p90.
- **Beside `-kvu`** at 8, in ten pairs of two revisions (checks of types ran for seconds beside some), cLLM has 1.10 times the tokens/s
  (0.98 to 1.24, not told apart), and first texts at p50 after 0.90 of its time; at 16 1.07 times (1.03 to 1.12).
- Short programs, and a test of two seconds, ran beside some pairs of `-b 32` and `-b 64` at 8 and of `-b 32` and `-kvu` at 16.
- **Memory**: `no prompt cache` saves nothing on the host and takes the least. Where 160 requests come five at a time `-no-kvu` keeps more
  of what ended, and cLLM has 0.53 of its memory after a pass, and 0.32 after two.
""",
    ),
    Finding(
        kind="peers",
        title="One at a time",
        of=("seed-40x8-c1",),
        text="""\
Sixteen requests a pass, on a machine with AVX-512.

- **A loss for sure, beside every setting**: 0.94 of the tokens/s of llama-server as it comes (0.92 to 0.96), 0.95 of `-kvu`'s, and 0.91 to
  0.94 beside `-b 32`, `-b 64` and `no prompt cache`, ten pairs each. Prompts of 32 tokens are computed alike with all of these, so that the
  least of them, 0.91 beside `-kvu -b 64`, which is `-b 64`, is the worst of equals. First texts are not told apart. Gaps are 1.06 to 1.08
  times as long at p50, 1.10 to 1.20 at p90 and 1.36 to 1.55 at p99. An earlier revision, on the machine with AMX, in a run that is not
  kept, had 0.89 to 0.99.
- **What it is at p50**, 1.2 ms of 17: drawing and Python's work, on the two cores that compute. Of each second the server's Trio thread
  takes 35 ms, for 56 tokens, and a thread that computes is without a core for 44. A bare loop in C takes 15.7 ms a token with cLLM's build
  of llama.cpp and 15.8 with llama-server's; cLLM's calls of it took 16.0, a draw 0.57 (0.13 by itself: Python's code and data are not in
  the caches after a step has read the weights). Where there is a core more than compute, this is not so.
- **At p90** a text comes up to 3 ms late and the next as much earlier: the thread that sends it waits for one of the cores.
- **At p99** it is the saving of what has ended, once a request for the first twenty, until it has seen that nobody asks for them: 9 MB took
  12 to 19 ms in memory that this machine had to find first, and 0.7 in memory that the process had had.
- **Mended before**: the next step begins by itself while what came of the last one is read and told: 1.034 times the tokens/s of the
  revision before (1.015 to 1.054, 16 pairs of four starts, greedily). With eight at a time, 110 ms a step, it was 0.985 (0.966 to 1.005),
  so that steps of more than 50 ms do without.
- **Tried and left**: a hundredth of OpenMP's spinning between steps had 1.00 of the tokens/s (0.97 to 1.04); to wake Trio's thread without
  giving Python's lock away 1.00 (0.98 to 1.01); whichever threads were held to one core, gaps were within a percent; a shorter slice of the
  kernel's time for the thread that sends changed nothing that could be told, in two starts each.

What is told of other pairs than the table's is of runs and single calls that are not kept.
""",
    ),
    Finding(
        kind="peers",
        title="Mixed prompts",
        of=("mixed-c8", "mixed-small-c8", "mixed-small-c16"),
        quotes=("passes-8-sequences",),
        text="""\
- **How they differ**: cLLM computes prompts in pieces beside answers, `-no-kvu` computes them first, all at once. So cLLM's slowest gaps
  are 0.3 to 0.4 times as long, and more of its gaps have a piece of a prompt in them: at 8 more than one in ten, which makes p90 1.9 to 2.6
  times as long. Half of the first texts come later at 8; of `mixed` those at p90 come sooner, and those at p99 later.
- **Tokens/s are not told apart**, and no order of the same rows gives much more: these workloads have some sixteen rows of prompts for each
  seven tokens (`mixed` fourteen), and by the single calls above such a share takes 101 ms if prompts are computed at once, apart; 109 apart
  in pieces of 64 rows, 110 in pieces of 25; 104 in a pool in pieces of 25. So the aim of 1.05 times is missed.
- **Lost for sure** in `mixed-small`, with all settings, on a machine with AVX2 alone: at 16 first texts at p99 come after 1.27 to 1.37
  times the time of `-kvu`, `-no-kvu` and `no prompt cache`, gaps at p50 are a third longer than those of the latter two, and at p90 1.91
  times as long as those of `-b 32`; at 8 gaps are 1.20 times those of `-b 64` at p50, and 1.9 and 1.6 times those of `no prompt cache` and
  `-kvu` at p90. `no prompt cache`, which saves nothing on the host, is the best of them at seven of fourteen main figures.
- **Beside those that cut prompts, too**, `-b 64` and `-b 32`: at 16 cLLM has 1.10 and 1.26 times their tokens/s, and half of its first
  texts after 0.67 and 0.43 of the time; at 8 they are not told apart. Gaps at p99 are 0.78 and 1.05 times as long as those of `-b 64`, at 8
  and 16, and 1.33 and 1.39 times as long as those of `-b 32`, which computes the smallest pieces and is the best of all at these, though
  not for sure. `-kvu` has fewer tokens/s at both.
- **Beside `-kvu -b 64`**, which cuts prompts and has all cells in one pool: 1.45 times its tokens/s at 16 (1.28 to 1.64) and 1.15 at 8
  (1.04 to 1.27). At 16 first texts come after 0.50 to 0.61 of its time, and gaps are 0.53 times as long at p50; at 8 they are 0.74 and 0.76
  times as long at p90 and p99, and the rest of these is not told apart.
- **`mixed` beside `-b 32`**, on a machine with AVX-512: 1.11 times its tokens/s (1.06 to 1.16), twice as many good requests (1.54 to 2.62),
  first texts after 0.54 to 0.58 of its time, and gaps 0.90 times as long at p50; but 1.34 times at p90 and 1.49 times at p99. A search of
  some seconds, and tests of half a second, ran beside some of these pairs.
- **What swings**: `mixed` at 8 has a wide interval beside `-no-kvu`, since of five starts one had 1.01 of the tokens/s and one 0.80; the
  slow one's requests were not as slow in another start, and in a simulation the scheduler needs as long for all of them as the faster
  starts did, within four percent. Single test files and checks of types ran for some seconds beside the pairs of `-kvu`.
- **Tried**, in runs that are not kept: on the machine with AMX first texts came after 1.39 times `-no-kvu`'s time at p50 and 1.37 at p99,
  with 1.8 times as many good requests; an earlier revision on a machine with AVX-512 had 0.91 and 1.18 of these times. There pieces four
  times as long had 1.02 times the tokens/s, and gaps 1.4 times as long at p99.
""",
    ),
    Finding(
        kind="peers",
        title="Overload",
        of=("overload-0.5x-c8", "overload-1x-c8", "overload-2x-c8", "overload-4x-c8"),
        quotes=("passes-8-sequences",),
        text="""\
Requests come in bursts of 24, at random times, whatever becomes of those before, at half, one, two and four times 0.59 a second, which is
what 24 requests came to eight at a time when that was measured, once, cold, their beginning and end counted in. At twice and four times as
much cLLM answered 0.62 to 0.72 a second, so that what is called the whole here is 0.8 to 0.9 of what can be served. Prompts go in pieces
beside answers, and once some have waited in vain the newest of those who wait go first.

- **Who has more good requests** is not told apart at the half and at the whole. At twice as much cLLM has 1.93 times as many as `-b 32`
  (1.68 to 2.22), 1.86 as `-kvu -b 64` (1.50 to 2.30), 1.61 as `-kvu` (1.36 to 1.91) and 1.34 as `-b 64` (1.20 to 1.48); at four times 2.14
  as `-kvu` (1.36 to 3.38), 1.77 as `-kvu -b 64` (1.49 to 2.31) and 1.24 as `no prompt cache` (1.02 to 1.51). Beside `-no-kvu` nothing is
  told.
- **At the whole cLLM waits longest**, beside all settings in ten pairs each but for `-b 32`, from which nothing tells it apart. First texts
  come at p90 after 1.25 (`-kvu -b 64`), 1.38 (`-no-kvu`), 1.62 (`-b 64`), 1.66 (`no prompt cache`) and 1.82 times (`-kvu`) the time, and
  whole answers at p50 after 1.25 to 1.27 times that of `-kvu` and `-b 64`. A prompt in pieces makes more of the steps that answers wait for
  longer, and itself ends later: gaps at p50 are 1.11 to 1.35 times as long as those of `-no-kvu`, `-kvu` and `no prompt cache`, at p90 1.67
  to 1.86 times, and at p99 0.30 to 0.44 times. Pieces cost more, too, 1.05 to 1.10 times the CPU time a token: by the single calls above 25
  rows of a prompt beside seven answers take 74 ms where each slot has cells of its own, and 60 as a part of 128 by themselves. That is 0.98
  to 0.99 of the tokens/s of `no prompt cache` and `-no-kvu`, and where nearly all that can be served comes such a difference makes who
  comes wait.
- **Beside `-no-kvu`** at twice and four times as much gaps are 0.4 of its at p99 and 1.7 to 2.0 times as long at p90; first texts at p90
  come after 1.61 times the time at twice as much, at p99 after 1.6 times, as at the whole, and 1.27 times at the half.
- **Beside `-b 32`**, which cuts prompts too, at twice and at four times as much: 1.08 and 1.09 times the tokens/s, gaps at p50 0.78 and
  0.65 times as long, first texts at p50 after 0.36 of the time at twice as much, at p90 and p99 after 0.90 and 0.87 at four times; but gaps
  are 1.45 and 1.48 times as long at p90, and at p99 1.58 times at twice as much (1.31 at four times, which does not tell).
- **Beside `no prompt cache`**, which saves nothing on the host and takes three quarters of cLLM's memory, at twice and four times as much:
  0.94 and 0.96 of its tokens/s, first texts after 1.49 and 1.16 times its time at p90, gaps 2.08 and 1.40 times as long at p90 and 0.43 and
  0.30 times at p99.
- **Beside `-kvu`** at twice and four times as much: 1.08 and 1.09 times its tokens/s, first texts at p50 after 0.63 and 0.73 of its time,
  gaps at p99 0.31 and 0.22 times as long, but at p90 1.90 and 1.59 times.
- **Beside `-b 64`** nothing tells tokens/s and gaps apart; at twice as much first texts come at p50 after 0.62 of its time and at p90 after
  1.32 times. **Beside `-kvu -b 64`**: 1.09 and 1.13 times its tokens/s, gaps 0.75 times as long at p90 and 0.83 and 0.80 times at p99.

What is good is counted by the second until the last answer, and a burst ends before: at four times the rate all 24 have come after some
10 s, and the last one was answered by cLLM after 28 to 44. So fewer good ones a second there are the burst's end, and under a load that
lasts it is otherwise (overload in "What scheduling must come to"). Pairs of `-no-kvu` are of an earlier revision.
Short programs ran beside some of those of `-b 64`, `-kvu -b 64` and, at four times, `-kvu`.
""",
    ),
    Finding(
        kind="peers",
        title="A shared prefix",
        of=("shared-prefix",),
        text="""\
- **More than twice the tokens/s**: 2.14 times those of `-no-kvu`, which has the most of its settings, and 3.07 times those of `-b 32`, both
  in ten pairs. The first eight of each pass wait until one of them has computed the prefix, and compute what is their own together then; in
  llama-server each slot computes the prefix once. So nine of ten first texts come after a quarter of its time.
- **Not better everywhere**: `-b 32` has first texts at p50 that are not told apart (1.12 times its time), and `-b 64`, in four pairs, has
  them after 0.68 of cLLM's; `no prompt cache`, in two, takes 0.85 of its memory, since it saves nothing on the host. These two would have
  gone on when the run was ended. Beside all with two or four pairs cLLM had 2.2 to 4.1 times the tokens/s.
""",
    ),
    Finding(
        kind="peers",
        title="A long prompt among short ones",
        of=("long-among-short",),
        quotes=("passes-2-sequences-2048-cells",),
        text="""\
- **What is bought**: the others wait 0.7 s at the longest, by the median of the passes (0.4 to 3.7), where `-no-kvu` has them wait 29 s for
  the whole prompt, and their answers end after 0.70 of the time; seven of eight requests are good in seven of the ten passes, and none of
  its.
- **What it costs**, which is most here: 0.86 of the tokens/s of `-no-kvu`, and its long prompt has its first text after half of cLLM's
  time. Beside the others only few rows of the prompt go in a step, so that gaps at p50 are 1.6 times as long; once they have ended it goes
  in full tiles. Rows of a sequence that do not fill a tile of 64 read what is before them one by one: 2,048 tokens deep, sixteen rows take
  0.22 s by the single calls above, thirty-four 0.43 and sixty-four 0.31. Who would rather have the prompt sooner says a longer
  `--itl-target-ms`.
- **The other settings**, in two pairs each: as it comes, `-kvu` and `no prompt cache` do as `-no-kvu` does, with waits of 28 to 34 s;
  `no prompt cache` has the first texts of the others after 0.84 of cLLM's time. `-kvu -b 64` has them wait 3.2 s where cLLM's wait 1.9,
  with 1.12 times the tokens/s; `-b 32` and `-b 64` 2.9 and 4.8 s, with 0.43 and 0.52 of the tokens/s.
- **Mended**: in an earlier run one start of five had its prompt's first text after 122 s in both passes, where the others' came after 76 to
  86: after a tile that something held up, tiles were believed dear, and none came any more. What is learned of sizes that are not met fades
  since then.

All have 34,816 cells: `-no-kvu` lets each sequence have an eighth of them, into which the prompt has to fit.
""",
    ),
    Finding(
        kind="peers",
        title="Conversations",
        of=("chat-turns-c8", "chat-turns-c32", "chat-turns-c8-row-budget"),
        text="""\
They begin in a pool, where each row walks by everybody's cells, and are laid apart once that has cost as much as the change. Eight end a
turn together and begin the next together, and their prompts are computed at once, however many steps of answers that takes, since all owe
about as much.

- **Eight, beside `-no-kvu`**: tokens/s are not told apart (0.98 to 1.05); first texts at p90 come after 0.83 of its time, and memory is
  0.59 of its after a pass, 0.46 after two.
- **Eight, beside `-b 64` and `-kvu -b 64`**, which compute the prompts of those who come together one after the other: half of their first
  texts come after 2.5 and 3.2 s, cLLM's after 3.42 and 2.52 times as long, and those at p99 after 1.72 and 1.51 times. Who has begun waits
  then: cLLM's gaps are 0.30 and 0.19 as long at p90, 0.36 and 0.15 at p99, and it has 1.10 (0.99 to 1.22) and 1.52 times their tokens/s.
  Who would rather have that says it: with `--row-budget 64`, beside `-b 64`, cLLM has 1.02 of its tokens/s (0.97 to 1.07) and first texts
  at p50 after 1.07 times its time, and nothing else tells the two apart (`chat-turns-c8-row-budget`).
- **Eight, beside `no prompt cache`**, which finds nothing again: 1.81 times the tokens/s (1.53 to 2.14), first texts at p50, p90 and p99
  after 0.70, 0.49 and 0.39 of its time, and gaps at p99 that are 0.06 times as long, where its own are of 8 s; it takes 0.87 of cLLM's
  memory after a pass, and 0.64 after two. Single test files of up to a minute and a half ran beside some of these pairs.
- **Eight, beside `-b 32` and `-kvu`**, in two and five pairs: 1.2 and 1.27 times their tokens/s (`-kvu`: 0.96 to 1.68, not told apart).
- **32 in 8 slots**, in ten pairs of ten starts beside llama-server as it comes: nothing is told apart (tokens/s 0.95 to 1.06) but memory,
  1.14 times its. Half of the first texts come after 48 s: the eight places are filled and emptied together, strictly in turn, here as it is
  there.
- **Good requests** are few with either, 5 to 8 % of cLLM's and 7 to 15 % of theirs beside the four settings with ten pairs, since most
  first texts come after 4 s.
- **Found again**: of eight, both have 11,680 of 16,752 tokens from their caches; of 32, llama-server has 46,720 in every pass and cLLM 512
  less in eight of ten. Each turn goes on from other tokens than were answered, which had to be known in advance, so that only prompts can
  be found again.
""",
    ),
    Finding(
        kind="peers",
        title="llama-cpp-python's own server",
        of=("seed-40x8-llama-cpp-python",),
        text="""\
It answers one request after the other, so that those who come together wait for those before them: first texts come after an eighth of its
time here, and gaps are twice as long, since eight are computed at a time. cLLM takes 1.16 times its memory after two passes. Both were sent
words, some 75 tokens a prompt, and of its tokens up to five of 800 are not counted, where a chunk of text holds two.
""",
    ),
    Finding(
        kind="peers",
        title="As it is started, without `--parallel`",
        of=("mixed-small-c16-default",),
        text="""\
cLLM then keeps `--itl-max-ms` of 250: fewer than the sixteen run at once, a step with prompts aims at a quarter of a second at most, and of
those who wait the newest go first.

- **Bought**: gaps are 0.33 and 0.20 times as long as `-no-kvu`'s at p90 and p99, and there are 2.1 times as many good requests a second
  (1.3 to 3.4).
- **Paid**: 0.83 of its tokens/s (0.74 to 0.94), half of the first texts after 2.6 times its time, and a tenth after 33 s, where its come
  after 9. Beside itself with `--parallel 16`, in seven pairs, it has 0.72 of the tokens/s (0.67 to 0.78), gaps at p99 0.48 times as long,
  and first texts at p90 after 5.2 times the time: with prompts in passes of their own, which are cheap when they are long, a quarter of a
  second is dear.
- **Tried**: on the machine that only counts time, with this machine's curve, 400 ms have nearly all of the tokens/s of no bound (51 of 53,
  where 250 have 42), first texts at p90 after 5 s in place of 37, gaps at p99 of 0.43 s in place of 0.27, and a third as many good
  requests, of which the time between tokens is 0.25 s at most. These runs are not kept.

Single tests and checks of types ran for seconds beside some of these pairs.
""",
    ),
    Finding(
        kind="peers",
        title="With OpenVINO",
        of=(
            "seed-40x8-c8-openvino-Q8_0", "seed-40x8-c8-openvino-Q4_K_M", "seed-40x8-c8-openvino-Q4_K_M-matched",
            "seed-40x8-c16-openvino-Q8_0", "seed-40x8-c16-openvino-Q4_K_M", "seed-40x8-c32-openvino-Q8_0",
            "seed-40x8-c32-openvino-Q4_K_M", "seed-40x8-c1-openvino-Q8_0",
        ),
        text="""\
Beside `-no-kvu` alone. At 8 and at 16 ten pairs each, on a machine with AVX-512; `matched`, at 32 and one at a time two or three pairs of
earlier revisions, on a machine whose instructions were not kept.

- **At 8 and at 16** it has 1.96 and 2.15 times the tokens/s with Q8_0 (1.89 to 2.05, 2.10 to 2.20) and 1.77 and 1.60 with Q4_K_M (1.71 to
  1.83, 1.52 to 1.68), first texts after 0.37 to 0.53 of the time at p50 and 0.43 to 0.54 at p90, and gaps at p50 0.44 to 0.66 times as
  long. The longest gap of a pass is 2.9 to 4.1 times as long, and memory is 1.9 and 1.7 times theirs with Q8_0, 1.5 and 1.3 with Q4_K_M.
- **At 32** it has 2.27 and 1.73 times the tokens/s, and one gap in a hundred is four times as long.
- **One at a time** it has three quarters of the tokens/s: gaps are 1.47 times as long, first texts come after 0.44 of the time.
- By default it computes in bf16 with keys and values in 8 bits; `matched` is in llama.cpp's own precision.
""",
    ),
)  # fmt: skip
