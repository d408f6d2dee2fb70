"""What the report says in words; its numbers are in the results, but for what was tried on the way and is told as such."""

from __future__ import annotations

from typing import Final

INTRODUCTION: Final = """\
# Benchmarks

<!-- Written by `python -m benchmarks report` from benchmarks/results. -->

`python -m benchmarks` lists the commands that measure; each writes a JSON file into `benchmarks/results`, from which `python -m benchmarks
report` writes this page and README's tables.

Models named `qwen3-0.6b` have that shape and random weights, made by `python -m benchmarks.models`: speed does not depend on what weights
say, texts mean nothing. They were measured on several machines alike in name, each with two cores that it shares with others: some have
AVX-512, some AVX2 alone, which runs name since that is kept; one was up to three times as slow as another, and the speed of each changes
within minutes. So ratios are taken within a pair or a turn, and tokens/s of different runs cannot be compared. Where a ratio stands beside
two figures, these are medians each by itself, of which it is not the quotient. A ratio is cLLM's figure over the other's: of times less
than 1 is better, of tokens/s more. The first text is the first chunk that a client sees of an answer, and between texts is the time from
one chunk to the next.
"""

LADDER: Final = """\
Each stage adds one real layer to the one above it in the table and answers the same requests; calls through each layer are counted, and a
run in which a stage went round its layer fails. The stages take turns within a run. Ratios are to the first stage of the same turn: median,
least and most over the turns. `isolated` is the loop with the model in a process of its own (`--isolate`), and is compared with `loop`.
Without a core is how long, in a step, a thread that computes could have run and had none, by the kernel's own count: its team waits for it
at the next barrier of the model's graph, up to that long for each thread. The CPU that serves is that of the process's other threads. What
takes more than 1 % off the one above, by the median of the turns, or makes a step more than 1 % longer outside llama.cpp, is told below the
table. What a step took more is told apart: in llama.cpp's own call, which is the same batches' work in every stage, so that more of it is
the machine's doing, or that of the cores which a stage's other processes take; in drawing; in the scheduler; and in all the rest, where a
stage's own layer is, and the waiting of threads for one another. Only what is outside llama.cpp is put down to the stage, with what its
layer spends time on and what was done about that; why llama.cpp's calls took longer is not told apart: threads, other processes' cores and
the machine are all in there. Times in llama.cpp, without a core and of CPUs are microseconds of a step.

From `engine` to `app` each pass begins with a scheduler of its own, where the stages after them have one that has served before. A new one
saves the cells of what has ended on the host until it has seen that nobody asks for them: of 66 requests that had nothing in common two
served starts have 20 of the first 33 saved, and none of the others. Here each has nine megabytes. That is a part of what these stages spend
more outside llama.cpp than `http` does, which has all of their layers; the readers of `loop` and `app` are in their own process, too.

Turns of one stage differ by a tenth and more, since the machine's speed changes within minutes, and four are too few to tell some percent:
one at a time, four turns of three days before, which are not kept, had `sse` behind `http` in each, and by the median of these it is ahead.
"""

REASONS: Final = {  # what a stage spends time on, in the order of the stages
    "backend": "the batch's columns are checked before llama.cpp sees them",
    "sampling": "every output's row of logits is read, and the cores that compute wait meanwhile",
    "engine": "the model's own tokens are fed back, every one is detokenised and looked at before the next step is planned, and a new "
    "scheduler copies cells of ended sequences to the host",
    "loop": "two hand-overs between threads in each step, and clients that come back one step late",
    "app": "a request's JSON, checks and hooks, which its tokens share",
    "http": "parsing and framing in a process that has the same cores as the model's threads and the client",
    "sse": "a write to a socket for each token, on the cores that compute",
    "client": "the client's own parsing of each event, on the cores that compute",
    "isolated": "each step's rows go over a socket and its tokens come back, with a process to be woken both times",
}

