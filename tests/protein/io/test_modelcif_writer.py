"""ModelCIF: other programs read the same structure, sequence and confidence that went in."""

from __future__ import annotations

import io
import itertools

import gemmi
import ihm.format
import modelcif.protocol
import modelcif.reader
import numpy as np
import pytest
from Bio.PDB import MMCIFParser
from Bio.PDB.MMCIF2Dict import MMCIF2Dict
from hypothesis import given, settings
from hypothesis import strategies as st

from fastfold.errors import OutputError
from fastfold.protein.io.modelcif_writer import to_modelcif
from fastfold.protein.protein import Protein, chain_name
from tests.helpers.structures import assert_same_structure, make_protein, protein_from_biopython, proteins


def write(protein: Protein, **changes: object) -> str:
    options: dict[str, object] = {
        "entry_id": "target",
        "title": "A title",
        "software_version": "1.2.3",
        "model_name": "model_1_ptm",
        "plddt": np.linspace(10, 90, len(protein)),
    }
    return to_modelcif(protein, **(options | changes))


def read_system(text: str) -> modelcif.System:
    (system,) = modelcif.reader.read(io.StringIO(text))
    return system


@settings(max_examples=25, deadline=None)
@given(proteins())
def test_biopython_reads_the_same_structure(protein):
    structure = MMCIFParser(QUIET=True).get_structure("x", io.StringIO(write(protein)))
    names = [chain_name(i) for i in range(len(protein.chains))]
    assert_same_structure(protein_from_biopython(structure, protein, names), protein)


def test_chains_of_one_sequence_share_an_entity():
    system = read_system(write(make_protein("ACD", "WY", "ACD")))
    assert [("".join(c.code for c in e.sequence), e.is_polymeric()) for e in system.entities] == [
        ("ACD", True), ("WY", True)
    ]  # fmt: skip
    assert [unit.entity._id for unit in system.asym_units] == ["1", "2", "1"]
    assert [unit.strand_id for unit in system.asym_units] == ["A", "B", "C"]
    assert [e.description for e in system.entities] == ["Protein, chains A, C", "Protein, chain B"]


def test_confidence_is_a_metric_of_each_residue_and_of_the_model():
    plddt = np.array([12.344, 56.789, 91.0, 99.999])
    text = write(make_protein("AC", "AC"), plddt=plddt, ptm=0.7126, iptm=0.25)
    ((model,),) = read_system(text).model_groups
    found = {(m.name, m.mode): [] for m in model.qa_metrics}
    for metric in model.qa_metrics:
        assert metric.software[0].name == "FastFold"
        place = (metric.residue.asym._id, metric.residue.seq_id) if metric.mode == "local" else ()
        found[metric.name, metric.mode].append((*place, metric.type, float(metric.value)))
    assert found == {
        ("pLDDT", "global"): [("pLDDT", round(plddt.mean(), 3))],
        ("pTM", "global"): [("pTM", 0.713)],
        ("ipTM", "global"): [("ipTM", 0.25)],
        ("pLDDT", "local"): [
            ("A", 1, "pLDDT", 12.344),
            ("A", 2, "pLDDT", 56.789),
            ("B", 1, "pLDDT", 91.0),
            ("B", 2, "pLDDT", 99.999),
        ],
    }


def test_aligned_error_is_a_metric_of_each_pair_if_asked_for():
    protein = make_protein("AC", "D")
    pae = np.arange(9.0).reshape(3, 3)
    ((model,),) = read_system(write(protein, pae=pae)).model_groups
    order = {("A", 1): 0, ("A", 2): 1, ("B", 1): 2}
    pairs = [m for m in model.qa_metrics if m.mode == "local-pairwise"]
    found = np.full((3, 3), np.nan)
    for m in pairs:
        first, second = ((r.asym._id, r.seq_id) for r in (m.residue1, m.residue2))
        found[order[first], order[second]] = m.value
    np.testing.assert_array_equal(found, pae)


def test_aligned_errors_of_a_complex_are_read_by_gemmi_with_their_residues():
    protein = make_protein("ACX", "AC")
    pae = np.random.default_rng(0).uniform(0, 31.75, (5, 5))
    block = gemmi.cif.read_string(write(protein, pae=pae)).sole_block()
    (metric,) = (row for row in block.find("_ma_qa_metric.", ["id", "type", "mode"]) if row[1] == "PAE")
    assert metric[2] == "local-pairwise"
    table = block.get_mmcif_category("_ma_qa_metric_local_pairwise.")
    assert table["ordinal_id"] == [str(number) for number in range(1, 17)]
    assert (set(table["model_id"]), set(table["metric_id"])) == ({"1"}, {metric[0]})
    # Mol* looks up both residues among the atoms, and takes a missing one for residue -1.
    residues = [("A", "1", "ALA"), ("A", "2", "CYS"), ("B", "1", "ALA"), ("B", "2", "CYS")]
    expected = np.round(pae, 2)[np.ix_([0, 1, 3, 4], [0, 1, 3, 4])]
    names = ("label_asym_id", "label_seq_id", "label_comp_id")
    first, second = (list(zip(*(table[f"{name}_{end}"] for name in names), strict=True)) for end in (1, 2))
    assert list(zip(first, second, strict=True)) == list(itertools.product(residues, residues))
    np.testing.assert_array_equal(np.array(table["metric_value"], float).reshape(4, 4), expected)


