"""The smoke test of the benchmarks: that none of its parts is forgotten. That they run, it shows itself."""

from __future__ import annotations

import pytest

from benchmarks import smoke


def test_every_part_is_in_one_lane_or_comes_after_them() -> None:
    assert sorted(smoke.PARTS) == sorted(["report", *(name for names in smoke.LANES for name in names)])


def test_a_part_that_there_is_not_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        smoke.main(["--only=ladder,stairs"])
    assert "no part stairs; there are bench, peers," in capsys.readouterr().err
