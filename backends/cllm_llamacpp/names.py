"""Where a long text may be cut so that its pieces have the tokens that it has as a whole: behind the names of special tokens.

llama.cpp looks for the names of special tokens before it tokenises what is between them (`tokenizer_st_partition` in llama-vocab.cpp), and
walks its list of parts from the beginning for each name that it finds. So a text takes time that grows with the square of its names: 32,000
take four seconds, and in as many bytes as the tokeniser takes there is room for what would take a quarter of an hour.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import attrs

from cllm.errors import TokenizeFailed

N_BYTES_PIECE: Final = 1 << 11  # of a piece at least: a thousand names of one byte with another between them take 10 ms
N_NAMES_MAX: Final = 1 << 15  # of a piece, behind its first bytes, where a text cannot be cut; they take four seconds, or twice that
_BLANKS: Final = b" \t\n\v\f\r"
_N_BYTES_SEARCHED: Final = 1 << 16  # at a time: Python's other threads wait meanwhile

# LLAMA_TOKEN_ATTR_*
_UNKNOWN: Final = 1 << 0
_CONTROL: Final = 1 << 3
_USER_DEFINED: Final = 1 << 4
_LSTRIP: Final = 1 << 7  # blanks before it are left out
_RSTRIP: Final = 1 << 8  # and behind it

_Trie: TypeAlias = dict[int, "_Trie"]
_END: Final = -1  # among the keys of a trie: a name ends here


@attrs.frozen(kw_only=True)
class Names:
    """The names that llama.cpp looks for, of at least one byte each, and which of them a text may be cut behind."""

    pattern: re.Pattern[bytes]  # the longest name at a place
    n_bytes_max: int  # of a name
    whole: frozenset[bytes]  # names that no other one can overlap: where they stand, llama.cpp finds them
    runs: frozenset[int]  # bytes of which any number in a row is names, and no other name has them: the row's end is one of its parts'

    @classmethod
    def of(cls, attributes: Mapping[bytes, int]) -> Names | None:
        """Return those with these attributes; None when there is none."""
        if not attributes:
            return None
        firsts = {name[0] for name in attributes}
        inner = {byte for name in attributes for byte in name[1:]}
        may_strip = any(map(_strips, attributes.values()))  # then a name may take away what is before it or behind it
        whole = {
            name
            for name, told in attributes.items()
            if name[0] not in inner and firsts.isdisjoint(name[1:]) and not _strips(told)
            if not may_strip or name == name.strip(_BLANKS)
        }
        runs = {
            name[0]
            for name in attributes
            if len(name) == 1 and all(name[0] not in other or set(other) == {name[0]} for other in attributes)
        }
        pattern = re.compile(_regex(_trie(attributes)), re.DOTALL)
        longest = max(map(len, attributes))
        return cls(pattern=pattern, n_bytes_max=longest, whole=frozenset(whole), runs=frozenset(() if may_strip else runs))

    def pieces(self, data: bytes, *, may_cut: bool) -> Iterator[bytes]:
        """Cut `data`, if it is long; together the pieces are it. Raises: TokenizeFailed where a piece has too many names."""
        first, n_names, place = 0, 0, N_BYTES_PIECE
        while (found := self._next(data, place)) is not None:
            place = found.end()
            n_names += 1
            if n_names > N_NAMES_MAX:
                raise TokenizeFailed("the text names more special tokens in a row than this model's tokeniser can look for in time")
            if may_cut and self._is_boundary(data, found):
                yield data[first:place]
                first, n_names, place = place, 0, place + N_BYTES_PIECE
        yield data[first:]

    def _next(self, data: bytes, place: int) -> re.Match[bytes] | None:
        """The next name from `place` on, and the longest there."""
        n_certain = max(_N_BYTES_SEARCHED, 2 * self.n_bytes_max)
        while place < len(data):
            found = self.pattern.search(data, place, place + n_certain + self.n_bytes_max)
            if found is not None and found.start() < place + n_certain:
                return found
            place += n_certain
        return None

    def _is_boundary(self, data: bytes, found: re.Match[bytes]) -> bool:
        name, end = found[0], found.end()
        return name in self.whole or (name[0] in self.runs and data[end : end + 1] != name[:1])


def names_of(lib: Any, vocab: Any, n_tokens: int, *, parse_special: bool) -> Names | None:
    """Return the names that llama.cpp looks for in a text; of control tokens only where these are parsed."""
    wanted = _USER_DEFINED | (_CONTROL | _UNKNOWN if parse_special else 0)
    attributes = {}
    for token in range(n_tokens):
        told = lib.llama_vocab_get_attr(vocab, token)
        # A token may be both: then it is looked for in parsed texts alone.
        is_looked_for = told & wanted and (parse_special or not told & (_CONTROL | _UNKNOWN))
        if is_looked_for and (name := lib.llama_vocab_get_text(vocab, token)):
            attributes[name] = told
    return Names.of(attributes)


def _strips(attributes: int) -> bool:
    return bool(attributes & (_LSTRIP | _RSTRIP))


def _trie(names: Mapping[bytes, int]) -> _Trie:
    root: _Trie = {}
    for name in names:
        node = root
        for byte in name:
            node = node.setdefault(byte, {})
        node[_END] = {}
    return root


def _regex(root: _Trie) -> bytes:
    """One that finds the longest name at a place, and looks at each byte of it once however many names there are."""
    written: dict[int, bytes] = {}
    order, owed = [], [root]
    while owed:  # not by recursion: names may be long
        node = owed.pop()
        order.append(node)
        owed += [below for byte, below in node.items() if byte != _END]
    for node in reversed(order):
        branches = [re.escape(bytes([byte])) + written[id(below)] for byte, below in sorted(node.items()) if byte != _END]
        inside = b"|".join(branches)
        ends = _END in node
        written[id(node)] = (
            b"" if not branches else b"(?:" + inside + b")" + (b"?" if ends else b"") if ends or len(branches) > 1 else inside
        )
    return written[id(root)]
