"""Small databases of HH-suite, and its programs where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

_DATA = Path("/usr/share/hhsuite/data")

needs_hhsearch = pytest.mark.skipif(
    not (shutil.which("hhsearch") and shutil.which("hhmake")), reason="HH-suite is not installed"
)


def ffindex(entries: Mapping[str, str]) -> tuple[bytes, bytes]:
    """Return data and index of a database with these entries."""
    data, lines = b"", []
    for name in sorted(entries):
        content = entries[name].encode() + b"\0"
        lines.append(f"{name}\t{len(data)}\t{len(content)}\n")
        data += content
    return data, "".join(lines).encode()


def profile_files(alignments: Mapping[str, str], folder: Path, database: str = "pdb70") -> dict[str, bytes]:
    """Return the files of a database of profiles, by name.

    Args:
        alignments: A3M text by the name of each profile.
        folder: Folder for temporary files.
        database: Name of the database.
    """
    profiles = {}
    for name, text in alignments.items():
        (folder / f"{name}.a3m").write_text(text)
        output = folder / f"{name}.hhm"
        command = ["hhmake", "-i", f"{name}.a3m", "-o", output.name, "-name", name, "-v", "0"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        profiles[name] = output.read_text()
    files = {}
    for kind, entries in (("a3m", alignments), ("hhm", profiles)):
        data, index = ffindex(entries)
        files |= {f"{database}_{kind}.ffdata": data, f"{database}_{kind}.ffindex": index}
    return files


def cluster_database(folder: Path, families: Mapping[str, str], *, name: str = "UniRef30_2021_03") -> Path:
    """Write a database that hhblits searches; return the common beginning of its files' names.

    Args:
        folder: Folder for the database.
        families: A3M text by the name of each family.
        name: Name of the database.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    for file, content in profile_files(families, work, name).items():
        (folder / file).write_bytes(content)
    command = [str(_cstranslate()), "-f", "-x", "0.3", "-c", "4", "-I", "a3m", "-b"]
    command += ["-i", f"{name}_a3m", "-o", f"{name}_cs219", "-A", str(_DATA / "cs219.lib")]
    command += ["-D", str(_DATA / "context_data.lib")]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / name


def _cstranslate() -> Path | None:
    """The program, where Debian's package has it, without choosing among processors."""
    path = Path("/usr/libexec/hhsuite/cstranslate-plain")
    return path if path.is_file() else None


needs_hhblits = pytest.mark.skipif(
    not (shutil.which("hhblits") and shutil.which("hhmake") and _cstranslate()),
    reason="Debian's HH-suite is not installed",
)
