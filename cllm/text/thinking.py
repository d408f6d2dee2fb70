"""What a request wants of reasoning, and what that means to a chat template and to the tokens that reasoning may take."""

from __future__ import annotations

from collections.abc import Mapping, Set
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
_EFFORT: Final = "reasoning_effort"


@attrs.frozen(kw_only=True)
class Thinking:
    """What a request says of reasoning; None leaves it to the model. A model that does not reason apart heeds none of it."""

    enabled: bool | None = None
    effort: str | None = None  # one of EFFORTS
    n_tokens_max: int | None = None  # of the reasoning; then it is ended

    @property
    def wanted(self) -> bool | None:
        """Whether there is to be reasoning, as far as anything says so."""
        if self.enabled is not None:
            return self.enabled
        if self.n_tokens_max == 0 or self.effort == "none":
            return False
        return None if self.effort is None else True

    def variables(self, known: Set[str], given: Mapping[str, Any]) -> dict[str, Any]:
        """The variables of a template that knows `known`, over which those `given` by the request prevail."""
        chosen: dict[str, Any] = {}
        if self.wanted is not None:
            chosen |= {name: self.wanted for name in SWITCHES if name in known}
        if self.effort not in (None, "none") and self.wanted and _EFFORT in known:
            chosen[_EFFORT] = self.effort
        return {**chosen, **given}

    def budget(self, known: Set[str]) -> int | None:
        """The tokens that reasoning may take; None: no limit."""
        if self.wanted is False:
            return 0
        if self.n_tokens_max is not None:
            return self.n_tokens_max
        return None if self.effort in (None, "none") or _EFFORT in known else EFFORTS[self.effort]
