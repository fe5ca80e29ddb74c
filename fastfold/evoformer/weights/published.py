"""DeepMind's published parameters: names, location on this machine, and verification of the files.

All files are in one folder, set by the variable ``FASTFOLD_WEIGHTS``. The SHA-256 of each file is recorded on first
use in ``SHA256SUMS`` of the same folder (``sha256sum -c SHA256SUMS`` reads it) and compared on every later use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path

from fastfold.errors import OutputError, WeightsError, suggest
from fastfold.evoformer.config import MINI
from fastfold.utils.atomic_files import write_atomic
from fastfold.utils.hashing import file_digest
from fastfold.utils.machine import user_cache

ARCHIVE = "alphafold_params_2022-12-06.tar"  #: Name of the published archive: the parameters of AlphaFold 2.3
SOURCE = "https://storage.googleapis.com/alphafold"  #: DeepMind's address of the archive's folder
FILE_MEGABYTES = 373  #: Size of each file: 93 million parameters in float32
LICENSE = """\
AlphaFold parameters, copyright DeepMind Technologies Limited, under the Creative Commons licence CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/). Whoever uses them in published work cites Jumper et al., Nature 596,
583
(2021), and for complexes Evans et al., bioRxiv 2021.10.04.463034."""
SUMS = "SHA256SUMS"  #: Name of the file with the recorded SHA-256 of each file

_ENDINGS = {"monomer": "", "monomer_ptm": "_ptm", "multimer": "_multimer_v3"}
PUBLISHED: Mapping[str, tuple[str, ...]] = {
    **{kind: tuple(f"model_{i}{end}" for i in range(1, 6)) for kind, end in _ENDINGS.items()},
    "all": tuple(f"model_{i}{end}" for end in _ENDINGS.values() for i in range(1, 6)),
}
"""Official names of the networks in the archive, by the name of a set."""


def weights_folder() -> Path:
    """Return the folder of downloaded parameters: ``FASTFOLD_WEIGHTS``, or one in the user's cache."""
    if folder := os.environ.get("FASTFOLD_WEIGHTS"):
        return Path(folder).expanduser()
    return user_cache() / "weights"


def file_name(network: str) -> str:
    """Return the name of a published network's file."""
    return f"params_{network}.npz"


def published_networks(name: str) -> tuple[str, ...]:
    """Return the networks of a set, or the network of that name; empty for other names."""
    return PUBLISHED.get(name) or ((name,) if name in PUBLISHED["all"] else ())


def weights_files(name: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a network or of a set of networks.

    Args:
        name: An existing file, or else ``mini`` (the network that ships with the package), a set of published
            networks (``monomer``, ``monomer_ptm``, ``multimer``, ``all``), or a published network
            (``model_1_multimer_v3``).

    Raises:
        WeightsError: A published network is not on this machine, or its file differs from its record.
    """
    text, path = os.fspath(name), Path(name)
    if not path.exists():
        if text == MINI:
            return [Path(str(resources.files("fastfold") / "trained" / f"{MINI}.safetensors"))]
        if networks := published_networks(text):
            folder, files = weights_folder(), [file_name(network) for network in networks]
            if missing := [file for file in files if not (folder / file).is_file()]:
                raise WeightsError(
                    f"the weights {text!r} are not on this machine: {folder} lacks {listed(missing)}. "
                    f"'fastfold weights download {text}' fetches them. {by_hand(missing, folder)}"
                )
            verify_recorded(folder, files)
            return [folder / file for file in files]
        if re.fullmatch(r"\w+", text):
            known = (*PUBLISHED, *PUBLISHED["all"], MINI)
            hint = suggest(text, known, otherwise="check the path of the weights", cutoff=0.7)
            raise WeightsError(f"{text}: no such file or published network; {hint}")
    return [path]


def one_weights_file(name: str | os.PathLike[str]) -> Path:
    """Return the file of one network; see :func:`weights_files`, and a set of several is refused."""
    paths = weights_files(name)
    if len(paths) > 1:
        raise WeightsError(
            f"expected one network, found {name} ({len(paths)} networks); name one, such as {paths[0].stem[7:]}"
        )
    return paths[0]


def listed(files: list[str]) -> str:
    """Return the names and sizes of missing files as text."""
    size = f"{FILE_MEGABYTES} MB"
    if len(files) == 1:
        return f"{files[0]} ({size})"
    return f"{', '.join(files)} ({len(files)} files of {size})"


def by_hand(files: list[str], folder: Path) -> str:
    """Return instructions for adding missing files without a network connection."""
    gigabytes = 15 * FILE_MEGABYTES / 1000
    return (
        f"Without a network connection, copy {ARCHIVE} (about {gigabytes:.1f} GB, {SOURCE}/{ARCHIVE}) to this machine "
        f"and pass its folder with `mirror`, or copy the {'files' if len(files) > 1 else 'file'} into {folder}; the "
        "variable FASTFOLD_WEIGHTS sets another folder"
    )


def read_sums(folder: Path) -> dict[str, str]:
    """Read the recorded SHA-256 of the folder's files by name; empty without a record.

    Raises:
        WeightsError: The record cannot be read.
    """
    try:
        text = (folder / SUMS).read_text("utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WeightsError(
            f"{folder / SUMS}: cannot be read ({error}); remove it to record the files again"
        ) from None
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](\S+)", line)
        if match is None:
            raise WeightsError(
                f"{folder / SUMS}:{number}: expected '<SHA-256>  <file>'; remove {SUMS} to record the weights again"
            )
        sums[match[2]] = match[1]
    return sums


def record_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Add the SHA-256 of files to the record.

    Raises:
        WriteError: The record cannot be written.
        WeightsError: As :func:`read_sums`.
    """
    known = read_sums(folder) | dict(sums)
    write_atomic(folder / SUMS, "".join(f"{known[name]}  {name}\n" for name in sorted(known)))


def verify_recorded(folder: Path, files: Iterable[str]) -> None:
    """Compare files with their recorded SHA-256; record new files if the folder is writable.

    Raises:
        WeightsError: A file differs from its record, or cannot be read.
    """
    sums = read_sums(folder)
    new = {}
    for name in files:
        try:
            digest = file_digest(folder / name)
        except OSError as error:
            raise WeightsError(
                f"{folder / name}: cannot be read ({error.strerror}); check its permissions"
            ) from None
        if sums.get(name, digest) != digest:
            raise WeightsError(
                f"{folder / name}: expected SHA-256 {sums[name][:16]}… ({SUMS}), found {digest[:16]}…; "
                f"the file was changed or damaged. Download it again, or remove its line in {SUMS} to accept it"
            )
        if name not in sums:
            new[name] = digest
    if new:
        try:
            record_sums(folder, new)
        except OutputError:
            return  # another user's folder, without write permission
