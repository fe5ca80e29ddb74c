"""AlphaFold's databases arrive whole in its layout, whatever breaks on the way."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastfold.cli.commands.resources import databases
from fastfold.data.databases import download
from fastfold.data.databases.download import database_sizes, download_databases, is_present
from fastfold.data.databases.published import DATABASES, find_databases, find_published
from fastfold.errors import ConfigError, InputError, NetworkError
from fastfold.utils.download.answers import Retries
from fastfold.utils.download.remote_file import RemoteFile
from tests.helpers.command_line import CommandLine
from tests.helpers.command_line import cli as cli
from tests.helpers.loopback import Loopback, Request, loopback, send_file
from tests.helpers.stand_in_msa_server import tar_gz

UNIREF, BFD, SEQRES = b">UniRef90_1\nMKVL\n", b">bfd_1\nMKVI\n", b">1abc_A mol:protein length:4\nMKVL\n"
PARTS = [f"{part}.{end}" for part in ("a3m", "hhm", "cs219") for end in ("ffdata", "ffindex")]
CLUSTERS: dict[str, Any] = {f"UniRef30_2021_03_{part}": part.encode() for part in PARTS}
FILES = {
    "uniref90.fasta.gz": gzip.compress(UNIREF, mtime=0),
    "bfd-first_non_consensus_sequences.fasta.gz": gzip.compress(BFD, mtime=0),
    "uniprot_trembl.fasta.gz": gzip.compress(b">tr|A\nMK\n", mtime=0),
    "uniprot_sprot.fasta.gz": gzip.compress(b">sp|B\nML\n", mtime=0),
    "UniRef30_2021_03.tar.gz": tar_gz({"./": b"", **CLUSTERS, "../evil": b"x", "evil.sh": b"x"}),
    "pdb_seqres.txt": SEQRES,
    "obsolete.dat": b"OBSLTE    31-JUL-94 116L     216L\n",
}
RSYNC = """#!/bin/sh
[ -e "$(dirname "$0")/fails" ] && { echo no route >&2; exit 10; }
cp -r "$6". "$7"
"""
SETS = ("uniref90", "small_bfd", "uniprot", "uniref30", "pdb_seqres")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that do not wait."""

    monkeypatch.setattr(download, "RemoteFile", partial(RemoteFile, timeout=5))
    monkeypatch.setattr(download, "Retries", partial(Retries, pause=lambda seconds: None))


@pytest.fixture
def server() -> Iterator[Loopback]:
    """Serves the packed files."""
    with loopback(lambda request: send_file(request, FILES[request.path[1:]])) as served:
        yield served


def fetch(names: tuple[str, ...], folder: Path, mirror: str, **settings: Any) -> list[Path]:
    return download_databases([find_published(name) for name in names], folder, mirror=mirror, **settings)


