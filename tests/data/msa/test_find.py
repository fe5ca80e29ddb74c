"""Alignments found by name: layouts, order, sharing, and real data with its oracle."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.find import (
    MAX_ROWS,
    find_alignments,
    find_hits,
    find_template_hits,
    load_alignments,
    read_msa,
)
from fastfold.data.queries.fasta import read_fasta
from fastfold.data.queries.pairs import Partner, baits_against_candidates, read_complexes, read_pair_table
from fastfold.data.targets import Chain, Target, target_from_sequence
from fastfold.errors import InputError
from fastfold.protein.residue_constants import hhblits_letter_to_id
from tests.conftest import require_shared

DIMER = "MKV:LLAA"


def put(folder: Path, name: str, query: str = "MKV", rows: int = 1) -> Path:
    """Writes an alignment with a number of rows under a name, in the format that the name asks for."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if ".sto" in name:
        body = "".join(f"r{i} {query}\n" for i in range(rows))
        text = f"# STOCKHOLM 1.0\n{body}//\n"
    else:
        text = "".join(f">r{i}\n{query}\n" for i in range(rows))
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def depths(folder: Path, target: Target) -> list[tuple[list[int], list[int]]]:
    """Numbers of rows of what is found for each chain."""
    loaded = load_alignments(folder, target)
    return [tuple([len(msa.sequences) for msa in kind] for kind in chain) for chain in loaded]  # type: ignore[misc]


@pytest.mark.parametrize("name", ["x.a3m", "x.a3m.gz", "x.sto", "x.sto.gz"])
def test_each_format_is_read(tmp_path: Path, name: str) -> None:
    """The extension says how a file is read, with a query to compare or without."""
    path = put(tmp_path, name, rows=2)
    assert read_msa(path).sequences == ("MKV", "MKV")
    assert read_msa(path, query="MKV").sequences == ("MKV", "MKV")
    with pytest.raises(InputError, match="position 2 of its first row is 'K', of the target 'R'") as caught:
        read_msa(path, query="MRV")
    assert caught.value.path == path


def test_a_single_chain_has_the_files_of_alphafold_multimer(tmp_path: Path) -> None:
    """Its folder is that of chain A, as for complexes; a folder of the target comes first."""
    target = target_from_sequence("MKV", "x")
    put(tmp_path, "x/msas/A/uniref90_hits.sto", rows=3)
    put(tmp_path, "x/msas/A/pdb_hits.sto")
    assert depths(tmp_path, target) == [([3], [])]
    assert find_template_hits(tmp_path, target) == {"MKV": [tmp_path / "x/msas/A/pdb_hits.sto"]}
    put(tmp_path, "x/msas/own.a3m", rows=2)
    assert depths(tmp_path, target) == [([2], [])]


def test_a_chain_alone_in_a_list_has_the_files_of_its_protein(tmp_path: Path) -> None:
    """``P:1-2``, one copy of a part, is named P_1-2; the alignment and hits of P are its own."""
    proteins = [target_from_sequence("MKV", "P")]
    lines = tmp_path / "complexes.txt"
    lines.write_text("P:1-2\n")
    ((part,), _), table = read_complexes(lines, proteins), tmp_path / "pairs.csv"
    table.write_text("id,chain_1\nx,P\n")
    ((named,), _) = read_pair_table(table, proteins)
    folder = tmp_path / "msas"
    put(folder, "P.a3m", rows=3)
    hits = put(folder, "P/pdb_hits.sto", rows=2)
    for target in (part.uncut, named):
        assert depths(folder, target) == [([3], [])]
        assert find_template_hits(folder, target) == {"MKV": [hits]}
    put(folder, "P_1-2.a3m", rows=2)
    assert depths(folder, part.uncut) == [([2], [])]
    assert depths(folder, named) == [([3], [])]


