"""Reads a list of numbers from a GGUF file's metadata: of these llama.cpp keeps the scalars alone.

Source: the format's specification (docs/gguf.md in ggml).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_WHOLE: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q"}  # kinds of whole numbers
_N_BYTES: Final = {**{kind: struct.calcsize(code) for kind, code in _WHOLE.items()}, 6: 4, 7: 1, 12: 8}  # and of other scalars
_STRING, _ARRAY = 8, 9
_N_MAX: Final = 1 << 20  # of anything that is counted; more was no header


class NoHeader(ValueError):
    """The file has no header that could be read."""


def numbers_in(path: str, key: str) -> list[int]:
    """Return the whole numbers of the list with that key; none where there is no such list, or no file that could be read."""
    try:
        with Path(path).open("rb") as file:
            return _numbers(file, key.encode())
    except (OSError, NoHeader):
        return []


def _numbers(file: BinaryIO, key: bytes) -> list[int]:
    if _read(file, 4) != _MAGIC or _number(file, "I") not in _VERSIONS:
        raise NoHeader("it is no GGUF file of a version that is known")
    file.seek(8, 1)  # how many tensors there are
    for _ in range(_counted(_number(file, "Q"))):
        name, kind = _text(file), _number(file, "I")
        if kind != _ARRAY:
            _pass(file, kind, 1)
            continue
        kind, n = _number(file, "I"), _counted(_number(file, "Q"))
        if name == key and kind in _WHOLE:
            return list(struct.unpack(f"<{n}{_WHOLE[kind]}", _read(file, n * _N_BYTES[kind])))
        _pass(file, kind, n)
    return []


def _pass(file: BinaryIO, kind: int, n: int) -> None:
    if kind == _STRING:
        for _ in range(n):
            file.seek(_number(file, "Q"), 1)
    elif kind in _N_BYTES:
        file.seek(n * _N_BYTES[kind], 1)
    else:
        raise NoHeader(f"it has a value of kind {kind}")


def _text(file: BinaryIO) -> bytes:
    return _read(file, _counted(_number(file, "Q")))


def _number(file: BinaryIO, code: str) -> int:
    return int(struct.unpack(f"<{code}", _read(file, struct.calcsize(code)))[0])


def _counted(n: int) -> int:
    if n > _N_MAX:
        raise NoHeader(f"it counts {n} of something")
    return n


def _read(file: BinaryIO, n: int) -> bytes:
    data = file.read(n)
    if len(data) != n:
        raise NoHeader("it ends too soon")
    return data
