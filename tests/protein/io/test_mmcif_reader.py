"""mmCIF structures: the real entry of the official program, invented ones, and files of this package."""

from __future__ import annotations

import gzip
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastfold.errors import InputError
from fastfold.protein import residue_constants as rc
from fastfold.protein.io.mmcif_reader import parse_mmcif
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.io.pdb_writer import to_pdb
from fastfold.protein.io.read import read_structure
from fastfold.protein.protein import Protein, chain_name
from fastfold.protein.structure import Structure
from tests.conftest import require_shared
from tests.helpers.structure_texts import BACKBONE
from tests.helpers.structures import proteins

ITEMS = [
    *(
        "group_PDB",
        "id",
        "label_atom_id",
        "label_alt_id",
        "label_comp_id",
        "label_asym_id",
        "label_entity_id",
    ),
    *("label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy", "B_iso_or_equiv"),
    *("auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num"),
]
ATOMS = """\
ATOM 1 N . MET A 1 2 ? 0 0 0 1 5 11 heavy 1
HETATM 2 SE . MSE A 1 3 ? 1.5 0 0 1 5 12 heavy 1
ATOM 3 CA A SER A 1 5 A 2 0 0 0.4 5 13 heavy 1
ATOM 4 CA B SER A 1 5 A 3 0 0 0.6 5 13 heavy 1
HETATM 5 "C5'" . ZZZ A 1 6 ? 4 0 0 1 5 14 heavy 1
HETATM 6 CB . ZZZ A 1 6 ? 4 0 0 1 5 14 heavy 1
HETATM 7 O . HOH B 3 . ? 9 0 0 1 5 90 heavy 1
HETATM 8 CA . CA C 4 . ? 9 0 0 1 5 91 heavy 1
ATOM 9 C4 . DA D 2 1 ? 9 0 0 1 5 1 D 1
ATOM 10 N . MET E 1 2 ? 7 0 0 1 5 11 heavy 1
ATOM 11 N . MET A 1 2 ? 0 0 0 1 5 11 heavy 2
"""
HEAD = """\
# a comment
data_TEST
_exptl.method 'ELECTRON MICROSCOPY'
_refine.ls_d_res_high ?
_em_3d_reconstruction.resolution
2.9
loop_
_pdbx_audit_revision_history.ordinal
_pdbx_audit_revision_history.revision_date
1 2011-05-04 2 2008-02-01
loop_
_entity_poly.entity_id
_entity_poly.type
_entity_poly.pdbx_seq_one_letter_code
1 polypeptide(L)
;GM(MSE)AS
loop_
;
2 polydeoxyribonucleotide 'A'
loop_
_entity_poly_seq.entity_id
_entity_poly_seq.num
_entity_poly_seq.mon_id
1 1 GLY
1 2 MET
1 3 MSE
1 4 ALA
1 5 SER
1 5 THR
1 6 ZZZ
2 1 DA
loop_
_pdbx_struct_mod_residue.label_comp_id
_pdbx_struct_mod_residue.parent_comp_id
ZZZ TRP
"""


def cif(head: str = HEAD, atoms: str = ATOMS, items: list[str] | None = None) -> str:
    names = "".join(f"_atom_site.{item}\n" for item in items or ITEMS)
    return f"{head}loop_\n{names}{atoms}"


def read(folder, text: str) -> Structure:
    path = folder / "test.cif"
    path.write_text(text, encoding="utf-8")
    return read_structure(path)


def test_invented_entry(tmp_path):
    """Sequence, masks, modified residues, alternates, names of chains and header, all in one file."""
    structure = read(tmp_path, cif())
    assert (structure.resolution, structure.method) == (2.9, "electron microscopy")
    assert structure.release_date == "2008-02-01"
    first, second = structure.chains
    assert (first.chain_id, second.chain_id) == ("heavy", "E")
    assert first.sequence == second.sequence == "GMMASW"
    assert first.mask.any(1).tolist() == [False, True, True, False, True, True]
    assert first.residue_index.tolist() == [0, 1, 2, 3, 4, 5]
    assert first.positions[2, rc.atom_order["SD"], 0] == 1.5
    assert first.positions[4, rc.atom_order["CA"], 0] == 3
    assert second.mask.sum() == 1
    assert "several models" in structure.warnings[0]


def test_without_entities(tmp_path):
    """A bare table of atoms: sequence as observed, gaps from the residue numbers."""
    atoms = "".join(f"ATOM {name} ALA A {n} {n} 0 0 \n" for n in (4, 5, 9) for name in ("N", "CA"))
    items = [ITEMS[i] for i in (0, 2, 4, 5, 14, 9, 10, 11)]
    (chain,) = read(tmp_path, cif("data_x\n", atoms, items)).chains
    assert (chain.chain_id, chain.sequence, chain.residue_index.tolist()) == ("A", "AAA", [4, 5, 9])


