"""How much work something is: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def n_lines(run: Callable[[], object]) -> int:
    """How many lines of Python `run` takes."""
    n = 0

    def count(_frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal n
        n += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        run()
    finally:
        sys.settrace(before)
    return n
