"""Finding chains to train on, and reading what their files hold."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.training.cache import FeatureCache
from fastfold.data.training.dataset import _structure_files, open_dataset
from fastfold.data.training.entry import (
    DISTILLATION,
    group_complexes,
    mask_low_plddt,
    read_chain_msa,
    read_entry,
)
from fastfold.data.training.index_tables import read_chain_data_cache, read_duplicates, read_index
from fastfold.errors import ConfigError, InputError
from tests.conftest import require_shared
from tests.helpers.small_sets import a3m, alignment_database, indexed_folder, openfold_folder, pdb_text, write


def test_index_says_what_belongs_to_a_split(tmp_path: Path) -> None:
    """Nothing of another split, clusters counted within the split, a missing structure listed."""
    found = open_dataset(indexed_folder(tmp_path), split="train")
    assert [entry.id for entry in found] == ["1aaa_A", "1bbb_A", "1ccc_B"]
    assert [entry.cluster_size for entry in found] == [2, 2, 1]
    assert [len(entry) for entry in found] == [9, 10, 10]
    assert [name for name, _ in found.unreadable] == ["1ddd_A"]
    assert [entry.id for entry in open_dataset(tmp_path, split="valid")] == ["2aaa_A"]
    with pytest.raises(ConfigError, match="lacks the split 'test': it has train, valid"):
        open_dataset(tmp_path, split="test")


def test_entry_reads_its_chain_and_alignment(tmp_path: Path) -> None:
    found = open_dataset(indexed_folder(tmp_path), split="train")
    data = read_entry(found[0])
    assert data.chain.sequence == "MKVLAAGIT"
    assert data.chain.positions.shape == (9, 37, 3)
    assert data.alignments[0].sequences == ("MKVLAAGIT", "MKVLAAG--", "--VLAAGIT")
    assert read_entry(found[2]).alignments == ()


def test_folder_without_an_index_is_read_file_by_file(tmp_path: Path) -> None:
    """Chains of one file become entries of their own; what cannot be read is listed with the reason."""
    write(tmp_path / "one.pdb", pdb_text({"A": "MKVLAAGIT"}))
    write(tmp_path / "two.pdb.gz", pdb_text({"A": "MKVLAAGIT", "B": "WwHHKKPPMM"}))
    write(tmp_path / "cut.cif", "data_cut\nloop_\n_atom_site.group_PDB\n")
    write(tmp_path / "notes.txt", "not a structure")
    found = open_dataset(tmp_path, split="train")
    assert [(entry.id, entry.chain_id) for entry in found] == [("one", "A"), ("two_A", "A"), ("two_B", "B")]
    assert [name for name, _ in found.unreadable] == ["cut"]
    assert "cut.cif" in found.unreadable[0][1]
    assert read_entry(found[2]).chain.sequence.upper() == found[2].sequence
    with pytest.raises(ConfigError, match=r"lacks the split 'valid': it has no splits; .* data\.valid_split"):
        open_dataset(tmp_path, split="valid")
    write(tmp_path / "valid" / "three.pdb", pdb_text({"A": "MKVLAAGIT"}))
    assert [entry.id for entry in open_dataset(tmp_path, split="valid")] == ["three"]


def test_openfold_layout(tmp_path: Path) -> None:
    """Chains with alignment folders, data from the cache where it has them, alignments in AlphaFold's order."""
    cache = {
        "1abc_A": {"seq": "MKVLAAGIT", "resolution": 2.5, "release_date": "2001-02-03", "cluster_size": 7},
        "1abc_C": {"seq": "MKVTTTQPES", "resolution": 0.0, "release_date": "2001-02-03", "cluster_size": -1},
    }
    found = open_dataset(openfold_folder(tmp_path, cache), layout="openfold", split="train")
    assert [(entry.id, entry.chain_id) for entry in found] == [("1abc_A", "A"), ("1abc_B", "B")]
    first, second = found
    assert (first.resolution, first.release_date, first.cluster_size) == (2.5, "2001-02-03", 7)
    assert (second.resolution, second.cluster_size, second.sequence) == (None, 1, "WWHHKKPPMM")
    assert [path.name for path in first.alignments()] == ["uniref90_hits.a3m", "mgnify_hits.a3m"]
    data = read_entry(first)
    assert (data.chain.chain_id, data.resolution, len(data.alignments)) == ("A", 2.5, 2)


