"""How many files and sockets a process may have open."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

N_DESCRIPTORS: Final = 65_536


def allow_descriptors() -> None:
    """Raise the bound on open files to what this process may have: the usual 1,024 are from when a process could not wait for more.

    Each connection takes one, and each request that is passed on to another server.
    """
    with suppress(ImportError, ValueError, OSError):  # not on Windows; some systems bound it lower than they say
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY and soft < N_DESCRIPTORS:
            most = N_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, N_DESCRIPTORS)
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
