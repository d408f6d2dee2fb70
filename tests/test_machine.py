"""What the machine has free, from what the system says of it."""

from __future__ import annotations

import math
import mmap
import sys

import pytest

from cllm import machine


def test_this_machine_has_cores_and_memory():
    assert machine.n_cores() >= 1
    assert machine.free_memory_bytes() > 0


def test_hyper_threads_of_one_core_count_once(monkeypatch, tmp_path):
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: {0, 1, 2, 3, 4})  # the system says nothing of CPU 4
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)

    assert machine.n_cores() == 3


@pytest.mark.parametrize(("limit", "n_cores"), [("150000 100000", 2), ("max 100000", 4), ("10000 100000", 1), ("", 4)])
def test_a_control_group_limits_the_cores(monkeypatch, tmp_path, limit, n_cores):
    (tmp_path / "cpu.max").write_text(limit)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)

    assert machine.n_cores() == n_cores


def test_a_quota_need_not_be_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.cpu_quota() == math.inf
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert machine.cpu_quota() == 1.5


def test_a_control_group_limits_the_memory(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    assert machine.free_memory_bytes() == 600_000


def test_a_control_group_that_is_held_up_from_some_memory_on_has_no_more(monkeypatch, tmp_path):
    for name, n_bytes in (("max", "1000000"), ("high", "900000"), ("current", "400000"), ("swap.max", "0")):
        (tmp_path / f"memory.{name}").write_text(n_bytes)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    assert machine.free_memory_bytes() == 500_000
    assert machine.memory_bytes() == 900_000


def test_the_tightest_group_from_the_own_one_to_the_root_limits_memory_and_cores(monkeypatch, tmp_path):
    groups = {"": ("max", "max 100000"), "a.slice": ("900000", "300000 100000"), "a.slice/b.service": ("800000", "max 100000")}
    for group, (memory, cpu) in groups.items():
        folder = tmp_path / "cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(memory + "\n")
        (folder / "memory.current").write_text("300000\n")
        (folder / "cpu.max").write_text(cpu + "\n")
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/a.slice/b.service\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(machine, "_CPUS", tmp_path)
    monkeypatch.setattr(machine, "_allowed_cpus", lambda: {0, 1, 2, 3, 4, 5})
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 8)

    assert machine.free_memory_bytes() == 500_000
    assert machine.n_cores() == 3


def test_files_that_a_control_group_has_in_memory_count_as_free(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    (tmp_path / "memory.stat").write_text("anon 100000\nfile 300000\ninactive_file 250000\nactive_file 50000\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    assert machine.free_memory_bytes() == 900_000


def test_a_control_group_limits_what_there_is_with_the_swap_that_it_leaves(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.swap.max").write_text("0")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)

    assert machine.memory_bytes() == 1_000_000


def test_a_group_that_only_the_host_of_a_container_sees_leaves_the_limits_of_the_root(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    (tmp_path / "own").write_text("0::/../../of-the-host/b.service\n")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_OWN_CGROUP", tmp_path / "own")

    assert machine.free_memory_bytes() == 600_000


def test_a_system_without_proc_still_answers(monkeypatch):
    monkeypatch.setattr(machine, "_read", lambda _path: "")

    assert machine.free_memory_bytes() > 0
    assert machine.n_cores() >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the system does not tell; runs on Linux")
def test_mapped_files_are_told_as_far_as_they_are_in_memory(tmp_path):
    file, n_bytes = tmp_path / "weights", 8 << 20
    file.write_bytes(b"x" * n_bytes)
    before = machine.mapped_file_bytes()
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[:: mmap.PAGESIZE].count(b"x") == n_bytes // mmap.PAGESIZE
        assert machine.mapped_file_bytes() - before >= n_bytes // 2
    assert machine.mapped_file_bytes() - before < n_bytes // 2


def test_without_the_systems_word_none_are_mapped(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_OWN_STATUS", tmp_path / "nowhere")
    assert machine.mapped_file_bytes() == 0
