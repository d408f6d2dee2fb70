"""What holds for every plugin in the repository: it uses the seam alone, and is shown as it is."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

from tests.test_docs import ROOT, tool

PLUGINS = sorted((ROOT / "plugins").iterdir())
OURS = ("cllm.backend", "cllm.errors", "cllm.machine", "cllm.testing")


def modules_imported(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_of_cllm_a_plugin_imports_the_seam_the_errors_what_the_machine_has_and_what_is_for_tests_alone(plugin: Path) -> None:
    sources = list((plugin / "src").rglob("*.py"))
    assert sources
    ours = {name for path in sources for name in modules_imported(path) if name.partition(".")[0] == "cllm"}
    assert {name for name in ours if not name.startswith(OURS)} == set()


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin.name)
def test_a_plugin_is_a_distribution_of_its_own_with_an_entry_point(plugin: Path) -> None:
    project = tomllib.loads((plugin / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == plugin.name
    assert project["entry-points"]["cllm.backends"]


def test_the_page_for_authors_shows_the_example_and_the_contract_as_they_are() -> None:
    quotes = tool("quotes")
    for page in quotes.PAGES:
        text = page.read_text("utf-8")
        assert quotes.quoted(text) == text, "run: python tools/quotes.py"
        assert "cllm/backend.py" in quotes.files(text)
        assert {f"plugins/cllm-backend-echo/{name}" for name in ("pyproject.toml", "src/cllm_backend_echo/__init__.py")} < {
            *quotes.files(text)
        }


def test_the_example_has_ten_lines_at_most_below_its_imports() -> None:
    source = (ROOT / "plugins" / "cllm-backend-echo" / "src" / "cllm_backend_echo" / "__init__.py").read_text("utf-8")
    lines = [line for line in source.partition("class ")[2].splitlines() if line.strip()]
    assert len(lines) <= 10
