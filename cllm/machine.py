"""What this machine has free, for backends: cores and memory, as far as this process may use them."""

from __future__ import annotations

import math
import os
from pathlib import Path, PurePosixPath

_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
_OWN_STATUS = Path("/proc/self/status")
_CPUS = Path("/sys/devices/system/cpu")


def n_cores() -> int:
    """Return the physical cores that this process may run on: two hyper-threads of a core compute no faster than one."""
    cores = {_core_of(cpu) for cpu in _allowed_cpus()}
    return max(1, math.ceil(min(len(cores), cpu_quota())))


def cpu_quota() -> float:
    """Return how many CPUs' worth of time the control groups allow, which need not be whole; infinity where they set no limit."""
    limits = [_read(group / "cpu.max").partition(" ") for group in _cgroups()]  # cgroup v2: "quota period"
    return min([int(quota) / int(period) for quota, _, period in limits if quota.isdigit() and period.isdigit()], default=math.inf)


def free_memory_bytes() -> int:
    """Return the memory that may be taken without swapping; a cautious guess where the system does not say."""
    return max(0, min(_mem_available(), _cgroup_memory_left()))


def memory_bytes() -> int:
    """Return all the memory that there is for this process, swap included; 0 where the system does not say."""
    lines = [line.split() for line in _read(Path("/proc/meminfo")).splitlines()]
    memory, swap = (sum(int(line[1]) * 1024 for line in lines if line[0] == name) for name in ("MemTotal:", "SwapTotal:"))
    limits = [limit for group in _cgroups() for limit in _memory_limits(group)]
    swaps = [int(limit) for group in _cgroups() if (limit := _read(group / "memory.swap.max")).isdigit()]
    return min([memory, *limits]) + min([swap, *swaps])


def mapped_file_bytes() -> int:
    """Return the bytes of mapped files that this process has in memory, its libraries' among them; 0 where the system does not say."""
    lines = [line.split() for line in _read(_OWN_STATUS).splitlines()]
    return sum(int(line[1]) * 1024 for line in lines if line[:1] == ["RssFile:"])


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> tuple[str, ...]:
    """Return what the hyper-threads of one core have in common; the CPU itself where the system does not say."""
    siblings = _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return (siblings,) if siblings else ("cpu", str(cpu))


def _mem_available() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows
        return 8 << 30


def _cgroup_memory_left() -> int:
    lefts = [1 << 62]
    for group in _cgroups():
        used = _read(group / "memory.current")
        if used.isdigit():
            lefts += [limit - max(int(used) - _file_cache(group), 0) for limit in _memory_limits(group)]
    return min(lefts)


def _memory_limits(group: Path) -> list[int]:
    """Return the bytes from which a group is killed (`MemoryMax`), and those from which it is held up (`MemoryHigh`), if it has any."""
    return [int(limit) for name in ("memory.max", "memory.high") if (limit := _read(group / name)).isdigit()]


def _file_cache(group: Path) -> int:
    """Return the bytes of files that a group has in memory: taken back before anything is killed, and free by ``MemAvailable``, too."""
    lines = [line.split() for line in _read(group / "memory.stat").splitlines()]
    return sum(int(line[1]) for line in lines if len(line) == 2 and line[0] in ("active_file", "inactive_file"))


def _cgroups() -> list[Path]:
    """Return the control groups that this process is in, its own first: the limits of each hold for all below it.

    cgroup v2 says "0::/system.slice/cllm.service". In a container the path may be one that only its host sees; the root's files are
    the container's own then.
    """
    own = next((line.removeprefix("0::/") for line in _read(_OWN_CGROUP).splitlines() if line.startswith("0::/")), "")
    path = PurePosixPath(own)
    return [_CGROUP / group for group in (path, *path.parents)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
