"""What the report says in words; its numbers are in the results, but for what was tried on the way and is told as such.

What each kind of run measures is said of whatever results there are. What was found is of the runs that `WRITTEN_OF` names, and is said of
these alone: who renews one of them reads what is said of it, and then renews its day and revision there.
"""

from __future__ import annotations

from typing import Final

INTRODUCTION: Final = """\
# Benchmarks

<!-- Written by `python -m benchmarks report` from benchmarks/results. -->

`python -m benchmarks` lists the commands that measure; those whose results are kept write a JSON file into `benchmarks/results`, from which
`python -m benchmarks report` writes this page and README's tables.

Models named `qwen3-0.6b` have that shape and random weights, made by `python -m benchmarks.models`: speed does not depend on what weights
say, texts mean nothing. Ratios are taken within a pair or a turn, since a machine's speed changes within minutes, and tokens/s of different
runs cannot be compared. Where a ratio stands beside two figures, these are medians each by itself, of which it is not the quotient. A ratio
is cLLM's figure over the other's: of times less than 1 is better, of tokens/s more. The first text is the first chunk that a client sees of
an answer, and between texts is the time from one chunk to the next. Promised is what cLLM sets itself as a bound, kept or missed.
"""

MACHINES: Final = """\
The runs are of several machines, each with two cores that it shares with others: some have AVX-512, some AVX2 alone, one AMX, which runs
name since that is kept; one was up to three times as slow as another.
"""

GLANCE: Final = """\
Beside other servers, `cllm serve` with no options but those that every server gets: its cells, how many requests run at once, and its
threads (told how many run, it keeps no `--itl-max-ms`). Each number is how many times better cLLM is: its tokens/s over theirs, or their
time or memory over its own. Each figure is beside the setting of theirs that is best at it, of those that have all pairs, or, where cLLM is
told to be worse than another one and not than that, beside the other; * marks runs in which llama-server was not started with all of seven
settings, or in which some that were better at something have fewer pairs. Not told apart is what has 1 within its 95 % interval, had too
few starts, or would be won but for a setting that did better in the fewer pairs it had. Each interval is by itself: of so many some are
beside 1 by chance. A server whose answers were not as long as was asked is not here, nor is cLLM as it is started, without `--parallel`:
see `mixed-small-c16-default`.
"""

GLANCE_BY_SETTING: Final = """\
Who chooses a setting has all that it is, and not what is best at each figure of seven. Beside each setting by itself, of those that have
all of a run's pairs, this is at how many figures of these runs cLLM is better, worse, or not told apart. As it comes llama-server is what
`-no-kvu` is, wherever several requests run at once.
"""

LADDER: Final = """\
Each stage adds one real layer to the one above it in the table and answers the same requests, but for the first two tokens of each prompt,
which differ so that nobody finds a prompt computed; the first three stages feed back tokens that were drawn before, not the model's. Calls
through each layer are counted, and a run in which a stage went round its layer fails. The stages take turns within a run. Ratios are to the
first stage of the same turn: median, least and most over the turns. `isolated` is the loop with the model in a process of its own
(`--isolate`), and is compared with `loop`. `replay` is no layer either: the calls that the server of `sse` made of llama.cpp are noted and
made again by the loop of `native`, on another context of the same weights that has had all earlier ones too, while nothing else runs. What
it has less than `native` is what a served pass's batches cost, whose requests come when their clients do and lie beside the cells of
earlier ones; what `sse` has less than `replay` is what runs between and beside them. Without a core is how long, in a step, a thread that
computes could have run and had none, by the kernel's own count: its team waits for it at the next barrier of the model's graph, up to that
long for each thread. The CPU that serves is that of the process's other threads. What takes more than 1 % off the one above, by the median
of the turns, or makes a step more than 1 % longer outside llama.cpp, is told below the table. What a step took more is told apart: in
llama.cpp's own call, which is the same rows in every stage, so that more of it is how they are batched and where their cells lie, of which
`replay` tells, or the machine's doing, or that of the cores which a stage's other processes take; in drawing; in the scheduler, but for
what it does while llama.cpp computes; and in all the rest, where a stage's own layer is, and the waiting of threads for one another. Only
what is outside llama.cpp is put down to the stage, and the second table says what its layer spends that on and what was done about it.
Times in llama.cpp, without a core and of CPUs are microseconds of a step.

In a ladder's picture the upper part has the medians of tokens/s, in percent of the first stage's, and what each stage takes off or adds;
the lower one what a step spends outside llama.cpp, by its parts, which is what layers cost whatever the machine's speed was.

Nothing is kept on the host in these stages (`--host-cache-mb 0`).
"""

