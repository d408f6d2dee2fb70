"""No text may crash a tokeniser: long runs of one character, in processes of their own.

llama.cpp's pre-tokenisers recurse on such runs; a mebibyte of them ends a process whose thread has the usual stack.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from cllm.testing.tiny import make_tiny_gguf

pytestmark = pytest.mark.slow

# The pre-tokenisers that were seen to need most: look-ahead, classes, plain ranges, nested groups, square time.
HUNGRY = ["gpt-4o", "tekken", "deepseek-v3", "default", "superbpe"]

TOKENIZE = """
import sys, threading
from cllm.backend import ModelSpec
from cllm.errors import TokenizeFailed
from cllm_llamacpp import make_cpu_backend

path, n_bytes, *units = sys.argv[1:]
vocabulary = make_cpu_backend().load(ModelSpec(path=path, n_cells=256), lambda share: True).vocabulary
for unit in units:
    unit = unit.encode().decode("unicode_escape").encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    text = (unit * int(n_bytes))[: int(n_bytes) // len(unit[0].encode(errors="replace"))]
    for parse_special in (False, True):
        try:
            found = vocabulary.tokenize(text, add_special=True, parse_special=parse_special)
        except TokenizeFailed as error:
            print("refused", error)
        else:
            assert found, unit
            print("done", len(found))
"""


def run(path, n_bytes: int, *units: str) -> list[str]:
    arguments = [sys.executable, "-c", TOKENIZE, str(path), str(n_bytes), *units]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize("pre", HUNGRY)
def test_runs_of_one_character_are_tokenised(tmp_path, pre):
    make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", pre=pre)
    units = ["a", "!", " ", "\\n", "\\U0001F600", "aB", "\\xe9", "\\u4e00", "a\\u0301", "\\0", "\\r\\n", "\\ud800"]

    lines = run(tmp_path / "tiny.gguf", 40_000, *units)

    assert len(lines) == 2 * len(units)
    assert all(line.startswith("done") for line in lines)


@pytest.mark.parametrize("pre", ["qwen2", "deepseek-v3"])  # one with a splitter of its own, one by regular expression
def test_a_mebibyte_of_one_character_is_tokenised(tmp_path, pre):
    make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", pre=pre)

    assert run(tmp_path / "tiny.gguf", 1 << 20, "a") == ["done 1048576"] * 2


def test_digits_that_would_take_hours_are_refused(tmp_path):
    make_tiny_gguf(tmp_path / "tiny.gguf", "qwen3", pre="superbpe")

    assert all(line.startswith("refused") for line in run(tmp_path / "tiny.gguf", 20_000, "1"))
    assert all(line.startswith("refused") for line in run(tmp_path / "tiny.gguf", 50_000, "1" * 999 + "x"))
