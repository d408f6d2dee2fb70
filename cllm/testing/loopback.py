"""This machine's own servers, which tests reach without a proxy."""

from __future__ import annotations

import os
from typing import Final

HOSTS: Final = "127.0.0.1,localhost"


def pass_by_proxies() -> None:
    """Let no client of this process, or of one that it starts, ask a proxy for them: that would look for them on a machine of its own."""
    kept = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))  # the small one counts where there are both
    if kept != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = f"{kept},{HOSTS}".lstrip(",")
