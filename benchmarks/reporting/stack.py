"""The report on what the layers could carry, on fake models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

from benchmarks.reporting.forms import SERVED, UNKNOWN, Run, circumstances, number, over_turns, plot_of, rung_slug, rung_title, table
from cllm.bench.metrics import CLIENT_SHARE_MAX

N_FUNCTIONS: Final = 10  # of a profile
CARRIED: Final = "instant"  # the fake model on which the stack must carry, to users,
CARRIED_LEAST: Final = 20_000.0  # tokens/s, with so many streams:
CARRIED_AT: Final = 64
STEPS_LEAST: Final = 475  # of the fakes of a fast device, with as many streams


def _of_served(rung: Run, figure: str) -> float | None:
    """The median of a figure of the stage that users meet, where it was measured."""
    return next((statistics.median(stage[figure]) for stage in rung["stages"] if stage["name"] == SERVED), None)


def stack(run: Run) -> str:
    """What each stage carries with each number of streams, and what a profile says of the Trio thread."""
    parts = [circumstances(run)]
    for rung in run["data"]["rungs"]:
        parts += [f"{rung_title(rung)}:\n", _carried(rung["stages"]), _served(rung)]
        parts += [client_of_stage(stage) for stage in rung["stages"] if "client_cpu_share" in stage]
        if rung.get("streams") == CARRIED_AT:
            parts.append(_carried_enough(rung) if run["settings"].get("fake", run["name"]) == CARRIED else _stepped_enough(rung))
        parts.append(f"![{rung_title(rung)}]({plot_of(run, rung_slug(rung))})\n")
    if run["data"].get("profile"):
        parts += _profile(run["data"])
    return "\n".join(parts)


def client_of_stage(stage: Run) -> str:
    share = stage["client_cpu_share"]
    busy = ": it may be what limits these figures" if share > CLIENT_SHARE_MAX else ""
    return f"The client of {stage['name']} took {share:.0%} of a core{busy}.\n"


def _carried(stages: Sequence[Run]) -> str:
    rows = [
        (
            str(stage["number"]),
            stage["name"],
            over_turns(stage["tokens_per_s"]),
            number(stage.get("steps_per_s")),
            _spread(stage.get("cpu_us_per_token")),
            number(stage.get("us_per_token")),
            number(stage.get("us_per_step")),
        )
        for stage in stages
    ]
    return table(("", "stage", "tokens/s", "steps/s", "CPU us a token", "over the one above", "CPU us a step, over it"), rows)


def _spread(values: Run | None) -> str:
    return f"{number(values['median'])} ({number(values['min'])} to {number(values['max'])})" if values else UNKNOWN


def _carried_enough(rung: Run) -> str:
    """Whether the stage that users meet carries as many tokens as it must."""
    carried = _of_served(rung, "tokens_per_s")
    if carried is None:
        return ""
    verdict = "kept" if carried >= CARRIED_LEAST else "missed"
    return f"{SERVED} carries {number(carried)} tokens/s, promised are at least {number(CARRIED_LEAST)}: {verdict}.\n"


def _stepped_enough(rung: Run) -> str:
    """Whether a fast device would be kept busy."""
    stepped = next((stage.get("steps_per_s") for stage in rung["stages"] if stage["name"] == SERVED), None)
    if stepped is None:
        return ""
    return f"{SERVED} makes {number(stepped)} steps/s, the aim is {STEPS_LEAST}: {'kept' if stepped >= STEPS_LEAST else 'missed'}.\n"


def _served(rung: Run) -> str:
    lines = []
    if step := rung.get("step"):
        model, sample, rest = (number(step[name]) for name in ("model_ms", "sample_ms", "rest_ms"))
        lines.append(f"A step of {SERVED}: {model} ms in the model, {sample} ms in sampling, {rest} ms between steps.")
    if requests := rung.get("requests_per_s"):
        cost = number(rung["cpu_us_per_request"]["median"])
        lines.append(f"Requests of one token, in one piece: {number(requests['median'])} a second, {cost} us of CPU time each.")
    return "\n".join(lines) + "\n"


def _profile(data: Run) -> list[str]:
    page = data["profile"]
    rows = [(part, number(us)) for part, us in page["us_by_part"].items()]
    functions = [(f"`{one['name']}`", number(one["us"]), number(one["calls"])) for one in page["functions"][:N_FUNCTIONS]]
    told = f"The server's Trio thread at {page['streams']} streams, under a profiler, which slows calls down"
    reading = f"To read the logits of a full step once, straight on, takes {number(data['reading_ms'])} ms here.\n"
    own = ("function", "us a token, its own", "calls a token")
    return [f"{told}:\n", table(("", "us a token"), rows), table(own, functions), reading]
