"""Where a token's time went, as a profile tells it."""

from __future__ import annotations

import cProfile
from pathlib import Path

import pytest

from benchmarks.whereabouts import profile_page
from cllm.engine.sampling.noise import mix


def test_a_profile_is_told_by_layer_and_by_function_for_each_token(tmp_path: Path) -> None:
    profile = cProfile.Profile()
    profile.runcall(lambda: [mix(i) for i in range(1000)])
    profile.dump_stats(tmp_path / "profile")
    page = profile_page(tmp_path / "profile", n_tokens=1000)
    (own,) = [one for one in page["functions"] if one["name"].startswith("engine/sampling/noise.py") and one["name"].endswith(" mix")]
    assert own["calls"] == 1
    assert page["us_by_part"]["engine"] == pytest.approx(own["us"])
    assert "trio" not in page["us_by_part"]