def files(folder: Path) -> dict[str, bytes]:
    """All files but records and locks."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in paths
        if path.name not in (download.RECORD, ".lock")
    }


WHOLE = {
    "uniref90/uniref90.fasta": UNIREF,
    "small_bfd/bfd-first_non_consensus_sequences.fasta": BFD,
    "uniprot/uniprot.fasta": b">tr|A\nMK\n>sp|B\nML\n",
    "pdb_seqres/pdb_seqres.txt": SEQRES,
    **{f"uniref30/{name}": content for name, content in CLUSTERS.items()},
}


def test_databases_arrive_in_alphafolds_layout(server: Loopback, tmp_path: Path) -> None:
    said: list[str] = []
    assert fetch(SETS, tmp_path, server.url) == [tmp_path / name for name in SETS]
    assert files(tmp_path) == WHOLE
    record = json.loads((tmp_path / "uniref90" / "record.json").read_bytes())
    assert record["files"] == {
        "uniref90.fasta": {"size": len(UNIREF), "sha256": hashlib.sha256(UNIREF).hexdigest()}
    }
    asked = len(server.requests)
    fetch(SETS, tmp_path, server.url, say=said.append)
    assert (len(server.requests), said) == (asked, [f"{name}: present" for name in SETS])
    (tmp_path / "uniref90" / "uniref90.fasta").write_bytes(b">x\n")
    with pytest.raises(InputError, match=r"expected 17 bytes by record\.json, found 3; remove"):
        is_present(find_published("uniref90"), tmp_path)


def test_a_folder_serves_as_a_mirror(tmp_path: Path) -> None:
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    for name, content in FILES.items():
        (mirror / name).write_bytes(content)
    fetch(SETS, tmp_path / "out", str(mirror))
    assert files(tmp_path / "out") == WHOLE
    (mirror / "uniref90.fasta.gz").unlink()
    with pytest.raises(ConfigError, match=r"uniref90\.fasta\.gz cannot be read"):
        fetch(("uniref90",), tmp_path / "other", str(mirror))


def test_a_broken_download_is_resumed(tmp_path: Path) -> None:
    content = gzip.compress(bytes(range(256)) * 1600, 0, mtime=0)
    broken = [True]

    def answer(request: Request) -> None:
        start = request.start_of_range()
        if broken[0] and start:
            request.send(404)
        else:
            send_file(request, content, drop_after=200_000 if broken[0] else None)

    with loopback(answer) as server:
        with pytest.raises(NetworkError, match="Run the same command again to resume"):
            fetch(("uniref90",), tmp_path, server.url)
        (begun,) = (tmp_path / "uniref90").glob("*.partial")
        had = begun.stat().st_size
        assert 0 < had < len(content)
        broken[0] = False
        server.requests.clear()
        said: list[str] = []
        fetch(("uniref90",), tmp_path, server.url, say=said.append)
        assert max(request.start_of_range() for request in server.requests) == had
    assert f"uniref90.fasta.gz: resuming after {had:,} of {len(content):,} bytes" in said
    assert files(tmp_path) == {"uniref90/uniref90.fasta": bytes(range(256)) * 1600}


def md5_of(content: bytes) -> dict[str, str]:
    return {"x-goog-hash": f"crc32c=AAAAAA==,md5={base64.b64encode(hashlib.md5(content).digest()).decode()}"}


@pytest.mark.parametrize(
    ("name", "content", "headers", "expected"),
    [
        ("uniref90", FILES["uniref90.fasta.gz"][:-6], {}, "is damaged .* and was removed"),
        ("uniref90", b"<html>not here</html>", {}, "is damaged"),
        ("uniref90", FILES["uniref90.fasta.gz"], md5_of(b"other"), "differs from the md5 sum"),
        (
            "uniref30",
            tar_gz({"UniRef30_2021_03_a3m.ffdata": b""}),
            {},
            r"has no UniRef30_2021_03_hhm\.ffdata",
        ),
        ("uniref30", FILES["UniRef30_2021_03.tar.gz"][:-40], {}, "is damaged"),
    ],
)
def test_a_damaged_file_is_removed(
    tmp_path: Path, name: str, content: bytes, headers: dict[str, str], expected: str
) -> None:
    with (
        loopback(lambda request: request.send(200, content, headers)) as server,
        pytest.raises(InputError, match=expected),
    ):
        fetch((name,), tmp_path, server.url)
    assert not is_present(find_published(name), tmp_path)
    assert not [
        path for path in files(tmp_path) if path.endswith((".gz", ".partial", ".unpacking", ".fasta"))
    ]


def test_a_matching_sum_is_accepted(tmp_path: Path) -> None:
    content = FILES["uniref90.fasta.gz"]
    with loopback(lambda request: request.send(200, content, md5_of(content))) as server:
        fetch(("uniref90",), tmp_path, server.url)
    assert files(tmp_path) == {"uniref90/uniref90.fasta": UNIREF}


def test_the_pdb_comes_by_rsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror, program = tmp_path / "mirror", tmp_path / "bin" / "rsync"
    (mirror / "mmcif_files" / "ab").mkdir(parents=True)
    (mirror / "mmcif_files" / "ab" / "1abc.cif.gz").write_bytes(b"x")
    (mirror / "obsolete.dat").write_bytes(FILES["obsolete.dat"])
    program.parent.mkdir()
    program.write_text(RSYNC)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    (program.parent / "fails").touch()
    with pytest.raises(NetworkError, match="failed with exit code 10: no route"):
        fetch(("pdb_mmcif",), tmp_path / "out", str(mirror))
    (program.parent / "fails").unlink()
    fetch(("pdb_mmcif",), tmp_path / "out", str(mirror))
    assert set(files(tmp_path / "out")) == {"pdb_mmcif/obsolete.dat", "pdb_mmcif/mmcif_files/ab/1abc.cif.gz"}
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program rsync"):
        fetch(("pdb_mmcif",), tmp_path / "other", str(mirror))


def test_sizes_come_first_and_room_is_checked(
    server: Loopback, cli: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    command = ("databases", "download", "uniref90", "uniprot", "--dir", cli.out, "--mirror", server.url)
    done = cli.run(*command, "--dry-run")
    assert (done.code, done.out, files(cli.out)) == (0, "", {}), done.err
    assert "uniref90: 0.0 MB to download, about 0.0 MB needed" in done.err
    sizes = database_sizes([find_published("uniprot")], cli.out, mirror=server.url, say=lambda line: None)
    packed = sum(len(FILES[f"uniprot_{name}.fasta.gz"]) for name in ("trembl", "sprot"))
    assert (sizes[0].download, round(sizes[0].needed)) == (packed, round(packed * (1 + 105 / 53)))
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage(0, 0, 10))
    done = cli.run(*command)
    assert (done.code, "0.0 GB free, the databases need about" in done.err) == (1, True)
    monkeypatch.undo()
    done = cli.run(*command)
    assert (done.code, done.out) == (0, f"{cli.out}/uniref90\n{cli.out}/uniprot\n"), done.err
    unknown = cli.run("databases", "download", "uniref50", "--dir", cli.out)
    assert "'uniref50' is not a database of AlphaFold; give names of uniref90, mgnify" in unknown.err
    assert [databases._gigabytes(size) for size in (5e6, 2e11)] == ["5.0 MB", "200.0 GB"]
    listed = cli.run("databases", "list").out
    assert [line.split()[0] for line in listed.splitlines()[1:-1]] == [one.name for one in DATABASES]


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


UNIREF30 = tuple(f"uniref30/UniRef30_2021_03_{part}" for part in PARTS)


@pytest.mark.parametrize(
    ("names", "has_hhblits", "sequences", "template", "remarks"),
    [
        (
            (
                "uniref90/uniref90.fasta",
                "mgnify/mgy_clusters_2022_05.fa",
                "small_bfd/bfd-first_x.fasta",
                *UNIREF30,
            ),
            True,
            ["uniref90", "uniref30", "mgnify"],
            None,
            ["no templates"],
        ),
        (
            ("uniref90/uniref90.fasta", "small_bfd/bfd-first_x.fasta", *UNIREF30),
            False,
            ["uniref90", "small_bfd"],
            None,
            ["bfd and uniref30 are left out", "no templates"],
        ),
        (
            ("uniref90/uniref90.fasta", "pdb70/pdb70_hhm.ffdata", "pdb_mmcif/mmcif_files/1abc.cif"),
            False,
            ["uniref90"],
            "pdb70/pdb70",
            [],
        ),
        (
            (
                *("uniref90/uniref90.fasta", "uniprot/uniprot.fasta", "pdb70/pdb70_hhm.ffdata"),
                *("pdb_seqres/pdb_seqres.txt", "pdb_mmcif/mmcif_files/1abc.cif"),
            ),
            False,
            ["uniref90", "uniprot"],
            "pdb_seqres/pdb_seqres.txt",
            [],
        ),
    ],
)
def test_a_folder_stands_for_eight_options(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    has_hhblits: bool,
    sequences: list[str],
    template: str | None,
    remarks: list[str],
) -> None:
    monkeypatch.setattr("fastfold.data.databases.published._has_hhblits", lambda: has_hhblits)
    found = find_databases(touch(tmp_path, *names))
    assert [text.partition("=")[0] for text in found.sequences] == sequences
    assert found.template_database == (None if template is None else tmp_path / template)
    assert [remark.startswith(begin) for remark, begin in zip(found.remarks, remarks, strict=True)] == [
        True
    ] * len(remarks)


def test_a_folder_without_databases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="found no database for alignments"):
        find_databases(touch(tmp_path, "uniprot/uniprot.fasta"))


def test_a_fold_searches_the_folder(cli: CommandLine) -> None:
    folder = cli.folder / "data"
    (folder / "uniref90").mkdir(parents=True)
    (folder / "uniref90" / "uniref90.fasta").write_text(">UniRef90_1\nMKVLAAGITMKVLAAGIT\n")
    query = cli.fasta({"T1": "MKVLAAGITMKVLAAGIT"})
    done = cli.infer(query, "--databases", folder, "--cpu", "1", "--msa-only")
    assert done.code == 0, done.err
    assert "no templates, which need pdb_mmcif" in done.err
    assert (cli.out / "alignments" / "T1" / "uniref90_hits.sto").is_file()
    wrong = cli.infer(query, "--databases", folder, "--msa-server", "http://x")
    assert "--databases searches AlphaFold's databases on this machine; leave out --msa-server" in wrong.err
