"""Arguments that say how many, and which."""

from __future__ import annotations

import pytest

from benchmarks import ceiling, ladder, peers
from benchmarks.arguments import numbers


@pytest.mark.parametrize("text", ["0", "-3", "many", ""])
@pytest.mark.parametrize("name", ["pairs", "screen", "pairs-a-start", "concurrency", "requests", "threads", "slots", "cells"])
def test_what_would_measure_nothing_or_for_ever_is_refused_by_name(name: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.parser().parse_args([f"--{name}={text}"])
    assert f"--{name}: {text!r} is not a number from 1 on" in capsys.readouterr().err


def test_several_may_stand_with_commas_between() -> None:
    assert numbers("1,8,64") == [1, 8, 64]


def test_what_a_later_workload_cannot_do_is_told_before_the_first_is_measured() -> None:
    with pytest.raises(SystemExit, match="of long-among-short all run at once: 40 requests cannot be 8 at a time"):
        peers.main(["--workloads=seed-40x8,long-among-short", "--concurrency=8", "--requests=40", "--llama-server=/none"])


def test_so_it_is_with_turns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ladder.main(["--turns", "0"])
    assert "--turns" in capsys.readouterr().err


def test_the_results_of_every_fake_cannot_all_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ceiling.main(["--name", "mine"])
    assert "--name: results of all fakes have their names; say which --fake it is" in capsys.readouterr().err
