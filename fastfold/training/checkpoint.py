"""Checkpoints of a run: sharded safetensors by ``torch.distributed.checkpoint``, and a JSON file of the rest.

A checkpoint is a folder ``step_00001000`` that appears at once, by renaming, when everything in it is written. Its
``state.json`` lists the files with their sizes; no pickle is written or read.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from fastfold.errors import ConfigError
from fastfold.parallel import DistributedContext

_FORMAT = 1
_NAME = re.compile(r"step_(\d{8})")

Tensors = Mapping[str, Tensor]
Json = dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: Where they lie.
        context: The run's processes; all of them call every method.
        keep: Newest checkpoints to keep.
        report: Called with one sentence when something was decided or went wrong.
    """

    def __init__(
        self, directory: Path, context: DistributedContext, *, keep: int, report: Callable[[str], None]
    ) -> None:
        self.directory, self._context, self._keep, self._report = directory, context, keep, report
        # A group of its own: its messages are sent next to those of the training loop.
        self._group = dist.new_group(backend="gloo") if context.size > 1 else None
        self._pending: Future[None] | None = None
        self.last: Path | None = None

    def save(self, step: int, tensors: Tensors, state: Json) -> None:
        """Write a checkpoint in the background, from a copy that is made before this returns.

        A checkpoint that is still being written is waited for.

        Args:
            step: Steps done.
            tensors: What is large, by name; the same names on all processes. Of a DTensor each writes its slice.
            state: What is small, as JSON; the first process's counts.
        """
        self.wait()
        copies = {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
        done: Future[None] = Future()
        self._pending = done

        def write() -> None:
            try:
                self._write(step, copies, state)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # A process that fails must end, so that the others hear of it. It would wait for any other kind of thread, and
        # this one waits for the other processes.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any; a failure is reported, not raised."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            last = f"the last good one is {self.last}" if self.last else "there is none yet"
            self._report(f"a checkpoint could not be written ({_reason(error)}); {last}")

    def close(self) -> None:
        """Finish what is being written."""
        self.wait()

    def _write(self, step: int, tensors: Tensors, state: Json) -> None:
        final = self.directory / f"step_{step:08d}"
        temporary = self.directory / f".step_{step:08d}.tmp"
        if self._context.is_rank_zero:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        try:
            self._barrier()
            with _quiet():
                writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
                dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
            self._barrier()
            if self._context.is_rank_zero:
                files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
                text = json.dumps({"format": _FORMAT, "step": step, "files": files, "state": state}, indent=1)
                (temporary / "state.json").write_text(text)
                shutil.rmtree(final, ignore_errors=True)
                temporary.rename(final)
                for old in self._folders()[self._keep :]:
                    shutil.rmtree(old, ignore_errors=True)
        finally:
            if self._context.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
        self.last = final

    def _barrier(self) -> None:
        if self._group is not None:
            dist.barrier(group=self._group)

    def _folders(self) -> list[Path]:
        """Checkpoints from the newest to the oldest, whole or not."""
        if not self.directory.is_dir():
            return []
        return sorted((p for p in self.directory.iterdir() if _NAME.fullmatch(p.name)), reverse=True)

    def find(self, resume: str) -> Path | None:
        """The checkpoint to resume from.

        Args:
            resume: ``auto`` for the newest valid one, or None if there is none; ``never``; or a folder.

        Raises:
            ConfigError: The folder named is not a whole checkpoint: it says what is missing. Or nothing is to be
                resumed where there are checkpoints, which those of the new run would replace.
        """
        if resume == "never":
            if self._folders():
                raise ConfigError(
                    f"{self.directory} has checkpoints of a run; to start anew, remove them or choose another "
                    "trainer.out"
                )
            return None
        if resume != "auto":
            path = Path(resume)
            problem = damage(path)
            if problem:
                raise ConfigError(f"{path} cannot be resumed from: {problem}")
            return path
        for path in self._folders():
            problem = damage(path)
            if problem is None:
                return path
            self._report(f"checkpoint {path} is left out: {problem}")
        return None

    def load(self, path: Path, tensors: Tensors) -> Json:
        """Read a checkpoint, whatever the number of processes that wrote it.

        Args:
            path: The checkpoint's folder, from :meth:`find`.
            tensors: Tensors of the right names and shapes, which are filled.

        Returns:
            The state that was saved with them.

        Raises:
            ConfigError: The checkpoint belongs to another network.
        """
        try:
            with _quiet():
                reader = HuggingFaceStorageReader(str(path))
                dcp.load(dict(tensors), storage_reader=reader, process_group=self._group)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise ConfigError(
                f"{path} does not fit this run: {_reason(error)}; resume with the configuration that it was "
                "written with, or choose another trainer.out"
            ) from error
        self.last = path
        state: Json = json.loads((path / "state.json").read_text())["state"]
        return state


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's folder, or None if all its files are there in full length."""
    try:
        content = json.loads((path / "state.json").read_text())
        files = dict(content["files"])
        if content["format"] != _FORMAT:
            return f"it has format {content['format']}, this version reads {_FORMAT}"
    except FileNotFoundError:
        return "it has no state.json"
    except (OSError, ValueError, KeyError, TypeError):
        return "its state.json cannot be read"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"its shard {name} is missing"
        if file.stat().st_size != size:
            return f"its shard {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def _reason(error: BaseException) -> str:
    """The cause inside an error of ``torch.distributed.checkpoint``, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warning that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