LADDER_FOUND: Final = """\
A scheduler with room on the host saves the cells of what has ended there until it has seen that nobody asks for them: of 66 requests that
had nothing in common two served starts, which are not kept, had 20 of the first 33 saved, and none of the others. From `engine` to `app`
each pass begins with a scheduler of its own, which would save them every time, where the server of the stages after them does so once.

Turns of one stage differ by a tenth and more, since the machine's speed changes within minutes, and so do starts: eight of the bare model,
which are not kept, had 0.91 to 1.10 of its time for the same step. So model and server are loaded anew after as many turns as
`turns_a_start` says, and where there were three starts the interval beside the promise is over these. Four are too few to tell some
percent: where a stage has more than the first, that is the machine. What a layer costs of a step is better told by the share of the step
that is not in llama.cpp, which its speed hardly changes. It is the least that a stage costs: on two cores, what serves takes them from the
threads that compute, whose calls take longer by up to what they were without a core more than those of `native`.

At 1, on a machine with AVX-512 and of a later revision, steps begin by themselves from `loop` on, while what came of the one before is read
and told. Passes of any stage had from 44 to 55 tokens/s, and which stage got the slow ones is chance: five of `engine`'s eight had less
than 46, one of `sse`'s less than 50, which is why `engine` has 0.89 of `native` by the median and `sse` 1.02. What tells a layer's cost is
the time outside llama.cpp: 0.1 ms of `native`'s steps of 20, and of `sse`'s 1.0, which is 0.2 in drawing, 0.2 in the scheduler while
nothing computes, and 0.6 in all the rest; `engine`, whose steps wait for the scheduler, spends 0.3 ms in that. Threads that compute were
without a core for 0.4 ms more in `sse`. The machine with AMX, where `sse` spent 1.1 ms of a step of 35 so, is not kept; at 8 the turns are
of that.

At 16, on a machine with AVX-512, turns of `sse` go from 0.78 to 1.14 of `native`, so that its 0.929, the mean, is not told from none; that
of `client` is: 0.916 (0.847 to 0.992). Outside llama.cpp a step of `sse` takes 2.2 ms of 199, and of `client` 3.7 of 205, which is 1.0 and
1.7 % more of a step than in `native`. The rest of what is missing is in llama.cpp's calls, that have 183 ms of `native`'s steps and 197 and
202 of these: its threads were without a core for 0.6 and 2.3 ms more, and for what remains no cause was found. On the machine with AMX
`seed-c16-served` has `native` and `sse` alone, in 22 turns of as many starts: 0.956 (0.928 to 0.985), which is a loss for sure. By the
median of the turns a step took 7.9 ms more of 166: 2.8 outside llama.cpp (1.1 in drawing, 0.4 in the scheduler, 1.3 in all the rest), and
5.2 in llama.cpp's calls (from 22 less to 24 more), whose threads were without a core for 0.9 more. What serves and the client took 2.0 ms
of these two cores for each step.

On a machine with AVX2 alone `seed-c16-replay` has `native`, `sse` and `replay` in 16 turns of eight starts, beside some of which single
tests of a few seconds ran. By the mean `sse` has 0.968 of `native` (0.881 to 1.063; by the median 1.019), its calls made again have 0.975
(0.901 to 1.054), and `sse` has 0.993 of these (0.872 to 1.131). Outside llama.cpp a step took 2.5 ms more of 250: 0.8 in drawing, 0.3 in
the scheduler, 1.3 in all the rest. So there neither a served pass's batches nor what runs beside them is told from the machine's own swings
of a tenth; on the machine with AMX it was not tried.

On a machine with AVX-512 `seed-c16-replay-avx512` has the same three in twelve turns of six starts: by the mean `sse` has 1.007 of `native`
(0.991 to 1.022; by the median 0.993), its calls made again have 0.998 (0.958 to 1.039), and `sse` has 1.009 of these (0.972 to 1.047).
Outside llama.cpp a step took 1.9 ms more of 167: 0.5 in drawing, 0.3 in the scheduler, 1.1 in all the rest. So what `seed-c16` lacks in
four turns, of an earlier revision, is not there in these twelve.

At 8 the turns of one stage differ by up to a third, so that six of each tell nothing of 0.95: `sse` has 0.955 of `native` by their median
and 0.941 by their mean. So `seed-c8-served` has these two alone, in 36 turns, each of a start of its own: 0.979, the mean, with 0.956 to
1.004 about it, by which the promise is kept. By the median of the turns a step took 2.6 ms more of 116 there. 2.1 were outside
llama.cpp: 0.8 in drawing, 0.3 in the scheduler, 1.0 in all the rest; and 0.6 in llama.cpp's calls (from 20 less to 21 more), whose threads
were without a core for 0.7 more.

A run at 8 of an earlier revision, which is not kept, had 0.876 (0.764 to 0.986 in six turns), and nearly all that was missing was in
llama.cpp's calls. A part was found: in a pool attention walks by every cell up to the highest in use, and a server has cells of earlier
passes there, where the stages up to `app` begin with none. By single calls, which are not kept, 3,360 cached cells made a step of eight
rows 1.21 times as long on that machine, of four 1.24, of two 1.08; one row took no longer beside 3,840. With a host pool what rests goes
there after some steps; without, as here, it stayed until its room was needed, and since then goes once carrying it has cost what it is
worth. Before that `sse` had 0.88 of `app`'s tokens/s (0.78 to 0.99 in six turns), in `seed-c8` it has 0.98 (0.86 to 1.22). On another
machine, where `sse` had less than `http` of the same server, twelve turns of 16 requests, of two starts, which are not kept, had 1.03 (0.96
to 1.11) of the tokens/s with answers that were streamed.
"""

