"""Opening weights files that come from anywhere: what they are, and that reading them can do no harm.

Nothing is ever executed: pickles are read by PyTorch's restricted unpickler or not at all. Nothing large is
allocated on a file's word alone: sizes are compared with each other and with the file's before data are read.
"""

from __future__ import annotations

import re
import stat
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fastfold.errors import WeightsError

SIZE_LIMIT = 8 << 30
"""Most bytes that a file's parameters may take; the official models take 0.4 GB."""

READABLE = "FastFold reads AlphaFold's .npz, OpenFold's .pt and its own .safetensors files"
DAMAGED = "is truncated or damaged: get it again"
NO_PICKLES = (
    "is a pickle, which could run code when it is read; FastFold never reads pickles. "
    f"Get the weights in another format: {READABLE}"
)

# Parameters hardly compress; a file that unpacks to much more than it is has been made to fill the memory.
_MAX_COMPRESSION = 100
_MAX_MEMBERS = 100_000
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

Format = Literal["npz", "torch", "safetensors"]


def file_format(path: Path) -> Format:
    """What a weights file is by its first bytes, whatever its name says.

    Raises:
        WeightsError: It does not exist, cannot be read, is empty, no file, or nothing that can be read here.
    """
    head, size = _head(path)
    if size == 0:
        raise WeightsError(f"{path}: the file is empty: get it again")
    if head.startswith(b"PK"):
        with open_archive(path) as archive:
            names = archive.namelist()
        return "torch" if any(re.fullmatch(r"([^/]+/)?data\.pkl", name) for name in names) else "npz"
    if head.startswith(_LEGACY_TORCH):
        return "torch"
    if head[8:9] == b"{" and not _is_text(head[:8]):
        return "safetensors"
    raise WeightsError(f"{path}: {_what_else(path, head)}")


def _head(path: Path) -> tuple[bytes, int]:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise WeightsError(
                f"{path}: is a folder; give a file in it. (A DeepSpeed checkpoint is joined to one file by the "
                "zero_to_fp32.py that lies in its folder.)"
            )
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"{path}: is a device or pipe, not a file; copy the weights to a file first")
        with path.open("rb") as file:
            return file.read(512), status.st_size
    except FileNotFoundError:
        raise WeightsError(f"{path}: there is no such file; check the path of the weights") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the path
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{str(path)!r}: cannot be read ({reason}); check the path and its permissions"
        ) from None


def _what_else(path: Path, head: bytes) -> str:
    """The remedy for a file that is not a weights file."""
    if re.match(rb"\x80[\x02-\x05]", head) or path.suffix in (".pkl", ".pickle"):
        return NO_PICKLES
    if head.startswith(b"\x93NUMPY"):
        return "is a single NumPy array, not a set of parameters: an AlphaFold .npz holds hundreds of them"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "is compressed; unpack it first"
    if head[257:262] == b"ustar":
        return f"is a tar archive; unpack it first (tar -xf {path.name}) and give one of its files"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights themselves; fetch them with: git lfs pull"
    if _is_text(head):
        return f"is a text file (was the download refused?), not weights: {READABLE}"
    return f"is of no known format, or damaged: {READABLE}"