def test_software_and_protocol_say_how_the_model_was_made():
    system = read_system(write(make_protein("AC", "D"), details="network model_1_ptm, seed 3"))
    assert [(s.name, s.version) for s in system.software] == [("FastFold", "1.2.3"), ("AlphaFold", "2")]
    ((step,),) = [protocol.steps for protocol in system.protocols]
    assert isinstance(step, modelcif.protocol.ModelingStep)
    assert step.details == "network model_1_ptm, seed 3"
    assert step.software[0].name == "FastFold"
    assert list(step.input_data) == system.entities
    ((model,),) = system.model_groups
    assert model.name == "model_1_ptm"
    assert list(step.output_data) == [model]


def test_unknown_residues_stay_in_the_sequence_as_not_modelled():
    text = write(make_protein("XACXX", "XX", "D"))
    system = read_system(text)
    assert [[c.id for c in e.sequence] for e in system.entities] == [
        ["UNK", "ALA", "CYS", "UNK", "UNK"], ["UNK", "UNK"], ["ASP"]
    ]  # fmt: skip
    assert [unit.strand_id for unit in system.asym_units] == ["A", "B", "C"]
    # The table's convention: residues that are not modelled have no author residue name.
    table = MMCIF2Dict(io.StringIO(text))
    assert table["_pdbx_poly_seq_scheme.mon_id"] == ["UNK", "ALA", "CYS", "UNK", "UNK", "UNK", "UNK", "ASP"]
    assert table["_pdbx_poly_seq_scheme.auth_mon_id"] == ["?", "ALA", "CYS", "?", "?", "?", "?", "ASP"]
    assert table["_pdbx_poly_seq_scheme.pdb_seq_num"] == ["1", "2", "3", "4", "5", "1", "2", "1"]


def test_a_chain_of_one_residue_is_a_polymer():
    text = write(make_protein("A"))
    table = MMCIF2Dict(io.StringIO(text))
    assert table["_entity.type"] == ["polymer"]
    assert table["_atom_site.label_seq_id"] == ["1"] * 5


def test_residue_numbers_of_the_author_are_kept_beside_positions():
    table = MMCIF2Dict(io.StringIO(write(make_protein("GG", residue_index=[7, 100]))))
    assert table["_atom_site.label_seq_id"] == ["1"] * 4 + ["2"] * 4
    assert table["_atom_site.auth_seq_id"] == ["7"] * 4 + ["100"] * 4


def test_more_chains_than_a_pdb_file_can_name():
    protein = make_protein(*["G"] * 70, atom_positions=np.full((70, 37, 3), 123_456.75))
    structure = MMCIFParser(QUIET=True).get_structure("x", io.StringIO(write(protein)))
    assert [chain.id for chain in structure.get_chains()] == [chain_name(i) for i in range(70)]
    assert_same_structure(
        protein_from_biopython(structure, protein, [chain_name(i) for i in range(70)]), protein
    )


@settings(max_examples=60, deadline=None)
@given(
    st.one_of(
        st.text(max_size=40),
        st.sampled_from(
            [
                "#1",
                "_entry.id",
                "data_x",
                "LOOP_",
                ";\nx",
                "'",
                '"',
                "?",
                ".",
                "a'b\"c \\",
                "a' b\" c",
                "stop_ x",
                "é",
                "\0",
            ]
        ),
    )
)
def test_no_name_or_title_breaks_the_file(text):
    """Names come from sequence files; whatever they hold, the tables that follow are read whole."""
    file = write(make_protein("G"), entry_id=text, title=text, model_name=text, details=text)
    assert file.isascii()
    table = MMCIF2Dict(io.StringIO(file))
    assert len(table["_atom_site.id"]) == 4
    for key in ("_entry.id", "_struct.title", "_ma_model_list.model_name"):
        assert len(table[key]) == 1
        assert table[key][0]
    system = read_system(file)
    assert system.id == table["_entry.id"][0]
    assert len(system.model_groups) == 1
    ihm.format.CifReader(io.StringIO(file), {}).read_file()


def test_plain_titles_are_kept():
    table = MMCIF2Dict(
        io.StringIO(write(make_protein("G"), entry_id="T1024-D1.a", title="Lactase (2 chains)"))
    )
    assert table["_struct.title"] == ["Lactase (2 chains)"]
    assert table["_entry.id"] == ["T1024-D1.a"]


@pytest.mark.parametrize("score", ["plddt", "pae", "ptm", "iptm"])
def test_scores_that_are_not_finite_are_not_written(score):
    value = {"plddt": np.array([1.0, np.nan]), "pae": np.full((2, 2), np.inf), "ptm": np.nan, "iptm": np.nan}
    with pytest.raises(OutputError, match="is not finite"):
        write(make_protein("AC"), **{score: value[score]})


def test_coordinates_that_are_not_finite_are_not_written():
    protein = make_protein("AC")
    protein.atom_positions[1, 1] = np.nan
    with pytest.raises(OutputError, match="without a finite position"):
        write(protein)


@pytest.mark.parametrize("shapes", [{"plddt": np.zeros(3)}, {"pae": np.zeros((2, 3))}])
def test_scores_of_another_length_are_refused(shapes):
    with pytest.raises(ValueError, match="expected"):
        write(make_protein("AC"), **shapes)