REASONS: Final = {  # what a stage spends time on, in the order of the stages
    "backend": "the batch's columns are checked before llama.cpp sees them",
    "sampling": "every output's row of logits is read, and the cores that compute wait meanwhile",
    "engine": "the model's own tokens are fed back, and every one is detokenised and looked at: before the next step, if that does not "
    "begin by itself",
    "loop": "two hand-overs between threads in each step that does not begin by itself",
    "app": "a request's JSON, checks and hooks, which its tokens share",
    "http": "parsing and framing in a process that has the same cores as the model's threads and the client",
    "sse": "a write to a socket for each token, on the cores that compute",
    "client": "the client's own parsing of each event, on the cores that compute",
    "isolated": "each step's rows go over a socket and its tokens come back, with a process to be woken both times",
}

MENDED: Final = {
    "backend": "llama.cpp reads the columns where they lie and logits are read where it leaves them, so that nothing is copied",
    "sampling": "rows whose parameters agree are drawn together, by a short list or a race in the place of a sort",
    "engine": "a step's columns are arrays that stay, a token's text is made of its own bytes, and 64 that generate are planned in less "
    "than a tenth of a millisecond on a fake model, as is held below; beside a real one plan and apply of 1 to 16 take 0.25 to 0.4 ms",
    "loop": "models compute in one thread of their own, which costs less than a new hop and keeps llama.cpp's barriers from sleeping, and "
    "events are sent while the next step computes",
    "app": "a body is decoded straight into what is checked, once for all tokens of its answer",
    "http": "connections and writes are the project's own, without a task or a timer for each of them; measured by itself below",
    "sse": "a chunk is encoded once but for its text, framed and written without a task being woken, while the next step computes",
    "client": "nothing, it is not ours",
    "isolated": "logits do not cross, only a batch's columns and what was drawn",
}

PASSES: Final = """\
What single calls of llama_decode take, with neither cLLM nor a server in the way: the prices at which scheduling has to buy. Each sequence
holds the cells that the settings name; a row of who generates has an output, a prompt's has none. Apart, each sequence has a memory of its
own and attention walks that; in a pool all share one. The calls take turns, and medians stand with the least and the most.
"""

STACK: Final = """\
Fake models, so that the stack's own cost shows: `instant` takes no time, greedy on a small vocabulary; `gpu` takes 2 ms for 64 rows and
gives 152k logits for each, from which the host draws with top_p 0.95; `gpu-draws` draws by itself in these 2 ms, so that it has no stage
for that. The stages are those above that need no real model. CPU time is that of the process that serves. Up to `app` that is its own
client, too; from `http` on the client is a process by itself on the same cores, so that `http` looks cheaper over `app` than it is, and may
come out below 0. Between steps is what a step has to wait for: that the scheduler applies what came and plans anew, if it must; what is
sent at that time takes its part of it. A picture has what a token takes of CPU time up to each stage, and in brackets what that adds to the
one before.
"""

STACK_FOUND: Final = """\
What a token costs depends on how many share a step. With one stream a step of `instant` is a hop into the models' thread and back, and
Trio's turn for what came of it: three quarters of what it takes up to there. With 64 a token takes 25 us over SSE: 1 to draw it, 4 in the
scheduler, 3 in the loop and the hop, 4 in the API, 3 in HTTP and the server's process, 11 for an event and a packet of its own. The
official client reads some 11,000 tokens/s and takes a core for that, so that `client` says what it bears, not what the server does.

What bounds `instant` over SSE is one thread of Python. The kernel's send is 16 % of it under the profiler, which makes Python's part nearly
twice as long and hardly the kernel's; of the time that a token takes without one, what the profile says of the send would be more than a
quarter. What bounds `gpu` at 64 streams is sampling, at 7.2 times its floor, which is to read all logits once. Two threads for the rows,
tried on the way, had 0.90 to 0.94 of the time for 64 of them, and 0.94 to 1.15 for 32, so that one draws them all.

The next step of answers begins by itself where nothing is to be decided before it, while what came of the last one is read and told. When
that was made, `gpu-draws` had, turn by turn with the revision before, on this machine, 1.10, 1.07 and 1.11 times the steps/s with 1, 8 and
64 streams over SSE, and spent 0.06, 0.10 and 0.35 ms between two in the place of 0.24, 0.27 and 0.6, in two or three turns, which are not
kept. A step that takes no time has nothing to hide that behind: `instant` with 64 streams had 0.8 to 0.9 of the tokens/s so, and does
without.

The aim of 475 steps/s is missed: `gpu` makes 100. The aim leaves 0.1 ms of each step to everything but the model, and to read the logits
takes ten times as long. Of `gpu-draws`, whose host draws nothing, the bare `engine`, which waits for itself, makes 448, and what is served
447 with 8 streams and 385 with 64. On a machine with AVX2 alone, at a revision before, these were 65, 402, 394 and 300, and `instant`
carried 26,000 tokens/s at 64 streams, where it carries 40,000 here.
"""

KILLS: Final = """\
Eight streams over HTTP at a time, half of them greedy and half seeded, on `cllm serve --isolate`; in each round the process that has the
model is killed (SIGKILL) at a random moment of them. A pause is the longest time without text that one of them had after that: loading the
model anew and computing all prompts and answers again. With F32 weights and cells, arithmetic does not depend on what else is in a batch,
and texts are the same; with 16 bits and less they may differ where two tokens are nearly equally likely.
"""

PROMISES: Final = """\
**How it is measured.** These bounds need no other server. Over-commit runs on the demo model in settings in which texts can be compared,
the planner on a fake model, the rest on the model that is named below; what steps cost was measured at the start of each. New text is what
no earlier turn of a conversation had. A step, seen from outside, is the time between two tokens of a request of the key that floods; the
usual step of those among whom a long prompt comes is the median of the gaps that they have without it, in a pass of their own in which
their texts become as long.
"""