@pytest.mark.parametrize(
    "layout", ["AB_{}.a3m", "AB/{}.a3m", "AB/{}/uniref90_hits.sto", "AB/msas/{}/bfd_hits.a3m"]
)
def test_chains_of_a_bait_have_the_files_of_their_record(tmp_path: Path, layout: str) -> None:
    baits = [Partner(target_from_sequence("MKV:LLAA", "AB"))]
    (pair,) = baits_against_candidates(baits, [Partner(target_from_sequence("GSH", "C"), 2)])
    put(tmp_path, layout.format("A"), rows=2)
    put(tmp_path, layout.format("B"), "LLAA", rows=3)
    put(tmp_path, "C.a3m", "GSH", rows=4)
    assert depths(tmp_path, pair) == [([2], []), ([3], []), ([4], []), ([4], [])]
    put(tmp_path, "AB_and_C_x2_A.a3m", rows=5)
    assert depths(tmp_path, pair)[0] == ([5], [])


def test_targets_whose_names_resemble_each_other_keep_their_own(tmp_path: Path) -> None:
    """The safe form of one name, or the name of a chain, may be another target's name."""
    put(tmp_path, "x_1/a.a3m")
    put(tmp_path, "x_1_hash/a.a3m", rows=2)
    assert find_alignments(tmp_path, "x|1").unpaired == [tmp_path / "x_1/a.a3m"]
    target = Target("x_1_hash", (Chain("A", "MKV"),), "", "x|1", ())
    assert depths(tmp_path, target) == [([2], [])]
    put(tmp_path, "y_A/a.a3m")
    put(tmp_path, "y/A/a.a3m", rows=3)
    put(tmp_path, "y/B/a.a3m", query="LLAA")
    assert depths(tmp_path, target_from_sequence(DIMER, "y")) == [([3], []), ([1], [])]


def test_unknown_extension_and_bad_files(tmp_path: Path) -> None:
    """What cannot be read is refused by name."""
    for name, message in [("x.fasta", "must end in .a3m or .sto"), ("y.a3m", "no such file")]:
        with pytest.raises(InputError, match=message):
            read_msa(tmp_path / name)
    (tmp_path / "z.a3m").write_bytes(gzip.compress(b">q\nMKV\n"))
    with pytest.raises(InputError, match="gzip"):
        read_msa(tmp_path / "z.a3m")
    (tmp_path / "z.a3m.gz").write_bytes(gzip.compress(b">q\n" + bytes(range(65, 91)) * 9)[:-9])
    with pytest.raises(InputError, match="damaged gzip"):
        read_msa(tmp_path / "z.a3m.gz")


def test_descriptions_may_hold_any_bytes(tmp_path: Path) -> None:
    """Greek letters and broken encodings in names do no harm; in a row they are refused."""
    (tmp_path / "x.a3m").write_bytes(">q β-lactamase\nMKV\n".encode() + b">a \xff\nMKV\n")
    assert read_msa(tmp_path / "x.a3m").descriptions[0] == "q β-lactamase"
    (tmp_path / "x.a3m").write_bytes(b">q\nMK\xff\n")
    with pytest.raises(InputError, match="neither a residue nor a gap"):
        read_msa(tmp_path / "x.a3m")


@pytest.mark.parametrize(
    "name", ["t.a3m", "t.a3m.gz", "t.sto", "t/any.a3m", "t/uniref90_hits.sto.gz", "t/msas/mgnify_hits.sto"]
)
def test_one_chain_is_found_by_name(tmp_path: Path, name: str) -> None:
    """Files and folders called as the target, and AlphaFold's msas folder."""
    path = put(tmp_path, name, rows=3)
    assert find_alignments(tmp_path, "t").unpaired == [path]
    assert depths(tmp_path, target_from_sequence("MKV", name="t")) == [([3], [])]


