"""Checkpoints of a run: sharded safetensors by ``torch.distributed.checkpoint``, and a manifest with the other state.

A checkpoint is a folder ``step_00001000``. Its manifest is written last and has the SHA-256 of every file, so that
incomplete or changed checkpoints are never loaded. No pickle is written or read.
"""

from __future__ import annotations

import copy
import re
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fastfold.errors import ConfigError, FastFoldError, first_line
from fastfold.parallel import DistributedContext
from fastfold.training.checkpoint.contents import (
    MANIFEST,
    Json,
    Manifest,
    ManifestError,
    Tensors,
    read_shards,
    write_shards,
)
from fastfold.training.checkpoint.storage import Storage, is_url
from fastfold.utils.hashing import file_digest

_NAME = re.compile(r"step_(\d{8})")
_MAX_MANIFEST = 1 << 28  # bytes

T = TypeVar("T")


class Checkpoints:
    """Checkpoints of one run.

    Args:
        place: Folder or URL of the checkpoints.
        context: The run's processes; all of them call every method.
        keep_last: Number of newest checkpoints to keep.
        keep_every: Also keep checkpoints of steps that are multiples of this; None for no others.
        report: Called with one sentence about decisions and failures.

    Attributes:
        last: Path of the newest checkpoint that was written or read.
        problem: Failure of the latest write, or None.

    Raises:
        ConfigError: The URL cannot be used on this machine.
        FastFoldError: The place is not writable.
    """

    def __init__(
        self,
        place: str,
        context: DistributedContext,
        *,
        keep_last: int,
        keep_every: int | None = None,
        report: Callable[[str], None],
    ) -> None:
        self._context, self._report = context, report
        self._keep_last, self._keep_every = keep_last, keep_every
        self.place, self._storage = place, Storage(place)
        # A separate group, because the background thread communicates while the training loop does.
        self._group = dist.new_group(backend="gloo") if context.size > 1 else None
        self._pending: Future[None] | None = None
        self._manifests: dict[str, Manifest] = {}
        self._copies: dict[str, tempfile.TemporaryDirectory[str]] = {}
        self.last: str | None = None
        self.problem: str | None = None
        self._on_first(self._storage.prepare)

    # ---- writing ---------------------------------------------------------------------------------------

    def save(self, step: int, tensors: Tensors, state: Json) -> None:
        """Copy the state and write a checkpoint in the background, after an earlier one that is still being written.

        ``step`` is the number of finished steps. The tensors have the same names on all processes, and each process
        writes its slice of a DTensor. ``state`` is other state, as JSON; the first process's is written.
        """
        self.wait()
        copies = {name: x.detach().to("cpu", copy=True) for name, x in tensors.items()}
        state = copy.deepcopy(state)
        done: Future[None] = Future()
        self._pending = done

        def write() -> None:
            try:
                self._write(step, copies, state)
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # A daemon thread, because a failed process must exit for the others to notice. It would otherwise wait for
        # this thread, which waits for the other processes.
        threading.Thread(target=write, name="checkpoint", daemon=True).start()

    def poll(self) -> None:
        """Report the result of a background write if it has finished."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the background write, if any; report a failure instead of raising it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self.problem = None
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            last = f"the last good one is {self.last}" if self.last else "there is none yet"
            self.problem = f"a checkpoint could not be written ({_reason(error)}); {last}"
            self._report(self.problem)

    def _write(self, step: int, tensors: Tensors, state: Json) -> None:
        storage, first = self._storage, self._context.is_rank_zero
        final = storage.join(f"step_{step:08d}")
        staging = storage.staging(final)
        try:
            self._together(lambda: storage.remove(staging) if first else None)
            written = self._together(lambda: write_shards(storage, staging, tensors, self._group))
            files = {name: file for part in written for name, file in part.items()}

            def publish() -> None:
                with storage.create(f"{staging}/{MANIFEST}") as file:
                    file.write(Manifest(step, files, state).to_json())
                storage.publish(staging, final)

            self._together(lambda: publish() if first else None)
        except BaseException:
            if first:
                with suppress(Exception):  # the first failure is the one to raise
                    storage.remove(staging)
            raise
        self.last = final
        if first:
            self._remove_old(step)

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Run an action on all processes of the background group, and return all results; raise on all if one fails."""
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = action()
        except (Exception, CheckpointException) as error:
            problem = error
        if self._group is None:
            if problem is not None:
                raise problem
            return [result]  # type: ignore[list-item]
        own = (result, None if problem is None else _reason(problem))
        of_all = [own] * self._context.size
        dist.all_gather_object(of_all, own, group=self._group)
        reasons = [reason for _, reason in of_all if reason is not None]
        if reasons:
            raise OSError(reasons[0]) from problem
        return [value for value, _ in of_all]  # type: ignore[misc]

    def _remove_old(self, step: int) -> None:
        try:
            # Later ones are damaged, or `find` would have found them; they do not count.
            names = [name for name in self._names() if int(name[-8:]) <= step]
            for name in names[self._keep_last :]:
                if self._keep_every is None or int(name[-8:]) % self._keep_every:
                    self._storage.remove(self._storage.join(name))
        except Exception as error:  # errors of drivers lack a common base
            self._report(f"an old checkpoint could not be removed ({first_line(error)})")

    def _names(self) -> list[str]:
        return sorted((name for name in self._storage.names() if _NAME.fullmatch(name)), reverse=True)

    # ---- reading ---------------------------------------------------------------------------------------

    def find(self, resume: str) -> str | None:
        """Find the checkpoint to resume from, and verify the hashes of its files.

        ``auto`` is the newest complete checkpoint, or None without one; otherwise ``never``, a folder or a URL.

        Raises:
            ConfigError: The named folder is not a complete checkpoint; the message names the missing part. Or the place
                has later checkpoints than it, which ``auto`` would find. Or ``resume`` is ``never`` and the place has
                checkpoints, which the new run would overwrite.
        """
        if resume not in ("auto", "never"):
            problem = self._examine(Storage(resume), resume)
            if problem:
                raise ConfigError(f"{resume} cannot be resumed from: {problem}")
            self._refuse_later(resume)
            return resume
        names = self._on_first(self._names)
        if resume == "never":
            if names:
                raise ConfigError(
                    f"{self.place} has checkpoints of a run; to start again, remove them or choose another trainer.out"
                )
            return None
        for name in names:
            path = self._storage.join(name)
            problem = self._examine(self._storage, path)
            if problem is None:
                return path
            self._report(f"checkpoint {path} is left out: {problem}")
        return None

    def _refuse_later(self, path: str) -> None:
        """Refuse checkpoints of later steps in this place: they count as the newest, and those to come as old."""
        step = self._manifests[path].step
        later = [name for name in self._on_first(self._names) if int(name[-8:]) > step]
        if later:
            raise ConfigError(
                f"{self.place} has checkpoints of later steps than {path}, the last is {later[0]}; remove them, "
                "choose another trainer.out, or continue from the last one with trainer.resume=auto"
            )

    def _examine(self, storage: Storage, path: str) -> str | None:
        """Copy a checkpoint to this machine and return its problem, or None (a collective)."""
        try:
            text = self._on_first(lambda: _manifest_text(storage, path))
            self._manifests[path] = manifest = Manifest.from_json(text)
        except (ManifestError, ConfigError) as error:
            return str(error)
        # Processes share the files of a folder; each has its own copy of a URL.
        own = slice(None) if is_url(path) else slice(self._context.rank, None, self._context.size)
        problem = None
        try:
            if not is_url(path):
                problem = _find_unlisted(Path(path), manifest)
            for name in sorted(manifest.files)[own]:
                problem = problem or self._examine_file(storage, path, name, manifest)
        except Exception as error:  # errors of drivers lack a common base
            problem = f"it cannot be read: {first_line(error)}"
        return next((one for one in self._context.gather(problem) if one is not None), None)

    def _examine_file(self, storage: Storage, path: str, name: str, manifest: Manifest) -> str | None:
        record = manifest.files[name]
        size = storage.size(f"{path}/{name}")
        if size is None:
            return f"its shard {name} is missing"
        if size != record.size:
            return f"its shard {name} has {size} bytes instead of {record.size}"
        folder = self._local(path)
        file = folder / name
        if is_url(path):
            if file.resolve().parent != folder.resolve():
                return f"its shard {name} would be written outside {folder}"
            storage.fetch(f"{path}/{name}", file, size=size)
        if record.sha256 is not None and file_digest(file) != record.sha256:
            return f"its shard {name} was changed after it was written"
        return None

    def _local(self, path: str) -> Path:
        """Return the folder of a checkpoint's files on this machine."""
        if not is_url(path):
            return Path(path)
        if path not in self._copies:
            self._copies[path] = tempfile.TemporaryDirectory(prefix="fastfold-checkpoint-")
        return Path(self._copies[path].name)

    def _on_first(self, action: Callable[[], T]) -> T:
        """Run an action on the first process; return its result, or raise its error, on all."""
        result: T | None = None
        problem: FastFoldError | None = None
        if self._context.is_rank_zero:
            try:
                result = action()
            except FastFoldError as error:
                problem = error
            except Exception as error:  # errors of drivers lack a common base and may not be picklable
                problem = ConfigError(f"it cannot be read: {first_line(error)}")
        result, problem = self._context.gather((result, problem))[0]
        if problem is not None:
            raise problem
        return result  # type: ignore[return-value]

    def state(self, path: str) -> Json:
        """Return the JSON state of a checkpoint from :meth:`find`."""
        return self._manifests[path].state

    def load(self, path: str, tensors: Tensors) -> Json:
        """Read a checkpoint from :meth:`find`, written by any number of processes; return the state saved with it.

        The tensors, of the right names and shapes, are filled in place.

        Raises:
            ConfigError: The checkpoint belongs to another network.
        """
        try:
            read_shards(self._local(path), tensors, self._group)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise ConfigError(
                f"{path} does not fit this run: {_reason(error)}; resume with the configuration that it was "
                "written with, or choose another trainer.out"
            ) from error
        self.last = path
        for folder in self._copies.values():
            folder.cleanup()
        self._copies.clear()
        return self.state(path)


def _manifest_text(storage: Storage, path: str) -> bytes:
    try:
        return storage.read(f"{path}/{MANIFEST}", limit=_MAX_MANIFEST)
    except FileNotFoundError as error:
        raise ConfigError(f"it has no {MANIFEST}") from error


def _find_unlisted(folder: Path, manifest: Manifest) -> str | None:
    """Return a problem if a folder has a shard without a hash, which the reader would open."""
    names = sorted(file.name for file in folder.glob("*.safetensors") if file.name not in manifest.files)
    return f"it has a file {names[0]} that its {MANIFEST} does not list; remove that file" if names else None


def _reason(error: BaseException) -> str:
    """Return the cause inside an error of ``torch.distributed.checkpoint``, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return first_line(error)