PROMISES_FOUND: Final = """\
**A long prompt.** As soon as it is 512 cells deeper than the others, there are two kinds of steps by turns, of answers and of the prompt,
because one step with both would cost more. Where each slot has cells of its own, a pass of llama.cpp walks as many cells of each as the
deepest has: seven rows and nine of a prompt with 2,048 cells took 0.43 s in one step; by themselves the seven took 0.07 and the nine 0.27
(single calls that are not kept). A prompt's step and one of answers are to take 1.85 of the latter; in runs that are not kept the longest
gaps were of 2.7 to 4.0 steps with 2.2, and of 2.1 to 3.1 with 2.0, as the machine was. The price is the prompt's, whose first text comes
after 74 to 109 s. Cells lie in one way throughout here. As the server comes, with 6,144 cells, they were laid apart while the first seven
ran, and together again when the first long prompt came that had no room in a part: everybody waited 1.2 and 1.45 s for that, once each.

**Two keys.** A quiet request waits for the rest of the step under way, and for the step of its own prompt. A step in which nobody generates
takes a third of a second at most where several keys ask, and a prompt may end in a step a quarter longer, so that it is not cut into 28 and
4 rows. What decides are the one or two longest of the waits: runs of 60 requests, not kept, had 1.84 to 3.8 steps, so that 150 are made.
The longest times between tokens of the flood are no steps: whoever gave up a place to the quiet key had 2.4 s between two tokens in a
traced run, whose longest step took 0.44 s.

**Overload.** Requests come at random times, whatever becomes of those before, and are counted as they end, once the load has settled, for a
minute: in 30 s the most overloaded pass had seven good answers only. What can be served is measured with as many requests at once as there
are slots. In some runs, which are not kept, up to 1.7 times as many were answered of an overload, so that four times that was a little over
twice what was ever answered.

**The planner** with prompts in parts misses its bound on this machine.
"""

PEERS: Final = """\
**How it is measured.** Model file, threads, slots and cells are the same for all. (llama-cpp-python's server has one slot, so that requests
wait for one another there; vLLM's cells are its own affair.) cLLM and a peer take turns with the same requests, new ones in every pair, and
who begins alternates. llama-server was built from the sources of llama.cpp that are in llama-cpp-python's own, so that both compute with
the same code; what a build calls itself says nothing, since those sources have no history. Where settings name `n_pairs_start`, both
servers are started anew after so many pairs at most; where `warms_up` is True, a whole pass that does not count goes first, where it is
False a few small requests.

**How to read a ratio.** It is cLLM's figure over the other's: the geometric mean over the pairs, with its 95 % interval by Student's t.
With several starts, each counts once, since starts of one server differ by more than passes of one start do. (Where a figure is 0 in some
pass, each start counts with its sums; if those are 0, too, the interval is by a bootstrap, of six starts at least.) If the interval has 1
in it, it is unclear who is better, which does not say that both are alike: in how many pairs cLLM was better stands beside it. Of fewer
than three starts nobody is called better, since two may agree by luck. A ratio is 1000 at most, which is what much to nothing is told as.
cLLM's own figure is that of the pairs with this peer, so that figures of one column may be of different minutes. A percentile is of a
pass's own values: first texts are 3 to 192, so that at p99 they are the slowest, or nearly so.
"""

