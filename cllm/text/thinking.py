"""What a request wants of reasoning, and what that means to a chat template and to the tokens that reasoning may take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any, Final

import attrs

EFFORTS: Final[Mapping[str, int | None]] = {
    "none": 0,
    "minimal": 128,
    "low": 512,
    "medium": 2048,
    "high": None,
    "xhigh": None,
    "max": None,
}
"""Tokens of reasoning, for models whose template has no word for effort; None: as many as the model likes."""

SWITCHES: Final = ("enable_thinking", "thinking")  # what templates call it
EFFORT: Final = "reasoning_effort"
USUAL_EFFORT: Final = "medium"  # OpenAI's, where reasoning is asked for without one
USUAL_EFFORTS: Final = ("low", "medium", "high")  # what templates know that take anything


@attrs.frozen(kw_only=True)
class Thinking:
    """What a request says of reasoning; None leaves it to the model. A model that does not reason apart heeds none of it."""

    enabled: bool | None = None
    effort: str | None = None  # one of EFFORTS
    n_tokens_max: int | None = None  # of the reasoning; then it is ended
    names: Mapping[str, str] = attrs.field(factory=dict, eq=False)  # what the request calls a field that a refusal would call otherwise

    @property
    def wanted(self) -> bool | None:
        """Whether there is to be reasoning, as far as anything says so."""
        if self.enabled is not None:
            return self.enabled
        if self.n_tokens_max == 0 or self.effort == "none":
            return False
        return None if self.effort is None else True

    def variables(self, known: Set[str], given: Mapping[str, Any], efforts: Sequence[str] = USUAL_EFFORTS) -> dict[str, Any]:
        """The variables of a template that knows `known` and `efforts`, over which those `given` by the request prevail."""
        chosen: dict[str, Any] = {}
        if self.wanted is not None:
            chosen |= {name: self.wanted for name in SWITCHES if name in known}
        if self.effort not in (None, "none") and self.wanted and EFFORT in known:
            chosen[EFFORT] = _nearest(self.effort, efforts)
        elif self.wanted is not None and not chosen and EFFORT in known and "none" in efforts:  # its only switch, off as it comes or on
            chosen[EFFORT] = _nearest(USUAL_EFFORT, efforts) if self.wanted else "none"
        return {**chosen, **given}

    def budget(self, known: Set[str]) -> int | None:
        """The tokens that reasoning may take; None: no limit."""
        if self.wanted is False:
            return 0
        if self.n_tokens_max is not None:
            return self.n_tokens_max
        return None if self.effort in (None, "none") or EFFORT in known else EFFORTS[self.effort]


def _nearest(effort: str, efforts: Sequence[str]) -> str:
    """What a template that takes `efforts` is told: the same, else the next above, else the next below."""
    order = list(EFFORTS)
    place = order.index(effort)
    nearest = [*order[place:], *reversed(order[1:place])]
    return next((one for one in nearest if one in efforts), effort)
