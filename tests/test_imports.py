"""Imports run one way: api -> serve -> engine -> text -> the seam. Read from the sources, so a lazy import counts too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cllm
import cllm_llamacpp

HOUSE = Path(cllm.__file__).parent
BACKEND = Path(cllm_llamacpp.__file__).parent

ORDER = ["cllm.backend", "cllm.text", "cllm.engine", "cllm.serve", "cllm.api", "cllm.commands"]
"""From the bottom to the top: a layer imports itself and what stands before it."""

# The server process starts the HTTP surface that it serves: the one place where serve knows of api.
DOORS = {("cllm.serve.server", "cllm.api.app")}
SHELL = {"trio", "quart", "quart_trio", "hypercorn", "anyio", "asyncio", "socket", "ssl"}


def modules(package: Path, name: str) -> Iterator[tuple[str, Path]]:
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        yield ".".join((name, *parts)).removesuffix(".__init__"), path


def imports(module: str, path: Path) -> set[str]:
    found: set[str] = set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            found |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return found


def layer(module: str) -> str | None:
    return next((one for one in ORDER if module == one or module.startswith(one + ".")), None)


SOURCES = [*modules(HOUSE, "cllm"), *modules(BACKEND, "cllm_llamacpp")]


@pytest.mark.parametrize(
    ("module", "path"), [one for one in SOURCES if layer(one[0])], ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_layer_imports_only_what_stands_below_it(module: str, path: Path) -> None:
    height = ORDER.index(layer(module) or "")
    upward = {name for name in imports(module, path) if (other := layer(name)) and ORDER.index(other) > height}
    assert {name for name in upward if not any(module == a and name.startswith(b) for a, b in DOORS)} == set()


@pytest.mark.parametrize("above", ["cllm.text", "cllm.engine"])
def test_what_decides_knows_of_ours_the_seam_the_errors_and_what_stands_below_it_alone(above: str) -> None:
    """No settings, no machine, no tests' fakes: it is told what it has to know."""
    known = {"cllm.errors", *ORDER[: ORDER.index(above) + 1]}
    for module, path in SOURCES:
        if layer(module) == above:
            ours = {name for name in imports(module, path) if name.partition(".")[0] == "cllm" and name != "cllm"}
            assert {name for name in ours if not any(name == one or name.startswith(f"{one}.") for one in known)} == set(), module


@pytest.mark.parametrize("below", ["cllm.backend", "cllm.text", "cllm.engine"])
def test_the_pure_layers_import_no_trio_no_socket_and_no_backend(below: str) -> None:
    for module, path in SOURCES:
        if layer(module) == below:
            roots = {name.partition(".")[0] for name in imports(module, path)}
            assert roots & (SHELL | {"llama_cpp", "cllm_llamacpp"}) == set(), module


def test_a_backend_needs_the_seam_the_errors_a_stack_for_native_code_and_what_the_machine_has_alone() -> None:
    for module, path in modules(BACKEND, "cllm_llamacpp"):
        ours = {name for name in imports(module, path) if name.partition(".")[0] == "cllm"}
        allowed = ("cllm.backend", "cllm.errors", "cllm.bigstack", "cllm.machine")
        assert {name for name in ours if not name.startswith(allowed) and name != "cllm"} == set(), module


def test_nothing_of_ours_imports_a_backend_by_name() -> None:
    for module, path in modules(HOUSE, "cllm"):
        assert not any(name.partition(".")[0] in ("llama_cpp", "cllm_llamacpp") for name in imports(module, path)), module


@pytest.mark.parametrize(
    ("module", "path"),
    [one for one in SOURCES if layer(one[0]) == "cllm.engine"],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
def test_in_the_engine_a_sequence_is_one_completion_and_the_type_of_lists_is_called_seq(module: str, path: Path) -> None:
    imported = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    taken = {(alias.name, alias.asname) for node in imported if node.module in {"collections.abc", "typing"} for alias in node.names}
    assert ("Sequence", None) not in taken
