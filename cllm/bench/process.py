"""A server's process and its children, and what they spend, read from /proc; where there is none, nobody knows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from cllm.threadtimes import PROC, Threads, threads_of

LISTEN: Final = "0A"  # the state of a listening socket in /proc/net/tcp (include/net/tcp_states.h)


def tree(pid: int) -> list[int]:
    """A process and all that descends from it."""
    by_parent = _by_parent()
    found = [pid]
    for one in found:  # grows while it is walked
        found.extend(by_parent.get(one, ()))
    return found


def children(pid: int) -> list[int]:
    """The processes whose parent it is."""
    return _by_parent().get(pid, [])


def _by_parent() -> dict[int, list[int]]:
    """All processes by their parents. A thread's own list of children would not do: when it ends, they are given to another thread."""
    found: dict[int, list[int]] = {}
    try:
        pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    except OSError:  # there is no /proc
        return found
    for pid in pids:
        fields = _stat(pid)
        if fields:
            found.setdefault(int(fields[1]), []).append(pid)
    return found


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process from its state on (proc_pid_stat(5)); nothing when it has ended."""
    try:
        return (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return []


def cpu_s(pid: int) -> float | None:
    """User and system time of the tree so far, of its children that have ended, too."""
    parts = [seconds for one in tree(pid) if (seconds := _cpu_s(one)) is not None]
    return sum(parts) if parts else None


def _cpu_s(pid: int) -> float | None:
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") if fields else None  # utime, stime, cutime, cstime


def threads(pid: int) -> Threads:
    """The times of every thread of the tree, by thread id; empty where the kernel does not tell."""
    return {thread: times for one in tree(pid) for thread, times in threads_of(one).items()}


def rss_peak_mb(pid: int) -> float | None:
    """The sum of the tree's greatest resident sizes since its start, the model's mapped file included."""
    return _status_mb(pid, "VmHWM")


def anonymous_mb(pid: int) -> float | None:
    """The tree's resident memory that is not a mapped file, now."""
    return _status_mb(pid, "RssAnon")


def _status_mb(pid: int, name: str) -> float | None:
    parts = [kib for one in tree(pid) if (kib := _status_kib(one, name)) is not None]
    return sum(parts) / 1024 if parts else None


def _status_kib(pid: int, name: str) -> int | None:
    try:
        lines = (PROC / str(pid) / "status").read_text("utf-8", "replace").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(name + ":")), None)


def name_of(pid: int) -> str | None:
    """What the kernel calls a process: the first 15 bytes of its program's name, or what that calls itself."""
    try:
        return (PROC / str(pid) / "comm").read_text("utf-8", "replace").strip()
    except OSError:
        return None


def listening_pid(port: int) -> int | None:
    """The process on this machine that listens on a port, if we may know."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    pids = sorted(int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit())
    return next((pid for pid in pids if sockets & set(_links(pid))), None)


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


def _links(pid: int) -> Iterator[str]:
    try:
        descriptors = list((PROC / str(pid) / "fd").iterdir())
    except OSError:  # somebody else's
        return
    for descriptor in descriptors:
        try:
            yield os.readlink(descriptor)
        except OSError:
            continue
