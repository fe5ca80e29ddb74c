"""Rows of Boltz' and Chai's tables are paired by their keys, and make the features of ColabFold's paired rows."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fastfold.data.features.assembly import joined_features, multimer_features
from fastfold.data.msa.find import load_alignments
from fastfold.data.msa.keyed import is_keyed_table, pair_by_keys, parse_keyed_table, read_chai_alignment
from fastfold.data.msa.msa import ChainMsas, Msa, parse_a3m
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target, target_from_sequence
from fastfold.errors import InputError

FIRST, SECOND = "MKTAYIAK", "GSHMAW"
TABLES = {
    FIRST: f"key,sequence\n0,{FIRST}\n1,MKTAYIAR\n3,MKTaaAYIWK\n-1,MKT--IAK\n,MKTAYLAK\n",
    SECOND: f"sequence,key\n{SECOND},0\nGSHLAW,3\nGSWMAW,2\nGSHMAF,-1\n-SHMAW,1\n",
}
"""Keys 1 and 3 are in both chains, in another order; 2 is in one alone."""
WHOLE = (
    "#8,6\t1,1\n>q\tq\nMKTAYIAKGSHMAW\n>1\t1\nMKTAYIAR-SHMAW\n>3\t3\nMKTaaAYIWKGSHLAW\n"
    ">a\nMKT--IAK------\n>b\nMKTAYLAK------\n>c\n--------GSWMAW\n>d\n--------GSHMAF\n"
)
"""The same rows as ColabFold writes them."""


def pair(*texts: str) -> list[Msa]:
    return [parse_keyed_table(text) for text in texts]


def assert_equal(ours: list[ChainMsas], theirs: list[ChainMsas], target: Target) -> None:
    """All features of a complex for networks of both kinds."""
    for function in (multimer_features, joined_features):
        found, expected = (function(target.chains, one) for one in (ours, theirs))
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], name)


def test_tables_in_a_folder_equal_colabfolds_alignment(tmp_path: Path) -> None:
    target = target_from_sequence(f"{FIRST}:{SECOND}", name="t")
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "t.a3m").write_text(WHOLE)
    (tmp_path / "tables").mkdir()
    for chain in target.chains:
        (tmp_path / "tables" / f"t_{chain.id}.csv").write_text(TABLES[chain.sequence])
    expected, found = (load_alignments(tmp_path / name, target) for name in ("whole", "tables"))
    assert [msa.sequences for msa in expected[0][1]] == [(FIRST, "MKTAYIAR", "MKTAYIWK")]
    assert_equal(found, expected, target)


def test_tables_of_boltz_input_equal_colabfolds_alignment(tmp_path: Path) -> None:
    """Through YAML, and with a second copy of a chain."""
    for name, (sequence, text) in zip("ab", TABLES.items(), strict=True):
        (tmp_path / f"{name}.csv").write_text(text)
        assert is_keyed_table(text), sequence
    yaml = "sequences:\n"
    for ids, name, sequence in (("[A, C]", "a", FIRST), ("B", "b", SECOND)):
        yaml += f"- protein:\n    id: {ids}\n    sequence: {sequence}\n    msa: {name}.csv\n"
    (tmp_path / "t.yaml").write_text(yaml)
    (tmp_path / "t.a3m").write_text(WHOLE.replace("1,1", "2,1"))
    (ours,), errors = read_targets([tmp_path / "t.yaml"])
    (theirs,), _ = read_targets([tmp_path / "t.a3m"])
    assert not errors
    assert [chain.sequence for chain in ours.chains] == [chain.sequence for chain in theirs.chains]
    assert_equal(list(ours.alignments or ()), list(theirs.alignments or ()), ours)  # type: ignore[arg-type]


def test_without_a_shared_key_nothing_is_paired() -> None:
    """The tables are plain alignments then, and so is one of a chain with its copies."""
    first, second = pair(TABLES[FIRST], TABLES[SECOND].replace("1\n", "7\n").replace("3\n", "8\n"))
    alignments: list[ChainMsas] = [([first], []), ([second], [])]
    assert pair_by_keys([FIRST, SECOND], alignments) == alignments
    assert pair_by_keys([FIRST, FIRST], alignments[:1] * 2) == alignments[:1] * 2
    plain = parse_a3m(f">q\n{FIRST}\n>1\nMKTAYIAR\n>3\nMKTaaAYIWK\n>4\nMKT--IAK\n>5\nMKTAYLAK\n")
    assert first.sequences == plain.sequences
    np.testing.assert_array_equal(first.deletions, plain.deletions)


def test_lines_of_more_chains_come_first_and_repeated_keys_are_counted() -> None:
    """A key's first row belongs to the first of the other chain, a row without a partner to its chain alone."""
    third = "WWPL"
    msas = pair(
        f"key,sequence\n0,{FIRST}\nx,AAAAAAAA\nx,CCCCCCCC\nx,DDDDDDDD\ny,EEEEEEEE\n",
        f"key,sequence\n0,{SECOND}\nx,AAAAAA\nx,CCCCCC\ny,EEEEEE\n",
        f"key,sequence\n0,{third}\ny,EEEE\n-1,FFFF\n",
    )
    found = pair_by_keys([FIRST, SECOND, third], [([msa], []) for msa in msas])
    assert [msa.sequences for _, paired in found for msa in paired] == [
        (FIRST, "EEEEEEEE", "AAAAAAAA", "CCCCCCCC"),
        (SECOND, "EEEEEE", "AAAAAA", "CCCCCC"),
        (third, "EEEE", "----", "----"),
    ]
    assert [[msa.sequences for msa in own] for own, _ in found] == [[("DDDDDDDD",)], [], [("FFFF",)]]
    assert all(msa.as_is and not msa.keys for own, paired in found for msa in (*own, *paired))


