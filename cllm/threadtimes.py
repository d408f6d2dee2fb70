"""What the kernel counts of a process's threads: time on a core, and time that they could have run and had none. Linux alone tells."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, TypeAlias

import attrs

from cllm.machine import cpu_quota

PROC: Final = Path("/proc")


@attrs.frozen
class ThreadTimes:
    """What a thread had of the cores so far, and for how long it could have run and had none, seconds."""

    cpu_s: float
    waiting_s: float


Threads: TypeAlias = dict[int, ThreadTimes]


def threads_of(pid: int) -> Threads:
    """The times of a process's threads, by thread id; empty where the kernel does not tell."""
    try:
        threads = [int(entry.name) for entry in (PROC / str(pid) / "task").iterdir()]
    except OSError:
        return {}
    return {thread: times for thread in threads if (times := _thread_times(pid, thread)) is not None}


def own_times() -> ThreadTimes:
    """The sum over this process's threads that have not ended; nothing where the kernel does not tell."""
    times = threads_of(os.getpid()).values()
    return ThreadTimes(sum(one.cpu_s for one in times), sum(one.waiting_s for one in times))


def n_cpus() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_share() -> float:
    """The seconds of them in each second that it may have: fewer than there are where a control group sets a quota."""
    return min(n_cpus(), cpu_quota())


def _thread_times(pid: int, thread: int) -> ThreadTimes | None:
    """Of the kernel's Documentation/scheduler/sched-stats.rst: nanoseconds on a core, and on a run queue."""
    try:
        cpu_ns, waiting_ns, _ = (PROC / str(pid) / "task" / str(thread) / "schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return ThreadTimes(int(cpu_ns) / 1e9, int(waiting_ns) / 1e9)
