"""What was measured of a model on a machine: how long its steps take."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import attrs

Points = tuple[tuple[int, float], ...]


def _points(value: Iterable[Iterable[float]]) -> Points:
    return tuple((int(n), float(seconds)) for n, seconds in value)


def _ascending(_: object, attribute: attrs.Attribute[Points], points: Points) -> None:
    counts = [n for n, _ in points]
    if not points or counts != sorted(set(counts)) or counts[0] < 1 or not all(0 <= s < math.inf for _, s in points):
        raise ValueError(f"{attribute.name} must be ascending counts with seconds")


def _seconds(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and not 0 <= value < math.inf:
        raise ValueError(f"{attribute.name} must be seconds")


@attrs.frozen(kw_only=True)
class Curve:
    """What was measured of one model on one machine; seconds throughout. Raises: ValueError for numbers that cannot be."""

    rows: Points = attrs.field(converter=_points, validator=_ascending)  # (rows, seconds of a step without outputs)
    outputs: Points = attrs.field(converter=_points, validator=_ascending)  # (outputs, seconds that they add)
    cell_s: float = attrs.field(default=0.0, validator=_seconds)  # that a cell in use adds to a step
    row_cell_s: float = attrs.field(default=0.0, validator=_seconds)  # that it adds for each row
    attended: Points = attrs.field(default=((1, 0.0),), converter=_points, validator=_ascending)  # (rows of one sequence, seconds that they
    # take together for each cell of their sequence before them)
    save_cell_s: float | None = attrs.field(default=None, validator=_seconds)  # to save a cell's content; None: not known
    restore_cell_s: float | None = attrs.field(default=None, validator=_seconds)
    save_fixed_s: float = attrs.field(default=0.0, validator=_seconds)  # to save what a state has however short, as recurrent ones do
    restore_fixed_s: float = attrs.field(default=0.0, validator=_seconds)
    apart_gain_cell_s: float | None = attrs.field(default=None, validator=_seconds)  # see `Apart`; None: they cannot lie apart
    is_cut_short: bool = False  # something held the machine up: less was measured than there is time for, or it is not to be trusted

    def __attrs_post_init__(self) -> None:
        if self.rows[0][1] <= 0:
            raise ValueError("a step takes time")


DEFAULT_CURVE = Curve(  # the shape of a small model on a CPU; how fast the machine is comes out at the first steps
    rows=((1, 0.012), (2, 0.022), (4, 0.033), (8, 0.060), (16, 0.070), (32, 0.120), (64, 0.230), (512, 1.84)),
    outputs=((1, 0.003), (8, 0.020), (16, 0.030), (64, 0.080), (512, 0.64)),
    cell_s=5e-7,
    row_cell_s=1e-7,
    attended=((1, 2e-5), (16, 8e-5), (64, 1.6e-4)),
)
