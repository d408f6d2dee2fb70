"""What this machine has free: cores and memory, as far as this process may use them."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")


def n_cores() -> int:
    """Return the physical cores that this process may run on: two hyper-threads of a core compute no faster than one."""
    cpus = _allowed_cpus()
    cores = {_core_of(cpu) for cpu in cpus}
    return max(1, min(len(cores), _cpu_quota()))


def free_memory_bytes() -> int:
    """Return the memory that may be taken without swapping; a cautious guess where the system does not say."""
    return max(0, min(_mem_available(), _cgroup_memory_left()))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> tuple[str, ...]:
    """Return what the hyper-threads of one core have in common; the CPU itself where the system does not say."""
    siblings = _read(_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list")
    return (siblings,) if siblings else ("cpu", str(cpu))


def _cpu_quota() -> int:
    """Return how many CPUs' worth of time the control group allows (cgroup v2: ``cpu.max`` is "quota period")."""
    quota, _, period = _read(_CGROUP / "cpu.max").partition(" ")
    if not quota.isdigit() or not period.isdigit():
        return os.cpu_count() or 1
    return max(1, -(-int(quota) // int(period)))


def _mem_available() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # no sysconf on Windows
        return 8 << 30


def _cgroup_memory_left() -> int:
    limit, used = _read(_CGROUP / "memory.max"), _read(_CGROUP / "memory.current")
    if not limit.isdigit() or not used.isdigit():
        return 1 << 62
    return int(limit) - int(used)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
