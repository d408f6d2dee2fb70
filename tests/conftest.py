"""For all tests: a machine that is busy with something else is no failure."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("cllm", deadline=None)
settings.load_profile("cllm")
