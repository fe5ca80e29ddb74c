"""Databases of HH-suite are searched by hhblits with AlphaFold's flags."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.find import load_alignments
from fastfold.data.search import hhblits
from fastfold.data.search.engine import SearchStage
from fastfold.data.search.hhblits import HhblitsEngine
from fastfold.data.search.hmmer import HmmerEngine
from fastfold.data.search.local import local_engines, search
from fastfold.data.search.settings import HmmerSettings, SearchSources
from fastfold.data.search.store import SearchStore
from fastfold.data.targets import target_from_sequence
from fastfold.errors import ConfigError, InputError
from tests.helpers.hh_suite import cluster_database, needs_hhblits
from tests.helpers.sequence_databases import queries, relative

QUERY = queries(1)["q0"]
STAND_IN = r"""#!/bin/sh
[ "$1" = -h ] && { echo "HHblits 3.3.0:"; exit 0; }
echo "$*" > "$(dirname "$0")/arguments"
[ -e "$(dirname "$0")/fails" ] && { echo "out of memory" >&2; exit 7; }
cat "$2" > "$4"
printf '>hit\n%s\n' "$(sed -n 2p "$2")" >> "$4"
"""
PARTS = [f"{part}.{end}" for part in ("a3m", "hhm", "cs219") for end in ("ffdata", "ffindex")]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for hhblits on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "hhblits"
    path.write_text(STAND_IN)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return path


def empty_database(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    for part in PARTS:
        (folder / f"{name}_{part}").write_text(name)
    return folder / name


def test_databases_are_searched_together_after_fasta_files(program: Path, tmp_path: Path) -> None:
    bfd = empty_database(tmp_path / "bfd", "bfd_metaclust_clu_complete")
    uniref = empty_database(tmp_path / "uniref30", "UniRef30_2021_03")
    fasta = tmp_path / "uniref90.fasta"
    fasta.write_text(f">x\n{QUERY}\n")
    first, engine = local_engines(SearchSources((str(bfd), str(fasta), str(uniref)), num_workers=2))
    assert isinstance(first, HmmerEngine)
    assert isinstance(engine, HhblitsEngine)
    assert engine.name == "bfd_uniref"
    steps: list[SearchStage] = []
    (found,) = engine.search([QUERY], steps.append)
    assert found.files == {"bfd_uniref_hits.a3m": f">query\n{QUERY}\n>hit\n{QUERY}\n".encode()}
    assert found.facts["rows"] == 2
    assert steps == [SearchStage(engine.cost([QUERY]))]
    arguments = (program.parent / "arguments").read_text()
    assert " -oa3m " in arguments
    assert arguments.endswith(
        f" -cpu 2 -o /dev/null -n 3 -e 0.001 -maxseq 1000000 -realign_max 100000 -maxfilt 100000 "
        f"-min_prefilter_hits 1000 -d {bfd} -d {uniref}\n"
    )


def test_another_database_is_another_search(program: Path, tmp_path: Path) -> None:
    store = SearchStore(tmp_path / "store")
    (engine,) = local_engines(SearchSources((str(empty_database(tmp_path / "a", "uniref30")),)))
    before = engine.key(store)
    assert (engine.name, before) == ("uniref30", engine.key(store))
    (tmp_path / "a" / "uniref30_hhm.ffdata").write_text("longer than before")
    assert engine.key(store) != before


def test_what_is_missing_is_said(program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = empty_database(tmp_path / "a", "uniref30")
    with pytest.raises(ConfigError, match="hhblits searches with AlphaFold's flags"):
        local_engines(SearchSources((str(database),), hmmer=HmmerSettings(iterations=3)))
    (engine,) = local_engines(SearchSources((str(database),)))
    (program.parent / "fails").touch()
    with pytest.raises(InputError, match="hhblits failed with exit code 7: out of memory"):
        list(engine.search([QUERY], lambda step: None))
    (tmp_path / "a" / "uniref30_hhm.ffdata").unlink()
    with pytest.raises(InputError, match=r"found no uniref30_hhm\.ffdata; download"):
        local_engines(SearchSources((str(database),)))
    (tmp_path / "a" / "uniref30_hhm.ffdata").touch()
    monkeypatch.setattr(hhblits, "find_program", lambda name: None)
    with pytest.raises(ConfigError, match="is a database of HH-suite, and hhblits is not installed"):
        local_engines(SearchSources((str(database),)))


@needs_hhblits
def test_the_alignment_is_that_of_debians_program(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    families = {}
    for number in range(6):
        rows = [relative(rng, QUERY, 0.2) if number < 3 else relative(rng, QUERY[::-1], 0.9)]
        rows += ["".join(c if rng.random() > 0.2 else "A" for c in rows[0]) for _ in range(3)]
        families[f"f{number}"] = "".join(f">f{number}_{k}\n{row}\n" for k, row in enumerate(rows))
    database = cluster_database(tmp_path / "uniref30", families)
    out = search(QUERY, database, tmp_path / "out", num_workers=2)
    (tmp_path / "q.fasta").write_text(f">query\n{QUERY}\n")
    command = "hhblits -i q.fasta -cpu 4 -oa3m q.a3m -o /dev/null -n 3 -e 0.001 -maxseq 1000000 -realign_max 100000 "
    command += f"-maxfilt 100000 -min_prefilter_hits 1000 -d {database}"
    subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
    written = out / "query" / "uniref30_hits.a3m"
    assert written.read_text() == (tmp_path / "q.a3m").read_text()
    (((msa,), _),) = load_alignments(out, target_from_sequence(QUERY))
    assert len(msa.sequences) > 4
