"""jackhmmer and phmmer find and align what HMMER's own programs do."""

from __future__ import annotations

import gzip
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyhmmer.easel import Alphabet, KeyHash, TextSequence

from fastfold.data.msa.find import read_msa
from fastfold.data.search import hmmer
from fastfold.data.search.database import SequenceDatabase
from fastfold.data.search.engine import Found, SearchStage
from fastfold.data.search.hmmer import HmmerEngine
from fastfold.data.search.settings import HmmerSettings
from fastfold.data.search.store import SearchStore
from fastfold.errors import ConfigError, InputError
from tests.conftest import require_shared
from tests.helpers.sequence_databases import made_up_database, queries, write_database

FLAGS = ("--noali", "--cpu", "1", "--F1", "0.0005", "--F2", "0.00005", "--F3", "0.0000005", "-E", "0.0001")


def search(path: Path, sequences: list[str], settings: HmmerSettings | None = None) -> dict[str, Found]:
    engine = HmmerEngine(
        settings or HmmerSettings(), SequenceDatabase("db", path), num_workers=1, memory_bytes=1 << 30
    )
    return {found.sequence: found for found in engine.search(sequences, lambda step: None)}


def alignment(found: Found) -> bytes:
    (text,) = found.files.values()
    return text


def comparable(text: bytes, query: str) -> list[str]:
    """The lines of a Stockholm file without the program's version, the name of the query, and what that widens."""
    lines = [re.sub(" +", " ", line.replace(query, "query")) for line in text.decode().splitlines()]
    return [line for line in lines if not line.startswith("#=GF")]


@pytest.fixture(scope="module")
def recorded() -> Path:
    return require_shared("oracles_data", "alignment_tools", "jackhmmer")


@pytest.mark.parametrize(
    "name", ["102m_A_c07001", "1bx7_A_c04496", "1ten_A_c07069", "1wkx_A_c00265", "3s97_A_c08396"]
)
def test_recorded_searches_of_jackhmmer_come_out_line_by_line(recorded: Path, name: str) -> None:
    """One of them has 102 domains that are reported and not aligned (their E-value is above 0.001)."""
    sequence = "".join((recorded / f"{name}.fasta").read_text().split("\n")[1:])
    expected = gzip.decompress((recorded / f"{name}.sto.gz").read_bytes())
    found = search(recorded / "database.fasta.gz", [sequence])[sequence]
    assert comparable(alignment(found), name) == comparable(expected, name)
    record: dict[str, Any] = json.loads(gzip.decompress((recorded / "expected.json.gz").read_bytes()))
    assert found.facts["hits"] == len(record["queries"][name]["hits"])
    assert found.facts["sequences_searched"] == record["database_sequences"]


@pytest.mark.skipif(shutil.which("jackhmmer") is None, reason="HMMER's jackhmmer is not on PATH")
@pytest.mark.parametrize("iterations", [1, 2, 5])
def test_iterations_are_those_of_the_program(tmp_path: Path, iterations: int) -> None:
    wanted = queries(3)
    path = write_database(tmp_path / "db.fasta", wanted, relatives=25)
    found = search(path, list(wanted.values()), HmmerSettings(iterations=iterations))
    for sequence in wanted.values():
        query, out = tmp_path / "query.fasta", tmp_path / "out.sto"
        query.write_text(f">query\n{sequence}\n")
        command = ["jackhmmer", "-o", "/dev/null", "-A", str(out), *FLAGS, "--incE", "0.0001"]
        subprocess.run([*command, "-N", str(iterations), str(query), str(path)], check=True)
        assert comparable(alignment(found[sequence]), "query") == comparable(out.read_bytes(), "query")


def test_more_iterations_find_more_and_stop_when_nothing_is_new(tmp_path: Path) -> None:
    wanted = queries(3)
    path = write_database(tmp_path / "db.fasta", wanted, relatives=25)
    once = search(path, list(wanted.values()))
    more = search(path, list(wanted.values()), HmmerSettings(iterations=9))
    assert sum(more[s].facts["rows"] - once[s].facts["rows"] for s in once) > 0
    assert all(1 < found.facts["iterations"] < 9 for found in more.values())


