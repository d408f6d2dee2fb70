"""What one render of a template may use: time, memory, and how large its values grow.

A call into C cannot be interrupted, so whatever could run or grow there without bound is measured *before* it happens; between such
calls the clock is looked at. Two things are counted:

- *work*, in units of roughly 10 ns, which only decides when to look at the clock;
- *characters*, of every text and element that the template makes, freed or not: their sum bounds the memory in use at any moment.

A container made by the template has a *weight*: the characters and elements that it unfolds to when it is printed, compared or
encoded. Forty times ``[x, x]`` is 40 small lists and 2**40 elements, so weights are bounded where containers are made.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any, Final, TypeAlias, TypeVar

import attrs
from jinja2.runtime import LoopContext
from jinja2.utils import Cycler, Joiner, Namespace

from cllm.errors import TemplateLimitExceeded, TemplateSlow

_T = TypeVar("_T")
Container: TypeAlias = "list[Any] | tuple[Any, ...] | dict[Any, Any]"

CONTAINERS: Final = (list, tuple, dict)
VIEWS: Final = (KeysView, ValuesView, ItemsView)

# What they hold may change after they were weighed, and is looked up by formats and by filters' attributes: as if there were no end of it.
OPAQUE: Final = (Namespace, Cycler, Joiner, LoopContext)

N_BITS_MAX: Final = 4096  # of an integer: multiplying, dividing and printing longer ones is quadratic
N_NESTED_MAX: Final = 100  # C code recurses into containers, and not everywhere with a check of its stack (the hash of a tuple)

_ELEMENT: Final = 16  # characters that an element of a list or dict weighs
_TUPLE_ELEMENT: Final = 1024  # tuples can be hashed, over and over in one expression: so they stay short
_WORK_BETWEEN_LOOKS: Final = 10_000
_WORK_OF_A_CALL: Final = 100
N_COPIES: Final = 4  # of all that came before, that a template may make for each message or tool
TOTAL_MORE: Final = 4  # times as much is the most that it may make, of very many


@attrs.frozen(kw_only=True)
class RenderLimits:
    """What one render may use. The memory in use is at most 4 bytes for each of `n_chars_total`."""

    timeout_s: float = 10.0  # some templates look at all messages for each: long sessions of tools take seconds
    n_chars_max: int = 4 * 2**20  # of the output, and of any one value: the prompt of a context of a million tokens
    n_chars_total: int = 32 * 2**20  # of all values together

    def for_parts(self, n_parts: int, n_chars: int) -> RenderLimits:
        """Return those for so many messages and tools that have `n_chars` characters together.

        Some templates put everything into one variable, so that they make all that came before anew for each of them (DeepSeek V3.2,
        Granite 4 and LFM2 with tools, Reka Edge with messages): little of that is in use at a time.
        """
        return attrs.evolve(self, n_chars_total=max(self.n_chars_total, min(N_COPIES * n_parts * n_chars, TOTAL_MORE * self.n_chars_total)))


class Meter:
    """The account of one render. Every method raises TemplateLimitExceeded when a limit is reached."""

    __slots__ = ("_clock", "_deadline", "_limits", "_n_chars", "_weights", "_work", "_work_at_look")

    def __init__(self, limits: RenderLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._deadline = clock() + limits.timeout_s
        self._work = 0
        self._work_at_look = _WORK_BETWEEN_LOOKS
        self._n_chars = 0
        # By identity: (the container, its weight, its depth). Holding the container keeps its identity from being used again.
        self._weights: dict[int, tuple[Any, int, int]] = {}

    def step(self, work: int = _WORK_OF_A_CALL) -> bool:
        """Do `work`; return True, so that generated code can write ``step() and ...``."""
        self._work += work
        if self._work >= self._work_at_look:
            self._look_at_clock()
        return True

    def _look_at_clock(self) -> None:
        self._work_at_look = self._work + _WORK_BETWEEN_LOOKS
        if self._clock() > self._deadline:
            raise TemplateSlow(f"the chat template took longer than {self._limits.timeout_s:g} s")

    def text(self, n_chars: int) -> None:
        """Make a text, or anything else that takes the memory of one, of `n_chars` characters: below 0 is none."""
        if not n_chars > 0:  # a width may be any number, and none gives back what was paid, nor makes the sum no number
            n_chars = 0
        self._n_chars += n_chars
        if n_chars > self._limits.n_chars_max:
            raise TemplateLimitExceeded(f"the chat template made a value of more than {self._limits.n_chars_max} characters")
        if self._n_chars > self._limits.n_chars_total:
            raise TemplateLimitExceeded(f"the chat template made more than {self._limits.n_chars_total} characters in all")
        self.step(n_chars)

    def elements(self, n: int) -> None:
        """Make a container of `n` elements that are no heavier than what the template was given."""
        self.text(_ELEMENT * n)

    def hold(self, container: _T) -> _T:
        """Return `container`, which the template has just made out of anything."""
        self.elements(len(container))  # type: ignore[arg-type]
        weight, depth = self._weigh(container)
        if weight > self._limits.n_chars_max:
            raise TemplateLimitExceeded(f"the chat template made a value of more than {self._limits.n_chars_max} characters")
        if depth > N_NESTED_MAX:
            raise TemplateLimitExceeded(f"the chat template nested values more than {N_NESTED_MAX} deep")
        return container

    def take(self, value: _T) -> _T:
        """Return `value`, which a function has just made, and pay for it if it is a text or a container."""
        if isinstance(value, str):
            self.text(len(value))
        elif isinstance(value, CONTAINERS):
            self.hold(value)
        return value

    def weight(self, value: Any) -> int:
        """Return what `value` unfolds to, in characters."""
        return self._weigh(value)[0]

    def _weigh(self, value: Any) -> tuple[int, int]:
        """Return weight and depth of any value."""
        if isinstance(value, str):
            return len(value), 0
        if isinstance(value, CONTAINERS):
            known = self._weights.get(id(value))
            if known is None:
                self._weights[id(value)] = known = (value, *self._weigh_children(value))
            return known[1], known[2]
        if isinstance(value, VIEWS):
            return self._weigh_children(dict(value.mapping))  # type: ignore[union-attr]
        if isinstance(value, OPAQUE):
            return self._limits.n_chars_max + 1, 0
        return 1, 0

    def _weigh_children(self, container: Container) -> tuple[int, int]:
        self.step(_ELEMENT * len(container))
        weight = (_TUPLE_ELEMENT if isinstance(container, tuple) else _ELEMENT) * len(container)
        depth = 0
        for child in _children(container):
            child_weight, child_depth = self._weigh(child)
            weight += child_weight
            depth = max(depth, child_depth)
        return weight, depth + 1


def _children(container: Container) -> Any:
    if isinstance(container, dict):
        return (*container.keys(), *container.values())
    return container
