"""The report on comparisons with other servers: every figure beside the best of their settings, wins and losses alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

import attrs

from benchmarks.contenders import LLAMA_SERVER_ALIKE, LLAMA_SERVER_SETTINGS
from benchmarks.figures import FIGURES_BY_NAME, N_STARTS_LEAST
from benchmarks.reporting.forms import UNKNOWN, Run, circumstances, number, plot_of, run_title, table
from benchmarks.reporting.found import in_order
from benchmarks.standings import (
    Page,
    best_rows,
    by_pairs,
    compared_by,
    key_of,
    median_of,
    n_full,
    n_short,
    n_spoiling,
    n_wrong,
    of_others,
    title_of,
)
from cllm.bench.metrics import CLIENT_SHARE_MAX

MAIN_TIMES: Final = (
    "first text p50, ms", "first text p90, ms", "first text p99, ms",
    "between texts p50, ms", "between texts p90, ms", "between texts p99, ms",
)  # fmt: skip
MAIN_FIGURES: Final[tuple[str, ...]] = ("tokens/s", *MAIN_TIMES)
MAIN_OVERLOAD_FIGURES: Final[tuple[str, ...]] = ("good requests/s", *MAIN_TIMES)
LATE_FIGURE: Final = "first text of the late one, ms"  # of the prompt that everything else is measured beside
SIDE_FIGURES: Final = (
    "tokens/s", "good requests/s", "first text p50, ms", "first text p99, ms", "between texts p50, ms", "between texts p99, ms",
    "whole answer p99, ms", "longest wait of the others, ms", LATE_FIGURE, "server CPU per token, ms", "server peak memory, MiB",
)  # fmt: skip
THEIR_DEFAULT: Final = "as it comes"
PROMISED_BESIDE: Final = "llama-server"
PROMISED: Final = {  # beside its setting that is best at a figure, by workload,
    "seed-40x8": {"tokens/s": 1.05},
    "seed-160x5": {"tokens/s": 1.05},
    "mixed": {"tokens/s": 1.05, "between texts p99, ms": 0.75},
    "mixed-small": {"tokens/s": 1.05, "between texts p99, ms": 0.75},
    "shared-prefix": {"tokens/s": 2.0, "first text p90, ms": 0.25},
}
PROMISED_DEFAULT: Final = {"mixed": {"between texts p99, ms": 0.25}, "mixed-small": {"between texts p99, ms": 0.25}}  # and beside this one
BESIDE_HEAD: Final = (
    "workload", "figure", "cLLM", "the other", "cLLM over it (95 %)", "", "beside", "pairs in which cLLM is better",
)  # fmt: skip
AMONG_HEAD: Final = "the best of how many settings"
IDLE_SHARE_MAX: Final = 0.02  # of a core, that a server may take while another is measured


def with_sizes_alone(runs: Sequence[Run]) -> list[Run]:
    """The comparisons of `cllm serve` without options but the sizes that every server gets."""
    return [run for run in in_order(runs, "peers") if not run["settings"].get("ours")]


def beside_others(runs: Sequence[Run]) -> list[Run]:
    """The comparisons with other servers: `cllm serve` with the sizes alone first, then with options, as another backend."""
    return sorted(in_order(runs, "peers"), key=lambda run: bool(run["settings"].get("ours")))


def comparisons(runs: Sequence[Run]) -> list[str]:
    """The main figures of all of them in one table, wins and losses alike, and what was promised of them."""
    rows = [row for run in runs for row in _main_rows(run, main_figures(run))]
    if not rows:
        return []
    alike, others = ([run for run in runs if bool(run["settings"].get("ours")) is with_options] for with_options in (False, True))
    parts = (("cLLM told only what every server is", alike), ("With other options, as another backend", others))
    counts = [f"{what}: {_verdicts(some)}" for what, some in parts if some]
    return [
        f"The main figures of all ({'. '.join(counts)}). What follows has the others, and every setting.\n",
        table((*BESIDE_HEAD, AMONG_HEAD), rows),
        *_promised_beside(alike),
    ]


def _verdicts(runs: Sequence[Run]) -> str:
    """How many of the main figures were won and lost; the others say much of the same, as requests/s beside tokens/s."""
    verdicts = Counter(row["verdict"] for run in runs for row in best_figures(run) if row["figure"] in main_figures(run))
    return ", ".join(f"{name} {n}" for name, n in sorted(verdicts.items(), reverse=True))


def _promised_beside(runs: Sequence[Run]) -> list[str]:
    """The ratios that were promised, and whether they were kept."""
    rows = [row for run in runs for row in _promised_of(run)]
    head = ("workload", "figure", "beside", "ratio", "promised", "")
    return ["What was promised of these:\n", table(head, rows)] if rows else []


def _promised_of(run: Run) -> Iterator[tuple[str, ...]]:
    workload = run["settings"].get("workload", {}).get("name")
    sides = [side for side in run["data"]["sides"] if side["peer"] == PROMISED_BESIDE]
    if not sides:
        return
    own = PROMISED_DEFAULT.get(workload, {})
    defaults = [side for side in sides if side["setting"] in LLAMA_SERVER_ALIKE]
    default = f"{PROMISED_BESIDE} {THEIR_DEFAULT}"
    if own and not defaults:
        yield from ((run_title(run), name, default, UNKNOWN, f"at most {bound:g}", "not measured") for name, bound in own.items())
    if not own or len(sides) > 1 or sides[0]["setting"] != THEIR_DEFAULT:  # a default alone is not the best of their settings
        best = f"the best of {n_settings(run['data'])}" if len(sides) > 1 else "the only setting measured"
        rows = {row["figure"]: row for row in best_figures(run)}
        others = [side for side in by_pairs(sides)[1] if not n_wrong(side, "theirs")]
        yield from (_held(run, name, best, rows[name], bound, others) for name, bound in PROMISED.get(workload, {}).items() if name in rows)
    if defaults:
        side = max(defaults, key=lambda side: (side["n_pairs"], side["setting"] == THEIR_DEFAULT))
        beside = default if side["setting"] == THEIR_DEFAULT else f"{default}, which is {side['setting']}"
        for figure, bound in own.items():
            if compared := compared_by(side, figure):
                row = {**attrs.asdict(compared), "n_failed": n_wrong(side, "ours")}
                yield _held(run, figure, beside, row, bound)


def n_settings(data: Run) -> str:
    """How many settings a best one was found among: those that have all pairs; and who was left out before."""
    sides = of_others(data["sides"])
    complete, left = by_pairs(sides)
    fewer = sorted({side["n_pairs"] for side in left})
    had = " to ".join(map(str, dict.fromkeys(fewer[:1] + fewer[-1:])))
    ended = ", when the run was ended" if {title_of(side) for side in left} & set(data.get("unfinished", ())) else ""
    among = f"{len(complete)} setting" if len(complete) == 1 else f"{len(complete)} settings"
    return among + (f", {len(left)} more having had {had} of {n_full(sides)} pairs{ended}" if left else "")


def _held(run: Run, figure: str, beside: str, row: Run, bound: float, others: Sequence[Page] = ()) -> tuple[str, ...]:
    """A row of what was promised; who left requests unanswered has kept nothing by being quick with the others, and missed what it missed.

    Nor is it kept where one of `others`, which had fewer pairs, was better than that in these.
    """
    is_least = FIGURES_BY_NAME[figure].is_higher_better

    def keeps(ratio: float) -> bool:
        return ratio >= bound if is_least else ratio <= bound

    is_kept = keeps(row["ratio"])
    has_starts = row["n_starts"] is None or row["n_starts"] >= N_STARTS_LEAST
    beaten = is_kept and any(not keeps(found.ratio) for side in others if (found := compared_by(side, figure)) is not None)
    is_sure = has_starts and row["low"] is not None and not row["low"] < bound < row["high"]
    verdict = f"{'kept' if is_kept else 'missed'}{'' if is_sure else ', by the mean alone'}"
    if beaten:
        verdict = "unclear: beside another one, in fewer pairs, it was not"
    if is_kept and row.get("n_failed") and not FIGURES_BY_NAME[figure].counts_failures:
        verdict = f"unclear: {row['n_failed']} requests of ours were not answered as asked"
    return run_title(run), figure, beside, ratio_told(row), f"at {'least' if is_least else 'most'} {bound:g}", verdict


def main_figures(run: Run) -> tuple[str, ...]:
    if run["settings"].get("rate"):
        return MAIN_OVERLOAD_FIGURES
    has_late = run["settings"].get("workload", {}).get("n_prompt_late")
    return (*MAIN_FIGURES, LATE_FIGURE) if has_late else MAIN_FIGURES


def _main_rows(run: Run, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    rows = {row["figure"]: row for row in best_figures(run)}
    among = _among(run["data"])
    return [(run_title(run), name, *_best_cells(rows[name]), among) for name in wanted if name in rows]


def best_figures(run: Run) -> list[Run]:
    """The figures of ours beside the setting that is best at each: by the pairs that are kept, not by what was said when they were made."""
    data = run["data"]
    sides = {key_of(side): side for side in data["sides"]}
    rows = best_rows(of_others(data["sides"]))
    return [{**row, "n_failed": n_wrong(sides[row["peer"], row["setting"]], "ours")} for row in rows]


def comparison(run: Run) -> str:
    """One of them: every figure, every setting, whose pairs these are, and what was not measured."""
    data = run["data"]
    parts = [circumstances(run)]
    if data["best"]:
        rows = [(row["figure"], *_best_cells(row)) for row in best_figures(run)]
        if len(of_others(data["sides"])) > 1:
            parts.append(f"Each figure beside the best of {n_settings(data)}:\n")
        parts.append(table(BESIDE_HEAD[1:], rows))
        parts.append(f"![{run['name']}: figures]({plot_of(run, 'bars')})\n\n![{run['name']}: latency]({plot_of(run, 'latency')})\n")
    if len(data["sides"]) > 1 or any(n_wrong(side, "theirs") for side in data["sides"]):
        parts.append("All settings, medians of theirs, and of ours beside each, and what that is for us:\n")
        parts.append(_sides(data["sides"]))
    else:
        parts += map(_alone, data["sides"])
    parts += [_busy_client(side) for side in data["sides"] if side["client_cpu_share_max"] > CLIENT_SHARE_MAX]
    parts += [line for side in data["sides"] if (line := _busy_while_idle(side))]
    parts += [line for side in data["sides"] if (line := _differently(side))]
    parts += [_unanswered(side) for side in data["sides"] if n_wrong(side, "theirs")]
    parts += _runs(run)
    measured = {title_of(side) for side in data["sides"]}
    for title, fault in data.get("broken", {}).items():
        parts.append(f"{'Ended early' if title in measured else 'Not measured'}: {title}: {fault}\n")
    if data.get("unfinished"):
        parts.append(f"The run was ended before all pairs were made: {', '.join(data['unfinished'])}.\n")
    if left_out := _left_out(data):
        parts.append(f"Settings that were not asked for: {', '.join(left_out)}.\n")
    if data.get("versions"):
        parts.append(f"What was beside us: {'; '.join(f'{peer}, {version}' for peer, version in data['versions'].items())}.\n")
    if data.get("not_found"):
        parts.append(f"Not found on this machine: {', '.join(data['not_found'])}.\n")
    return "\n".join(parts)


def _runs(run: Run) -> list[str]:
    """Whose pairs these are, where they are not those of one run."""
    runs = run["data"].get("runs", ())  # of one run, which the circumstances tell, where older results do not say
    if len(runs) < 2:
        return []
    told = []
    for one in runs:
        pairs = ", ".join(f"{n} beside {title}" for title, n in one["n_pairs"].items())
        told.append(f"- {one['date']}, revision {one['revision']}, seed {one['seed']}: {pairs}")
    return ["The pairs are those of several runs, each with seeds of its own:\n", "\n".join(told) + "\n"]


def _left_out(data: Run) -> list[str]:
    """The settings of llama-server that a run was not to measure: the best of the others is the best of those that it did."""
    settings = {side["setting"] for side in data["sides"] if side["peer"] == "llama-server"}
    if not settings:
        return []
    tried = settings | {title.partition("(")[2].removesuffix(")") for title in data.get("broken", {})}
    return [name for name in LLAMA_SERVER_SETTINGS if name not in tried]


def _among(data: Run) -> str:
    """How many settings a best one was found among, in few words."""
    complete, left = by_pairs(of_others(data["sides"]))
    return str(len(complete)) + (f", {len(left)} more in fewer pairs" if left else "")


def _best_cells(row: Run) -> tuple[str, ...]:
    which, better = f"{row['peer']} {row['setting']}", f"{row['n_better']} of {row['n_pairs']}"
    return number(row["ours"]), number(row["theirs"]), ratio_told(row), row["verdict"], which, better


def ratio_told(row: Run) -> str:
    return f"{row['ratio']:.3f}" if row["low"] is None else f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _sides(sides: Sequence[Run]) -> str:
    names = [name for name in SIDE_FIGURES if any(median_of(side, name, "theirs") is not None for side in sides)]
    rows = []
    for side in sides:
        cells = [_side_cell(side, name) for name in names]
        failed = f"{side['n_failed']['theirs']} / {side['n_failed']['ours']}"
        inexact = f"{side['n_inexact']['theirs']} / {side['n_inexact']['ours']}"
        client = f"{side['client_cpu_share_max']:.0%}"
        rows.append((f"{side['peer']} {side['setting']}", str(side["n_pairs"]), *cells, failed, inexact, client))
    return table(("theirs / ours", "pairs", *names, "failed", "not exactly as many tokens", "client CPU, most"), rows)


def _side_cell(side: Run, name: str) -> str:
    """A figure of both; the verdict, unless requests of theirs were not answered as asked: fewer or shorter ones are answered faster."""
    compared = compared_by(side, name)
    figure = FIGURES_BY_NAME[name]
    is_told = compared is not None and not n_spoiling(side, figure, "theirs")
    verdict = f" {compared.verdict(figure, n_spoiling=n_spoiling(side, figure, 'ours'))}" if compared and is_told else ""
    return f"{number(median_of(side, name, 'theirs'))} / {number(median_of(side, name, 'ours'))}{verdict}"


def _alone(side: Page) -> str:
    """Of the only setting, whose figures have a table already, what is not in that."""
    failed, inexact = (" / ".join(str(side[name][whose]) for whose in ("theirs", "ours")) for name in ("n_failed", "n_inexact"))
    share = f"{side['client_cpu_share_max']:.0%}"
    return f"Theirs / ours: failed {failed}, not exactly as many tokens {inexact}. The client took {share} of a core at most.\n"


def _differently(side: Run) -> str:
    """What was sent or counted in another way than beside the others, if anything was."""
    told = [] if side.get("takes_ids", True) else ["takes no token ids, so both were sent words, which are more tokens than their row says"]
    if any(one.get("counted_by") == "chunks" for one in side.get("passes", {}).get("theirs", ())):
        told.append("reports no usage, so its tokens are counted by chunks of text, of which some hold several")
    return f"{side['peer']} {side['setting']} {'; and it '.join(told)}.\n" if told else ""


def _busy_client(side: Run) -> str:
    share = f"{side['client_cpu_share_max']:.0%}"
    return f"Beside {side['peer']} {side['setting']} the client took up to {share} of a core: it may be what limits these figures.\n"


def _busy_while_idle(side: Run) -> str:
    """A server that computes while the other is measured takes from it what it should have."""
    shares = {"theirs": side.get("idle_cpu_share", 0.0), "ours": side.get("idle_cpu_share_ours", 0.0)}
    busy = [f"{whose} took {share:.1%}" for whose, share in shares.items() if share > IDLE_SHARE_MAX]
    return f"Beside {side['peer']} {side['setting']}, while the other was measured, {' and '.join(busy)} of a core.\n" if busy else ""


def _unanswered(side: Run) -> str:
    n, n_other = side["n_failed"]["theirs"], n_short(side, "theirs")
    told = [f"left {n} requests unanswered"] if n else []
    told += [f"answered {n_other} requests with other than as many tokens as were asked"] if n_other else []
    compared = "nothing of it is compared" if n_other else "only what counts those is compared"
    return f"{side['peer']} {side['setting']} {' and '.join(told)}: {compared}.\n"