def test_openfold_cache_alone_names_the_chains(tmp_path: Path) -> None:
    write(tmp_path / "mmcifs" / "1abc.pdb", pdb_text({"A": "MKVLAAGIT", "C": "MKVTTTQPES"}))
    write(tmp_path / "mmcifs" / "AF-Q1.pdb", pdb_text({"A": "MKVLA"}))
    write(
        tmp_path / "chain_data_cache.json",
        '{"1abc_C": {"seq": "MKVTTTQPES", "resolution": 0.0, "cluster_size": -1}, "AF-Q1": {"seq": "MKVLA"}}',
    )
    found = open_dataset(tmp_path, layout="openfold", source=DISTILLATION)
    assert [(entry.id, entry.resolution, entry.cluster_size) for entry in found] == [
        ("1abc_C", None, 1),
        ("AF-Q1", None, 1),
    ]
    assert all(entry.has_plddt for entry in found)
    assert [read_entry(entry).chain.sequence for entry in found] == ["MKVTTTQPES", "MKVLA"]


def test_mmcif_with_openfold_alignments(tmp_path: Path) -> None:
    """A real entry in OpenFold's layout: mmCIF, Stockholm and A3M."""
    source = require_shared("data", "2q2k")
    (tmp_path / "mmcifs").mkdir()
    os.symlink(source / "2q2k.cif", tmp_path / "mmcifs" / "2q2k.cif")
    (tmp_path / "alignments").mkdir()
    for name in ("2q2k_A", "2q2k_B"):
        os.symlink(source / name, tmp_path / "alignments" / name)
    found = open_dataset(tmp_path, layout="openfold")
    assert [entry.id for entry in found] == ["2q2k_A", "2q2k_B"]
    data = read_entry(found[0])
    assert len(data.alignments) == 3
    assert all(msa.sequences[0] == data.chain.sequence for msa in data.alignments)


def test_oversampled_chains_are_named_whole_or_by_their_beginning(tmp_path: Path) -> None:
    found = open_dataset(indexed_folder(tmp_path), split="train", oversample={"1aaa": 3, "1ccc_B": 0.5})
    assert [entry.weight for entry in found] == [3, 1, 0.5]
    with pytest.raises(ConfigError, match=r"'1aab'.*did you mean 1aaa"):
        open_dataset(tmp_path, split="train", oversample={"1aab": 2})
    with pytest.raises(ConfigError, match="positive"):
        open_dataset(tmp_path, split="train", oversample={"1aaa": 0})


