"""A model with a clock of its own, for what is measured at load."""

from __future__ import annotations

from cllm.backend import Batch, OnProgress
from cllm.engine.cost.curve import Curve
from cllm.serve.calibration import Clock, measure
from cllm.testing.fake import FakeModel
from cllm.threadtimes import ThreadTimes


class TimedModel(FakeModel):
    """Moves a clock of its own: each step by `row_s` for each row, `output_s` for each output, `cell_s` for each cell in use.

    And by `attended_s` for each cell that is before a row in its sequence, as many rows as are in one tile of `tile` reading it together.
    `held_up` are further seconds that steps take, by their number
    from 1.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.005,
        row_s: float = 0.0,
        output_s: float = 0.0,
        cell_s: float = 0.0,
        attended_s: float = 0.0,
        tile: int = 1,
        **fields: object,
    ) -> None:
        super().__init__(before_step=self._take, **fields)  # type: ignore[arg-type]
        self.now = 0.0
        self.sizes: list[int] = []
        self.held_up: dict[int, float] = {}
        self._costs = first_s, row_s, output_s, cell_s
        self._attended_s, self._tile = attended_s, tile

    def clock(self) -> float:
        return self.now

    def _take(self, batch: Batch) -> None:
        first_s, row_s, output_s, cell_s = self._costs
        self.sizes.append(batch.n_rows)
        self.now += first_s + batch.n_rows * row_s + batch.n_outputs * output_s + self.n_cells_used * cell_s
        self.now += self.held_up.get(len(self.sizes), 0.0)
        self.now += self._attended_s * float(batch.positions[: batch.n_rows : self._tile].sum())

    def restore(self, slot: int, state: bytes) -> None:
        super().restore(slot, state)
        self.now += 0.01


def by_its_own_clock(model: TimedModel, on_progress: OnProgress, _clock: Clock | None = None) -> Curve:
    """`measure`, whatever clock it is given, and as if nobody else had the cores."""
    return measure(model, on_progress, model.clock, lambda: ThreadTimes(cpu_s=0.0, waiting_s=0.0))
