"""The files that figures go to: what can be known to be wrong with one before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

from cllm.errors import SettingsError


def check_output(name: str, path: str | None) -> None:
    """Look whether the file that `--name` names can be written; - is standard output. Raises: SettingsError."""
    if not path or path == "-":
        return
    if os.path.isdir(path):
        raise SettingsError(f"--{name}: {path} is a folder")
    if os.path.exists(path):  # a pipe, a device, or a file that is written over: its folder does not matter
        if not os.access(path, os.W_OK):
            raise SettingsError(f"--{name}: cannot write {path}")
    elif not os.path.isdir(Path(path).parent) or not os.access(Path(path).parent, os.W_OK):
        raise SettingsError(f"--{name}: cannot write into {Path(path).parent}")
