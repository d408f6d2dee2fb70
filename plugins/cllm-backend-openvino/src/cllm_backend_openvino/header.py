"""Reads what a GGUF file says of its model, without its weights and without its vocabulary.

The package ``gguf`` would read all of it, which takes five seconds for a vocabulary of 152,000 tokens.
Source: the format's specification (docs/gguf.md in ggml).
"""

from __future__ import annotations

import os
import re
import struct
from math import prod
from pathlib import Path
from typing import BinaryIO, Final

import attrs

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_N_MAX: Final = 1 << 20  # of anything that is counted; more was no header
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_ALIGNMENT: Final = 32
_FIRST_PART: Final = re.compile(r"(?P<stem>.*)-00001-of-(?P<total>\d{5})\.gguf", re.DOTALL)

TYPES: Final = {  # number: (name, elements of a block, bytes of a block)
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
"""The types of tensors that OpenVINO reads."""


class NoGguf(Exception):
    """The file is none, or is damaged; the message says how."""


@attrs.frozen
class Tensor:
    """A tensor's description."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int  # of its data, from where all data of its file begin

    @property
    def n_elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)


@attrs.frozen
class Header:
    """What was read."""

    values: dict[str, object]  # scalars and strings; no arrays
    tensors: list[Tensor]
    n_bytes: int  # of the file, or of all parts

    @property
    def architecture(self) -> str:
        """Its name in llama.cpp."""
        return str(self.values.get("general.architecture", ""))

    def number(self, name: str, default: int = 0) -> int:
        """A hyperparameter of the architecture."""
        value = self.values.get(f"{self.architecture}.{name}", default)
        return value if isinstance(value, int) else default


def read_model(path: str | os.PathLike[str]) -> Header:
    """Read the header of a model, of a split one those of all its parts. Raises: NoGguf · OSError."""
    header = read_header(path)
    n_parts = header.values.get("split.count", 1)
    if not isinstance(n_parts, int) or n_parts < 2:
        return header
    split = _FIRST_PART.fullmatch(os.fspath(path))
    if split is None or int(split["total"]) != n_parts:
        raise NoGguf(f"it is one of {n_parts} parts of a model, and by its name not the first")
    parts = [header, *(read_header(f"{split['stem']}-{i:05}-of-{split['total']}.gguf") for i in range(2, n_parts + 1))]
    return Header(header.values, [tensor for part in parts for tensor in part.tensors], sum(part.n_bytes for part in parts))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read a file's header, and see that its data are all there. Raises: NoGguf · OSError."""
    with Path(path).open("rb") as file:
        reader = _Reader(file)
        n_tensors, n_values = reader.begin()
        values = dict(entry for entry in (reader.entry() for _ in range(n_values)) if entry[1] is not None)
        tensors = [reader.tensor() for _ in range(n_tensors)]
        begin = file.tell()
    n_bytes = Path(path).stat().st_size
    alignment = values.get("general.alignment", _ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise NoGguf("its alignment is no number")
    begin += -begin % alignment
    for tensor in tensors:
        if tensor.type in TYPES and begin + tensor.offset + _n_bytes(tensor) > n_bytes:
            raise NoGguf(f"it is cut short: {tensor.name} is not all there")
    return Header(values, tensors, n_bytes)


def _n_bytes(tensor: Tensor) -> int:
    _, n_block, n_bytes_block = TYPES[tensor.type]
    return tensor.n_elements // n_block * n_bytes_block


class _Reader:
    """Reads value by value from where the file stands."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def begin(self) -> tuple[int, int]:
        """How many tensors and values there are."""
        if self._bytes(4) != _MAGIC:
            raise NoGguf("it is no GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise NoGguf(f"it is of version {version} of the format")
        return self._count(), self._count()

    def entry(self) -> tuple[str, object]:
        """A name and its value; None for an array, which is passed over."""
        name = self._string()
        return name, self._value(self._number("I"))

    def tensor(self) -> Tensor:
        """A tensor's description."""
        name = self._string()
        shape = tuple(int(self._number("Q")) for _ in range(min(int(self._number("I")), 8)))
        return Tensor(name, shape, int(self._number("I")), int(self._number("Q")))

    def _value(self, kind: int | float) -> object:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            self._pass_array()
            return None
        if kind not in _SCALARS:
            raise NoGguf(f"a value has the unknown type {kind}")
        return self._number(_SCALARS[int(kind)])

    def _pass_array(self) -> None:
        kind, n = self._number("I"), self._count()
        if kind in _SCALARS:
            self._bytes(n * struct.calcsize("<" + _SCALARS[int(kind)]))
            return
        for _ in range(n):
            self._value(kind)

    def _string(self) -> str:
        return self._bytes(self._count(1 << 30)).decode("utf-8", "replace")

    def _count(self, n_max: int = _N_MAX) -> int:
        n = int(self._number("Q"))
        if n > n_max:
            raise NoGguf("its header is damaged")
        return n

    def _number(self, code: str) -> int | float:
        value: int | float = struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]
        return value

    def _bytes(self, n: int) -> bytes:
        data = self._file.read(n)
        if len(data) < n:
            raise NoGguf("its header is cut short")
        return data
