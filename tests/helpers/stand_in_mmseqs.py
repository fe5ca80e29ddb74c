"""A program that stands in for MMseqs2 on PATH, and files by which ColabFold's databases are known."""

from __future__ import annotations

from pathlib import Path

import pytest

from fastfold.data.search.colabfold.mmseqs import ENVIRONMENT, UNIREF

# Notes what it is called with, and finds each query itself.
STAND_IN = r"""#!/bin/sh
here=$(dirname "$0")
echo "$*" >> "$here/calls"
[ "$1" = "$(cat "$here/fails" 2>/dev/null)" ] && { echo "no such thing"; exit 3; }
case "$1" in
version) echo 18-stand-in ;;
search) [ "$2" = --help ] && cat "$here/help"; [ -e "$here/slow" ] && sleep 60; exit 0 ;;
createdb) cp "$2" "$3" ;;
unpackdb)
    mkdir -p "$3"
    awk -v out="$3" '/^>/ { name = $0; next } { f = out "/" n++ ".a3m"; print name "\n" $0 "\n>hit\n" $0 > f }' \
        "$(dirname "$2")/query.fasta" ;;
esac
"""


def install_mmseqs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH, in a new folder; return its path."""
    folder.mkdir()
    path = folder / "mmseqs"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    (folder / "help").write_text("--gpu INT  Use GPU\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return path


def make_databases(folder: Path) -> Path:
    """Make the files by which ColabFold's databases are known in a new folder; return it."""
    folder.mkdir()
    for name in (UNIREF, ENVIRONMENT):
        for end in ("", "_seq", "_aln"):
            (folder / f"{name}{end}.dbtype").touch()
    for end in ("_mapping", "_taxonomy"):
        (folder / f"{UNIREF}{end}").touch()
    return folder
