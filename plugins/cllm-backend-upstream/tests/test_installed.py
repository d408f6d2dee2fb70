"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from cllm.testing.environment import Environment, chat, content_of, make_environment

PLUGIN: Final = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without the plugin."""
    return make_environment(tmp_path_factory.mktemp("environment"))


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment) -> None:
    """Before the demo model, which another process serves."""
    off = ("--calibrate", "off")
    with environment.lent(PLUGIN, "upstream") as reasons:
        assert reasons["upstream"].startswith("has other servers answer")
        with environment.served(*off) as behind, environment.served("--backend", "upstream", "--model", behind, *off) as url:
            here, there = (json.loads(chat(one, "Hello!", temperature=0, max_tokens=30)[1]) for one in (url, behind))
            assert here["choices"] == there["choices"]
            assert here["model"] == there["model"]
            assert content_of(chat(url, "Hello!", stream=True, max_tokens=5))


def test_it_keeps_the_contract(environment: Environment, faulty: Any) -> None:
    """With one that behaves; there are other tests for those that do not."""
    with environment.installed(PLUGIN):
        environment.check_contract("upstream", "--model", faulty.url)
