"""Tensors of a checkpoint as safetensors files, one per process, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fastfold.training.checkpoint.manifest import FileRecord
from fastfold.training.checkpoint.storage import Storage

Tensors = Mapping[str, Tensor]


def write_shards(
    storage: Storage, folder: str, tensors: Tensors, group: dist.ProcessGroup | None
) -> dict[str, FileRecord]:
    """Write tensors into a folder (a collective); each process writes its slices of DTensors.

    All processes of the group give the same names; None is one process. Returns the records of this process's files.

    Raises:
        CheckpointException: A process could not write; raised on all.
    """
    files = _HashedFiles(storage)
    with _quiet():
        writer: Any = HuggingFaceStorageWriter(folder, save_distributed=True)
        writer.fs, writer.path = files, folder
        writer.sync_files = False  # the storage syncs them
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
    return files.written


def read_shards(folder: Path, tensors: Tensors, group: dist.ProcessGroup | None) -> None:
    """Fill tensors from a local folder, written by any number of processes (a collective).

    Raises:
        CheckpointException: Names or shapes differ from those in the folder.
    """
    with _quiet():
        reader = HuggingFaceStorageReader(str(folder))
        dcp.load(dict(tensors), storage_reader=reader, process_group=group)


class _HashedFiles(FileSystemBase):
    """File system for ``torch.distributed.checkpoint`` that writes to a storage and hashes files."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.written: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with self._storage.create(str(path)) as file:
            stream = _HashedStream(file)
            yield stream
        self.written[str(path).rpartition("/")[2]] = FileRecord(stream.size, stream.digest.hexdigest())

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: str | os.PathLike[str]) -> str:
        return str(path)

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Do nothing: creating a file also creates its folder."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return self._storage.size(str(path)) is not None

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        raise NotImplementedError

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _HashedStream(io.BufferedIOBase):
    """Sequential stream that hashes a file of a storage, which closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning about a run on a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
