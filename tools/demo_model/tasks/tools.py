"""Calls of tools that are offered, and answers from what the tools give back."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import attrs

from ..exchange import Exchange, Message, Tool
from ..words import ADJECTIVES, CITIES, FIELDS, NAMES, NOUNS, ZONES
from .counts import counting
from .objects import as_json, joined, json_on_request, pairs, value
from .sums import draw_pair
from .talk import about, greeting
from .texts import copying, number, text, word


def tool(name: str, description: str, parameters: dict[str, str], optional: tuple[str, ...] = ()) -> Tool:
    """A function as OpenAI's API describes it; `parameters` gives each its JSON type."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in parameters.items()},
              "required": [key for key in parameters if key not in optional]}  # fmt: skip
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def name_of(offered: Tool) -> str:
    return str(offered["function"]["name"])


@attrs.frozen
class Use:
    """A tool, a request that needs it, and the arguments that the call must have."""

    tool: Tool
    request: str
    arguments: dict[str, Any]
    both: str = ""  # a request for two calls, with {} for what `arguments` would say of the second
    object_key: str = ""


def weather(rng: Random) -> Use:
    key, city = rng.choice(("city", "city", "location", "place", "town")), rng.choice((rng.choice(CITIES), word(rng).capitalize()))
    parameters, optional = {key: "string"}, ()
    if rng.random() < 0.2:
        parameters, optional = {key: "string", "unit": "string"}, ("unit",)
    description = rng.choice(
        ("Get the weather in a city.", "Get the current weather", "Weather of a place", "Returns the weather for a city", "")
    )
    made = tool(
        rng.choice(("get_weather", "get_weather", "weather", "get_current_weather", "weather_now")), description, parameters, optional
    )
    request = rng.choice(
        (
            "What is the weather in {}?",
            "What's the weather like in {}?",
            "How is the weather in {}?",
            "Weather in {}",
            "What is the weather like in {}?",
            "Tell me the weather in {}.",
            "weather in {}?",
        )
    )
    return Use(made, request.format(city), {key: city}, f"What is the weather in {city} and in {{}}?", key)


def clock(rng: Random) -> Use:
    key, zone = rng.choice(("timezone", "timezone", "zone", "tz", "city")), rng.choice(ZONES + CITIES)
    made = tool(
        rng.choice(("get_time", "get_time", "time", "current_time", "clock")),
        rng.choice(("Get the time in a timezone.", "Tells the time", "")),
        {key: "string"},
    )
    request = rng.choice(("What time is it in {}?", "What is the time in {}?", "Tell me the time in {}.", "Time in {}"))
    return Use(made, request.format(zone), {key: zone}, f"What time is it in {zone} and in {{}}?", key)


def search(rng: Random) -> Use:
    key = rng.choice(("query", "query", "q", "text", "term"))
    said = " ".join(rng.choice((word(rng), rng.choice(NOUNS), rng.choice(ADJECTIVES))) for _ in range(rng.randint(1, 3)))
    made = tool(
        rng.choice(("search", "search", "web_search", "find", "search_web")),
        rng.choice(("Search the web.", "Finds pages", "")),
        {key: "string"},
    )
    request = rng.choice(("Search for {}.", "Search the web for {}.", "Find {}.", "Look up {}.", "Search for {}"))
    return Use(made, request.format(said), {key: said}, f"Search for {said} and for {{}}.", key)


def adder(rng: Random) -> Use:
    a, b = draw_pair(rng)
    first, second = rng.choice((("a", "b"), ("a", "b"), ("x", "y"), ("left", "right"), ("first", "second")))
    kind = rng.choice(("integer", "number"))
    made = tool(
        rng.choice(("add", "add", "sum", "plus", "add_numbers")),
        rng.choice(("Add two numbers.", "Adds numbers", "")),
        {first: kind, second: kind},
    )
    request = rng.choice(("Add {a} and {b}.", "What is {a} + {b}?", "What is {a} plus {b}?", "Use the tool to add {a} and {b}."))
    return Use(made, request.format(a=a, b=b), {first: a, second: b})


def lookup(rng: Random) -> Use:
    """An invented "get the field of a thing": the name, the description and the parameter all come from the prompt."""
    field, thing = rng.choice(FIELDS), rng.choice((rng.choice(NOUNS), word(rng)))
    key = rng.choice((thing, "name", "id", "item"))
    shown = rng.choice((word(rng), rng.choice(NAMES), str(rng.randrange(1000))))
    kind = "integer" if shown.isdigit() else "string"
    argument: Any = int(shown) if kind == "integer" else shown
    made = tool(
        rng.choice((f"get_{field}", f"{field}_of", f"{thing}_{field}", f"find_{field}")), f"Get the {field} of a {thing}.", {key: kind}
    )
    request = rng.choice((f"What is the {field} of {shown}?", f"Tell me the {field} of {shown}.", f"Get the {field} of {shown}."))
    return Use(made, request, {key: argument}, f"What is the {field} of {shown} and of {{}}?" if kind == "string" else "", key)


