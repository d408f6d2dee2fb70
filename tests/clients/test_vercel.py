"""The Vercel AI SDK, which is JavaScript's."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "vercel"
KEY = "key-of-the-tests"
END_S = 300.0

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node here"),
    # npm writes this file last: without it the folder is what an interrupted installation left.
    pytest.mark.skipif(not (HERE / "node_modules" / ".package-lock.json").is_file(), reason=f"npm install --prefix {HERE}"),
]


def test_streams_tools_and_structured_output(url: str) -> None:
    command = ["node", str(HERE / "chat.js"), url, KEY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert (got["text"], got["finish"]) == ("Good day, friend.", "stop")
    assert got["n_pieces"] > 1
    assert sorted(got["cities"]) == ["Oslo", "Rome"]
    assert got["after_tools"] == "Oslo is cold, Rome is warm."
    assert got["person"] == {"name": "Ada", "age": 36}
