"""Alignments of other programs in a folder of alignments are read, and files that are none are named."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.find import find_alignments, load_alignments, unread_files
from fastfold.data.msa.formats import is_aligned_fasta, parse_aligned_fasta, parse_stockholm
from fastfold.data.msa.other_files import is_other_alignment, named_like, parse_other_file
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import target_from_sequence
from fastfold.errors import InputError

ALIGNED = ">query\nMK--TA\nYI\n>h1\nMKwWTA\n-I\n>h2\nM-..TAYI\n"


def test_aligned_fasta_equals_stockholm() -> None:
    """Columns without a residue of the query are insertions in both."""
    stockholm = "# STOCKHOLM 1.0\nquery MK--TAYI\nh1 MKWWTA-I\nh2 M---TAYI\n//\n"
    ours, theirs = parse_aligned_fasta(ALIGNED), parse_stockholm(stockholm)
    assert ours.sequences == theirs.sequences == ("MKTAYI", "MKTA-I", "M-TAYI")
    np.testing.assert_array_equal(ours.deletions, theirs.deletions)
    assert ours.deletions.tolist()[1] == [0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            ">q\nMK-T\n>a\nMKT\n",
            r"x\.fasta:3 \(record 'a'\): expected 4 columns as in the first row, found 3",
        ),
        (">q\nM\nK-\n>a\nM1K\n", r"x\.fasta:4 \(record 'a'\): '1' is neither a residue nor a gap"),
    ],
)
def test_wrong_rows_are_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_aligned_fasta(text, path="x.fasta")


def test_fasta_without_gaps_is_no_alignment(tmp_path: Path) -> None:
    """Proteins of one length, such as mutants, could be targets."""
    for text, expected in ((ALIGNED, True), (">a\nMKT\n>b\nMRT\n", False), (">a\nM-T\n", False), ("", False)):
        assert is_aligned_fasta(text) is expected
        (tmp_path / "x.fa").write_text(text)
        assert is_other_alignment(tmp_path / "x.fa", limit=1000) is expected
    assert not is_other_alignment(tmp_path / "x.fa", limit=-1)


def test_files_of_the_targets_name_are_read_after_a3m(tmp_path: Path) -> None:
    target = target_from_sequence("MKTAYI", name="t")
    (tmp_path / "t.fasta").write_text(ALIGNED)
    (((msa,), _),) = load_alignments(tmp_path, target)
    assert msa.sequences == parse_other_file(tmp_path / "t.fasta", limit=1000).sequences
    (tmp_path / "t.csv").write_text("key,sequence\n0,MKTAYI\n-1,MKTAYL\n")
    (((msa,), _),) = load_alignments(tmp_path, target)
    assert msa.sequences == ("MKTAYI", "MKTAYL")
    (tmp_path / "t.a3m").write_text(">q\nMKTAYI\n")
    assert find_alignments(tmp_path, "t").unpaired == [tmp_path / "t.a3m"]
    (tmp_path / "t.a3m").unlink()
    with pytest.raises(InputError, match=r"t\.csv .*belongs to another sequence"):
        load_alignments(tmp_path, target_from_sequence("MKTAYW", name="t"))
    dimer = target_from_sequence("MKTAYI:MK", name="t")
    with pytest.raises(
        InputError, match=r"one alignment for 2 different chains; give separate ones: t_A\.a3m"
    ):
        load_alignments(tmp_path, dimer)


def test_files_that_are_not_read_are_named(tmp_path: Path) -> None:
    """But for the file of the target itself, and those of other names."""
    for name in ("t.aln", "t.csv", "t.fasta", "tt.aln", "t_B.pqt", "A.clustal"):
        (tmp_path / name).write_text(">t\nMK:MV\n" if name == "t.fasta" else "id,sequence\nx,MK\n")
    (tmp_path / "t.folder").mkdir()
    assert [path.name for path in named_like(tmp_path / "t")] == ["t.aln", "t.csv", "t.fasta"]
    assert named_like(tmp_path / "none" / "t") == []
    (single,), _ = read_targets([tmp_path / "t.fasta"])
    assert [path.name for path in unread_files(tmp_path, single, single.chains[1])] == ["t_B.pqt"]
    alone = target_from_sequence("MK", name="t")
    assert [path.name for path in unread_files(tmp_path, alone, alone.chains[0])] == [
        "t.aln",
        "t.csv",
        "t.fasta",
    ]
    assert load_alignments(tmp_path, alone) == [([], [])]


def test_protenix_folder_pairs_by_taxon_and_uses_all_rows(tmp_path: Path) -> None:
    """Rows of ``pairing.a3m`` are the chain's own too, before the others."""
    target = target_from_sequence("MKTA:WWPL", name="t")
    for chain, rows in zip("AB", (("MKTL", "MKTV"), ("WWPP", "WWPI")), strict=True):
        (tmp_path / "t" / chain).mkdir(parents=True)
        query = target.chains["AB".index(chain)].sequence
        text = f">query\n{query}\n>UniRef100_X1_9606/\t204\n{rows[0]}\n>UniRef100_X2_10090/\n{rows[1]}\n"
        (tmp_path / "t" / chain / "pairing.a3m").write_text(text)
        (tmp_path / "t" / chain / "non_pairing.a3m").write_text(f">query\n{query}\n>x\n{query[::-1]}\n")
    found = load_alignments(tmp_path, target)
    assert [msa.sequences for msa in found[0][0]] == [("MKTA", "MKTL", "MKTV"), ("MKTA", "ATKM")]
    assert [msa.sequences for msa in found[1][1]] == [("WWPL", "WWPP", "WWPI")]


def test_packed_files_of_other_programs_are_read(tmp_path: Path) -> None:
    """``ID.fasta.gz`` and ``ID.csv.gz`` are read as the plain files are."""
    target = target_from_sequence("MKTAYI", name="t")
    for name, text in (("t.fasta", ALIGNED), ("t.csv", "key,sequence\n0,MKTAYI\n-1,MKTAYL\n")):
        (tmp_path / name).write_text(text)
        (((plain,), _),) = load_alignments(tmp_path, target)
        (tmp_path / name).unlink()
        packed = tmp_path / f"{name}.gz"
        packed.write_bytes(gzip.compress(text.encode()))
        (((msa,), _),) = load_alignments(tmp_path, target)
        assert msa.sequences == plain.sequences
        packed.unlink()