def test_folders_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; set data\.directory"):
        open_dataset(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no structure to train on"):
        open_dataset(tmp_path)
    with pytest.raises(ConfigError, match="lacks a folder 'mmcifs'"):
        open_dataset(tmp_path, layout="openfold")
    with pytest.raises(ConfigError, match="unknown layout 'pdb'"):
        open_dataset(tmp_path, layout="pdb")
    write(tmp_path / "empty.pdb", "")
    with pytest.raises(ConfigError, match=r"1 are invalid:\n  empty: .*is empty"):
        open_dataset(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name\tsplit\n1abc\n", r"index.tsv:2.*has 1 columns"),
        ("id\tsplit\n", "must name the columns"),
        ("name\n1abc\n1abc\n", r"index.tsv:3.*is missing or repeated"),
        ("name\n../../etc\n", "is not the name of a file"),
        ("name\tresolution\n1abc\tsharp\n", "number of Å, found 'sharp'"),
        ("name\trelease_date\n1abc\t3.2.01\n", "YYYY-MM-DD"),
        ("name\trelease_date\n1abc\t2018-30-04\n", "YYYY-MM-DD, found '2018-30-04'"),
    ],
)
def test_damaged_index_is_an_error_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_index(write(tmp_path / "index.tsv", text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"1abc_A": {"seq": "MK"}', "is not valid JSON"),
        ("[]", "must map names"),
        ('{"1abc_A": {"resolution": 1}}', r"record '1abc_A'\): lacks a sequence"),
        ('{"1abc_A": {"seq": "MK", "cluster_size": "big"}}', "whole number"),
        ('{"1abc_A": {"seq": "MK", "resolution": -1}}', "number of Å"),
    ],
)
def test_damaged_chain_data_cache_is_an_error_with_its_chain(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_chain_data_cache(write(tmp_path / "cache.json", text))


def test_alignment_of_another_chain_is_refused(tmp_path: Path) -> None:
    """Modified residues and ligands at the end may be written in another way; another sequence may not."""
    chain = "MKVLAAGITWWHHKKPPMMQ"
    modified = write(tmp_path / "modified.a3m", a3m("E" + chain[1:] + "X", "-" + chain[1:-1] + "aA-"))
    msa = read_chain_msa(modified, chain)
    assert msa.sequences == (chain, "-" + chain[1:-1] + "A")
    assert msa.deletions.shape == (2, 20)
    assert msa.deletions[1, 19] == 1
    for other in ("EE" + chain[2:], chain + "Q", chain[:-1]):
        path = write(tmp_path / "other.a3m", a3m(other))
        with pytest.raises(InputError, match=r"other\.a3m.*another sequence"):
            read_chain_msa(path, chain)


def test_chain_that_is_not_in_the_file_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    write(tmp_path / "x.pdb", pdb_text({"A": "MKVLA", "B": "WWHHK"}))
    write(tmp_path / "index.tsv", "name\tchain\tsequence\nx\tQ\tMKVLA\n")
    (entry,) = open_dataset(tmp_path)
    with pytest.raises(InputError, match="no chain 'Q'; its chains are A, B"):
        read_entry(entry)


def test_residues_of_low_plddt_are_masked(tmp_path: Path) -> None:
    write(tmp_path / "p.pdb", pdb_text({"A": "MKVLA"}, b_factors={1: 30.0, 2: 49.9, 3: 50.0}))
    (entry,) = open_dataset(tmp_path, source=DISTILLATION)
    chain = read_entry(entry).chain
    masked = mask_low_plddt(chain, 50.0)
    np.testing.assert_array_equal(masked.mask.sum(1), [0, 0, 4, 4, 4])
    assert not masked.positions[:2].any()
    np.testing.assert_array_equal(masked.positions[2:], chain.positions[2:])
    with pytest.raises(InputError, match="95"):
        mask_low_plddt(chain, 95.0)


CHAINS = {"A": "MKVLAAGIT", "B": "WWHHKKPPMM", "C": "MKVLAAGIT"}


def database_set(root: Path) -> Path:
    """Two chains with alignments in a database, and copies of the first without; returns the index."""
    write(root / "mmcifs" / "1abc.pdb", pdb_text(CHAINS))
    write(root / "mmcifs" / "2abc.pdb", pdb_text({"A": CHAINS["A"]}))
    files = {
        f"1abc_{chain}": {
            "uniref90_hits.a3m": a3m(CHAINS[chain], CHAINS[chain][::-1]),
            "uniprot_hits.a3m": a3m(CHAINS[chain]),
            "pdb70_hits.hhr": "hits",
        }
        for chain in "AB"
    }
    write(root / "duplicate_pdb_chains.txt", "1abc_C 1abc_A 2abc_A\n3abc_A 3abc_B\n")
    return alignment_database(root / "databases", files)


def test_alignments_lie_in_a_database(tmp_path: Path) -> None:
    """Of chains, of their duplicates, and of complexes, with their template hits."""
    index = database_set(tmp_path)
    found = open_dataset(tmp_path, layout="openfold", alignments=index)
    assert [entry.id for entry in found] == ["1abc_A", "1abc_B", "1abc_C", "2abc_A"]
    assert found.unreadable == ()
    rows = [read_entry(entry).alignments[0].sequences for entry in found]
    assert [len(row) for row in rows] == [2, 2, 2, 2]
    assert rows[0] == rows[2] == rows[3]
    assert all(entry.has_template_hits for entry in found)
    trimer, alone = group_complexes(found.entries)
    data = read_entry(trimer)
    assert [len(msas.unpaired) for msas in data.msas] == [1, 1, 1]
    assert data.msas[1].paired[0].sequences == (CHAINS["B"],)
    assert {path.name for path in trimer.template_hits(data.chains).values()} == {"pdb70_hits.hhr"}
    assert len(trimer.template_hits(data.chains)) == 2
    assert alone.has_template_hits


def test_chains_of_one_file_have_their_own_files_in_a_database(tmp_path: Path) -> None:
    """Of a plain folder, whose chains are only known once the file has been read; of complexes as well."""
    write(tmp_path / "data" / "two.pdb", pdb_text({"A": CHAINS["A"], "B": CHAINS["B"]}))
    files = {f"two_{name}": {"uniref90_hits.a3m": a3m(CHAINS[name], CHAINS[name])} for name in "AB"}
    found = open_dataset(tmp_path / "data", alignments=alignment_database(tmp_path / "databases", files))
    assert [entry.id for entry in found] == ["two_A", "two_B"]
    for entry in found:
        assert [len(msa.sequences) for msa in read_entry(entry).alignments] == [2]
    (whole,) = group_complexes(found.entries)
    assert [len(msas.unpaired) for msas in read_entry(whole).msas] == [1, 1]


def test_the_cache_reads_a_database(tmp_path: Path) -> None:
    """As it reads files; what changes there is read again."""
    first = open_dataset(tmp_path, layout="openfold", alignments=database_set(tmp_path))[0]
    cache = FeatureCache(tmp_path / "cache")
    for _ in range(2):
        assert cache.read(first).alignments[0].sequences[1] == CHAINS["A"][::-1]
    assert (cache.hits, cache.misses) == (1, 1)
    database = tmp_path / "databases" / "alignments.db"
    database.write_bytes(database.read_bytes().replace(b"TIGAALVKM", b"TIGAALVKW"))
    assert cache.read(first).alignments[0].sequences[1] == "TIGAALVKW"
    assert cache.misses == 2


def test_duplicates_share_the_folder_of_one(tmp_path: Path) -> None:
    """Also as chains of a complex; a group without alignments has no chains, and an own folder counts first."""
    write(tmp_path / "mmcifs" / "1abc.pdb", pdb_text(CHAINS))
    write(tmp_path / "mmcifs" / "2abc.pdb", pdb_text({"A": CHAINS["A"]}))
    write(tmp_path / "raw" / "2abc_A" / "a3m" / "uniref90_hits.a3m", a3m(CHAINS["A"], CHAINS["A"][::-1]))
    write(tmp_path / "raw" / "2abc_A" / "hhr" / "pdb70_hits.hhr", "hits")
    write(tmp_path / "duplicates.txt", "1abc_A 1abc_C 2abc_A\n1abc_B 9abc_A\n")
    options = {"alignments": tmp_path / "raw", "duplicates": tmp_path / "duplicates.txt"}
    found = open_dataset(tmp_path, layout="openfold", **options)
    assert [entry.id for entry in found] == ["1abc_A", "1abc_C", "2abc_A"]
    assert [entry.alignment_name for entry in found] == ["2abc_A", "2abc_A", ""]
    assert all(len(read_entry(entry).alignments[0].sequences) == 2 for entry in found)
    assert all(entry.has_template_hits for entry in found)
    whole = group_complexes(found.entries)[0]
    data = read_entry(whole)
    assert [len(msas.unpaired) for msas in data.msas] == [1, 0, 1]
    assert list(whole.template_hits(data.chains)) == [CHAINS["A"]]


def test_where_alignments_are_is_said_or_refused(tmp_path: Path) -> None:
    indexed_folder(tmp_path / "data")
    write(tmp_path / "others" / "1aaa_A.a3m", a3m("MKVLAAGIT", "MKVLAAGIT", "MKVLAAGI-"))
    found = open_dataset(tmp_path / "data", split="train", alignments=tmp_path / "others")
    assert len(read_entry(found[0]).alignments[0].sequences) == 3
    with pytest.raises(
        ConfigError, match=r"the alignments '.*none' do not exist; data\.alignments names a folder"
    ):
        open_dataset(tmp_path / "data", alignments=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"data\.duplicates belongs to data\.layout=openfold"):
        open_dataset(tmp_path / "data", duplicates=tmp_path / "others")
    openfold_folder(tmp_path / "openfold")
    with pytest.raises(ConfigError, match=r"the table of duplicates .* does not exist"):
        open_dataset(tmp_path / "openfold", layout="openfold", duplicates=tmp_path / "none")
    for text in ("1abc_A 1abc_B\n1abc_B 2abc_A\n", "1abc_A ../x\n"):
        write(tmp_path / "bad.txt", text)
        with pytest.raises(InputError, match="a name is repeated, or is not the name of a file"):
            read_duplicates(tmp_path / "bad.txt")


def test_a_pipe_among_structures_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "1abc.pdb")
    write(tmp_path / "2abc.pdb", "")

    assert _structure_files(tmp_path) == {"2abc": tmp_path / "2abc.pdb"}