def test_order_in_a_folder_is_fixed(tmp_path: Path) -> None:
    """UniRef90, BFD, MGnify, others by name; UniProt only for pairing; template hits and strange files are not read."""
    names = ["uniref30_hits.a3m", "bfd_uniclust_hits.a3m", "mgnify_hits.sto", "uniref90_hits.sto", "a.a3m"]
    others = ["pdb_hits.sto", "hmm_output.sto", "pdb70_hits.hhr", "notes.txt", "._x.a3m", "x.fasta"]
    for name in [*names, *others, "uniprot_hits.sto"]:
        put(tmp_path / "t", name)
    put(tmp_path / "t", "mgnify_hits.sto.gz")
    found = find_alignments(tmp_path, "t")
    assert [path.name for path in found.unpaired] == [
        "uniref90_hits.sto",
        "bfd_uniclust_hits.a3m",
        "uniref30_hits.a3m",
        "mgnify_hits.sto",
        "a.a3m",
    ]
    assert [path.name for path in found.paired] == ["uniprot_hits.sto"]
    assert depths(tmp_path, target_from_sequence("MKV", name="t")) == [([1] * 5, [])]


def test_as_many_rows_as_alphafold_reads(tmp_path: Path) -> None:
    """Of its own searches, whatever the format; other files are read whole."""
    names = ("uniref90_hits.sto", "mgnify_hits.a3m.gz", "uniprot_hits.sto", "other.a3m", "mgnify.a3m")
    for name in names:
        put(tmp_path / "t", name, rows=600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MAX_ROWS, "uniref90_hits", 10)
        patch.setitem(MAX_ROWS, "uniprot_hits", 20)
        assert depths(tmp_path, target_from_sequence("MKV:MKV", name="t"))[0] == ([10, 600, 501, 600], [20])
    assert MAX_ROWS == {"uniref90_hits": 10_000, "mgnify_hits": 501, "uniprot_hits": 50_000}


@pytest.mark.parametrize(
    "layout", ["t_{}/hits.a3m", "t_{}.a3m", "t/{}/hits.a3m", "t/{}.sto", "t/msas/{}/hits.sto"]
)
def test_chains_of_a_complex_are_found_by_name(tmp_path: Path, layout: str) -> None:
    """OpenFold's, AlphaFold's and plain layouts give each chain its own alignment."""
    put(tmp_path, layout.format("A"), "MKV", rows=2)
    put(tmp_path, layout.format("B"), "LLAA", rows=3)
    target = target_from_sequence(DIMER, name="t")
    assert depths(tmp_path, target) == [([2], []), ([3], [])]
    assert find_alignments(tmp_path, "t", chain=target.chains[1]).unpaired == [tmp_path / layout.format("B")]


def test_pairing_files_of_a_complex(tmp_path: Path) -> None:
    """UniProt hits stand apart from the rest."""
    for chain, query in (("A", "MKV"), ("B", "LLAA")):
        put(tmp_path, f"t_{chain}/uniref90_hits.sto", query, rows=2)
        put(tmp_path, f"t_{chain}/uniprot_hits.sto", query, rows=5)
    assert depths(tmp_path, target_from_sequence(DIMER, name="t")) == [([2], [5]), ([2], [5])]


def test_chains_from_records_are_found_by_their_records(tmp_path: Path) -> None:
    """Where a complex is a file of records, each record's own alignments serve its chain."""
    fasta = tmp_path / "both.fasta"
    fasta.write_text(">1abc_H\nMKV\n>1abc_L\nLLAA\n>2abc\nMKVA:LLAV\n")
    put(tmp_path / "msas", "1abc_H/bfd.a3m", "MKV", rows=2)
    put(tmp_path / "msas", "1abc_L.a3m", "LLAA", rows=3)
    put(tmp_path / "msas", "2abc_A.a3m", "MKVA", rows=4)
    put(tmp_path / "msas", "2abc/B/bfd.a3m", "LLAV", rows=5)
    (target,) = read_fasta(fasta, complex_=True)
    assert depths(tmp_path / "msas", target) == [([2], []), ([3], []), ([4], []), ([5], [])]


def test_identical_chains_share(tmp_path: Path) -> None:
    """One folder serves all copies of a chain, whichever of them it is called after; it is read once."""
    put(tmp_path, "t_B/x.a3m", "MKV", rows=2)
    loaded = load_alignments(tmp_path, target_from_sequence("MKV:MKV:LLAA", name="t"))
    assert loaded[0] is loaded[1]
    assert len(loaded[0][0][0].sequences) == 2
    assert loaded[2] == ([], [])
    put(tmp_path, "h.a3m", "MKV", rows=4)
    assert depths(tmp_path, target_from_sequence("MKV:MKV", name="h")) == [([4], []), ([4], [])]


