"""Arranges the turns of a conversation as its template takes them: clients send orders that many templates refuse, or lose a part of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

Message: TypeAlias = dict[str, Any]


class Takes(Protocol):
    """What a template takes."""

    @property
    def supports_system(self) -> bool:
        """A system message at the beginning."""

    @property
    def takes_system_anywhere(self) -> bool:
        """Several of them, and between other turns."""

    @property
    def takes_system_before_results(self) -> bool:
        """One at the beginning, also if the last turn is not the user's; some write it into his last turn, and only if that is the last."""

    @property
    def takes_system_alone(self) -> bool:
        """One that nothing follows."""

    @property
    def takes_answers_first(self) -> bool:
        """A turn of the model's before any of the user's."""

    @property
    def takes_no_user(self) -> bool:
        """The model's turns without any of the user's."""

    @property
    def wants_parts(self) -> bool:
        """Content is a list of parts."""

    @property
    def takes_neighbours(self) -> bool:
        """Two turns of the user's, one after the other."""

    @property
    def takes_text_after_results(self) -> bool:
        """A turn of the user's after a tool's result."""

    @property
    def takes_several_calls(self) -> bool:
        """More than one call in a turn."""

    @property
    def takes_empty_turns(self) -> bool:
        """One of the model's that says and calls nothing."""

    @property
    def takes_text_beside_calls(self) -> bool:
        """Text in a turn that calls: it is shown before the results."""

    @property
    def speaker(self) -> str:
        """Whose a turn is that has the text apart from the calls."""

    @property
    def wants_results_with_calls(self) -> bool:
        """Results are told with the turn that called, in `tool_responses`."""

    @property
    def empty_content(self) -> str | None:
        """What stands for the content of a turn that only calls."""


def arranged(messages: list[Message], takes: Takes) -> list[Message]:
    """Return the turns in an order that the template takes, with all that they say.

    What is said later changes nothing before it: the next request's turns begin as these do, but where the user had said nothing yet.
    """
    messages = in_order_of_calls(messages)
    if not takes.takes_empty_turns:
        messages = [message for i, message in enumerate(messages) if i == len(messages) - 1 or not _is_empty(message)]
    if not takes.supports_system:
        messages = _told_by_users(messages)
    elif not takes.takes_system_anywhere:
        n_leading = _n_leading(messages)
        messages = [*_joined(messages[:n_leading]), *_told_by_users(messages[n_leading:])]
    messages = _asked_first(messages, takes)
    if not (takes.takes_neighbours and takes.takes_text_after_results):
        messages = _apart(messages, takes)
    if not takes.takes_system_before_results:  # now that what is said after a result is no turn of its own any more
        messages = _told_in_last_question(messages)
    if not takes.takes_several_calls:
        messages = _one_call_each(messages, takes.empty_content)
    if not takes.takes_text_beside_calls:
        messages = [turn for message in messages for turn in _text_first(message, takes)]
    return _results_with_calls(messages) if takes.wants_results_with_calls else messages


def _n_leading(messages: list[Message]) -> int:
    """System messages before anybody else's."""
    return next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))


def _is_empty(message: Message) -> bool:
    return message.get("role") == "assistant" and not (message.get("content") or message.get("tool_calls"))


def _text_first(message: Message, takes: Takes) -> list[Message]:
    """A turn that calls, and before it one of what it says besides."""
    if not (message.get("tool_calls") and message.get("content")):
        return [message]
    return [{"role": takes.speaker, "content": message["content"]}, message | {"content": takes.empty_content}]


def _results_with_calls(messages: list[Message]) -> list[Message]:
    told: list[Message] = []
    results: list[Message] | None = None  # of the last turn, if it called
    for message in messages:
        calls = told[-1].get("tool_calls") if told else None
        if message.get("role") != "tool" or not calls:
            told.append(message)
            results = None
            continue
        if results is None:
            results = [*told[-1].get("tool_responses", ())]
            told[-1] = told[-1] | {"tool_responses": results}
        name = message.get("name") or calls[min(len(results), len(calls) - 1)]["function"]["name"]
        results.append({"name": name, "response": message.get("content")})
    return told


def in_order_of_calls(messages: Iterable[Message]) -> list[Message]:
    """Results in the order of the calls that they name, not in that in which tools ended: most templates show no ids, only places."""
    ordered: list[Message] = []
    calls: list[Any] = []
    places: dict[str, int] | None = None  # of these, once somebody asked
    for role, turns in itertools.groupby(messages, lambda message: message.get("role")):
        run = list(turns)
        if role == "assistant":
            calls, places = [call for turn in run for call in turn.get("tool_calls") or ()], None
        elif role == "tool" and len(run) > 1 and len(calls) > 1:
            places = _places_of(calls) if places is None else places
            run = _by_places(run, places)
        ordered += run
    return ordered


def _places_of(calls: Sequence[Any]) -> dict[str, int]:
    return {call["id"]: place for place, call in reversed([*enumerate(calls)]) if call.get("id")}


