"""What results say of what was measured."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

import pytest

from benchmarks import results


def git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b.c", *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("cllm/engine.py", "benchmarks/peers.py", "docs/a.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("first\n", "utf-8")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    monkeypatch.setattr(results, "_GIT", ("git", "-C", str(tmp_path / "benchmarks")))
    monkeypatch.setattr(results, "_MEASURED", ("../cllm", "./*.py"))
    monkeypatch.setattr(results, "_at_first", functools.cache(results._at_first.__wrapped__))
    return tmp_path


def test_a_run_names_the_commit_that_it_began_with(checkout: Path) -> None:
    first = results.revision()
    assert len(first) == 10
    (checkout / "docs/a.md").write_text("second\n", "utf-8")
    git(checkout, "commit", "-qam", "b")
    assert results.revision() == first


@pytest.mark.parametrize("is_committed", [False, True])
def test_it_says_so_if_what_it_measures_was_changed_since(checkout: Path, is_committed: bool) -> None:
    """A server that is started in a later hour has the change, and the one before had not."""
    first = results.revision()
    (checkout / "cllm/engine.py").write_text("second\n", "utf-8")
    if is_committed:
        git(checkout, "commit", "-qam", "b")
    assert results.revision() == f"{first}+"


def test_it_says_so_if_it_began_with_files_that_are_no_commits(checkout: Path) -> None:
    (checkout / "benchmarks/peers.py").write_text("second\n", "utf-8")
    assert results.revision().endswith("+")
    git(checkout, "checkout", "-q", ".")
    assert results.revision().endswith("+")


def test_where_there_are_no_commits_the_revision_is_unknown(tmp_path: Path, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_GIT", ("git", "-C", str(tmp_path / "nowhere")))
    assert results.revision() == "unknown"
