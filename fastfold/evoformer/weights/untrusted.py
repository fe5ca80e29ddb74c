"""Safe opening of untrusted weights files, and recognition of their format.

Reading never executes code: pickles are read by PyTorch's restricted unpickler or refused. Reading never allocates
more than the file can fill: declared sizes are compared with the file's size before data are read.
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
from fastfold.evoformer.weights.containers import contained_networks

SIZE_LIMIT = 8 << 30  #: Limit in bytes for a file's parameters; the official models take 0.4 GB

READABLE = "FastFold reads AlphaFold's .npz, OpenFold's .pt, and its own .safetensors files and state dicts"
DAMAGED = "is truncated or damaged; download it again"
NO_PICKLES = (
    "is a pickle, which can run code when it is read; FastFold never reads pickles. "
    f"Use another format: {READABLE}"
)

# Parameters hardly compress, so a file that unpacks to far more than its size is a zip bomb.
_MAX_COMPRESSION = 100
_MAX_MEMBERS = 100_000
_LEGACY_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."

Format = Literal["npz", "torch", "safetensors"]


def file_format(path: Path) -> Format:
    """Recognise the format of a weights file by its first bytes, independent of its name.

    Raises:
        WeightsError: The file does not exist, cannot be read, is empty, is not a regular file, or has another format.
    """
    head, size = _head(path)
    if size == 0:
        raise WeightsError(f"{path}: the file is empty; download it again")
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
        if (path / "adapter_config.json").is_file():
            raise WeightsError(
                f"{path}: is an adapter; merge it into its base first: fastfold weights merge BASE {path} OUT"
            )
        if stat.S_ISDIR(status.st_mode):
            raise WeightsError(
                f"{path}: is a folder; pass a file in it. (For a DeepSpeed checkpoint, run zero_to_fp32.py in its "
                "folder to join it into one file.)"
            )
        if not stat.S_ISREG(status.st_mode):
            raise WeightsError(f"{path}: is a device or pipe, not a file; copy the weights to a file first")
        with path.open("rb") as file:
            return file.read(512), status.st_size
    except FileNotFoundError:
        raise WeightsError(f"{path}: no such file; check the path of the weights") from None
    except (OSError, ValueError) as error:  # ValueError for a NUL character in the path
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(
            f"{str(path)!r}: cannot be read ({reason}); check the path and its permissions"
        ) from None


def _what_else(path: Path, head: bytes) -> str:
    """Describe a file that is not a weights file, with a remedy."""
    if re.match(rb"\x80[\x02-\x05]", head) or path.suffix in (".pkl", ".pickle"):
        return NO_PICKLES
    if head.startswith(b"\x93NUMPY"):
        return "is a single NumPy array; expected an AlphaFold .npz with hundreds of arrays"
    if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return "is compressed; unpack it first"
    if head[257:262] == b"ustar":
        return f"is a tar archive; unpack it first (tar -xf {path.name}) and pass one of its files"
    if head.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the weights themselves; fetch them with: git lfs pull"
    if _is_text(head):
        return f"is a text file, perhaps of a refused download; {READABLE}"
    return f"has an unknown format, or is damaged; {READABLE}"


def _is_text(data: bytes) -> bool:
    return re.search(rb"[\x00-\x08\x0e-\x1f\x7f-\xff]", data) is None


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open a zip archive after a check of its table of contents. The caller closes it.

    Raises:
        WeightsError: The archive is truncated, encrypted, has two members of one name, or unpacks to far more than its
            size.
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
        raise WeightsError(f"{path}: the archive is empty; download it again")
    if len(members) > _MAX_MEMBERS:
        raise WeightsError(
            f"{path}: expected at most {_MAX_MEMBERS} members, found {len(members)}; download it again"
        )
    seen: set[str] = set()
    for member in members:
        if member.filename in seen:
            raise WeightsError(f"{path}: has two members named {member.filename!r}; download it again")
        seen.add(member.filename)
        if member.flag_bits & 1:
            raise WeightsError(f"{path}: is encrypted; unpack it with its password and pack it without one")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise WeightsError(
                f"{path}: {member.filename} has a compression that NumPy never writes: {DAMAGED}"
            )
    check_size(path, sum(member.file_size for member in members))


def check_size(path: Path, size: int) -> None:
    """Check that parameters of ``size`` bytes are plausible for their file.

    Raises:
        WeightsError: ``size`` exceeds the need of any network, or the file's possible contents.
    """
    if size > SIZE_LIMIT:
        raise WeightsError(
            f"{path}: expected at most {SIZE_LIMIT >> 30} GiB of parameters, found {size / 2**30:.1f} GiB. "
            "The file is not an AlphaFold network or is malicious; do not use it"
        )
    if size > _MAX_COMPRESSION * path.stat().st_size:
        raise WeightsError(
            f"{path}: unpacks to {size / 2**20:.0f} MiB, more than {_MAX_COMPRESSION} times its own size. "
            "The file is a zip bomb or damaged; do not use it"
        )


def read_torch(path: Path) -> tuple[dict[str, Tensor], str]:
    """Read a network's tensors from a PyTorch checkpoint, memory-mapped if its format allows it.

    Returns:
        Tensors by name, and the network's place in the checkpoint; see :mod:`fastfold.evoformer.weights.containers`.

    Raises:
        WeightsError: The file is damaged, or holds objects other than tensors, or tensors that are not plain
            parameters, or several networks.
    """
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with open_archive(path) as archive:
            members = archive.infolist()
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise WeightsError(
                f"{path}: has compressed members, which PyTorch never writes; download it again"
            )
    # PyTorch treats a path with this suffix as another format.
    mapped = zipped and path.suffix != ".safetensors"
    try:
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about pickle versions do not help the user
            source: Any = str(path) if mapped else file
            content = torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # objects in a damaged file may raise any error
        match = re.search(r"GLOBAL (\S+)", str(error))
        if match is None:
            raise WeightsError(f"{path}: {DAMAGED}") from None
        raise WeightsError(
            f"{path}: expected only tensors, found a Python object ({match[1]}); it {NO_PICKLES}. (From a training "
            "checkpoint, save only the parameters: torch.save(checkpoint['ema']['params'], FILE).)"
        ) from None
    state, place = _network(path, content)
    for name, tensor in state.items():
        if problem := _problem(name, tensor):
            raise WeightsError(f"{path}: {problem}")
    check_size(path, sum(4 * tensor.numel() for tensor in state.values()))
    return {name: tensor.detach() for name, tensor in state.items()}, place


def types_of(dtypes: Iterable[torch.dtype]) -> str:
    """Return element types as text: ``float32``, or several with commas."""
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def _network(path: Path, content: object) -> tuple[Mapping[Any, Any], str]:
    """Return the entries of a checkpoint's network and its place; all entries if no network is recognised."""
    networks = contained_networks(content)
    if len(networks) > 1:
        places = ", ".join(network.place or "the file's own entries" for network in networks)
        raise WeightsError(
            f"{path}: expected one network, found {len(networks)} ({places}); save one of them with "
            "torch.save(STATE_DICT, FILE)"
        )
    if networks:
        return networks[0].entries, networks[0].place
    if not isinstance(content, Mapping) or not content:
        raise WeightsError(
            f"{path}: expected a state dict; save one with torch.save(model.state_dict(), FILE)"
        )
    return content, ""


def _problem(name: Any, tensor: Any) -> str | None:
    """Return the reason why an entry of a state dict cannot be a parameter, or None."""
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        return (
            f"entry {str(name)[:80]!r}: expected a tensor, found {type(tensor).__name__}; save only the parameters: "
            "torch.save(model.state_dict(), FILE)"
        )
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        return f"parameter {name} is sparse, quantized or without data; save plain CPU tensors"
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return f"parameter {name} has less data than its shape {list(tensor.shape)} needs; the file {DAMAGED}"
    return None
