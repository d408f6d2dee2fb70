"""What arguments of the benchmarks may be."""

from __future__ import annotations

import argparse


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