MENDED: Final = {
    "backend": "llama.cpp reads the columns where they lie and logits are read where it leaves them, so that nothing is copied",
    "sampling": "rows whose parameters agree are drawn together, by a short list or a race in the place of a sort",
    "engine": "a step of 64 that generate is planned in less than a tenth of a millisecond on a fake model, as is held below; plan and "
    "apply of 1 to 16 take 0.2 to 0.3 ms beside a real one, whatever may be the reason",
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
gives 152k logits for each, from which the host draws with top_p 0.95; `gpu-draws` draws by itself in these 2 ms. The stages are those above
that need no real model, but that `app` is asked for streams here, so that `sse` over it is the socket and the server's process. CPU time is
that of the process that serves. Up to `app` that is its own client, too; with `sse` the client is a process by itself on the same cores, so
that `sse` looks cheaper over `app` than it is, and may come out below 0. Between steps the scheduler applies what came and plans anew; what
is sent at that time takes its part of it. What bounds `instant` over SSE is one thread of Python: an event and a packet for each token. The
kernel's send is a sixth of it under the profiler, which makes Python's part more than twice as long and hardly the kernel's; of the time
that a token takes without one, what the profile says of the send would be a third. What bounds `gpu` at 64 streams is sampling, at seven
and a half times its floor, which is to read all logits once.

The aim of 475 steps/s leaves 0.1 ms of each to everything but the model. That is less than to read the logits takes, and less than the
scheduler's own part: of `gpu-draws`, whose host draws nothing, the bare `engine` makes 421, and what is served 342.
"""

KILLS: Final = """\
Eight streams over HTTP at a time, half of them greedy and half seeded, on `cllm serve --isolate`; in each round the process that has the
model is killed (SIGKILL) at a random moment of them. A pause is the longest time without text that one of them had after that: loading the
model anew and computing all prompts and answers again. With F32 weights and cells, arithmetic does not depend on what else is in a batch,
and texts are the same; with 16 bits and less they may differ where two tokens are nearly equally likely.
"""

PROMISES: Final = """\
What scheduling must come to, held against bounds that need no other server. Over-commit runs on the demo model in settings in which texts
can be compared, the planner on a fake model, the rest on the model that is named below; what steps cost was measured at the start of each.
New text is what no earlier turn of a conversation had. In an overload, requests come at random times, whatever becomes of those before, and
are counted as they end, once the load has settled. What can be served is measured with as many requests at once as there are slots; in
some runs up to 1.7 times as many were answered of an overload, so that four times that was a little over twice what was ever answered.
A step, seen from outside, is the time between two tokens of a request of the key that floods; the usual step of those among whom a long
prompt comes is the median of the gaps that they have without it, in a pass of their own in which their texts become as long.

Beside a long prompt there are two kinds of steps by turns, of answers and of the prompt, as soon as it is 512 cells deeper than they are.
Before, they had 4.2 and 4.5 steps at most, counted by the shorter ones that they have while their texts are short. By a log of the steps
that had two reasons. Where each slot has cells of its own, a pass of llama.cpp walks as many cells of each as the deepest has: seven rows
and nine of a prompt with 2,048 cells take 0.43 s in one step; by themselves the seven take 0.07 and the nine 0.27. In a pool, where no step
told what answers take without the prompt, that was believed to be half as much again, and steps were as much longer. Cells lie in one way
throughout here: as the server comes, with 6,144 cells, they were laid apart while the first seven ran, and together again when the first
long prompt came that had no room in a part, and everybody waited 1.2 and 1.45 s for that, once each; the two turns after it had 2.5 steps
at most. A prompt's step and one of answers are to take 1.85 of the latter; with 2.2 the longest gaps were of 2.7 to 4.0 steps, with 2.0 of
2.1 to 3.1, as the machine was. The price is the prompt's, whose first text comes after 74 to 109 s.

Of two keys, each wait was traced: a quiet request waits for the rest of the step under way, and for the step of its own prompt. Of 60, the
slowest had come while prompts were computed by themselves for 0.44 s, or were cut into 28 and 4 rows, which is a step more. Since then a
step in which nobody generates takes a third of a second at most where several keys ask, and such a prompt may end in a step a quarter
longer. Before, runs of 60 requests had 1.84 to 3.8 steps, as the machine was; what decides are the one or two longest of their waits, so
that 150 are made now. The longest times between tokens of the flood are no steps: the longest step of a traced run took 0.44 s, and whoever
gave up a place to the quiet key had 2.4 s between two tokens in that run.

Of an overload a minute is counted: in 30 s the most overloaded pass had seven good answers, and two runs had 0.7 and 1.0 of the best. In
the first, of a slow hour, answers had 0.24 and 0.25 s between two tokens in the mean at twice and at four times what could be served, where
0.25 is the bound for a good one.

The planner with prompts in parts misses its bound where the machine is slow: on another day it had 93 us before what is asked for in every
plan was worked out once, which took 7 % off in parts, and 18 % in a pool.
"""

PEERS: Final = """\
The same model file, threads, slots and cells for all, but for llama-cpp-python's server, which has one slot, so that requests wait for one
another, and vLLM, whose cells are its own affair; ours and a peer take turns with the same requests, which are new in every pair, and who
begins alternates. A ratio is ours over theirs, the geometric mean over the pairs, with its 95 % interval by Student's t (where a figure is
0 in some pass, each start counts with its sums, and if those are 0, too, by a bootstrap, of six starts at least). Where that has 1 in it,
it is unclear who is better, which does not say that both are alike: in how many of the pairs ours was stands beside it. It is wide where
pairs are few, and of a single pair there is none. Each figure of ours stands against the setting beside which it does worst, of those that
were measured in that run; the others are named below each table. Ours is that of the pairs with this setting, so that the figures of one
column may be of different minutes. Texts are chunks as a client sees them. A ratio is 1000 at most, which is what much to nothing is told
as; where both medians are 0, some passes had something.

