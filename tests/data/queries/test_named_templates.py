"""Templates that inputs of other programs name: the residues that they pair, and structures aligned by sequence."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastfold.data.queries.jobs import Entity, QueryJob
from fastfold.data.queries.named_templates import boltz_templates, entity_templates
from fastfold.data.queries.read import read_targets
from fastfold.data.targets import Target
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder
from fastfold.errors import InputError
from fastfold.protein.residue_constants import atom_order, hhblits_letter_to_id
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry, position

MSA = f">q\n{QUERY}\n>h\n{HOMOLOGUE}\n"


def read(folder: Path, tree: Any, name: str = "in.json") -> tuple[list[Target], list[InputError]]:
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return read_targets([folder / name])


def af3(*templates: dict[str, Any]) -> dict[str, Any]:
    protein = {
        "id": "A",
        "sequence": QUERY,
        "unpairedMsa": MSA,
        "pairedMsa": "",
        "templates": list(templates),
    }
    return {"name": "t", "sequences": [{"protein": protein}], "dialect": "alphafold3", "version": 2}


def template(query: list[int], theirs: list[int], **fields: Any) -> dict[str, Any]:
    fields = fields or {"mmcif": entry({"X": HOMOLOGUE}, missing=[1, 2, 3])}
    return {**fields, "queryIndices": query, "templateIndices": theirs}


def test_residues_are_paired_as_the_input_says(tmp_path: Path) -> None:
    """Places in the template count residues without atoms, as AlphaFold 3 documents."""
    (target,), errors = read(tmp_path, af3(template([0, 5, 9], [10, 3, 2])))
    assert not errors
    assert target.templates is not None
    (found,) = target.templates
    assert found is not None
    aatype, positions, mask = (
        found[f"template_{name}"][0] for name in ("aatype", "all_atom_positions", "all_atom_masks")
    )
    letters = {0: HOMOLOGUE[10], 5: HOMOLOGUE[3], 9: HOMOLOGUE[2]}
    expected = [hhblits_letter_to_id[letters.get(place, "-")] for place in range(len(QUERY))]
    assert aatype.argmax(-1).tolist() == expected
    assert np.flatnonzero(mask.any(-1)).tolist() == [0, 5]  # the third residue has no atoms
    for mine, theirs in ((0, 11), (5, 4)):
        np.testing.assert_allclose(positions[mine, atom_order["CA"]], position(theirs, "CA"), atol=1e-3)
    assert found["template_domain_names"].tolist() == [b"template_1_X"]


def test_files_may_be_packed_and_four_are_used(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "1abc.cif.xz").write_bytes(lzma.compress(entry({"B": HOMOLOGUE}).encode()))
    one = template(list(range(40)), list(range(40)), mmcifPath="x/1abc.cif.xz")
    thin = template([0], [0])
    (target,), errors = read(tmp_path, af3(thin, one, one, one, one, one))
    assert not errors
    assert target.templates is not None
    assert target.templates[0] is not None
    assert target.templates[0]["template_domain_names"].tolist() == [b"1abc_B"] * 4
    assert target.warnings == (
        "entry 1, template 1 is left out: the aligned part has 0 atoms, fewer than 5",
        "entry 1: 4 of 6 templates are used, the networks take no more",
    )


def test_an_empty_list_and_null_are_no_templates(tmp_path: Path) -> None:
    (target,), _ = read(tmp_path, af3())
    assert target.templates is None
    assert entity_templates(QueryJob("x", "t"), None, QUERY, 1) == (None, [])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mmcif": ""}, "template 1: expected one of 'mmcif' and 'mmcifPath'"),
        ({"mmcifPath": "none.cif"}, "template 1: expected one of 'mmcif' and 'mmcifPath'"),
        ({"mmcif": None, "mmcifPath": "none.cif"}, "template 1, 'mmcifPath': no such file: 'none.cif'"),
        ({"mmcif": entry({"A": QUERY, "B": QUERY})}, "of one protein chain, found 2 (A, B)"),
        ({"mmcif": "data_x\nloop_\n"}, "entry 1, template 1: "),
        ({"mmcif": 5}, "'mmcif': expected the text of an mmCIF file"),
        ({"queryIndices": [0, 40]}, "'queryIndices': 40 is beyond the 40 residues"),
        ({"templateIndices": [0, 44]}, "'templateIndices': 44 is beyond the 40 residues"),
        ({"templateIndices": [0, 0]}, "'templateIndices': a residue is repeated"),
        ({"templateIndices": [0]}, "as many queryIndices as templateIndices, found 2 and 1"),
        ({"templateIndices": [0, -1]}, "'templateIndices': expected whole numbers from 0"),
        ({"queryIndices": "0"}, "'queryIndices': expected a list of whole numbers"),
    ],
)
def test_wrong_templates_are_refused_with_the_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    targets, (error,) = read(tmp_path, af3(template([0, 1], [0, 1]) | change))
    assert not targets
    assert str(error).startswith(f"{tmp_path / 'in.json'} (record 't'): entry 1, template 1")
    assert said in str(error)


def boltz(folder: Path, templates: str, *sequences: str) -> tuple[list[Target], list[InputError]]:
    text = "sequences:\n"
    for name, sequence in zip("PQ", sequences or (QUERY,), strict=False):
        text += f"- protein: {{id: {name}, sequence: {sequence}}}\n"
    return read(folder, f"{text}templates:\n{templates}", "t.yaml")


def test_structures_of_boltz_equal_those_of_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "1abc.cif").write_text(entry({"A": HOMOLOGUE, "B": QUERY[5:35]}))
    (target,), errors = boltz(tmp_path, "- cif: 1abc.cif\n")
    assert not errors
    assert target.templates is not None
    (found,) = target.templates
    assert found is not None
    finder = TemplateFinder(TemplateOptions(structures=(tmp_path / "1abc.cif",)))
    (expected,) = finder.find(target, [([], [])])
    features = expected.features()
    assert sorted(expected.templates[i].name for i in range(2)) == ["1abc_A", "1abc_B"]
    assert found.keys() == features.keys()
    for name, value in features.items():
        np.testing.assert_array_equal(found[name], value, name)


def test_chains_of_boltz_are_chosen_by_their_names(tmp_path: Path) -> None:
    """Those of mmCIF are the file's own, L1 and L2 here, and those of PDB have a number."""
    (tmp_path / "1abc.cif").write_text(entry({"A": QUERY, "B": QUERY}))
    other = HOMOLOGUE[::-1]
    (target,), errors = boltz(tmp_path, "- cif: 1abc.cif\n  chain_id: P\n  template_id: L2\n", QUERY, other)
    assert not errors
    assert target.templates is not None
    assert target.templates[1] is None
    assert target.templates[0] is not None
    assert target.templates[0]["template_domain_names"].tolist() == [b"1abc_B"]
    entities = [Entity(QUERY, ["P"]), Entity(other, ["Q"])]
    job = QueryJob(tmp_path / "t.yaml", "t")
    found, _ = boltz_templates(job, [{"cif": "1abc.cif", "chain_id": ["P"], "template_id": ["L1"]}], entities)
    assert found[0].templates is not None
    assert found[0].templates["template_domain_names"].tolist() == [b"1abc_A"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- cif: none.cif\n", "template 1, 'cif': no such file: 'none.cif'"),
        (
            "- cif: 1abc.cif\n  force: true\n",
            "template 1: 'force' needs a 'threshold' over 0 Å, found 'None'",
        ),
        ("- cif: 1abc.cif\n  force: true\n  threshold: 0\n", "needs a 'threshold' over 0 Å, found '0'"),
        ("- cif: 1abc.cif\n  force: true\n  threshold: .inf\n", "needs a 'threshold' over 0 Å, found 'inf'"),
        ("- cif: 1abc.cif\n  force: 2\n", "template 1, 'force': expected true or false, found '2'"),
        ("- cif: 1abc.cif\n  chain_id: Z\n", "'chain_id': 'Z' is not a protein; expected one of P"),
        ("- cif: 1abc.cif\n  template_id: Z\n", "'template_id': 'Z' is not in the file; expected one of L1"),
        (
            "- cif: 1abc.cif\n  chain_id: P\n  template_id: [L1, L1]\n",
            "a template_id for each chain_id, found 2 and 1",
        ),
        ("- name: x\n", "template 1: expected one of 'cif' and 'pdb' with a path"),
        ("  a: 1\n", "'templates': expected a list"),
    ],
)
def test_wrong_lists_of_boltz_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "1abc.cif").write_text(entry({"A": QUERY}))
    targets, (error,) = boltz(tmp_path, text)
    assert not targets
    assert said in str(error)


