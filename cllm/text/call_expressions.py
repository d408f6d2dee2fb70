"""Reads calls that are written as expressions, whole only: as Python writes a function's call, and as Gemma writes one."""

from __future__ import annotations

import ast
import json
import re
from typing import Any, Final

from cllm.text.call_bodies import N_HEAD_MAX, N_NESTED_MAX, read_json, written
from cllm.text.markers import N_BLANKS_MAX

# What Python's parser and `literal_eval` raise of a text: of a set of objects (`{{...}}`) a TypeError, of 1j beside a number that no float
# holds an OverflowError.
NOT_PYTHON: Final = (ValueError, SyntaxError, RecursionError, MemoryError, TypeError, OverflowError)
_JSON_WORDS: Final = {"true": True, "false": False, "null": None}

# --- a function's call -------------------------------------------------------------------------------------------------


class PythonBody:
    """A call as Python writes it: `look_up(city="Ulm", days=3)`. Told when it is complete."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._text = ""
        self._pos = 0  # so much of it has been looked at
        self._quote = ""  # of the string that it ends in
        self._depth = 0

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        n_before = len(self._text)
        self._text += text[pos:]
        if self.name is None:
            name, bracket, _ = self._text.partition("(")
            self.is_bad = len(name) > N_HEAD_MAX or not _NAME.fullmatch(name)
            if not bracket or self.is_bad:
                return len(text)
            self.name, self._pos = name.strip(), len(name)
        self._look()
        if self.is_complete:
            self._end()
            return pos + self._pos - n_before
        return len(text)

    def _look(self) -> None:
        while not (self.is_complete or self.is_bad):
            found = _IN_PYTHON.search(self._text, self._pos)
            if found is None:
                self._pos = max(self._pos, len(self._text) - self._text.endswith("\\"))  # which may belong to what comes
                return
            letter, self._pos = found[0], found.end()
            if self._quote:
                self._quote = "" if letter == self._quote else self._quote
            elif letter in "'\"":
                self._quote = letter
            elif letter in "([{":
                self._depth += 1
                self.is_bad = self._depth > N_NESTED_MAX
            elif letter in ")]}":
                self._depth -= 1
                self.is_complete = not self._depth

    def _end(self) -> None:
        try:
            arguments = _keywords(self._text[self._text.index("(") : self._pos])
            self.fragments.append(written(arguments))
        except NOT_PYTHON:
            self.is_bad, self.is_complete = True, False


# Or an escape between strings, which opens none: from each of its quotes a search would go to the end, and find nothing.
_PYTHON_STRING = re.compile(r"""\\.|(['"])(?:\\.|(?!\1)[^\\])*+\1""", re.DOTALL)
_KEYWORD = re.compile(  # or what it might be taken for, and the brackets
    r"""\\.|(?P<quote>['"])(?:\\.|(?!(?P=quote))[^\\])*+(?P=quote)|(?P<bracket>[()\[\]{}])"""
    r"""|(?P<before>,\s*+|(?<=\()\s*+)(?P<name>[\w.$-]++)\s*+=(?!=)""",
    re.DOTALL,
)
_LINE_END = re.compile(r"\\.|[\n\r]", re.DOTALL)  # or an escape, as of a line end that does not count
_NAME = re.compile(r"\s*[\w.:/-]*\s*")
_IN_PYTHON = re.compile(r"""\\.|['"()\[\]{}]""", re.DOTALL)


def _keywords(text: str) -> dict[str, Any]:
    """The values of a call's keywords, of which `text` has the brackets and what is in them. Raises: what Python's parser does."""
    text = _PYTHON_STRING.sub(lambda string: _LINE_END.sub(_escaped, string[0]), text)  # line ends, which templates write as they are
    text, names = _with_stand_ins(text)
    call = ast.parse(f"f{text}", mode="eval").body
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    values: dict[str, Any] = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("keywords that are not named")
        values[names.get(keyword.arg, keyword.arg)] = ast.literal_eval(_AsPython().visit(keyword.value))
    return values


def _with_stand_ins(text: str) -> tuple[str, dict[str, str]]:
    """The call with other names for its keywords, and what those stand for: a schema's names may be no names in Python (`from`, `x-id`)."""
    names: dict[str, str] = {}
    depth = 0

    def stand_in(found: re.Match[str]) -> str:
        nonlocal depth
        if found["bracket"]:
            depth += 1 if found["bracket"] in "([{" else -1
        elif found["name"] and depth == 1:
            names[name := f"_{len(names)}"] = found["name"]
            return f"{found['before']}{name}="
        return found[0]

    return _KEYWORD.sub(stand_in, text), names


def _escaped(found: re.Match[str]) -> str:
    return {"\n": "\\n", "\r": "\\r"}.get(found[0], found[0])


class _AsPython(ast.NodeTransformer):
    """JSON's words as values."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in _JSON_WORDS:
            raise ValueError(f"{node.id} is no value")
        return ast.Constant(_JSON_WORDS[node.id])


# --- objects whose strings have marks of their own ---------------------------------------------------------------------

QUOTE: Final = '<|"|>'  # around strings in Gemma's calls
# An escape between strings, which opens none, as above; a string in plain quotes, as some are written all the same; a key, which may have
# blanks; Python's words.
_IN_BARE = re.compile(
    r"""(?P<escape>\\["\\])|(?P<string>"(?:\\.|[^"\\])*+")"""
    r"""|(?P<before>[{,]\s*+)(?P<key>[^\s{}\[\],:"](?:[^{}\[\],:"]*[^\s{}\[\],:"])?)(?P<behind>\s*:)"""
    r"""|\b(?P<word>None|True|False)\b""",
    re.DOTALL,
)
_WORDS: Final = {"None": "null", "True": "true", "False": "false"}  # templates write earlier values so, and models copy that


class MarkedBody:
    """`call:look_up{city:<|"|>Ulm<|"|>,days:3}`: an object whose keys stand bare. Told when it is complete."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.fragments: list[str] = []
        self.is_complete = False
        self.is_bad = False
        self._text = ""
        self._start = 0  # where the object begins
        self._pos = 0  # so much has been looked at
        self._depth = 0
        self._is_inside = False  # a string
        self._is_quoted = False  # one in plain quotes

    def push(self, text: str, pos: int) -> int:
        """See `Body.push`."""
        n_before = len(self._text)
        self._text += text[pos:]
        if self.name is None and not self._read_name():
            return len(text)
        if not self._look():
            return len(text)
        try:
            self.fragments.append(written(read_json(_as_json(self._text[self._start : self._pos]))))
            self.is_complete = True
        except ValueError:
            self.is_bad = True
        return pos + self._pos - n_before

    def _read_name(self) -> bool:
        head, brace, _ = self._text.partition("{")
        begun = head.strip()
        is_name = begun.startswith("call:") if brace else begun[:5] == "call:"[: len(begun)]
        self.is_bad = not is_name or len(begun) > N_HEAD_MAX or len(head) > N_HEAD_MAX + N_BLANKS_MAX
        if not brace or self.is_bad:
            return False
        self.name = begun.removeprefix("call:").strip()
        self._start = self._pos = len(head)
        return True

    def _look(self) -> bool:
        """Whether the object is at its end."""
        for found in _IN_MARKED.finditer(self._text, self._pos):
            mark, self._pos = found[0], found.end()
            if mark == QUOTE and not self._is_quoted:
                self._is_inside = not self._is_inside
            elif mark == '"' and not self._is_inside:
                self._is_quoted = not self._is_quoted
            elif mark in "{}[]" and not (self._is_inside or self._is_quoted):
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return True
        self._pos = max(self._pos, len(self._text) - len(QUOTE) + 1)  # a mark may have begun
        return False


# A quote behind `<|` may be of a mark that is not whole yet. A backslash counts before a quote or another one alone: in marked strings it
# stands for itself, and must not hide the mark behind it.
_IN_MARKED = re.compile(re.escape(QUOTE) + r'|\\["\\]|(?<!<\|)"|[{}\[\]]')


def _as_json(text: str) -> str:
    """What stands between marks is a string, and what stands before a colon a key."""
    pieces = text.split(QUOTE)
    for i, piece in enumerate(pieces):
        pieces[i] = json.dumps(piece, ensure_ascii=False) if i % 2 else _IN_BARE.sub(_bare_as_json, piece)
    return "".join(pieces)


def _bare_as_json(found: re.Match[str]) -> str:
    if found["key"]:
        return f'{found["before"]}"{found["key"]}"{found["behind"]}'
    return found["escape"] or found["string"] or _WORDS[found["word"]]