def test_ligand_without_sequence_numbers_takes_no_name(tmp_path):
    """Without label_seq_id a ligand of chain A under a label of its own neither joins nor renames a chain."""
    atoms = "".join(f"ATOM {name} ALA A A 1 0 0 {z}\n" for z, name in enumerate(("N", "CA")))
    atoms += "HETATM O LIG B A 90 0 0 5\n" + atoms.replace(" A A 1", " C B 1")
    items = [ITEMS[i] for i in (0, 2, 4, 5, 15, 14, 9, 10, 11)]
    chains = read(tmp_path, cif("data_x\n", atoms, items)).chains
    assert [(chain.chain_id, chain.sequence) for chain in chains] == [("A", "A"), ("B", "A")]


PYMOL = [ITEMS[i] for i in (0, 2, 4, 5, 7, 8, 15, 9, 10, 11)]


def pymol(*residues: str) -> str:
    """An mmCIF file of bonded residues as PyMOL writes it; each ``LABEL NUMBER INSERTION AUTHOR``."""
    rows = [
        f"ATOM {name} ALA {residue} {3.8 * place + x} 0 0\n"
        for place, residue in enumerate(residues)
        for name, x in BACKBONE.items()
    ]
    return cif("data_obj01\n", "".join(rows), PYMOL)


@pytest.mark.parametrize("first", [1, 101])
def test_chains_without_labels_have_their_authors_names(tmp_path, first):
    """PyMOL's label_asym_id is '.': chains A and B stay two, whether their numbers overlap or not."""
    residues = [". 1 ? A", ". 2 ? A", f". {first} ? B"]
    chains = read(tmp_path, pymol(*residues)).chains
    assert [(chain.chain_id, chain.sequence) for chain in chains] == [("A", "AA"), ("B", "A")]
    assert chains[1].author_numbers == (str(first),)


@pytest.mark.parametrize("first", [1, 101])
def test_of_two_polymers_with_one_author_s_name_the_second_keeps_its_label(tmp_path, first):
    """Without places in a sequence, too, which merged them where their numbers do not overlap."""
    text = pymol("P 1 ? A", "P 2 ? A", f"Q {first} ? A").replace("label_seq_id", "auth_seq_id")
    chains = read(tmp_path, text).chains
    assert [(chain.chain_id, chain.sequence) for chain in chains] == [("A", "AA"), ("Q", "A")]


def test_without_author_numbers_and_sequence_the_label_is_the_author_number(tmp_path):
    """Numbers below 1 and insertion codes are read as in a PDB file."""
    (chain,) = read(tmp_path, pymol(*(f". {number} A" for number in ("-4 ?", "20 ?", "20 A", "20 B")))).chains
    assert chain.author_numbers == ("-4", "20", "20A", "20B")
    assert chain.residue_index.tolist() == [-4, -3, -2, -1]


def test_without_author_numbers_the_label_is_a_place_in_a_sequence_that_is_listed(tmp_path):
    items = [item for item in ITEMS if item != "auth_seq_id"]
    atoms = "ATOM 1 N . MET A 1 2 ? 0 0 0 1 5 heavy 1\n"
    (chain,) = read(tmp_path, cif(atoms=atoms, items=items)).chains
    assert chain.sequence == "GMMASW"
    assert chain.mask.any(1).tolist() == [False, True, False, False, False, False]


def test_a_chain_without_places_is_kept_beside_one_with_places(tmp_path):
    """Chain B lacks label_seq_id, its selenomethionine too; the ligand of chain A stays out."""
    atoms = "".join(f"ATOM {name} ALA A A 1 1 0 0 {z}\n" for z, name in enumerate(("N", "CA")))
    atoms += "ATOM CA ALA B B ? 7 0 0 5\nHETATM CA MSE B B ? 8 0 0 9\nHETATM CA GLY C A . 9 0 0 5\n"
    items = [ITEMS[i] for i in (0, 2, 4, 5, 15, 7, 14, 9, 10, 11)]
    chains = read(tmp_path, cif("data_x\n", atoms, items)).chains
    assert [(chain.chain_id, chain.sequence) for chain in chains] == [("A", "A"), ("B", "AM")]
    assert chains[1].author_numbers == ("7", "8")


