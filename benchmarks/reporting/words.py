"""What each kind of run measures, in words that hold of whatever results there are; what was found is in `found`."""

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
Beside other servers, `cllm serve` with the options that every server gets, its cells, how many requests run at once and its threads, and no
other that changes what it does (`--log-level warning`, since llama-server logs to a file; and where its cost model is kept). Told how many
run at once it keeps no `--itl-max-ms`; as it is started, without `--parallel`, it is in `mixed-small-c16-default` alone.

- Each number is how many times better cLLM is: its tokens/s over theirs, or their time or memory over its own.
- Each figure is beside the setting of theirs that is best at it, of those that have all pairs; or, where cLLM is told to be worse than
  another one and not than that, beside the other.
- Not told apart is what has 1 within its 95 % interval, had too few starts, or would be won but for a setting that did better in the fewer
  pairs it had, or for requests that cLLM did not answer as asked. Each interval is by itself: of so many some are beside 1 by chance.
- A star marks runs in which llama-server was not started with all of seven settings, of which two are one, or in which some that were
  better at something have fewer pairs. A server whose answers were not as long as was asked is not here.
"""

GLANCE_BY_SETTING: Final = """\
Who chooses a setting has all that it is, and not what is best at each figure of seven. So, beside each setting by itself, of those that
have all of a run's pairs: at how many figures of these runs cLLM is better, worse, or not told apart. Llama-server as it comes is what
`-no-kvu` is, wherever several requests run at once.
"""

LADDER: Final = """\
- **Stages.** Each adds one real layer to the one above it in the table and answers the same requests, but for the first two tokens of each
  prompt, which differ so that nobody finds a prompt computed; the first three feed back tokens that were drawn before, not the model's.
  Calls through each layer are counted, and a run in which a stage went round its layer fails.
- **Beside them**: `isolated` is the loop with the model in a process of its own (`--isolate`), compared with `loop`. `replay` is the calls
  that the server of `sse` made of llama.cpp, noted and made again by the loop of `native`, on another context of the same weights, while
  nothing else runs: what it has less than `native` is what a served pass's batches cost, and what `sse` has less than `replay` is what runs
  between and beside them.
- **Turns.** Stages take turns within a run. Ratios are to the first stage of the same turn: median, least and most. Turns of one stage
  differ by a tenth and more, since the machine's speed changes within minutes, and so do starts: eight of the bare model had 0.91 to 1.10
  of its time for the same step. So model and server are loaded anew after as many turns as `turns_a_start` says, and where there were three
  starts an interval over these stands beside the mean.
- **What a layer costs** is better told by the share of a step that is not in llama.cpp, which the machine's speed hardly changes. It is the
  least that it costs: on two cores, what serves takes them from the threads that compute. Without a core is how long, in a step, such a
  thread could have run and had none, by the kernel's own count: its team waits for it at the next barrier of the model's graph.
- **Losses.** What takes more than 1 % off the stage above, by the median of the turns, or makes a step more than 1 % longer outside
  llama.cpp, is told below its table, and the second table here says what its layer spends that on and what was done about it. A step's time
  is told apart: in llama.cpp's own call, which is the same rows in every stage, so that more of it is how they are batched and where their
  cells lie, or the machine's doing; in drawing; in the scheduler, but for what it does while llama.cpp computes; and in all the rest, where
  a stage's own layer is. Only what is outside llama.cpp is put down to the stage.
- **Pictures.** The upper part has the medians of tokens/s, in percent of the first stage's; the lower one what a step spends outside
  llama.cpp, by its parts.

