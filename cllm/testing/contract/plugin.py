"""What pytest loads everywhere, through an entry point: it adds the suite's options to a run that names the suite, and to no other.

A conftest.py would not do: with --pyargs pytest reads it only after the command line.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

NAMES_THE_SUITE: Final = re.compile(r"cllm[./]testing[./]contract(?!\.plugin)")  # as a package or as a path


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Register the options while the command line is still being read."""
    if any(NAMES_THE_SUITE.search(arg) for arg in args):
        early_config.pluginmanager.import_plugin("cllm.testing.contract.options")