def test_a_polymer_that_the_list_of_polymers_lacks_is_kept(tmp_path):
    """Atoms of a second program stand behind a header that describes the first chain only."""
    atoms = "ATOM 1 N . MET A 1 2 ? 0 0 0 1 5 11 A 1\nATOM 2 N . SER B 7 1 ? 9 0 0 1 5 1 B 1\n"
    assert [chain.sequence for chain in read(tmp_path, cif(atoms=atoms)).chains] == ["GMMASW", "S"]


def test_the_first_data_block_with_atoms_is_read_and_said(tmp_path):
    first = pymol(". 1 ? A", ". 2 ? A")
    second = first.replace("obj01", "obj02")
    structure = read(tmp_path, "data_settings\n_entry.id x\n" + first + second)
    assert [chain.sequence for chain in structure.chains] == ["AA"]
    assert "2 data blocks with atoms; the first one is read" in structure.warnings[0]


def test_real_entry_equals_the_official_labels():
    """Chain A of 2Q2K is, bit for bit, what the official program trains on."""
    structure = read_structure(require_shared("data", "2q2k", "2q2k.cif"), chain_ids=["A"])
    with np.load(require_shared("oracles", "monomer_ptm", "features.npz"), allow_pickle=False) as features:
        (chain,) = structure.chains
        assert np.array_equal(chain.positions, features["all_atom_positions"][0])
        assert np.array_equal(chain.mask, features["all_atom_mask"][0])
        assert np.array_equal(rc.sequence_to_aatype(chain.sequence), features["aatype"][0])
        assert np.array_equal(chain.residue_index, features["residue_index"][0])
        assert structure.resolution == features["resolution"][0]
    assert structure.method == "x-ray diffraction"


def assert_equals(structure: Structure, protein: Protein, names: list[str]) -> None:
    """Chains with atoms are the same, but for NH1 and NH2, which invented arginines have at random."""
    chains = [c for c in protein.chains if protein.atom_mask[c].any()]
    assert [c.chain_id for c in structure.chains] == names
    for found, part in zip(structure.chains, chains, strict=True):
        assert found.sequence == rc.aatype_to_sequence(protein.aatype[part])
        slots = np.setdiff1d(np.arange(37), [rc.atom_order["NH1"], rc.atom_order["NH2"]])
        mask = protein.atom_mask[part][:, slots]
        assert np.array_equal(found.mask[:, slots], mask)
        expected = protein.atom_positions[part][:, slots] * mask[..., None]
        # Three decimals, and what a float32 of that size can hold.
        assert (np.abs(found.positions[:, slots] - expected) < 6e-4 + np.spacing(np.abs(expected))).all()
        assert found.mask.sum() == protein.atom_mask[part].sum()


FILES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FILES
@given(proteins())
def test_written_modelcif_is_read_back(tmp_path, protein):
    """Whatever the package writes as mmCIF comes back: every chain, residue and atom, missing ones masked."""
    text = to_modelcif(
        protein, entry_id="x", title="x", software_version="1", model_name="m", plddt=np.ones(len(protein))
    )
    (tmp_path / "x.cif.gz").write_bytes(gzip.compress(text.encode()))
    names = [chain_name(i) for i, c in enumerate(protein.chains) if protein.atom_mask[c].any()]
    assert_equals(read_structure(tmp_path / "x.cif.gz"), protein, names)


@FILES
@given(proteins())
def test_written_pdb_is_read_back(tmp_path, protein):
    """The same for PDB files, whose SEQRES and REMARK 465 give missing residues their places."""
    lengths = [c.stop - c.start for c in protein.chains]
    numbers = np.concatenate([np.arange(1, n + 1) for n in lengths])
    protein = Protein(
        protein.atom_positions,
        protein.atom_mask,
        protein.aatype,
        numbers,
        protein.chain_index,
        protein.b_factors,
    )
    (tmp_path / "x.pdb").write_text(to_pdb(protein))
    names = [chain_name(i) for i, c in enumerate(protein.chains) if protein.atom_mask[c].any()]
    assert_equals(read_structure(tmp_path / "x.pdb"), protein, names)


