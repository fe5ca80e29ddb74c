"""Small databases of HH-suite, and its programs where they are installed."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

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