PEERS_FOUND: Final = """\
**Which settings.** Each figure stands against the setting beside which it does worst, of those that were measured in that run; the others
are named below each table. `seed-40x8` at 1, 8, 16, 24 and 32, `mixed-small` at 8 and 16, `chat-turns` at 8, `overload` from the whole of
what can be served on (but `as it comes`), `shared-prefix` and `long-among-short` have all of llama-server's settings, one to six of them
for two to four pairs. Told how many slots there are, as it always is here, llama-server as it comes gives each slot cells of its own, so
that it is what `-no-kvu` is; and at one slot `-kvu` is too, and `-kvu -b 64` what `-b 64` is: the best of seven is then the luckiest of
equals, too. The other runs have fewer, chosen by shorter runs that are not kept, and a setting that is not there is not known to be slower;
nor is one that was left after two pairs of one start: at 8, beside `-b 32` and `-b 64` cLLM's first texts at p50 came after 1.6 and 1.5
times theirs in these, as beside `-kvu -b 64`, which went on. A server's memory is its greatest since its start, and caches of prompts grow
with every pass, so the last pass of each start stands for it, mostly the second.

**Short prompts at the same time** (`seed-40x8` at 8 to 32, `seed-160x5`). Both servers spend a step in the same kernels, with little around
them (the ladder, above), so that who has more tokens/s is not told apart. cLLM computes all prompts that come together in one step, if that
takes no more than 48 steps of their answers and six seconds (thirty where they have all places), and then generates for all. At 8,
`no prompt cache` has its first texts sooner at p50, cLLM's after 1.20 times its time: it computes the first of those who come together by
itself, and whoever has begun waits a second while the others are computed. `-kvu -b 64` has them after six tenths of cLLM's time, while
those who have begun wait for half a second, and its tokens/s are less. Beside `-kvu`, whose ten pairs are of two revisions (checks of types
ran for seconds beside some of them), cLLM has 1.10 times the tokens/s, which does not tell who is better (0.98 to 1.24), and first texts at
p50 after 0.90 of its time. `no prompt cache` saves nothing on the host and takes the least memory; in a run that is not kept cLLM had 297
MB of what ended there after one pass beside other work. Where 160 requests come five at a time, `-no-kvu` keeps more of what ended, and
cLLM has 0.32 of its memory. At 16 it is as at 8: beside llama-server as it comes tokens/s, first texts at p50, gaps up to p99 and whole
answers are within three percent, none of which tells who is better, and `-b 64` has first texts at p50 after 0.56 of cLLM's time, by the
same trade: it lets those who have begun wait, its gaps are three times as long at p99, and its tokens/s are less. `-kvu -b 64` trades more,
in ten pairs: first texts at p50 after 0.60 of cLLM's time, gaps at p99 3.8 times as long, and cLLM has 1.20 times its tokens/s (1.14 to
1.27). At 24, on the machine with AMX, nothing but first texts at p50 and memory tells who is better: tokens/s are 1.01 of the best
setting's, gaps at p50 1.00 and at p99 1.12; at p50 first texts come after 1.81 times the time of `-b 64`, whose tokens/s are 0.89 of
cLLM's, and whose gaps at p99 1.8 times as long. At 32, there too, tokens/s and gaps are within three percent of the best settings', none of
which tells who is better; first texts come after 1.13 times `-no-kvu`'s time at p90, and after 1.48 times that of `-kvu -b 64` at p50,
whose tokens/s are two thirds of cLLM's. The first 32 come together after a median of 4.2 s there, so that in eight of ten passes they miss
the 4 s of a good request; `-no-kvu`'s come after 3.8, but starts differ so much that who has more good ones is not told apart.

**One at a time** (`seed-40x8` at 1, 16 requests a pass, on the machine with AMX). Of llama-server's settings `-b 32` comes out best at
nearly everything, and cLLM has 0.89 of its tokens/s (0.80 to 0.99): its five starts had from 0.80 to 1.02. Prompts of 32 tokens are
computed alike with each setting, so that some of this is that the worst of seven was chosen: beside llama-server as it comes, `-b 64` and
`no prompt cache`, with ten pairs each, it is 0.99, 0.97 and 0.98, none of which tells who is better. An earlier run with 40 requests on a
machine with AVX-512, beside llama-server as it comes alone, which is not kept, was a loss for sure: 0.95 (0.91 to 0.99), with gaps 1.06
times as long at p50, 1 ms of 16, and 1.17 and 1.16 at p90 and p99. The one at p50 is about what a step spends outside llama.cpp (1.0 ms in
the ladder above), with the half millisecond that drawing takes with the workload's sampling. Such a draw, tried by itself, takes 0.13 ms,
and 0.47 where 240 MB are read before each, as a step reads the weights: Python's code and data are not in the caches any more then. A whole
step of the instant fake takes 0.24 ms. OpenMP's threads spin between two steps, on the cores that the rest needs; with a hundredth of that
(`GOMP_SPINCOUNT=3000`), ten pairs of ten starts, which are not kept, had 1.00 (0.97 to 1.04) of the tokens/s, so that was left as it is.
Since these runs the next step begins by itself while what came of the last one is read and told: beside the revision before that, on a
machine with AVX-512, greedily, 16 pairs of four starts, which are not kept, had 1.034 times the tokens/s (1.015 to 1.054) and gaps 0.98
times as long at p50; with eight at a time, 110 ms a step, twelve pairs on the way had 0.985 (0.966 to 1.005), so that steps of more than 50
ms do without. That is a small part of the loss: six pairs of two starts beside llama-server as it comes there, which are not kept either,
had 0.93 of the tokens/s with the workload's sampling (0.90 to 0.96), and gaps 1.07, 1.14 and 1.46 times as long at p50, p90 and p99.
Neither build of llama.cpp is faster: a bare loop in C takes 15.7 ms a token with cLLM's and 15.8 with llama-server's, by medians of eight
turns. cLLM's calls of it took 16.0, a draw 0.57 (0.2 of the likeliest token), and 0.6 to 1.2 ms, in the mean, are neither: Python's work on
two cores whose caches the weights have just filled. By samples Trio's thread takes 0.65 ms of a core for each token, spread thin: a third
in Trio's own turns and its waits for the kernel, a tenth in sending, an eighth in the cost model. To wake it without giving Python's lock
away had 1.00 (0.98 to 1.01) of the tokens/s in twelve pairs, and whichever threads were held to one core, gaps were within a percent:
neither was kept. First texts come after 1.05 times the time at p50 beside llama-server as it comes (1.01 to 1.09), and 1.12 beside
`no prompt cache`, which saves nothing of what ended when the next one comes.

**Mixed prompts.** cLLM computes prompts in pieces beside answers, `-no-kvu` computes them first, all at once. So cLLM's slowest gaps are
0.3 to 0.5 times as long, and more of its gaps have a piece of a prompt in them: at 8 more than one in ten, which makes p90 1.9 to 2.6 times
as long. Half of the first texts come later at 8; of `mixed` those at p90 come sooner, and those at p99 later. Who has more tokens/s is not
told apart, and no order of the same rows gives much more: these workloads have some sixteen rows of prompts for each seven tokens, and by
the single calls above such a share takes 101 ms if prompts are computed at once, apart; 109 apart in pieces of 64 rows, 110 in pieces of
25; 104 in a pool in pieces of 25. (`mixed` has fourteen.) `mixed-small` at 16 and at 8 has all settings, on a machine with AVX2 alone;
single test files and checks of types ran for some seconds beside the pairs of `-kvu`. `no prompt cache`, which saves nothing on the host,
is the best of them at seven of fourteen main figures. At 16 first texts at p99 come after 1.27 to 1.37 times the time of `-kvu`, `-no-kvu`
and `no prompt cache`, gaps at p50 are a third longer than those of the latter two, and at p90 1.91 times as long as those of `-b 32`, all
for sure; so are gaps at p50 of 1.20 times those of `-b 64` at 8, and at p90 of 1.9 and 1.6 times those of `no prompt cache` and `-kvu`.
`-b 64` and `-b 32` cut prompts, too: at 16 cLLM has 1.10 and 1.26 times their tokens/s, and half of its first texts after 0.67 and 0.43 of
the time; at 8 they are not told apart. Gaps at p99 are 0.78 and 1.05 times as long as those of `-b 64`, at 8 and 16, and 1.33 and 1.39
times as long as those of `-b 32`, which computes the smallest pieces: it is the best of all at these, though not for sure. `-kvu` has fewer
tokens/s at both. A run on the machine with AMX, which is not kept, had first texts after 1.39 times `-no-kvu`'s time at p50 and 1.37 at
p99, and 1.8 times as many good requests; one of an earlier revision on a machine with AVX-512 0.91 and 1.18 of these times. There pieces
four times as long, tried on the way, had 1.02 times the tokens/s, and gaps 1.4 times as long at p99. The interval of `mixed` at 8 is wide,
since starts differ: of five, one had 1.01 of the tokens/s and one 0.80, the slow one's requests were not as slow in another start, and in a
simulation the scheduler needs as long for all of them as the faster starts did, within four percent. Eight starts of the bare model, each
in turns with one that stayed, had 0.91 to 1.10 of its time for the same step; these are not kept.

**Overload.** Requests come in bursts of 24, at random times, whatever becomes of those before; the machine served 0.59 a second when that
was measured. Beside `-no-kvu` who has more good ones is not told apart at any rate; at the whole of what can be served cLLM has 0.99 of the
tokens/s for sure (0.98 to 1.00). Prompts go in pieces beside answers, so that from the whole of what can be served on gaps at p99 are 0.4
of `-no-kvu`'s, and at p90 1.7 to 2.0 times as long; and first texts come later at p90: after 1.38 times the time at the whole, and 1.61 at
twice as much, where the newest of those who wait go first once some have waited in vain; at p50 who has them sooner is unclear; those at
p99 after 1.6 times the time at both and 1.27 at the half, and gaps at p50 are 1.11 times as long at the whole. At all of these but the half
there are other settings, too, of later revisions. At the whole four have two or three pairs each, on a slower day, so that more came than
could be served, and they are cLLM's worst: first texts at p90 after 1.5 to 2.9 times their time and 0.59 to 0.96 times as many good
requests a second, with 0.96 to 1.01 of the tokens/s, and gaps at p99 0.14 to 0.35 times as long. Three of them would have gone on when the
run was ended. `-b 32` looked so in its first two pairs, too; in ten of ten starts nothing is told apart from it there: 1.01 times the
tokens/s (0.99 to 1.02), 0.99 times the good requests a second (0.90 to 1.09), and first texts at p90 after 1.07 times the time (0.74 to
1.55). Beside it, in ten pairs of six starts at twice and at four times as much, cLLM has 1.08 and 1.09 times the tokens/s for sure, gaps at
p50 0.78 and 0.65 times as long, and first texts at p50 after 0.36 of the time at twice as much, at p90 and p99 after 0.90 and 0.87 at four
times; there are 1.93 times as many good requests a second at twice as much (1.68 to 2.22), which is not told apart at four times; but gaps
are 1.5 times as long at p90 at both, and at p99 1.58 times at twice as much (1.31 at four times, which does not tell). Beside
`no prompt cache`, in ten pairs of nine starts at twice as much, cLLM has 0.94 of its tokens/s (0.88 to 1.00), first texts after 1.49 and
1.45 times its time at p90 and p99, gaps 2.08 times as long at p90 and 0.43 at p99; it saves nothing on the host, and takes 0.72 of cLLM's
memory. At four times as much, in ten pairs of as many starts, cLLM has 0.96 of its tokens/s (0.93 to 1.00), 1.24 times the good requests a
second (1.02 to 1.51), first texts after 1.16 and 1.20 times its time at p90 and p99, gaps 1.40 times as long at p50 and p90, and 0.30 at
p99. `-kvu`, `-b 64` and `-kvu -b 64` had two pairs at each, three of the last at four times, in which cLLM had 1.03 to 1.13 times the
tokens/s. What is good is counted by the second until the last answer, and a burst ends before: at four times the rate all 24 have come
after some 10 s, and the last one was answered by cLLM after 28 to 44. So fewer good ones a second there are the burst's end, and under a
load that lasts it is otherwise (overload, above). What could be served was measured once, cold, with a beginning and an end: cLLM answered
the bursts of four times that at 0.55 to 0.86 a second.

**llama-cpp-python's own server** answers one request after the other, so that those who come together wait for those before them: first
texts come after an eighth of its time here, and gaps are twice as long, since eight are computed at a time. cLLM takes 1.16 times its
memory. Both were sent words, some 75 tokens a prompt, and of its tokens up to five of 800 are not counted, where a chunk of text holds two.

**As it is started**, without `--parallel` (`mixed-small-c16-default`, on a machine with AVX-512), cLLM keeps `--itl-max-ms` of 250: fewer
than the sixteen run at once, a step with prompts aims at a quarter of a second at most, and of those who wait the newest go first. So gaps
are 0.33 and 0.20 times as long as `-no-kvu`'s at p90 and p99, and there are 2.1 times as many good requests a second (1.3 to 3.4; single
tests and checks of types ran for seconds beside some of these pairs); but the tokens/s are 0.83 of its (0.74 to 0.94), half of the first
texts come after 2.6 times its time, and a tenth after 34 s, where its come after 9. Beside itself with `--parallel 16`, in seven pairs, it
has 0.72 of the tokens/s (0.67 to 0.78), gaps at p99 0.48 times as long, and first texts at p90 after 5.2 times the time: with prompts in
passes of their own, which are cheap when they are long, a quarter of a second is dear. On the machine that only counts time, with this
machine's curve, in runs that are not kept, 400 ms have nearly all of the tokens/s of no bound (51 of 53, where 250 have 42), first texts at
p90 after 5 s in place of 37, gaps at p99 of 0.43 s in place of 0.27, and a third as many good requests, of which the time between tokens is
0.25 s at most.

**A shared prefix.** The first eight of each pass wait until one of them has computed it, and compute what is their own together then. In
llama-server each slot computes the prefix once, so that nine of ten first texts come after a quarter of its time here. `-no-kvu` has the
most tokens/s of its settings, of which cLLM has 2.14 times as many; beside `-b 32`, with as many pairs, it has 3.07 times as many, and its
first texts come at p50 after 1.12 times its time, which does not tell who is better. Of the others, with two pairs, or four of `-b 64`,
cLLM had 2.2 to 4.1 times the tokens/s. What they were better at there: `-b 64` has first texts at p50 after 0.68 of cLLM's time, and
`no prompt cache`, which saves nothing on the host, takes 0.85 of its memory. These two would have gone on when the run was ended.

**A long prompt among short ones** is where small steps cost most. Of all settings, ten pairs of `-no-kvu` on the machine with AMX and two
of each other one, `-no-kvu` has the most tokens/s, of which cLLM has 0.86 (as on a machine with AVX-512, in a run that is not kept), and
its long prompt has its first text after half of the time. In turn the others wait 0.7 s at the longest, by the median of the passes (0.4 to
3.7), where `-no-kvu` has them wait 29 s for the whole prompt, and their answers end after 0.70 of the time; seven of eight requests are
good in seven of the ten passes, and none of its. In two pairs each, llama-server as it comes, `-kvu` and `no prompt cache` do as `-no-kvu`
does, with waits of 28 to 34 s; `no prompt cache` has the first texts of the others after 0.84 of cLLM's time. `-kvu -b 64` has them wait
3.2 s where cLLM's wait 1.9, and 1.12 times the tokens/s; `-b 32` and `-b 64` 2.9 and 4.8 s, with 0.43 and 0.52 of the tokens/s. Rows of a
sequence that do not fill a tile of 64 read what is before them one by one: 2,048 tokens deep, sixteen rows take 0.22 s by the single calls
above, thirty-four 0.43 and sixty-four 0.31. Beside others only few go in a step, so that the others' gaps are 1.6 times as long at p50;
once they have ended, the prompt goes in full tiles. In an earlier run, one start of five had its prompt's first text after 122 s in both
passes, where the others' came after 76 to 86 (0.80 of the tokens/s, 0.64 to 0.99; that run is not kept). A simulation with the planner's
own choices has such ends: after a tile that something held up, tiles were believed dear, and none came any more. What is learned of sizes
that are not met fades since then. Who would rather have the prompt sooner says a longer `--itl-target-ms`. All have 34,816 cells: `-no-kvu`
lets each sequence have an eighth of them, into which the prompt has to fit.

**Conversations.** They begin in a pool, where each row walks by everybody's cells, and are laid apart once that has cost as much as the
change. Eight end a turn together and begin the next together, and their prompts are computed at once, however many steps of answers that
takes, since all owe about as much. Of 32 in 8 slots ten pairs of ten starts do not tell who has more tokens/s, llama-server as it comes or
cLLM (0.95 to 1.06), nor anything else but memory, of which cLLM has 1.14 times as much after the one pass of a start. Of eight, with all
settings, there are ten pairs of five starts beside `-no-kvu`, `-b 64`, `-kvu -b 64` and `no prompt cache` each. Those of `-no-kvu` do not
tell who has more tokens/s either (0.98 to 1.05); there cLLM has first texts at p90 after 0.83 of its time, and 0.46 of its memory. `-b 64`
and `-kvu -b 64` compute the prompts of those who come together one after the other, so that half of the first texts come after 2.5 and 3.2
s, cLLM's after 3.42 and 2.52 times as long, and those at p99 after 1.72 and 1.51 times. Who has begun waits then: cLLM's gaps are 0.30 and
0.19 as long at p90, 0.36 and 0.15 at p99. It has 1.10 (0.99 to 1.22) and 1.52 times their tokens/s, and the latter 0.94 of its memory. Who
would rather have that says it: with `--row-budget 64`, in ten pairs beside `-b 64`, it has 1.02 of its tokens/s (0.97 to 1.07) and first
texts at p50 after 1.07 times its time, 2.3 s, and nothing else tells the two apart. `no prompt cache` finds nothing again: beside it cLLM
has 1.81 times the tokens/s (1.53 to 2.14), first texts at p50, p90 and p99 after 0.70, 0.49 and 0.39 of its time, whole answers at p50
after 0.56, and gaps at p99 that are 0.06 times as long, where its own are of 8 s; it takes 0.64 of cLLM's memory. In two pairs of one start
each it had 1.2 times the tokens/s of `-b 32`, which cuts prompts as `-b 64` does, and of `-kvu`. Few requests are good with either, 5 to 8
% of cLLM's and 7 to 15 % of theirs in the mean beside the four settings with ten pairs, since most first texts come after 4 s. Each turn
goes on from other tokens than were answered, which had to be known in advance, so that only prompts can be found again: of eight, both have
11,680 of 16,752 tokens from their caches; of 32, llama-server has 46,720 in every pass and cLLM 512 less in eight of ten. Half of the first
texts come after 48 s. The eight places are filled and emptied together, by a log of a pass, so that no step has both answers and prompts,
and it is strictly in turn here as it is there. Other work went on beside some of these pairs, single test files of up to a minute and a
half beside those of `no prompt cache`.
"""