def _is_text(data: bytes) -> bool:
    return re.search(rb"[\x00-\x08\x0e-\x1f\x7f-\xff]", data) is None


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip archive whose table of contents makes sense. The caller closes it.

    Raises:
        WeightsError: It is truncated, encrypted, has two members of one name, or unpacks to far more than it is.
    """
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError):
        raise WeightsError(f"{path}: {DAMAGED}") from None
    try:
        _check_contents(path, archive.infolist())
    except BaseException:
        archive.close()
        raise
    return archive


def _check_contents(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if not members:
        raise WeightsError(f"{path}: the archive is empty: get it again")
    if len(members) > _MAX_MEMBERS:
        raise WeightsError(f"{path}: has {len(members)} members, which no weights file has: get it again")
    seen: set[str] = set()
    for member in members:
        if member.filename in seen:
            raise WeightsError(f"{path}: has two members named {member.filename!r}: get it again")
        seen.add(member.filename)
        if member.flag_bits & 1:
            raise WeightsError(f"{path}: is encrypted; unpack it with its password and pack it again without")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise WeightsError(
                f"{path}: {member.filename} is packed in a way that NumPy never uses: {DAMAGED}"
            )
    check_size(path, sum(member.file_size for member in members))


def check_size(path: Path, size: int) -> None:
    """See that parameters of ``size`` bytes fit the file that they are said to come from.

    Raises:
        WeightsError: They are more than any network needs, or than the file can hold.
    """
    if size > SIZE_LIMIT:
        raise WeightsError(
            f"{path}: would take {size / 2**30:.1f} GiB in memory; weights take at most {SIZE_LIMIT >> 30} GiB. "
            "This is not an AlphaFold network, or is a file made to do harm: do not use it"
        )
    if size > _MAX_COMPRESSION * path.stat().st_size:
        raise WeightsError(
            f"{path}: unpacks to {size / 2**20:.0f} MiB, more than {_MAX_COMPRESSION} times its own size. "
            "Weights never do; this is a zip bomb or damaged: do not use it"
        )


def read_torch(path: Path) -> dict[str, Tensor]:
    """Named tensors of a PyTorch checkpoint, mapped from the file where its format allows.

    The exponential moving average of a training checkpoint is preferred; wrappers around a state dict are opened.

    Raises:
        WeightsError: It is damaged, holds other objects than tensors, or tensors that are no plain parameters.
    """
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with open_archive(path) as archive:
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise WeightsError(f"{path}: has compressed members, which PyTorch never writes: get it again")
    # PyTorch takes a path with this ending for another format.
    mapped = zipped and path.suffix != ".safetensors"
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle versions, which are no concern of the user's
            source: Any = str(path) if mapped else file
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # the unpickler raises whatever the objects in a damaged file make it
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            raise WeightsError(f"{path}: {DAMAGED}") from None
        raise WeightsError(
            f"{path}: holds a Python object ({found[1]}) in addition to parameters; it {NO_PICKLES}. (Of a training "
            "checkpoint, save the parameters alone: torch.save(checkpoint['ema']['params'], FILE).)"
        ) from None
    state = _state_dict(content)
    if state is None:
        raise WeightsError(f"{path}: holds no state dict; save one with torch.save(model.state_dict(), FILE)")
    for name, tensor in state.items():
        if problem := _problem(name, tensor):
            raise WeightsError(f"{path}: {problem}")
    check_size(path, sum(4 * tensor.numel() for tensor in state.values()))
    return {name: tensor.detach() for name, tensor in state.items()}


def types_of(dtypes: Iterable[torch.dtype]) -> str:
    """Element types for people: ``float32``, or several with commas."""
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def _state_dict(content: Any) -> Mapping[str, Any] | None:
    """The parameters in a checkpoint: of the moving average, below a wrapper, or as they are."""
    if not isinstance(content, Mapping):
        return None
    ema = content.get("ema")
    if isinstance(ema, Mapping) and isinstance(ema.get("params"), Mapping):
        return ema["params"]
    wrapped = (content.get(name) for name in ("state_dict", "model", "module"))
    return next((state for state in wrapped if isinstance(state, Mapping)), content) or None


def _problem(name: Any, tensor: Any) -> str | None:
    """Why an entry of a state dict cannot be a parameter, or None."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return (
            f"entry {str(name)[:80]!r} is of type {type(tensor).__name__}, not a tensor; save the parameters "
            "alone: torch.save(model.state_dict(), FILE)"
        )
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return f"parameter {name} is sparse, quantized or without data; save plain tensors"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"parameter {name} of shape {list(tensor.shape)} has fewer data than that; the file {DAMAGED}"
    return None
