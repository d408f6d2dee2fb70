"""The pages say what the code does, where a machine can tell."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from cllm.api.app import OPERATIONS

ROOT = Path(__file__).parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_of_settings_is_up_to_date() -> None:
    table = tool("settings_table")
    assert (ROOT / "docs" / "settings.md").read_text("utf-8") == table.page(), "run: python tools/settings_table.py"


def test_a_runner_runs_the_line_that_the_readme_gives() -> None:
    line = "python3 tools/test.py"
    assert f"\n    {line}\n" in (ROOT / "README.md").read_text("utf-8")
    assert (ROOT / ".ci" / "run").read_text("utf-8").rstrip().endswith(f"\n{line}")


def test_the_wheel_tool_builds_the_version_that_the_package_asks_for() -> None:
    wheel = tool("llama_wheel")
    assert wheel.requirement() in (ROOT / "pyproject.toml").read_text("utf-8")
    assert wheel.requirement().partition("==")[2] in wheel.key()
    assert wheel.requirement() in (ROOT / "README.md").read_text("utf-8")


def test_the_page_of_the_api_has_every_endpoint() -> None:
    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    listed = [one for one in OPERATIONS if one.alias_of is None and one.path != "/"]
    named = {(method, path) for method, path in re.findall(r"`([A-Z]+) (/[^\s`?,]*)", page)}
    assert [one.public_path for one in listed if (one.method, one.public_path) not in named] == []


def test_what_is_logged_as_a_warning_or_worse_stands_on_the_page_for_operators() -> None:
    page = (ROOT / "docs" / "operating.md").read_text("utf-8")
    sources = [path.read_text("utf-8") for folder in ("cllm", "backends") for path in (ROOT / folder).rglob("*.py")]
    events = {event for source in sources for event in re.findall(r'log\.(?:warning|error|critical)\(\s*"([a-z_]+\.[a-z_]+)"', source)}
    assert {"engine.died", "step.failed", "drain.cut"} <= events
    assert [event for event in sorted(events) if f"`{event}`" not in page] == []