Times in llama.cpp, without a core and of CPUs are microseconds of a step; the CPU that serves is that of the process's other threads.
Nothing is kept on the host in these stages (`--host-cache-mb 0`): a scheduler with room there saves what has ended until it has seen that
nobody asks for it, and from `engine` to `app` each pass begins with a new one, which would save it every time.
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
    "than a tenth of a millisecond on a fake model, as is held below; beside a real one plan and apply of 1 to 16 take 0.2 to 0.4 ms",
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
come out below 0; so may any stage whose turns differ by more than it adds, and `client`, to which several events go at once, as it is slow.
Between steps is what a step has to wait for: that the scheduler applies what came and plans anew, if it must; what is
sent at that time takes its part of it. A picture has what a token takes of CPU time up to each stage, and in brackets what that adds to the
one before.
"""

KILLS: Final = """\
Eight streams over HTTP at a time, half of them greedy and half seeded, on `cllm serve --isolate`; in each round the process that has the
model is killed (SIGKILL) at a random moment of them. A pause is the longest time without text that one of them had after that: loading the
model anew and computing all prompts and answers again. With F32 weights and cells, arithmetic does not depend on what else is in a batch,
and texts are the same; with 16 bits and less they may differ where two tokens are nearly equally likely. Where a run tells how many have
the same text with nothing killed, the same requests came one, two and four at a time instead of eight: so much does company change alone.
"""

PROMISES: Final = """\
**How it is measured.** These bounds need no other server. Over-commit runs on the demo model in settings in which texts can be compared,
the planner on a fake model, the rest on the model that is named below; what steps cost was measured at the start of each. New text is what
no earlier turn of a conversation had. A step, seen from outside, is the time between two tokens of a request of the key that floods; the
usual step of those among whom a long prompt comes is the median of the gaps that they have without it, in a pass of their own in which
their texts become as long.
"""

PEERS: Final = """\
**How it is measured.** Model file, threads, slots and cells are the same for all. (llama-cpp-python's server has one slot, so that requests
wait for one another there; vLLM's cells are its own affair.) cLLM and a peer take turns with the same requests, new ones in every pair, and
who begins alternates. llama-server was built from the sources of llama.cpp that are in llama-cpp-python's own, so that both compute with
the same code; what a build calls itself says nothing, since those sources have no history. Where settings name `n_pairs_start`, both
servers are started anew after so many pairs at most; where `warms_up` is True, a whole pass that does not count goes first, where it is
False a few small requests. README's table calls the former warm and the latter cold, since the first that each start answers counts there,
with caches that are all but empty and cells that lie as they do at a start.

**How to read a ratio.** It is cLLM's figure over the other's: the geometric mean over the pairs, with its 95 % interval by Student's t.
With several starts, each counts once, since starts of one server differ by more than passes of one start do. (Where a figure is 0 in some
pass, each start counts with its sums; if those are 0, too, the interval is by a bootstrap, of six starts at least.) If the interval has 1
in it, it is unclear who is better, which does not say that both are alike: in how many pairs cLLM was better stands beside it. Of fewer
than three starts nobody is called better, since two may agree by luck. A ratio is 1000 at most, which is what much to nothing is told as.
cLLM's own figure is that of the pairs with this peer, so that figures of one column may be of different minutes. A percentile is of a
pass's own values: first texts are 3 to 192, so that at p99 they are the slowest, or nearly so.

**Which settings.** Each figure stands beside the setting that is best at it, of those that have all of a run's pairs, or ten; or, where
cLLM is told to be worse than another one and not than that, beside the other. Settings of which there are fewer pairs were left after
these, since they were best at nothing, or the run was ended; they are named with each run, as are those that were not tried: neither is
known to be slower. Told how many slots there are, as it always is here, llama-server as it comes gives each slot cells of its own, so that
it is what `-no-kvu` is; at one slot `-kvu` is too, and `-kvu -b 64` what `-b 64` is: the best of seven is then the luckiest of equals, too.
Batches of 128 and 512, and of 32 in one pool, were not tried with any.

**Passes of one start** are not alike. A server's memory is its greatest since its start, and caches of prompts grow from pass to pass: in a
second one of these runs llama-server's with a prompt cache by a seventh to three quarters, cLLM's by a third with conversations, by a
seventh or less with one request at a time, a long prompt, and prompts of words, and elsewhere not. Nobody has three. Settings of one run
may have starts of one pass and others of two, so the first pass of each start stands for its memory. Other figures are of all passes: over
all settings that have both, first texts at p90 come in second passes after 0.91 times what they take beside theirs in first ones (0.87 to
0.95, each setting counting once), while of tokens/s (0.99 to 1.03) and gaps at p50 and p99 nothing is told apart.
"""

VERIFY: Final = """\
The Kullback-Leibler divergence of a backend's distributions of the next token from llama.cpp's on the same file, in nats, over the whole
vocabulary at each token of six short texts (`cllm verify`); 0 means the same distribution. The same token is the share of the rows in
which both hold the same one likeliest.
"""
