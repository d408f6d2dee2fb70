"""The native parts of one loaded model, and who frees them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import attrs

from cllm_llamacpp.abortflag import AbortFlag
from cllm_llamacpp.context import Contexts


@attrs.define
class Native:
    """Handles of a loaded model. `parts` frees them, last made first."""

    lib: Any
    model: Any
    contexts: Contexts
    abort: AbortFlag
    model_params: Any  # llama.cpp goes on reading what they point at
    parts: ExitStack