def _by_places(results: list[Message], places: dict[str, int]) -> list[Message]:
    """The results by the places of their calls; one of no known call stays where it is."""
    named = sorted((one for one in results if one.get("tool_call_id") in places), key=lambda one: places[one["tool_call_id"]])
    in_turn = iter(named)
    return [next(in_turn) if one.get("tool_call_id") in places else one for one in results]


def _one_call_each(messages: list[Message], empty_content: str | None) -> list[Message]:
    """A turn for each call of a turn, with its results behind it; what the turn says besides is the first one's."""
    told: list[Message] = []
    i = 0
    while i < len(messages):
        turn, i = messages[i], i + 1
        calls = turn.get("tool_calls") or ()
        if len(calls) < 2:
            told.append(turn)
            continue
        first_result = i
        while i < len(messages) and messages[i].get("role") == "tool":
            i += 1
        results = messages[first_result:i]
        places = _places_of(calls)
        own: list[list[Message]] = [[] for _ in calls]
        for place, one in enumerate(results):
            own[places.get(one.get("tool_call_id") or "", min(place, len(calls) - 1))].append(one)
        for place, call in enumerate(calls):
            first = {"role": "assistant", "content": empty_content} if place else turn
            told += [first | {"tool_calls": [call]}, *own[place]]
    return told


def _joined(messages: list[Message]) -> list[Message]:
    return [messages[0] | {"content": together([message["content"] for message in messages])}] if messages else []


def _told_by_users(messages: list[Message]) -> list[Message]:
    """System messages as a part of the user's turn before or behind, else as one of his, before the model says more."""
    told: list[list[Message]] = []  # each is to be one turn
    pending: list[Any] = []  # between a call and its results nothing may come
    for message in messages:
        role = message.get("role")
        if role == "system" and not pending and told and told[-1][0].get("role") == "user":
            told[-1].append(message)
        elif role == "system":
            pending.append(message["content"])
        elif role == "tool":
            told.append([message])
        elif pending and role == "user":
            told.append([message | {"content": together([*pending, message["content"]])}])
            pending = []
        else:
            told += [[_user(pending)], [message]] if pending else [[message]]
            pending = []
    if pending:
        told.append([_user(pending)])
    return [_one(turns) for turns in told]


def _asked_first(messages: list[Message], takes: Takes) -> list[Message]:
    """A user's turn where the template wants one first, or any: an empty one, or the system's last word where nothing follows it."""
    n_leading = _n_leading(messages)
    leading, rest = messages[:n_leading], messages[n_leading:]
    if not rest:
        return messages if takes.takes_system_alone or not leading else [*leading[:-1], _user([leading[-1]["content"]])]
    speaks_first = rest[0].get("role") == "assistant" and not rest[0].get("tool_calls")  # of calls many templates keep no count
    lacks_user = not takes.takes_no_user and all(message.get("role") != "user" for message in rest)
    if not lacks_user and (takes.takes_answers_first or not speaks_first):
        return messages
    return [*leading, _user([[{"type": "text", "text": ""}] if takes.wants_parts else ""]), *rest]


def _told_in_last_question(messages: list[Message]) -> list[Message]:
    """The system message where it was when the user's turn was the last one, before the model called."""
    places = [place for place, message in enumerate(messages) if message.get("role") == "user"]
    if not places or places[-1] == len(messages) - 1 or messages[0].get("role") != "system":
        return messages
    system, question = messages[0], messages[places[-1]]
    told = question | {"content": together([system["content"], question["content"]])}
    return [*messages[1 : places[-1]], told, *messages[places[-1] + 1 :]]


def _user(contents: list[Any]) -> Message:
    return {"role": "user", "content": together(contents)}


def _apart(messages: list[Message], takes: Takes) -> list[Message]:
    """No two turns of one role in a row, nor a user's after a result, where the template does not take these."""
    apart: list[list[Message]] = []  # each is to be one turn
    for message in messages:
        before, role = (apart[-1][0].get("role") if apart else None), message.get("role")
        is_neighbour = not takes.takes_neighbours and before == role and role in ("user", "assistant")
        if is_neighbour or (not takes.takes_text_after_results and before == "tool" and role == "user"):
            apart[-1].append(message)
        else:
            apart.append([message])
    return [_one(turns) for turns in apart]


def _one(turns: list[Message]) -> Message:
    """One turn in place of several; calls and reasoning of all are its, and of everything else the first one's."""
    if len(turns) == 1:
        return turns[0]
    one = {name: value for turn in reversed(turns) for name, value in turn.items()}
    one["content"] = together([turn["content"] for turn in turns if turn.get("content")] or [turns[0].get("content")])
    if calls := [call for turn in turns for call in turn.get("tool_calls") or ()]:
        one["tool_calls"] = calls
    if thoughts := [turn["reasoning_content"] for turn in turns if turn.get("reasoning_content")]:
        one["reasoning_content"] = together(thoughts)
    return one


def together(contents: list[Any]) -> Any:
    """Several contents in one: texts, or lists of parts."""
    if any(isinstance(content, list) for content in contents):
        return [part for content in contents for part in (content if isinstance(content, list) else [{"type": "text", "text": content}])]
    return "\n\n".join(contents) if len(contents) > 1 else contents[0]