def test_a_forced_template_has_the_atoms_of_the_best_aligned_chain(tmp_path: Path) -> None:
    """Copies of a protein keep to it each, and a protein that does not align to none."""
    (tmp_path / "1abc.cif").write_text(entry({"A": QUERY[5:35], "B": HOMOLOGUE}, missing=[3]))
    other = "GSGSGSGSGSGSGSGSGSGS"
    (target,), errors = boltz(tmp_path, "- cif: 1abc.cif\n  force: true\n  threshold: 2\n", QUERY, other)
    assert not errors
    ((one,), none) = target.forced_templates
    assert none == ()
    assert (one.name, one.threshold) == ("1abc_B", 2.0)
    assert np.flatnonzero(~one.mask).tolist() == [2]
    np.testing.assert_allclose(one.positions[9], position(10, "CA"), atol=1e-3)
    assert target.templates is not None
    assert target.templates[0] is not None
    assert not any("'force'" in warning for warning in target.warnings)
    listed = [{"cif": "1abc.cif", "force": True, "threshold": 1.5}]
    found, warnings = boltz_templates(QueryJob(tmp_path / "t.yaml", "t"), listed, [Entity(QUERY, ["P", "Q"])])
    assert [one.threshold for one in found[0].forced] == [1.5]
    assert "not the chains to each other" in warnings[-1]


def test_a_forced_template_without_a_chain_that_aligns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1abc.cif").write_text(entry({"A": "GSGSGSGSGSGSGSGSGSGS"}))
    targets, (error,) = boltz(tmp_path, "- cif: 1abc.cif\n  force: true\n  threshold: 2\n")
    assert not targets
    assert "template 1: 'force' needs a chain that aligns; entry 1: 0 used of 1 found" in str(error)


def test_an_unrelated_structure_is_named(tmp_path: Path) -> None:
    (tmp_path / "1abc.cif").write_text(entry({"A": "GSGSGSGSGSGSGSGSGSGS"}))
    (target,), _ = boltz(tmp_path, "- cif: 1abc.cif\n")
    assert target.templates is None
    assert "1abc_A (no part of its sequence aligns with the chain)" in target.warnings[0]
