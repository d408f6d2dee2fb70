"""Says in one line why llama.cpp did not load something."""

from __future__ import annotations

from cllm.errors import LoadFailed
from cllm_llamacpp.library import LOG


def load_failed(path: str, otherwise: str = "llama.cpp gave no reason") -> LoadFailed:
    """Make one line of llama.cpp's complaints: the first names the cause, those after it repeat it from further out."""
    errors = LOG.last_errors()
    reason = errors[0].partition(": ")[2] or errors[0] if errors else otherwise
    return LoadFailed(f"{path}: {reason}")