def test_colabfold_alignment_of_a_complex(tmp_path: Path) -> None:
    """One A3M for all chains is split, in the order of the target's chains."""
    text = "#4,3\t1,2\n>1\t2\nLLAAMKV\n>p\tq\nLL-AM-V\n>1\nLLAA---\n>u\n-LLA---\n>2\n----MKV\n"
    (tmp_path / "t.a3m").write_text(text)
    target = target_from_sequence("MKV:LLAA:MKV", name="t")
    assert depths(tmp_path, target) == [([1], [2]), ([2], [2]), ([1], [2])]
    with pytest.raises(InputError, match="another sequence"):
        load_alignments(tmp_path, target_from_sequence("MKV:LLAG", name="t"))
    with pytest.raises(InputError, match="ColabFold alignment of 2 chains"):
        load_alignments(tmp_path, target_from_sequence("MKV", name="t"))


def test_one_alignment_for_different_chains_is_refused(tmp_path: Path) -> None:
    """The remedy names the files that are needed."""
    put(tmp_path, "t.a3m")
    with pytest.raises(InputError, match=r"t_A\.a3m, t_B\.a3m"):
        load_alignments(tmp_path, target_from_sequence(DIMER, name="t"))


def test_nothing_found_is_single_sequence_mode(tmp_path: Path) -> None:
    """No place of that name: empty lists."""
    assert not find_alignments(tmp_path, "t")
    assert load_alignments(tmp_path, target_from_sequence("MKV", name="t")) == [([], [])]
    assert load_alignments(tmp_path, target_from_sequence(DIMER, name="t")) == [([], [])] * 2


@pytest.mark.parametrize("sequence", ["MKV", DIMER])
@pytest.mark.parametrize("content", [None, "t/pdb_hits.sto", "t/notes.txt"])
def test_empty_folder_is_refused(tmp_path: Path, sequence: str, content: str | None) -> None:
    """A folder without an alignment is a search that failed, not a wish for single-sequence mode."""
    (tmp_path / "t").mkdir()
    if content:
        put(tmp_path, content)
    with pytest.raises(InputError, match="contains no alignment"):
        load_alignments(tmp_path, target_from_sequence(sequence, name="t"))
    with pytest.raises(InputError, match="contains no alignment"):
        find_alignments(tmp_path, "t")


def test_empty_folder_of_a_chain_is_refused(tmp_path: Path) -> None:
    """One chain's search failed: the complex isn't folded with half of its alignments unasked."""
    put(tmp_path, "t_A/x.a3m")
    (tmp_path / "t_B").mkdir()
    with pytest.raises(InputError, match="contains no alignment") as caught:
        load_alignments(tmp_path, target_from_sequence(DIMER, name="t"))
    assert caught.value.path == tmp_path / "t_B"


def test_uniprot_hits_alone_are_no_alignment_of_one_chain(tmp_path: Path) -> None:
    """They only pair chains; one chain would silently be folded alone."""
    put(tmp_path, "t/uniprot_hits.sto")
    with pytest.raises(InputError, match="is used only to pair chains"):
        load_alignments(tmp_path, target_from_sequence("MKV", name="t"))


def test_bad_alignment_folder(tmp_path: Path) -> None:
    """A mistyped --msa-dir is an error, not single-sequence mode."""
    put(tmp_path, "file.a3m")
    for path, message in [(tmp_path / "none", "no such folder"), (tmp_path / "file.a3m", "is not a folder")]:
        with pytest.raises(InputError, match=message):
            find_alignments(path, "t")
        with pytest.raises(InputError, match=message):
            load_alignments(path, target_from_sequence("MKV"))


def test_broken_link_is_noticed(tmp_path: Path) -> None:
    """An alignment that is linked, but gone, is an error."""
    (tmp_path / "t.a3m").symlink_to(tmp_path / "gone.a3m")
    with pytest.raises(InputError, match="no such file"):
        load_alignments(tmp_path, target_from_sequence("MKV", name="t"))