Where settings name `n_pairs_start`, both servers are started anew after so many pairs, and where they say `warms_up`, a whole pass goes by
first that does not count: a server's first pass is not like those that follow. If there were several starts, the interval is over them,
each counting once. In the other runs each setting stands beside one start of either server, and the interval is over its passes, which say
less of the next start: in a run that is not kept, four starts of ours had 102, 107, 109 and 110 tokens/s over ten passes each. Of fewer
than three starts nobody is called better, whatever their interval: two may agree by luck.

A server's memory is its greatest since it was started: caches of prompts grow with every pass on either side, so that two passes of a start
have more than one, and a server that has answered for a day may have more than either.

Where a run has not all settings, those it has were chosen by shorter runs, which are not kept, and what it does not have is not known to be
slower: of `seed-40x8` at 8, which has all, `no prompt cache` is the best at tokens/s, and most other runs do not have it. Ten pairs beside
it have 0.98 (0.91 to 1.04) of its tokens/s and leave open who is faster; ten of three days before, on an hour when the machine was faster,
with a whole pass before each start's first, which are not kept any more, had 1.05 (1.02 to 1.07). Its first texts come sooner at p50, ours
after 1.20 times its time: there the first of those who come together is computed by itself, and has a gap of a second while the others are,
as the longest gaps tell; here all are computed in one step. Beside `as it comes` and `-no-kvu` ours come after 0.84 and 0.85 of the time.
With `-kvu -b 64` they come at p50 after six tenths of our time, while those who have begun wait for half a second, and the whole has 0.91
of our tokens/s. `no prompt cache` takes the least memory, since it saves nothing on the host: ours had 297 MB of what ended and may be
asked for again after one pass beside other work. Where 160 requests come five at a time (`seed-160x5`), that is the other way round beside
`-no-kvu`, which keeps more of what ended: ours is 0.41 of its memory.

What bounds tokens/s beside llama-server is that both spend a step in the same kernels, with little around them (the ladder, above). Those
who come together with short prompts lie apart in either; cLLM computes all of these prompts in one step, if that takes no more than 48
steps of their answers and six seconds, or thirty where they have all places (more than six were needed on the slowest of these machines
only), and then generates for all of them in every step. What that comes to at 24 and 32 stands in the table, with intervals that are wide
where starts differ. The runs at 16, 24 and 32, the eight conversations, the shared prefix, and the long prompt among short ones are of the
slowest machine, which has AVX2 alone and takes 0.27 s for 16 rows and 0.45 for 32. There the prompts took longer than what was borne at
first, and went in pieces. At 16, where that was three seconds, two pairs each, which are not kept, had 0.94 of the tokens/s of `no prompt
cache` and 0.99 of `-no-kvu`, and gaps at p99 two and a half times as long; and what cells gain apart was not known, since the time in which
that is measured was over before: without pieces, two more pairs still had 0.94 of `-no-kvu`. At 32, where it was ten seconds and 24 steps,
ten pairs, which are not kept either, had 0.99 (0.95 to 1.03) of `-no-kvu`, whole answers at p90 after 1.19 times the time, and four 0.94 of
`no prompt cache`, which was not measured again. All this was mended before the runs in the table. Starts of the servers differ by more than
the passes of one: of five at 32, one had 0.95 of the tokens/s and one 1.19. So it is not known either whether steps of 16 rows do take
longer than there, as the median gap of that run would have it.