def test_a_profile_is_pickled_whatever_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyhmmer stores ``sys.argv`` in it, and reads that back as ASCII."""
    monkeypatch.setattr(sys, "argv", ["fastfold", "search", "--out", "Süd"])
    sequence = TextSequence(name="query", sequence="MKTAYIAKQR").digitize(Alphabet.amino())
    profile = hmmer._build(hmmer._Query("MKTAYIAKQR", sequence, KeyHash()))
    assert pickle.loads(pickle.dumps(profile)).consensus == profile.consensus


def test_phmmer_aligns_domains_up_to_e_value_001(tmp_path: Path) -> None:
    assert HmmerSettings(engine="phmmer").pipeline == HmmerSettings().pipeline | {"incdomE": 1e-2}
    wanted = queries(1)
    path = write_database(tmp_path / "db.fasta", wanted)
    (sequence,) = wanted.values()
    one, other = (
        search(path, [sequence], HmmerSettings(engine=e))[sequence] for e in ("jackhmmer", "phmmer")
    )
    assert one.facts["hits"] == other.facts["hits"] > 3


def test_a_batch_is_as_one_by_one_and_steps_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hmmer, "BATCH", 2)
    wanted = list(queries(3).values())
    path = write_database(tmp_path / "db.fasta", queries(3))
    steps: list[SearchStage] = []
    engine = HmmerEngine(
        HmmerSettings(iterations=3), SequenceDatabase("db", path), num_workers=1, memory_bytes=1 << 30
    )
    together = {found.sequence: alignment(found) for found in engine.search(wanted, steps.append)}
    assert sum(step.cost for step in steps) == engine.cost(wanted)
    for sequence in wanted:
        alone = search(path, [sequence], HmmerSettings(iterations=3))
        assert alignment(alone[sequence]) == together[sequence]


def test_without_a_relative_the_alignment_is_the_query_alone(tmp_path: Path) -> None:
    path = tmp_path / "db.fasta"
    path.write_text(made_up_database({}, unrelated=30))
    (sequence,) = queries(1).values()
    for file_format in ("sto", "a3m"):
        found = search(path, [sequence], HmmerSettings(file_format=file_format))[sequence]  # type: ignore[arg-type]
        ((name, text),) = found.files.items()
        (tmp_path / name).write_bytes(text)
        assert read_msa(tmp_path / name, query=sequence).sequences == (sequence,)
        assert found.facts["hits"] == 0


def test_equal_names_are_one_row_in_stockholm_unless_their_sequences_differ(tmp_path: Path) -> None:
    (sequence,) = queries(1).values()
    other = sequence[:30] + "WWW" + sequence[33:]
    path = tmp_path / "db.fasta"
    path.write_text(f">a\n{sequence}\n>a\n{sequence}\n>b\n{other}\n>empty\n\n>c\nMKV\n")
    rows = ["query", f"a/1-{len(sequence)}", f"b/1-{len(sequence)}"]
    (tmp_path / "x.sto").write_bytes(alignment(search(path, [sequence])[sequence]))
    msa = read_msa(tmp_path / "x.sto", query=sequence)
    assert [text.split()[0] for text in msa.descriptions] == rows
    path.write_text(path.read_text().replace(">b", ">a"))
    with pytest.raises(InputError, match=r"record 'a'\): two different sequences have this name"):
        search(path, [sequence])
    found = search(path, [sequence], HmmerSettings(file_format="a3m"))[sequence]
    assert alignment(found).count(b">") == 4


def test_letters_for_several_residues_are_kept(tmp_path: Path) -> None:
    (sequence,) = queries(1).values()
    odd = sequence[:20] + "BJOUZX" + sequence[26:]
    path = write_database(tmp_path / "db.fasta", {"q": sequence})
    found = search(path, [odd], HmmerSettings(file_format="a3m"))[odd]
    assert found.facts["hits"] > 3
    assert alignment(found).split(b"\n")[1] == odd.encode()


def test_the_key_changes_with_the_settings_and_the_contents_of_the_database(tmp_path: Path) -> None:
    store = SearchStore(tmp_path / "store")
    path = tmp_path / "db.fasta"

    def key(settings: HmmerSettings | None = None, *, num_workers: int = 1) -> str:
        engine = HmmerEngine(
            settings or HmmerSettings(),
            SequenceDatabase("db", path),
            num_workers=num_workers,
            memory_bytes=1 << 30,
        )
        return engine.key(store).digest

    path.write_text(">a\nMKV\n")
    first = key()
    others = {
        key(HmmerSettings(e_value=1e-3)),
        key(HmmerSettings(iterations=2)),
        key(HmmerSettings(engine="phmmer")),
        key(HmmerSettings(file_format="a3m")),
    }
    assert len(others | {first}) == 5
    assert key(num_workers=7) == first
    path.write_text(">a\nMKVA\n")
    assert key() != first


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "blast"},
        {"iterations": 0},
        {"engine": "phmmer", "iterations": 2},
        {"e_value": 0.0},
        {"include_e_value": float("nan")},
        {"msv_filter": 2.0},
        {"file_format": "fasta"},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        HmmerSettings(**wrong)


def test_a_share_of_a_filter_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match=r"HmmerSettings\.viterbi_filter must be more than 0 .*, found 2$"):
        HmmerSettings(viterbi_filter=2.0)
