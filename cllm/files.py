"""What is wrong with a file that is named."""

from __future__ import annotations

import os
import stat


def why_no_file(path: str) -> str | None:
    """Say in a few words why there is no file to be read at `path`; None where there is one, or something that is read like one."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
        return (getattr(error, "strerror", None) or str(error)).lower()
    return "a folder, not a file" if stat.S_ISDIR(mode) else None