@pytest.mark.parametrize(
    ("identifier", "name"), [("sp|P1|X", "sp|P1|X"), ("sp|P1|X", "sp_P1_X"), ("a b", "a_b"), ("a..b", "a..b")]
)
def test_odd_identifiers_are_found_raw_and_safe(tmp_path: Path, identifier: str, name: str) -> None:
    """The file may be called as the identifier or as the outputs."""
    put(tmp_path, f"{name}.a3m", rows=2)
    assert depths(tmp_path, target_from_sequence("MKV", name=identifier)) == [([2], [])]


@pytest.mark.parametrize(
    "identifier", ["../outside", "..", "", "a/../../outside", "x\0y", "x" * 5000, "C:outside"]
)
def test_identifiers_never_lead_out_of_the_folder(tmp_path: Path, identifier: str) -> None:
    """Files beside the folder of alignments are out of reach."""
    inside = tmp_path / "msas"
    inside.mkdir()
    put(tmp_path, "outside.a3m")
    put(tmp_path, "x.a3m")
    target = target_from_sequence(DIMER, name=identifier)
    chain = Chain("A", "MKV", identifier)
    assert not find_alignments(inside, identifier, chain=chain)
    assert load_alignments(inside, target) == [([], [])] * 2


def test_absolute_identifier_never_leads_out_of_the_folder(tmp_path: Path) -> None:
    """An absolute path in a header names no file."""
    (tmp_path / "msas").mkdir()
    put(tmp_path, "outside.a3m")
    assert not find_alignments(tmp_path / "msas", str(tmp_path / "outside"))


def test_real_complex_in_openfold_layout() -> None:
    """Both chains of 2Q2K are found and their files are in the network's order."""
    folder = require_shared("data", "2q2k")
    query = read_msa(folder / "2q2k_A" / "bfd_uniclust_hits.a3m").sequences[0]
    target = target_from_sequence(f"{query}:{query}", name="2q2k")
    for chain in target.chains:
        found = find_alignments(folder, "2q2k", chain=chain)
        assert {path.parent.name for path in [*found.unpaired, *found.paired]} == {f"2q2k_{chain.id}"}
        names = [path.name for path in found.unpaired]
        assert names == ["uniref90_hits.sto", "bfd_uniclust_hits.a3m", "mgnify_hits.sto"]
    (unpaired, paired), second = load_alignments(folder, target)
    assert second[0] is unpaired
    assert [len(msa.sequences) for msa in unpaired] == [16, 4, 7]
    assert len(paired) == 1
    assert paired[0].descriptions[1].startswith("tr|A0A0K0ME10|A0A0K0ME10_9STAP/1-51 [subseq from] Plasmid")
    assert load_alignments(folder, target_from_sequence(query, name="2q2k_A"))[0][0][0].sequences[0] == query


def test_official_raw_features_of_a_real_chain() -> None:
    """UniRef90, MGnify and BFD of 2Q2K (in this order), joined without repeats, are what was recorded of them."""
    with np.load(require_shared("oracles", "monomer_ptm", "raw_features.npz"), allow_pickle=False) as file:
        expected = {key: file[key] for key in ("msa", "deletion_matrix_int", "sequence")}
    target = target_from_sequence(expected["sequence"].tobytes().decode(), name="2q2k_A")
    ((unpaired, _),) = load_alignments(require_shared("data", "2q2k"), target)
    rows = {}
    for msa in (unpaired[0], unpaired[2], unpaired[1]):
        for sequence, deletions in zip(msa.sequences, msa.deletions, strict=True):
            rows.setdefault(sequence, deletions)
    ids = [[hhblits_letter_to_id[letter] for letter in sequence] for sequence in rows]
    np.testing.assert_array_equal(ids, expected["msa"])
    np.testing.assert_array_equal(np.stack(list(rows.values())), expected["deletion_matrix_int"])
    assert expected["deletion_matrix_int"].any()


