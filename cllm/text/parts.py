"""The parts of an answer, in the order in which they come: what its readers tell and every surface shapes."""

from __future__ import annotations

from typing import TypeAlias

import attrs


@attrs.define
class Content:
    """Text for whoever asked."""

    text: str


@attrs.define
class Reasoning:
    """Text that the model writes for itself before it answers."""

    text: str


@attrs.define
class CallBegun:
    """A tool is called; its arguments follow. `call` counts an answer's calls from 0."""

    call: int
    name: str


@attrs.define
class Arguments:
    """The next piece of a call's arguments; all pieces of a call that was not cut short are together one JSON object."""

    call: int
    fragment: str


Part: TypeAlias = Content | Reasoning | CallBegun | Arguments


def written(parts: list[Part]) -> str:
    """All that the model wrote in `parts`, one after the other, for a log."""
    return "".join([_written(part) for part in parts])


def _written(part: Part) -> str:
    if isinstance(part, CallBegun):
        return part.name
    return part.fragment if isinstance(part, Arguments) else part.text
