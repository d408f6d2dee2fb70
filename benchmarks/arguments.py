"""What arguments of the benchmarks may be."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Final

from cllm.bench.workloads import OVERLOAD_FACTORS

_NAME: Final = re.compile(r"\w[\w.-]*")


def positive(text: str) -> int:
    """A number of at least 1, for an argument that says how many."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return number


def numbers(text: str) -> list[int]:
    """Such numbers with commas between."""
    return [positive(part) for part in text.split(",")]


def loads(text: str) -> tuple[float, ...]:
    """Some of the loads of an overload, in their order."""
    named = {f"{factor:g}": factor for factor in OVERLOAD_FACTORS}
    parts = text.split(",")
    if unknown := [part for part in parts if part not in named]:
        raise argparse.ArgumentTypeError(f"there is no load {unknown[0]!r}; there are {', '.join(named)}")
    return tuple(factor for name, factor in named.items() if name in parts)


def seconds(text: str) -> float:
    """A time of more than 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time of more than 0, in seconds")
    return number


def model_path(text: str) -> Path:
    """A model file that is there: what is measured for hours should not end with its name."""
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def result_name(text: str) -> str:
    """What a result may be called: a part of a file's name."""
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} may have letters, digits and any of ._-, the first no sign")
    return text
