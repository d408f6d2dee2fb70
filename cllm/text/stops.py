"""Finds stop strings in text that arrives in pieces, and holds back what might begin one."""

from __future__ import annotations

from collections import deque
from functools import lru_cache


class _Automaton:
    """All prefixes of the stop strings as numbered states (Aho and Corasick, 1975). State 0 is the empty prefix.

    The state after a text is the longest prefix of a stop string that the text ends with: it is exactly what must be held back.
    """

    __slots__ = ("any_ends_blank", "depths", "falls", "first_letters", "moves", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.moves: list[dict[str, int]] = [{}]
        self.depths = [0]  # length of each prefix, characters
        self.falls = [0]  # the longest proper suffix that is a prefix too
        self.stops: list[str | None] = [None]  # the longest stop string that the prefix ends with
        for stop in stops:
            self._add(stop)
        self._link()
        self.first_letters = frozenset(self.moves[0])
        self.any_ends_blank = any(stop != stop.rstrip() for stop in stops)

    def _add(self, stop: str) -> None:
        state = 0
        for depth, letter in enumerate(stop, 1):
            following = self.moves[state].get(letter)
            if following is None:
                following = self.moves[state][letter] = len(self.moves)
                self.moves.append({})
                self.depths.append(depth)
                self.falls.append(0)
                self.stops.append(None)
            state = following
        self.stops[state] = stop

    def _link(self) -> None:
        """Fill in `falls` and `stops`, shorter prefixes first, because longer ones build on them."""
        queue = deque(self.moves[0].values())
        while queue:
            state = queue.popleft()
            for letter, following in self.moves[state].items():
                self.falls[following] = fall = self.step(self.falls[state], letter)
                self.stops[following] = self.stops[following] or self.stops[fall]
                queue.append(following)

    def step(self, state: int, letter: str) -> int:
        moves = self.moves
        while letter not in moves[state]:
            if not state:
                return 0
            state = self.falls[state]
        return moves[state][letter]


# Clients send the same few stop strings with every request. Building takes 4 ms at the contract's limit of 16 times 256 characters.
_automaton = lru_cache(maxsize=64)(_Automaton)


class StopStrings:
    """Watches the text of one sequence for its stop strings, none of them empty.

    The stop string that is *complete* first ends the text; of several that are complete with the same character, the longest. So the
    outcome is a property of the text and not of the pieces it came in: with the stops "bc" and "abcd", the text "abcd" is over at
    "abc", and "a" is released. What follows is never released.
    """

    __slots__ = ("_automaton", "_first_letters", "_held", "_state", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._automaton = _automaton(stops)
        self._first_letters = self._automaton.first_letters
        self._held = ""  # the prefix that `_state` stands for
        self._state = 0
        self.matched: str | None = None

    @property
    def any_ends_blank(self) -> bool:
        """Whether one of them ends with a blank, so that blanks must not be withheld from the search."""
        return self._automaton.any_ends_blank

    def push(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Return the text that may be released now, and the stop string that has ended it, if one has.

        One that is complete in a text that does not count is text; one that begins there may be complete later. Costs O(len(text)),
        amortised. After a match it answers ("", the match) for ever.
        """
        if not self._state and self._first_letters.isdisjoint(text):
            return text, None
        if self.matched is not None:
            return "", self.matched
        return self._search(text, counts)

    def flush(self) -> str:
        """Return the text still held back, when the sequence has ended otherwise; "" after a match."""
        held, self._held = self._held, ""
        if self.matched is None:
            self._state = 0
        return held

    def _search(self, text: str, counts: bool) -> tuple[str, str | None]:
        automaton, state = self._automaton, self._state
        moves, falls, stops = automaton.moves, automaton.falls, automaton.stops
        text, n_held = self._held + text, len(self._held)
        for i in range(n_held, len(text)):
            letter = text[i]
            while letter not in moves[state]:  # `step`, inlined: this is the loop that runs for each character
                if not state:
                    break
                state = falls[state]
            else:
                state = moves[state][letter]
                if stops[state] is not None:
                    if counts:
                        return self._match(state, text[: i + 1])
                    while state and not moves[state]:  # nothing is to be held back that cannot go on
                        state = falls[state]
        n_released = len(text) - automaton.depths[state]
        self._state, self._held = state, text[n_released:]
        return text[:n_released], None

    def _match(self, state: int, text: str) -> tuple[str, str | None]:
        # The state stays: it is not 0, which keeps the fast path of `push` shut.
        self._state, self._held = state, ""
        self.matched = matched = self._automaton.stops[state]
        assert matched is not None
        return text[: -len(matched)], matched
