"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import pytest

from cllm.testing import environment as made
from cllm.testing.environment import Environment, make_environment

PLUGIN: Final = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without the plugin."""
    return make_environment(tmp_path_factory.mktemp("environment"))


def ask(url: str, **fields: Any) -> tuple[int, str]:
    return made.chat(url, "Is anybody there?", **{"max_tokens": 8, "temperature": 0, **fields})


def content_of(url: str) -> str:
    return made.content_of(ask(url))


def worker_of(url: str) -> int:
    """The process id of the model's process, a child of the server's."""
    port = url.rpartition(":")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"--port\0{port}" in (folder / "cmdline").read_text("utf-8", "replace"):
                children = [int(pid) for task in (folder / "task").iterdir() for pid in (task / "children").read_text().split()]
                return next(pid for pid in children if b"cllm.serve.worker.start" in Path(f"/proc/{pid}/cmdline").read_bytes())
        except (OSError, StopIteration):
            continue
    raise AssertionError("the model has no process")


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment, tiny: Path) -> None:
    with environment.lent(PLUGIN, "openvino"):
        check_served(environment, tiny)
        done = environment.run("cllm", "verify", str(tiny), "--backend", "openvino", "--text-tokens", "8", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["mean"] < 0.1


def check_served(environment: Environment, tiny: Path) -> None:
    with environment.served(str(tiny), "--backend", "openvino", "--ctx-size", "1024", "--parallel", "4") as url:
        check_answers(url)
        check_forms(url)
        check_refusals(url)
        check_another_life(url)


def check_answers(url: str) -> None:
    whole = content_of(url)
    assert made.content_of(ask(url, stream=True)) == whole
    _, body = ask(url, logprobs=True)
    assert len(json.loads(body)["choices"][0]["logprobs"]["content"]) == 8
    if letters := re.findall("[a-z]", whole):
        _, body = ask(url, stop=letters[-1])
        assert json.loads(body)["choices"][0]["message"]["content"] == whole[: whole.index(letters[-1])]


def check_forms(url: str) -> None:
    """Each is answered in full, and held to what was asked."""
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}}, "required": ["yes", "n"]}
    for fields in ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}, {"json_schema": schema}):
        status, body = ask(url, max_tokens=200, **fields)
        assert status == 200, body
        content = json.loads(json.loads(body)["choices"][0]["message"]["content"])
        assert (content.keys(), content["yes"] in (True, False), content["n"] in (1, 2, 3)) == ({"yes", "n"}, True, True)
    _, body = ask(url, structured_outputs={"choice": ["north", "south"]})
    assert json.loads(body)["choices"][0]["message"]["content"] in ("north", "south")


def check_refusals(url: str) -> None:
    for fields, param in (
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"json_schema": {"type": "integer", "multipleOf": 7}}, "json_schema"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
    ):
        status, body = ask(url, **fields)
        error = json.loads(body)["error"]
        assert (status, error["type"], error["param"]) == (400, "not_supported_error", param)


def check_another_life(url: str) -> None:
    """Nobody who asks next learns that the model's process was killed."""
    whole = content_of(url)
    os.kill(worker_of(url), signal.SIGKILL)
    assert content_of(url) == whole


def test_it_keeps_the_contract(environment: Environment, tiny: Path) -> None:
    with environment.installed(PLUGIN):
        environment.check_contract("openvino", "--model", str(tiny))
