"""A reserved file, its parts, and what it leaves behind."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

from fastfold.errors import ConfigError, OutputError
from fastfold.memory.devices.disk_file import PAGE, DiskFile, map_file


def test_parts_begin_on_pages_until_there_is_no_room(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), 2 * PAGE + 100)
    assert [file.take(size) for size in (1, PAGE, 101, 100)] == [0, PAGE, None, 2 * PAGE]
    assert file.take(1) is None


def test_a_write_changes_its_bytes_and_no_others(tmp_path: Path) -> None:
    file = DiskFile(str(tmp_path), 3 * PAGE)
    file.write(100, torch.arange(2000, dtype=torch.float32))
    found = torch.frombuffer(file.map, dtype=torch.uint8)
    assert torch.equal(found[100:8100].view(torch.float32), torch.arange(2000, dtype=torch.float32))
    assert found[:100].sum() == 0
    assert found[8100:].sum() == 0


def test_a_write_that_the_system_does_in_pieces_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwritev
    monkeypatch.setattr("os.pwritev", lambda file, data, start: whole(file, [data[0][:1000]], start))
    file = DiskFile(str(tmp_path), 2 * PAGE)
    file.write(0, torch.ones(4001, dtype=torch.uint8))
    assert bytes(file.map[:4002]) == b"\x01" * 4001 + b"\x00"


def test_no_file_and_no_open_descriptor_is_left(tmp_path: Path) -> None:
    """Also while the map is still in use, and after an error."""
    gc.collect()  # what other tests have left
    before = len(os.listdir("/proc/self/fd"))
    file = DiskFile(str(tmp_path), PAGE)
    file.read_ahead(0, PAGE)
    assert os.listdir(tmp_path) == []
    shown = file.map
    file.in_thread(lambda: None).result()
    del file
    gc.collect()
    shown[0] = 1
    assert shown[0] == 1
    del shown
    gc.collect()
    with pytest.raises(OutputError, match=r"cannot reserve 1,125,899,906,842,624 bytes.*Free some space"):
        map_file(str(tmp_path), 1 << 50)
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_system_with_fewer_calls_writes_zeros_and_reads_when_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As macOS; the blocks are reserved there too."""
    for name in ("posix_fallocate", "posix_fadvise"):
        monkeypatch.delattr(os, name)
    file = DiskFile(str(tmp_path), 3 * PAGE + 1)
    assert os.fstat(file._file).st_blocks * 512 >= 3 * PAGE
    file.read_ahead(0, PAGE)
    file.write(PAGE, torch.ones(10, dtype=torch.uint8))
    assert bytes(file.map[PAGE : PAGE + 11]) == b"\x01" * 10 + b"\x00"


def test_windows_is_told_that_it_has_no_memory_on_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "pwritev")
    with pytest.raises(ConfigError, match="memory on a disk needs Linux or macOS; leave out offload_dir="):
        DiskFile(str(tmp_path), PAGE)
