"""The plugin as its user meets it: installed with pip into an environment that has cLLM, listed, served, asked, uninstalled, gone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from cllm.testing.environment import Environment, chat, content_of, make_environment

PLUGIN: Final = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """One without the plugin."""
    return make_environment(tmp_path_factory.mktemp("environment"))


def variant(folder: Path, name: str, *, was: str = "", becomes: str = "", entry_point: str = "echo") -> Path:
    """Write a distribution like the plugin, called `name`, with another entry point or another line in its module."""
    shutil.copytree(PLUGIN, folder / name, ignore=shutil.ignore_patterns("tests", "__pycache__"))
    package = name.replace("-", "_")
    (folder / name / "src" / "cllm_backend_echo").rename(folder / name / "src" / package)
    replace(folder / name / "pyproject.toml", "echo = ", f"{entry_point} = ")
    replace(folder / name / "pyproject.toml", "cllm-backend-echo", name)
    replace(folder / name / "pyproject.toml", "cllm_backend_echo", package)
    if was:
        replace(folder / name / "src" / package / "__init__.py", was, becomes)
    return folder / name


def replace(path: Path, was: str, becomes: str) -> None:
    text = path.read_text("utf-8")
    assert was in text
    path.write_text(text.replace(was, becomes), "utf-8")


# --- one plugin -------------------------------------------------------------------------------------------------------


def test_it_is_installed_listed_served_asked_uninstalled_and_gone(environment: Environment) -> None:
    with environment.lent(PLUGIN, "echo") as reasons:
        assert reasons == {"echo": "says again what it is told"}
        with environment.served("--backend", "echo", "--calibrate", "off") as url:
            status, body = chat(url, "Is anybody there?")
            answer = json.loads(body)
            assert (status, answer["model"]) == (200, "echo")
            assert answer["choices"][0]["message"]["content"] == "Is anybody there?"
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert content_of(chat(url, "Is anybody there?", stream=True)) == "Is anybody there?"


def test_it_keeps_the_contract(environment: Environment) -> None:
    with environment.installed(PLUGIN):
        environment.check_contract("echo")


# --- plugins that cannot be used --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """The environment with the plugin, and beside it one that claims its name, two of other contracts, and one that cannot be imported."""
    folder = tmp_path_factory.mktemp("projects")
    version = "contract_version = 1"
    projects = [
        variant(folder, "cllm-backend-ohce"),
        variant(folder, "cllm-backend-past", was=version, becomes="contract_version = 0", entry_point="past"),
        variant(folder, "cllm-backend-future", was=version, becomes="contract_version = 99", entry_point="future"),
        variant(folder, "cllm-backend-broken", was="import LoadAborted", becomes="import NoSuchError as LoadAborted", entry_point="broken"),
        variant(folder, "cllm-backend-sound", entry_point="sound"),
    ]
    with environment.installed(PLUGIN, *projects):
        yield environment


def test_each_that_cannot_be_used_is_listed_with_the_reason_in_one_line(bad: Environment) -> None:
    found = bad.backends()
    both = "is claimed by cllm-backend-echo 1.0 and cllm-backend-ohce 1.0; uninstall one of them"
    assert found["echo of cllm-backend-echo"] == found["echo of cllm-backend-ohce"] == f"the backend name echo {both}"
    assert found["past of cllm-backend-past"].endswith("update the backend")
    assert found["future of cllm-backend-future"].endswith("update cLLM")
    assert found["broken of cllm-backend-broken"].startswith("is broken: ImportError: cannot import name 'NoSuchError'")
    assert not [reason for reason in found.values() if "\n" in reason]


def test_the_others_go_on(bad: Environment) -> None:
    with bad.served("--backend", "sound", "--calibrate", "off") as url:
        assert content_of(chat(url, "Still there?")) == "Still there?"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("echo", "the backend name echo is claimed by cllm-backend-echo 1.0 and cllm-backend-ohce 1.0; uninstall one of them"),
        ("past", "backend past (cllm-backend-past 1.0) speaks version 0 of the contract, this server version 1; update the backend"),
        ("future", "backend future (cllm-backend-future 1.0) speaks version 99 of the contract, this server version 1; update cLLM"),
        ("broken", "backend broken (cllm-backend-broken 1.0) is broken: ImportError: cannot import name 'NoSuchError'"),
    ],
)
def test_serving_with_one_that_cannot_be_used_is_one_line_and_code_1(bad: Environment, name: str, complaint: str) -> None:
    bad.check_refused(name, complaint)


def test_serving_with_one_that_is_not_there_is_a_mistake_in_the_settings(bad: Environment) -> None:
    bad.check_refused("sonud", "--backend: no backend sonud; did you mean sound?", code=2)
