"""The machine that measures, as results name it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any, Final

from cllm.threadtimes import n_cpus

INSTRUCTIONS: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "avx_vnni", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures, and nothing that tells whose machine it was. Memory is GiB."""
    return {
        "processor": _of_processor("model name") or platform.processor() or platform.machine(),
        "instructions": _instructions(),
        "n_cores": n_cpus(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
    }


def _instructions() -> str:
    """Of the sets that decide how fast llama.cpp computes, those that are here: virtual machines call unlike processors by one name."""
    here = set((_of_processor("flags") or _of_processor("Features")).split())
    return " ".join(name for name in INSTRUCTIONS if name in here)


def _of_processor(name: str) -> str:
    """What the kernel says of the first core; nothing where it does not say it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == name), "")