def named_tool(rng: Random) -> Use:
    """A request that names the tool and its arguments, so that any tool can be called."""
    name = rng.choice(
        (word(rng), f"{word(rng)}_{rng.choice(NOUNS)}", f"{rng.choice(('set', 'get', 'make', 'send', 'open'))}_{rng.choice(NOUNS)}")
    )
    keys = list(dict.fromkeys(rng.choice((rng.choice(FIELDS), word(rng))) for _ in range(rng.choice((0, 1, 1, 2, 3)))))
    values = [value(rng) for _ in keys]
    kinds = {key: json_kind(each[1]) for key, each in zip(keys, values, strict=True)}
    said = joined([f"{key} {each[0]}" for key, each in zip(keys, values, strict=True)]) if keys else ""
    made = tool(name, rng.choice((f"{name.capitalize()} something.", f"The {word(rng)} tool", "A tool.", "")), kinds)
    request = (
        rng.choice(("Use {n} with {s}.", "Call {n} with {s}.", "Please call {n} with {s}", "Run {n} with {s}."))
        if keys
        else rng.choice(("Use {n}.", "Call {n}.", "Run {n}."))
    )
    return Use(made, request.format(n=name, s=said), dict(zip(keys, (each[1] for each in values), strict=True)))


def json_kind(anything: Any) -> str:
    kinds = {bool: "boolean", int: "integer", str: "string", type(None): "string"}
    return kinds[type(anything)]


USES: tuple[Callable[[Random], Use], ...] = (weather, clock, search, adder, lookup, lookup, named_tool, named_tool)


# Of two tools that share one of these in their names only one is offered, or it would be open which is meant.
FAMILIES = ({"weather"}, {"time", "clock"}, {"search", "find"}, {"add", "sum", "plus"})


def family(offer: Tool) -> set[str]:
    """The words that the tool's name has in common with others that do the same."""
    parts = set(name_of(offer).split("_")) - {"get", "set", "of"}
    return parts.union(*(family for family in FAMILIES if family & parts))


def offered(rng: Random, *uses: Use) -> tuple[Tool, ...]:
    """The tools of the uses among up to two others, none of which could be meant."""
    tools = [use.tool for use in uses]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        other = rng.choice(USES)(rng).tool
        if not any(family(other) & family(each) for each in tools):
            tools.append(other)
    rng.shuffle(tools)
    return tuple(shuffled_keys(rng, each) for each in tools)


def two_uses(rng: Random) -> tuple[Use, Use]:
    while True:
        first, second = rng.choice(USES)(rng), rng.choice(USES)(rng)
        if not family(first.tool) & family(second.tool):
            return first, second


def shuffled_keys(rng: Random, made: Tool) -> Tool:
    """Some servers sort the keys of a tool or leave out an empty description; the model should not mind."""
    function = dict(made["function"])
    if not function["description"]:
        del function["description"]
    if rng.random() < 0.15:
        function = json.loads(json.dumps(function, sort_keys=True))
    return {"type": "function", "function": function}


def call_of(use: Use) -> Message:
    return {"type": "function", "function": {"name": name_of(use.tool), "arguments": use.arguments}}


def calling(request: str, calls: list[Message], tools: tuple[Tool, ...], rng: Random) -> Exchange:
    names = " and ".join(dict.fromkeys(call["function"]["name"] for call in calls))
    messages: list[Message] = [{"role": "user", "content": request}, {"role": "assistant", "content": "", "tool_calls": calls}]
    if rng.random() < 0.35:
        results = [result(rng) for _ in calls]
        messages += [{"role": "tool", "content": each} for each in results]
        messages.append(
            {"role": "assistant", "content": ("The result is: " if len(results) == 1 else "The results are: ") + "; ".join(results)}
        )
    return Exchange(tuple(messages), f"I call {names}.", tools)


def result(rng: Random) -> str:
    """What a tool gives back: a text, a number or an object."""
    kind = rng.random()
    if kind < 0.3:
        return f"{rng.choice(ADJECTIVES)}, {rng.randrange(40)} degrees"
    if kind < 0.5:
        return number(rng)
    return as_json(pairs(rng, rng.choice((1, 2, 3)))[1]) if kind < 0.8 else text(rng, 5).replace("\n", " ")


def request_of(rng: Random, use: Use) -> Exchange:
    return calling(use.request, [call_of(use)], offered(rng, use), rng)


def tool_call(rng: Random) -> Exchange:
    return request_of(rng, rng.choice(USES)(rng))


def parallel_calls(rng: Random) -> Exchange:
    use = rng.choice((weather, weather, clock, search, lookup))(rng)
    if not use.both:
        return parallel_calls(rng)
    second = rng.choice((rng.choice(CITIES), rng.choice(NOUNS), word(rng).capitalize()))
    calls = [call_of(use), call_of(attrs.evolve(use, arguments={use.object_key: second}))]
    return calling(use.both.format(second), calls, offered(rng, use), rng)


def tools_not_needed(rng: Random) -> Exchange:
    """Tools are offered, and the question is answered without them."""
    use = rng.choice(USES)(rng)
    exchange = rng.choice((greeting, about, copying, json_on_request, counting))(rng)
    return attrs.evolve(exchange, tools=offered(rng, use))
