"""Contents of a checkpoint: tensors as safetensors files, one per process, and a manifest.

``torch.distributed.checkpoint`` writes the tensors. The manifest has the files with lengths and SHA-256, and the state
other than tensors.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fastfold.errors import InputError
from fastfold.training.checkpoint.storage import Storage
from fastfold.utils.foreign_text import parse_json
from fastfold.utils.hashing import input_hash
from fastfold.utils.tensor_files import sort_metadata

MANIFEST = "state.json"  #: Name of the manifest's file, which is written last

_FORMATS = (1, 2)  #: Format 1 has lengths, but no hashes

_NAME = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]+")
"""Valid names of files: without separators, so that they stay in the checkpoint's folder."""

Json = dict[str, Any]
Tensors = Mapping[str, Tensor]


class ManifestError(Exception):
    """Invalid manifest; the message gives the reason."""


@dataclass(frozen=True)
class FileRecord:
    """Record of a checkpoint's file."""

    size: int  #: Length in bytes
    sha256: str | None  #: Hexadecimal digest; None in checkpoints of format 1


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int  #: Number of finished steps
    files: Mapping[str, FileRecord]  #: Records of the files by name
    state: Json  #: State other than tensors

    def to_json(self) -> bytes:
        """Return the contents of the manifest's file."""
        content = parse_json(json.dumps({"format": _FORMATS[-1], **asdict(self)}), MANIFEST)
        return json.dumps(content | {"sha256": input_hash(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Parse a manifest's file; inverse of :meth:`to_json`.

        Raises:
            ManifestError: The text is damaged, has an unknown format, or names a file outside its folder.
        """
        try:
            content = parse_json(text, MANIFEST)
            digest = content.pop("sha256", None)
            if content["format"] not in _FORMATS:
                raise ManifestError(
                    f"expected format {' or '.join(map(str, _FORMATS))}, found {content['format']}"
                )
            hashed = content["format"] > 1
            if hashed and digest != input_hash(content):
                raise ManifestError(f"its {MANIFEST} was changed after it was written")
            files = {}
            for name, file in content["files"].items():
                if _NAME.fullmatch(name) is None:
                    raise ManifestError(
                        f"its {MANIFEST} names the file {name[:60]!r}; expected letters, digits, '.', '_' and '-'"
                    )
                size, sha256 = (file["size"], str(file["sha256"])) if hashed else (file, None)
                files[name] = FileRecord(int(size), sha256)
            return cls(int(content["step"]), files, dict(content["state"]))
        except (ArithmeticError, AttributeError, InputError, KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"its {MANIFEST} cannot be read") from error


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
    """Stream that hashes a safetensors file of a storage, which closes the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.size, self.digest = file, 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write a whole file, as the writer does, with its metadata in order."""
        for part in sort_metadata(data):
            self.digest.update(part)
            self.size += len(part)
            self._file.write(part)
        return len(data)

    def tell(self) -> int:
        return self.size


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning about a run on a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
