"""What the system and its limits leave of the host's memory and cores."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from fastfold.utils import machine
from fastfold.utils.machine import available_cores, host_available_bytes
from fastfold.utils.units import GIB


class TestControlGroups:
    """Limits that batch systems and containers set."""

    @pytest.fixture
    def groups(self, tmp_path: Path) -> Path:
        (tmp_path / "own").write_text("5:memory:/elsewhere\n0::/slurm/job_7\n")
        (tmp_path / "slurm" / "job_7").mkdir(parents=True)
        return tmp_path

    @staticmethod
    def limit(folder: Path, most: str, used: int, files: int) -> None:
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used - files}\nfile {files + 9}\nshmem 9\n")

    def left(self, groups: Path) -> list[int]:
        return machine._group_memory(groups / "own", groups)

    def test_every_group_on_the_way_up_counts_and_file_pages_are_free(self, groups: Path):
        self.limit(groups / "slurm" / "job_7", str(8 * GIB), 3 * GIB, GIB)
        self.limit(groups / "slurm", str(7 * GIB), 4 * GIB, 2 * GIB)
        assert self.left(groups) == [6 * GIB, 5 * GIB]

    def test_no_limit_is_none(self, groups: Path):
        self.limit(groups / "slurm" / "job_7", "max", GIB, 0)
        assert self.left(groups) == []

    def test_groups_of_version_1_count_alone_or_beside_version_2(self, groups: Path):
        """A container sees its own group at the top, while its path is that of the machine."""
        self.limit(groups / "slurm" / "job_7", str(8 * GIB), 3 * GIB, GIB)
        for folder, most, used in (("memory/elsewhere", 4, 3), ("memory", 5, 2)):
            group = groups / folder
            group.mkdir(parents=True, exist_ok=True)
            (group / "memory.limit_in_bytes").write_text(f"{most * GIB}\n")
            (group / "memory.usage_in_bytes").write_text(f"{used * GIB}\n")
            (group / "memory.stat").write_text(f"cache 1\ntotal_cache {GIB // 2 + 7}\ntotal_shmem 7\n")
        first, second = GIB + GIB // 2, 3 * GIB + GIB // 2
        assert sorted(self.left(groups)) == [first, second, 6 * GIB]
        (groups / "own").write_text("11:cpu,memory:/docker/abc\n3:cpuset:/docker/abc\n")
        assert self.left(groups) == [second]

    @pytest.mark.parametrize("own", ["", "garbage", "5:memory:/x\n"])
    def test_what_cannot_be_read_limits_nothing(self, groups: Path, own: str):
        (groups / "own").write_text(own)
        assert self.left(groups) == []
        assert machine._group_memory(groups / "none", groups) == []

    def test_the_smallest_limit_decides(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(machine, "_group_memory", lambda: [5, 7])
        assert host_available_bytes() == 5
        monkeypatch.setattr(machine, "_group_memory", lambda: [-1])
        assert host_available_bytes() == 0


def test_a_system_without_meminfo_and_sysconf_asks_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows; macOS has the total by sysconf, and by psutil what is free."""

    class Psutil(ModuleType):
        @staticmethod
        def virtual_memory() -> SimpleNamespace:
            return SimpleNamespace(available=5 * GIB)

    def no_file(*args: object, **options: object) -> None:
        raise FileNotFoundError

    stand_in = Psutil("psutil")
    stand_in.__spec__ = ModuleSpec("psutil", None)
    monkeypatch.setitem(sys.modules, "psutil", stand_in)
    monkeypatch.setattr(machine, "open", no_file, raising=False)
    monkeypatch.delattr(machine.os, "sysconf", raising=False)
    assert machine._system_memory() == 5 * GIB


def test_a_process_of_any_name_has_its_memory(tmp_path: Path) -> None:
    path = tmp_path / "status"
    path.write_bytes("Name:\tété.py\nVmRSS:\t    12 kB\n".encode("latin-1"))
    assert machine._reported_bytes(str(path), "VmRSS") == 12 * 1024


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert available_cores() == len(before)


def test_without_a_mask_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


def test_the_processor_has_a_name_wherever_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = "processor : 0\nmodel name\t: A Processor @ 2 GHz\nmodel name\t: another\n"
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **options: lines)
    assert machine.processor_name() == "A Processor @ 2 GHz"
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **options: "Features: neon\n")
    monkeypatch.setattr(machine.platform, "processor", lambda: "")
    monkeypatch.setattr(machine.platform, "machine", lambda: "arm64")
    assert machine.processor_name() == "arm64"


def test_the_cache_follows_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.user_cache() == tmp_path / "fastfold"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert machine.user_cache() == tmp_path / "home" / ".cache" / "fastfold"