def test_real_alignments_begin_with_their_chains() -> None:
    """A sample of 41 alignments of real chains: the first row is the sequence of the index."""
    folder = require_shared("data", "structures", "msas")
    with open(require_shared("data", "structures", "index.tsv"), newline="") as file:
        sequences = {row["name"]: row["sequence"] for row in csv.DictReader(file, delimiter="\t")}
    names = sorted(path.name.removesuffix(".a3m.gz") for path in folder.glob("*.a3m.gz"))[::40]
    assert len(names) > 30
    for name in names:
        ((unpaired, _),) = load_alignments(folder, target_from_sequence(sequences[name], name=name))
        assert unpaired[0].sequences[0] == sequences[name]
        assert unpaired[0].deletions.shape == (len(unpaired[0].sequences), len(sequences[name]))
        assert len(unpaired[0].sequences) >= 8


def test_template_hits_are_found_where_alignments_are(tmp_path: Path) -> None:
    """Of a chain, of the chains of a complex, and of a complex of equal chains as a whole."""
    single, dimer = target_from_sequence("MKV", "t"), target_from_sequence(DIMER, "t")
    copies = target_from_sequence("MKV:MKV", "t")
    names = (
        "t/pdb70_hits.hhr",
        "t/pdb_hits.sto.gz",
        "t/msas/A/pdb_hits.hhr",
        "t_B/hmm_output.sto",
        "t/pdb_hits.txt",
    )
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    common = [tmp_path / "t" / "pdb_hits.sto.gz", tmp_path / "t" / "pdb70_hits.hhr"]
    assert find_template_hits(tmp_path, single) == {"MKV": common}
    assert find_template_hits(tmp_path, dimer) == {
        "MKV": [tmp_path / "t" / "msas" / "A" / "pdb_hits.hhr"],
        "LLAA": [tmp_path / "t_B" / "hmm_output.sto"],
    }
    (tmp_path / "t" / "msas" / "A" / "pdb_hits.hhr").unlink()
    assert find_template_hits(tmp_path, copies) == {"MKV": common}
    assert find_template_hits(tmp_path, target_from_sequence("MKV", "other")) == {}


def test_raw_openproteinset_folders(tmp_path: Path) -> None:
    """Alignments in ``a3m``, template hits in ``hhr``; what lies beside them counts too."""
    for name in ("a3m/mgnify_hits.a3m", "a3m/uniref90_hits.a3m", "hhr/pdb70_hits.hhr", "bfd_hits.a3m"):
        path = tmp_path / "1abc_A" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(">q\nMKV\n")
    found = find_alignments(tmp_path, "1abc_A").unpaired
    assert [path.name for path in found] == ["uniref90_hits.a3m", "bfd_hits.a3m", "mgnify_hits.a3m"]
    assert find_hits(tmp_path, "1abc_A") == [tmp_path / "1abc_A" / "hhr" / "pdb70_hits.hhr"]
    assert find_hits(tmp_path, "1abc", chain=Chain("A", "MKV")) == find_hits(tmp_path, "1abc_A")
    assert find_hits(tmp_path, "2abc_A") == []


@pytest.mark.parametrize("name", ["a.a3m", "a/x.a3m", "a/msas/x.sto"])
def test_a_pipe_among_alignments_is_named_and_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="is not a regular file"):
        load_alignments(tmp_path, target_from_sequence("MKV", "a"))


def test_names_beyond_ascii_are_found_in_any_form(tmp_path: Path) -> None:
    composed, decomposed = "prot\xe9ine", "prote\u0301ine"
    for written in (composed, decomposed, "proteine"):
        folder = tmp_path / str(len(written)) / written.encode().hex()
        folder.mkdir(parents=True)
        (folder / f"{written}.a3m").write_text(">q\nMKV\n")
        for name in (composed, decomposed):
            assert find_alignments(folder, name).unpaired == [folder / f"{written}.a3m"]
    assert not find_alignments(folder, "prot\u03b5ine")
    for written in (composed, decomposed):
        (tmp_path / f"{written}.a3m").write_text(">q\nMKV\n")
    for name in (composed, decomposed):
        assert find_alignments(tmp_path, name).unpaired == [tmp_path / f"{name}.a3m"]
