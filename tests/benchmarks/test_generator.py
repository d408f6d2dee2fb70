from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from benchmarks.generator import Generator, GeneratorDied, GeneratorFailed


@pytest.fixture(autouse=True)
def checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # `benchmarks` is in the checkout alone


def test_a_generator_that_died_is_there_again_for_the_next_order() -> None:
    with Generator() as generator, socket.socket() as silent:
        generator._process.kill()
        generator._process.wait()
        silent.bind(("127.0.0.1", 0))  # nobody listens there, which it can tell, nor can anybody else
        with pytest.raises(GeneratorFailed) as failed:
            generator.dialect(silent.getsockname()[1])
    assert "died" not in str(failed.value)


def test_one_that_dies_in_the_middle_of_an_order_is_not_the_servers_fault() -> None:
    with Generator() as generator, socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Timer(1.0, generator._process.kill).start()
        with pytest.raises(GeneratorDied):
            generator.dialect(silent.getsockname()[1])


def test_a_signal_to_the_run_and_all_that_it_started_does_not_reach_the_generator() -> None:
    with Generator() as generator:
        assert os.getpgid(generator._process.pid) != os.getpgid(0)
