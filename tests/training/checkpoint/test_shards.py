"""Processes write checkpoints together: what fails on one of them is said on all, and nobody waits for it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor

from fastfold.parallel import DistributedContext, ParallelMesh, ParallelPlan
from fastfold.training.checkpoint.checkpoints import Checkpoints
from fastfold.training.checkpoint.contents import MANIFEST, read_shards, write_shards
from fastfold.training.checkpoint.storage import Storage
from tests.helpers.spawn_ranks import launch


def sharded() -> dict[str, torch.Tensor]:
    """A matrix of which each rank has half of the rows."""
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return {"x": distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])}


def checkpoints(place: str, said: list[str]) -> Checkpoints:
    mesh = ParallelMesh(ParallelPlan(dp=dist.get_world_size()), "cpu")
    context = DistributedContext(
        dist.get_rank(), mesh.plan.dp, torch.device("cpu"), mesh, dist.new_group(backend="gloo")
    )
    return Checkpoints(place, context, keep_last=3, report=said.append)


def test_every_file_is_hashed_as_it_is_written(tmp_path: Path):
    values = {"a": torch.arange(6.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    written = write_shards(Storage(str(tmp_path)), str(tmp_path / "x"), values, None)
    assert set(written) == {path.name for path in (tmp_path / "x").iterdir()}
    for name, record in written.items():
        data = (tmp_path / "x" / name).read_bytes()
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    filled = {name: torch.zeros_like(x) for name, x in values.items()}
    read_shards(tmp_path / "x", filled, None)
    assert all(torch.equal(filled[name], x) for name, x in values.items())


def _write_together(place: str) -> list[str]:
    said: list[str] = []
    found = checkpoints(place, said)
    found.save(1, sharded(), {})
    found.wait()
    assert said == []
    path = found.find("auto")
    assert path is not None
    filled = {name: x * 0 for name, x in sharded().items()}
    found.load(path, filled)
    (x,) = filled.values()
    assert isinstance(x, DTensor)
    assert torch.equal(x.full_tensor(), torch.arange(8.0).reshape(4, 2))
    return [path]


def test_two_processes_write_and_read_their_slices(tmp_path: Path):
    (path,), _ = launch(_write_together, 2, str(tmp_path))
    files = json.loads((Path(path) / MANIFEST).read_text())["files"]
    assert len(files) == 2
    for name, record in files.items():
        data = (Path(path) / name).read_bytes()
        assert record == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert load_file(Path(path) / name)["x"].shape == (2, 2)


def _find_damaged(place: str) -> tuple[str | None, list[str]]:
    said: list[str] = []
    found = checkpoints(place, said)
    for step in (1, 2):
        found.save(step, sharded(), {})
        found.wait()
    if dist.get_rank() == 0:
        (shard,) = Path(place, "step_00000002").glob("shard-00002*")
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    return found.find("auto"), said


def test_what_one_process_sees_all_decide_by(tmp_path: Path):
    """Each looks at some of the files only."""
    for path, (said,) in launch(_find_damaged, 2, str(tmp_path)):
        assert path == str(tmp_path / "step_00000001")
        assert "step_00000002 is left out: its shard shard-00002" in said


def _fail(place: str, rank: int, method: str) -> tuple[list[str], str | None]:
    said: list[str] = []
    found = checkpoints(place, said)
    found.save(1, sharded(), {})
    found.wait()
    if dist.get_rank() == rank:

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        setattr(found._storage, method, full)
    found.save(2, sharded(), {})
    found.wait()
    return said, found.last


@pytest.mark.parametrize(("rank", "method"), [(0, "remove"), (0, "create"), (1, "create"), (0, "publish")])
def test_a_disk_that_is_full_for_one_process_costs_all_the_checkpoint(tmp_path: Path, rank: int, method: str):
    for (said,), last in launch(_fail, 2, str(tmp_path), rank, method, timeout=60):
        assert "No space left on device" in said
        assert last == str(tmp_path / "step_00000001")
    assert "step_00000002" not in {path.name for path in tmp_path.iterdir()}