One at a time ten pairs of five starts have 0.95 of the default's tokens/s, and gaps 1.06 times as long at p50, 1 ms of 16: about what a
step spends outside llama.cpp, by the ladder, with the half millisecond that drawing takes there with the workload's sampling. Ten pairs of
the same day, before one row was drawn in fewer calls, had 0.97 (0.92 to 1.03): the fewer calls take a tenth of a millisecond off a step,
which is less than starts differ by. Such a draw takes 0.13 ms by itself, and 0.47 where 240 MB are read before each, as a step reads the
weights: Python's code and data are not in the caches any more then. On the instant fake a whole step takes 0.24 ms. OpenMP's threads spin
between two steps, on the cores that the rest needs; with a tenth and a hundredth of that (`GOMP_SPINCOUNT`) two starts each had 0.97 and
1.03 of the tokens/s, which tells nothing. Of all this only the table's run is kept.

What scheduling adds where prompts are mixed is that gaps are short: prompts go in pieces beside answers. What it costs is that more of the
gaps have a piece of a prompt in them, and that prompts end later where few wait; the smaller the pieces, the longer prompts wait for each
other, and the fewer generate meanwhile. Pieces that made a step beside answers two and a half times as long as one without had, in four
pairs at 8 on the faster machine, which are not kept any more, 0.98 of the tokens/s of `-no-kvu`, and 0.72 of the gaps of `-b 32` at p99. On
the slowest machine such a piece was of 16 rows, and ten pairs with three times as long a step, which are not kept either, had 0.93 (0.87 to
0.99) of the tokens/s of `-no-kvu`, first texts at p50 after 1.76 times the time, and gaps 1.19 times as long at p50, 1.76 at p90 and 0.30
at p99. The run at 8 in the table is of the same machine, ten more pairs with steps of up to four times: 1.04 (0.91 to 1.19) of the
tokens/s, first texts at p50 after 1.32 times the time, gaps 0.97 times as long at p50, 2.37 at p90 and 0.46 at p99.

Of mixed prompts at 8, no order of the same rows gives much more tokens/s than the fastest setting. These workloads have some sixteen rows
of prompts for each seven tokens. By the medians of the single calls above, such a share takes 101 ms if prompts are computed at once,
apart, which is what `-no-kvu` does and what makes its gaps (62.9 for a step of seven, and sixteen times 308 / 128); 109 apart in pieces of
64 rows (a quarter of the steps at 245, the others without), and 110 in pieces of 25; 104 in a pool in pieces of 25. Nine rows fill a tile
of sixteen in a pool, which costs little (78.2 in place of 69.1), but they are not all: with the other seven at once it would be 96. What is
gained beside that are gaps between slots: apart, a sequence that has ended leaves one, which is a pass more for those on either side of it,
in llama-server as it was in cLLM, which closes them now with rows that it takes back.

Of prompts to 512 tokens at 8, ten pairs have 0.92 of `-no-kvu`'s tokens/s (0.82 to 1.04), first texts at p50 after 1.28 times the time and
at p90 after 0.73, and gaps 2.63 times as long at p90 and 0.31 at p99. Starts differ more than pairs: of five, one had 1.01 of the tokens/s
and one 0.80, with gaps at p50 1.01 and 1.28 times as long. It is not the layout: in six starts that were looked at since, cells were laid
apart at once or in the first seconds, and none was as slow, two passes with the slow start's own requests among them, beside some other
work. On a machine that only counts time (the simulation's, with a curve set by hand near the calibration's, and its attention) the
scheduler needs as long for these requests as the first two starts did, within four percent, and with whole prompts as long as `-no-kvu` in
all five, within eight; the slow start took 1.2 times as long in both of its passes. So it looks like no order of rows, but like what a
start has of the machine: eight of the bare model, each measured in turns with one that stayed, had 0.91 to 1.10 of its time for a step of
eight. Large pages for the weights make no difference (1.01 of the time, twenty-four turns). None of this is kept. Such a prompt is four
steps or more, each a little over twice as long as one without a piece, by a log of an earlier run; those who wait behind it generate the
later. Two pairs beside `-b 32` of a revision before, which are not kept any more, had 1.11 times its tokens/s, and gaps at p99 of 0.63.

In an overload, ten pairs of five starts do not tell who has more good requests: 1.02 of theirs in the mean at half of what can be served
(0.95 to 1.09), 1.00 at the whole (0.89 to 1.12), 1.26 at twice (0.93 to 1.71) and 1.24 at four times as much (0.63 to 2.46); the machine
served 0.59 requests/s when that was measured. Gaps at p99 are 0.39 to 0.41 of theirs from the whole on. First texts at p90 come after 1.38
times the time at the whole, since prompts go in pieces beside answers, and after 1.61 at twice as much, where the newest of those who wait
go first once some have waited in vain: at p50 they come after 0.69 of the time. These are bursts of few requests, whose end counts as much
as their middle.

