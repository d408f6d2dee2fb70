"""Arguments that say how many, and which."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks import against_native, ceiling, ladder, passes, peers, verify
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


def test_no_turns_at_all_are_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ladder.main(["--turns", "0"])
    assert "--turns" in capsys.readouterr().err


def test_the_results_of_every_fake_cannot_all_have_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ceiling.main(["--name", "mine"])
    assert "--name: results of all fakes have their names; say which --fake it is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "told"),
    [
        (peers, ["--model=nowhere.gguf"], "--model: there is no file nowhere.gguf"),
        (peers, ["--goodput-ttft-s=-1"], "--goodput-ttft-s: '-1' is not a time of more than 0"),
        (ladder, ["--model=nowhere.gguf"], "--model: there is no file nowhere.gguf"),
        (passes, ["--quantization=q4_k_m"], "--quantization: invalid choice: 'q4_k_m'"),
        (verify, ["--quantization=q4_k_m"], "--quantization: invalid choice: 'q4_k_m'"),
        (ladder, ["--name=../elsewhere"], "--name: '../elsewhere' may have letters"),
        (ladder, ["--concurrency=1,64"], "--requests: 64 at a time are more than 40"),
        (ladder, ["--concurrency=1,64", "--requests=64"], "--ctx-size: 64 sequences of 32 and 50 tokens take 5248 cells"),
        (against_native, ["--concurrency=64", "--requests=64"], "--ctx-size: 64 sequences of 32 and 50 tokens take 5248 cells"),
        (ceiling, ["--streams=1,300"], "--streams: the server is started for 256 at once"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_by_name(
    command: ModuleType, arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert told in capsys.readouterr().err


def test_a_ladder_on_another_model_or_of_another_load_has_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.gguf").touch()
    parser = argparse.ArgumentParser()
    ladder.add_arguments(parser)
    asked = [
        [],
        [f"--model={tmp_path / 'mine.gguf'}"],
        ["--quantization=Q8_0", "--requests=12"],
        ["--concurrency=1,16", "--stages=http,sse", "--sampling=usual", "--kv=streams", "--threads=99"],
    ]
    names = [ladder.usual_name(parser.parse_args(one)) for one in asked]
    assert names == [
        "seed-40x8",
        "seed-40x8-mine",
        "12-requests-of-32-and-50-Q8_0",
        "seed-40x8-c1-16-usual-http-sse-99-threads-streams",
    ]


def test_a_stack_of_other_streams_has_a_name_of_its_own() -> None:
    asked = [([1, 8, 64, 256], 200), ([1, 8], 20)]
    names = [ceiling.usual_name(argparse.Namespace(fake="gpu", streams=streams, generated=n)) for streams, n in asked]
    assert names == ["gpu", "gpu-streams-1-8-20-tokens"]