VERIFY: Final = """\
The Kullback-Leibler divergence of a backend's distributions of the next token from llama.cpp's on the same file, in nats, over the whole
vocabulary at each token of six short texts (`cllm verify`); 0 means the same distribution. The same token is the share of the rows in
which both hold the same one likeliest.
"""

WRITTEN_OF: Final = {  # the runs, by kind and name, and of each the day and the revision that it measured
    "ladder-seed-c1-avx512": "2026-11-30 64a1e2019a",
    "ladder-seed-c16": "2026-11-28 4d22ae9f4e",
    "ladder-seed-c16-replay-avx512": "2026-11-30 2a827bf337",
    "ladder-seed-c16-replay": "2026-11-30 7317f9e40b",
    "ladder-seed-c16-served": "2026-11-28 c08fe9f147",
    "ladder-seed-c8": "2026-11-28 8e892bc749",
    "ladder-seed-c8-served": "2026-11-28 c08fe9f147",
    "peers-chat-turns-c32": "2026-11-27 42d3cda5f7",
    "peers-chat-turns-c8-row-budget": "2026-11-29 b3eb8e40c7",
    "peers-chat-turns-c8": "2026-11-30 7459a21f53",
    "peers-long-among-short": "2026-11-29 8aaae89e0d",
    "peers-mixed-c8": "2026-11-27 0543dee0f6",
    "peers-mixed-small-c16-default": "2026-11-30 0af562cb07",
    "peers-mixed-small-c16": "2026-11-30 7459a21f53",
    "peers-mixed-small-c8": "2026-11-30 a71bf62a23",
    "peers-overload-0.5x-c8": "2026-11-27 3751b6e58f",
    "peers-overload-1x-c8": "2026-11-30 2b808f729b",
    "peers-overload-2x-c8": "2026-11-30 8d1a0b991d",
    "peers-overload-4x-c8": "2026-11-30 ad26a79533",
    "peers-seed-160x5": "2026-11-27 164e1040b0",
    "peers-seed-40x8-c1-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c1": "2026-11-29 da728bc734",
    "peers-seed-40x8-c16-openvino-Q4_K_M": "2026-11-25 16be67a521",
    "peers-seed-40x8-c16-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c16": "2026-11-30 612387b6b7",
    "peers-seed-40x8-c24": "2026-11-28 96017e7e88",
    "peers-seed-40x8-c32-openvino-Q4_K_M": "2026-11-25 16be67a521",
    "peers-seed-40x8-c32-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c32": "2026-11-28 19f33e9fb8",
    "peers-seed-40x8-c8-openvino-Q4_K_M-matched": "2026-11-22 534e0ba3e8",
    "peers-seed-40x8-c8-openvino-Q4_K_M": "2026-11-25 16be67a521",
    "peers-seed-40x8-c8-openvino-Q8_0": "2026-11-25 16be67a521",
    "peers-seed-40x8-c8": "2026-11-30 612387b6b7",
    "peers-seed-40x8-llama-cpp-python": "2026-11-28 4bb071c4dc",
    "peers-shared-prefix": "2026-11-29 da728bc734",
    "promises-chat-turns-demo": "2026-11-24 e7534ea24e+",
    "promises-long": "2026-11-25 6ac7d36829",
    "promises-over-commit": "2026-11-24 d642b3a9b8",
    "promises-overload": "2026-11-25 bf613b25e9",
    "promises-planner": "2026-11-25 6ac7d36829",
    "promises-two-keys": "2026-11-25 8391f77520",
    "stack-gpu-draws": "2026-11-30 667a208188",
    "stack-gpu": "2026-11-30 667a208188",
    "stack-instant": "2026-11-30 b3f39a8121",
}
FOUND: Final = {"ladder": LADDER_FOUND, "stack": STACK_FOUND, "promises": PROMISES_FOUND, "peers": PEERS_FOUND}