Of mixed prompts at 16, ten pairs have 1.04 of `-no-kvu`'s tokens/s (0.97 to 1.10), first texts at p90 after 0.74 of the time, and gaps 1.11
times as long at p50 and 0.41 at p99. By a log of an earlier run, a step beside answers took two and a half times as long as one without
prompts, and had some 30 rows of them: ten that generate take nearly nine tenths of what sixteen do, so that more of them at once bring
little, and four times as long brought 1.02 times the tokens/s and gaps 1.4 times as long at p99. `-no-kvu` computes all prompts first,
which makes gaps of a second and more.

Of a shared prefix, the first eight of each pass wait until one of them has computed it, and compute what is their own together then: half
of the first texts come a little earlier than there, and nine of ten after a quarter of the time, since there each slot computes the prefix
once. Four pairs on the faster machine beside two settings, which are not kept any more, had 2.25 of the tokens/s.

A long prompt among short ones is where small steps cost most. Rows of a sequence that do not fill a tile of 64 read what is before them one
by one: 2,048 tokens deep, sixteen rows take 0.22 s by the single calls above, thirty-four 0.43 and sixty-four 0.31. In a step beside the
others only few go, and the others' gaps are 1.8 times as long at p50 and p90 all the same: by ten pairs the prompt takes twice as long as
at once, and a fifth of the tokens/s is lost. In turn the others' longest wait is 0.6 s, where they wait 58 s for the whole prompt there,
and their answers end after 0.63 of the time at p50. Seven first texts and the late one's are too few for a p90: it lies between these. Once
they have ended, it goes in full tiles. Who would rather have it sooner says a longer `--itl-target-ms`. With the cells that the workload
needs, 6,144, `-no-kvu` refuses the prompt, which then has to fit an eighth of them: all have 33,280 here. Two pairs of an older revision on
the faster machine, beside `llama-server` as it comes, which are not kept any more, had 0.56 of the tokens/s.

Conversations begin in a pool, where each row walks by everybody's cells, and are laid apart once that has cost as much as the change, in
which everybody's cells go to the host and back. Eight end a turn together and begin the next one together, whose prompts take 6 to 10 s on
the slowest machine, by logs of two passes as long as 33 to 44 steps of their answers. 48 were borne at first, counted without the cells
that answers read, which was an edge: in one logged pass five turns went at once or nearly so, and the last in pieces beside the first
answers. Two pairs of another start, which are not kept, had 0.87 of the tokens/s of `-no-kvu`, first texts at p50 after 0.46 of the time,
gaps at p50 1.66 times as long and whole answers at p50 after 1.12 times the time, as if all had gone in pieces. Since prompts that owe
about as much go at once however many of those steps that is, which a log of one more pass shows, the table has first texts and gaps nearer
to 1.

Of 32 conversations in 8 slots there is one pair, which says little: 0.97 of the tokens/s of `llama-server` as it comes, first texts at p50
after 1.05 times the time, and all 192 requests of either answered; half of the first texts come after 43 s, a tenth after 55 s and more.
One of an earlier revision on the slowest machine, which is not kept any more, had 1.03 and 0.92. By a log of another pass the eight places
are filled and emptied together, so that no step has both answers and prompts, and it is strictly in turn here as it is there. Before
prompts that owe about as much went at once, two pairs on the faster machine, which are not kept any more, had 0.90 and 0.85 of its
tokens/s. By a log of all steps, of the 369 s in which 9,600 tokens were generated 265 went to steps with pieces of prompts beside answers
then, and by the price of a row in a large step the same rows would have taken 80 s less; but half of the first texts came within 4.6 s
there, where the newest of one key went first once the oldest had waited longer than `--queue-patience-s`, and every twentieth time the
oldest. One pair of a revision between had 0.72 of the tokens/s and one failed request, the reason of which was not kept; six of eight that
ended together were not saved on the host at that time, and computed a turn more the next time.
"""

VERIFY: Final = """\
The Kullback-Leibler divergence of a backend's distributions of the next token from llama.cpp's on the same file, in nats, over the whole
vocabulary at each token of six short texts (`cllm verify`); 0 means the same distribution. The same token is the share of the rows in
which both hold the same one likeliest.
"""