def test_a_chain_without_keys_gets_lines_of_gaps() -> None:
    """Its own rows stay; chains that are paired already are left as they are."""
    plain = parse_a3m(">q\nWWPL\n>a\nWWPP\n>a\nWWPP\n")
    msas = pair(TABLES[FIRST], TABLES[SECOND])
    third: ChainMsas = ([plain], [])
    found = pair_by_keys([FIRST, SECOND, "WWPL"], [([msas[0]], []), ([msas[1]], []), third])
    assert [msa.sequences for msa in found[2][1]] == [("WWPL", "----", "----")]
    assert found[2][0][0].sequences == plain.sequences
    assert pair_by_keys([FIRST, SECOND, "WWPL"], found) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id,sequence\n0,MK\n", "t.csv:1: expected the columns 'key' and 'sequence'"),
        ("key,sequence\n", "t.csv: the alignment has no rows"),
        (
            f"key,sequence\n0,{FIRST}\n1,MKT\n",
            r"t.csv:3 \(record 'row 2'\): expected 8 columns as in the query",
        ),
        (f"key,sequence\n0,{FIRST}\n\n1,MKTAY7AK\n", "t.csv:4 .*'7' is neither a residue nor a gap"),
        (f"key,sequence\n0,{FIRST}\n1,>KTAYIAK\n", "t.csv:3 .*'>' is neither a residue nor a gap"),
        (f"key,sequence\n0,{FIRST}\n1\n", "t.csv:3: has 1 columns"),
    ],
)
def test_wrong_tables_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_keyed_table(text, path="t.csv")


def test_chais_files_need_a_reader_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{hashlib.sha256(b'MKV').hexdigest()}.aligned.pqt"
    path.write_bytes(b"PAR1")
    monkeypatch.setattr("fastfold.data.msa.keyed.is_installed", lambda name: False)
    with pytest.raises(InputError, match=r"aligned\.pqt: is a Parquet file, which needs the package pyarrow"):
        load_alignments(tmp_path, target_from_sequence("MKV", name="t"))


def test_chais_files_have_keys(tmp_path: Path) -> None:
    """Found by the hash of the sequence."""
    target = target_from_sequence("MKV", name="t")
    path = tmp_path / f"{hashlib.sha256(b'MKV').hexdigest()}.aligned.pqt"
    path.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="expected Chai's columns"):
        load_alignments(tmp_path, target)
    rows = {"sequence": ["MKV", "MRV", "MKL"], "pairing_key": ["", "mouse", ""], "comment": ["q", "a", "b"]}
    rows["source_database"] = ["query", "uniprot", "uniref90"]
    parquet.write_table(pyarrow.table(rows), path)
    (((msa,), paired),) = load_alignments(tmp_path, target)
    assert (msa.sequences, msa.keys, paired) == (("MKV", "MRV", "MKL"), ("", "mouse", ""), [])
    assert read_chai_alignment(path, limit=1 << 20).sequences == msa.sequences
    with pytest.raises(InputError, match="larger than 100 bytes"):
        read_chai_alignment(path, limit=100)


def test_taken_rows_keep_their_keys() -> None:
    (msa,) = pair(TABLES[FIRST])
    assert msa.take([0, 2]).keys == ("0", "3")
    assert replace(msa, keys=()).take([0]).keys == ()


OF_THREE = {
    FIRST: f"key,sequence\n0,{FIRST}\n1,MKTAYIAR\n9,MKTLYIAK\n3,MKTaaAYIWK\n-1,MKT--IAK\n,MKTAYLAK\n7,MKTAYVVK\n",
    SECOND: f"sequence,key\n{SECOND},0\nGSHLAW,3\nGSWMAW,2\nGSHMAF,-1\n-SHMAW,1\nGSIIAW,9\n",
    "WWPL": "key,sequence\n0,WWPL\n3,WWPP\n5,WAPL\n9,WWAL\n",
}
BOLTZ_LINES = [
    (FIRST, SECOND, "WWPL"),
    ("MKTLYIAK", "GSIIAW", "WWAL"),
    ("MKTAYIWK", "GSHLAW", "WWPP"),
    ("MKTAYIAR", "-SHMAW", None),
]
"""Paired rows of Boltz 2.2.1's ``construct_paired_msa`` for these tables, without its second row of queries.

None is a chain that is not paired in a line, which Boltz fills with one of its other rows.
"""


def test_pairs_are_those_of_boltz() -> None:
    """In its order: lines with more chains first, then as they occur in the first chain."""
    sequences = list(OF_THREE)
    msas = [([msa], []) for msa in pair(*OF_THREE.values())]
    found = pair_by_keys(sequences, msas)
    lines = list(zip(*(paired[0].sequences for _, paired in found), strict=True))
    assert lines == [
        tuple(one or "-" * len(sequences[k]) for k, one in enumerate(line)) for line in BOLTZ_LINES
    ]
    assert found[0][1][0].deletions[2].tolist() == [0, 0, 0, 2, 0, 0, 0, 0]