LAST = cif().count("\n")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (cif()[:-20], LAST, "truncated"),
        (cif().replace("ATOM 1 N .", "ATOM 1 N", 1), LAST - ATOMS.count("\n") + 1, "expected 17 values"),
        (cif().split("loop_\n;")[0], 17, "unterminated text field"),
        (cif().replace("'A'", "'A"), 19, "unterminated 'string'"),
        (cif().replace("2.9\n", "", 1), 5, "expected a value of"),
        (cif().replace("1 2 ? 0 0 0", "1 2 ? a 0 0", 1), None, "not a number"),
        (cif().replace("1 2 ? 0 0 0", "1 2 ? 1_0 0 0", 1), None, "not a number"),
        (cif().replace("1 2 ? 0 0 0", "1 0_2 ? 0 0 0", 1), None, "not a number"),
        (cif().replace("1 2 ? 0 0 0", "1 2 ? nan 0 0", 1), None, "not finite"),
        (cif().replace("1 2 ? 0 0 0", "1 7 ? 0 0 0", 1), None, "outside the 6 residues"),
        (cif(items=["x", *ITEMS[1:2], "y", *ITEMS[3:]]), None, "lacks label_atom_id"),
        (cif(atoms=""), None, "no atoms"),
        (HEAD, None, "no _atom_site"),
        ("data_x\nvalue\n", 2, "unexpected 'value'"),
        ("data_x\nloop_\nvalue\n", 3, "unexpected 'value'"),
    ],
)
def test_damaged_files_are_named_by_line(tmp_path, text, line, message):
    with pytest.raises(InputError, match=message) as caught:
        read(tmp_path, text)
    assert line is None or caught.value.line == line
    assert caught.value.path == tmp_path / "test.cif"


@FILES
@given(data=st.data())
def test_damaged_text_never_breaks_the_reader(tmp_path, data):
    """Any piece of the file replaced or removed gives a structure or a clear error, nothing else."""
    text = cif()
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 40)))
    piece = data.draw(st.text(alphabet="_;'\"# \nadloopt.?1-\0eN", max_size=8))
    (tmp_path / "x.cif").write_text(text[:start] + piece + text[stop:], encoding="utf-8")
    try:
        structure = read_structure(tmp_path / "x.cif")
    except InputError:
        return
    for chain in structure.chains:
        assert len(chain) == len(chain.mask) == len(chain.residue_index)
        assert np.all(np.diff(chain.residue_index) > 0)


def test_records_are_handed_over_as_the_file_has_them():
    """Before any decision: places in the polymer, alternates, waters; no ligand, no water, no second model."""
    found = parse_mmcif((cif() + "#\n").splitlines(), path="x.cif")
    assert (found.resolution, found.method) == (2.9, "electron microscopy")
    assert (found.release_date, found.waters) == ("2008-02-01", 1)
    assert found.warnings == ["The file has several models; the first one is read."]
    assert list(found.chains) == ["heavy", "D", "E"]  # two polymers call themselves heavy, D is DNA
    chain = found.chains["heavy"]
    assert chain.protein is True
    assert chain.sequence == ["GLY", "MET", "MSE", "ALA", "SER", "ZZZ"]
    assert {place: (r.number, r.insertion, r.names) for (place, _), r in chain.residues.items()} == {
        1: (11, "", ["MET"]),
        2: (12, "", ["MSE"]),
        4: (13, "A", ["SER"]),
        5: (14, "", ["ZZZ"]),
    }
    assert chain.residues[4, ""].atoms == [
        ("SER", "A", "CA", 0.4, 2.0, 0.0, 0.0, 5.0),
        ("SER", "B", "CA", 0.6, 3.0, 0.0, 0.0, 5.0),
    ]
    assert not any(residue.hetero for residue in chain.residues.values())  # MSE stands in the polymer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("MET A 1 2 ? 0 0", "MET A 1 2 ? x 0"), "position or residue number of an atom is not a number"),
        (
            ("MET A 1 2 ? 0 0", "MET A 1 2 ? ? 0"),
            "position or residue number of an atom is not a number|not finite",
        ),
        (("MET A 1 2 ? 0 0", "MET A 1 2 ? 1e9 0"), "not finite or too large"),
        (("MET A 1 2 ? 0 0", "MET A 1 9 ? 0 0"), "label_seq_id 9 is outside the 6 residues"),
        (("MET A 1 2 ? 0 0", "MET A 1 0 ? 0 0"), "label_seq_id 0 is outside"),
        (("_atom_site.Cartn_y\n", "_atom_site.other\n"), "_atom_site lacks cartn_y"),
    ],
)
def test_errors_name_the_line(change, message):
    assert change[0] in cif()
    with pytest.raises(InputError, match=message) as caught:
        parse_mmcif(cif().replace(*change, 1).splitlines(), path="x.cif")
    assert re.match(r"x\.cif:\d+: ", str(caught.value))


def test_a_file_without_atoms_is_refused():
    with pytest.raises(InputError, match=r"contains no atoms \(no _atom_site table\)"):
        parse_mmcif(["data_x", "_exptl.method NMR"], path="x.cif")
