"""Templates of whole complexes: assignment of chains, superposition, and clashes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastfold.data.msa.msa import Msa
from fastfold.data.targets import target_from_sequence
from fastfold.data.templates.custom import CustomChain
from fastfold.data.templates.entry import EntryChain
from fastfold.data.templates.options import TemplateOptions
from fastfold.data.templates.source import TemplateFinder
from fastfold.data.templates.whole.complexes import (
    ChainMap,
    clashing_residues,
    complex_templates,
    overlapping_residues,
    read_whole,
)
from fastfold.errors import ConfigError, InputError
from fastfold.protein import residue_constants as rc
from tests.helpers.small_sets import pdb_text
from tests.helpers.template_files import HOMOLOGUE, QUERY, entry

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())
OTHER = "GSHWDEELNPKVCTLMARFGIYDNQSETHKWPLLVAGCRE"


def alone(sequence: str) -> Msa:
    """An alignment of one row."""
    return Msa((sequence,), np.zeros((1, len(sequence)), np.int32), ("q",))


def chain(name: str, sequence: str, shift: float = 0.0) -> CustomChain:
    """A chain of a file, with CA and backbone atoms on a spiral that is moved along x."""
    at = np.arange(len(sequence))
    ca = np.stack([5 * np.cos(at) + shift, 5 * np.sin(at), 3.0 * at], -1)
    positions = np.zeros((len(sequence), 37, 3), np.float32)
    mask = np.zeros((len(sequence), 37), np.float32)
    for k, atom in enumerate(("N", "CA", "C", "O")):
        positions[:, rc.atom_order[atom]] = ca + np.array([0.4 * k - 0.4, 0.3 * k**2, 0.2 * k])
        mask[:, rc.atom_order[atom]] = 1.0
    return CustomChain(name, f"{name}_{shift:g}", EntryChain(sequence, positions, mask))


def ca(template: object) -> np.ndarray:
    """CA positions of a template."""
    return template.positions[:, rc.atom_order["CA"]]  # type: ignore[attr-defined]


def test_chains_are_assigned_by_sequence() -> None:
    """In any order of the file; copies in its order; a missing chain has an empty template of the same number."""
    sequences = [QUERY, OTHER, QUERY, "WWWWHHHHWWWWHHHH"]
    file = [chain("x", OTHER, 60.0), chain("x", HOMOLOGUE, 0.0), chain("x", QUERY, 30.0)]
    found = complex_templates(sequences, [alone(one) for one in sequences], [file, file])
    assert [[one.frame for one in each.templates] for each in found] == [[1, 2]] * 4
    names = [each.templates[0].name for each in found]
    assert names == ["x_30", "x_60", "x_0", "x"]
    assert found[2].templates[0].sequence == HOMOLOGUE
    assert not found[3].templates[0].mask.any()
    assert "none of its chains aligns with this one" in found[3].describe()
    assert [one["name"] for one in found[3].report()["used"]] == ["x", "x"]
    apart = ca(found[1].templates[0]) - ca(found[0].templates[0])
    np.testing.assert_allclose(apart, np.broadcast_to([30.0, 0.0, 0.0], apart.shape), atol=1e-4)
    features = found[0].features()
    assert features["template_frame"].tolist() == [1, 2]
    assert found[0].sources == ("whole complex x",)


@pytest.mark.parametrize("is_split", [False, True])
def test_parts_of_a_protein_are_shown_where_they_are(is_split: bool) -> None:
    """Residues 1-20 and 21-40 of one chain, or of two that the file has in the other order; no part clashes itself."""
    whole = chain("x", QUERY)
    file = [whole]
    if is_split:
        file = [chain("x", QUERY[20:], 60.0), chain("x", QUERY[:20])]
    parts = [frozenset(range(20)), frozenset(range(20, 40))]
    profiles = [alone(QUERY)] * 2
    first, second = complex_templates([QUERY] * 2, profiles, [file], parts=parts)
    for shown, part, moved in ((first, parts[0], 0.0), (second, parts[1], 60.0 * is_split)):
        (template,) = shown.templates
        assert set(template.mapping) == part
        assert np.flatnonzero(template.mask.any(-1)).tolist() == sorted(part)
        source = ca(whole.chain)[sorted(part)] if not is_split else ca(chain("x", QUERY[:20], moved).chain)
        np.testing.assert_allclose(ca(template)[sorted(part)], source, atol=1e-4)
    copies = complex_templates([QUERY] * 2, profiles, [[whole]], parts=[parts[0]] * 2)
    assert [bool(each.templates[0].mask.any()) for each in copies] == [True, False]


def test_chains_of_other_files_are_superposed() -> None:
    """The monomer's atoms lie where the complex has the chain, and other chains stay."""
    file = [chain("x", HOMOLOGUE), chain("x", OTHER, 30.0)]
    monomer = chain("m", QUERY)
    turn = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    moved = (monomer.chain.positions @ turn.T + 100.0) * monomer.chain.mask[..., None]
    other = CustomChain("m", "m_A", EntryChain(QUERY, moved.astype(np.float32), monomer.chain.mask))
    sequences = [QUERY, OTHER]
    first, second = complex_templates(sequences, [alone(one) for one in sequences], [file], [other])
    template = first.templates[0]
    assert (template.name, template.sequence, template.frame) == ("m_A", QUERY, 1)
    assert first.outcomes[0].message == "superposed on x_0"
    np.testing.assert_allclose(ca(template), file[0].chain.positions[:, 1], atol=1e-4)
    np.testing.assert_allclose(ca(second.templates[0]), file[1].chain.positions[:, 1], atol=1e-4)


def test_chains_that_cannot_be_superposed_are_named() -> None:
    """One without a chain of the target, and one whose place the complex lacks."""
    sequences, file = [QUERY, OTHER], [chain("x", QUERY)]
    others = [chain("m", "WWWWHHHHWWWWHHHHWWWW"), chain("n", OTHER)]
    first, second = complex_templates(sequences, [alone(one) for one in sequences], [file], others)
    assert "left out: m_0 (it aligns with no chain of the target" in first.describe()
    assert "n_0 (x lacks the chain to superpose it on)" in second.describe()


def test_clashing_residues_are_those_of_af_unmasked() -> None:
    published = PUBLISHED["clashes"]
    chains = []
    for points in published["ca"]:
        positions, mask = np.zeros((len(points), 37, 3), np.float32), np.zeros((len(points), 37), np.float32)
        positions[:, 1], mask[:, 1] = points, 1.0
        chains.append(EntryChain("A" * len(points), positions, mask))
    kept = [np.flatnonzero(~clashes).tolist() for clashes in clashing_residues(chains)]
    assert kept == published["kept"]


@pytest.mark.parametrize("run", PUBLISHED["overlaps"]["runs"])
def test_overlapping_residues_are_those_of_alphapulldown(run: dict) -> None:
    """Neighbours in a chain may overlap, others may not, and atoms that can bond by hydrogen a little more."""
    published = PUBLISHED["overlaps"]
    atoms = [rc.atom_order[name] for name in published["atoms"]]
    chains = []
    for points in published["positions"]:
        positions, mask = np.zeros((len(points), 37, 3), np.float32), np.zeros((len(points), 37), np.float32)
        positions[:, atoms], mask[:, atoms] = points, 1.0
        chains.append(EntryChain("C" * len(points), positions, mask))
    found = [np.flatnonzero(one).tolist() for one in overlapping_residues(chains, run["overlap"])]
    assert found == run["clashing"]


def test_a_user_assigns_the_chains(tmp_path: Path) -> None:
    """Against their sequences, for copies one after the other, in one file of several."""
    path = tmp_path / "map.csv"
    path.write_text("# protein,file,chain\nP1, x.cif ,60\nP1,x.cif,0\n\n")
    file = [chain("x", OTHER, 0.0), chain("x", QUERY, 30.0), chain("x", HOMOLOGUE, 60.0)]
    other = [chain("y", QUERY, 0.0), chain("y", OTHER, 30.0)]
    target = target_from_sequence(f"{QUERY}:{QUERY}:{OTHER}")
    chains = [replace(one, record=name) for one, name in zip(target.chains, ("P1", "P1", "P2"), strict=True)]
    chain_map = ChainMap(path)
    chain_map.check([file, other])
    sequences = [one.sequence for one in chains]
    found = complex_templates(
        sequences, [alone(one) for one in sequences], [file, other], chain_map=chain_map.of_target(chains)
    )
    assert [[one.name for one in each.templates] for each in found] == [
        ["x_60", "y_0"],
        ["x_0", "y"],
        ["x", "y_30"],
    ]
    assert found[1].templates[0].mask.any()
    assert found[0].outcomes[0].message == "assigned as given"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A,x.cif\n", "expected protein,file,chain such as .* found 'A,x.cif'"),
        ("", "has no rows"),
        ("A,z.cif,0\n", "z is not among TemplateOptions.complexes: x"),
        ("A,x.cif,7\n", "x lacks a protein chain 7; its chains are 0, 30"),
        ("C,x.cif,0\n", "C is not a chain of the target; its chains are A, B"),
        ("A,x.cif,0\nA,x.cif,30\n", "A has 1 chains, and this row of x is one more"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "map.csv"
    path.write_text(text)

    def assign() -> None:
        chain_map = ChainMap(path)
        chain_map.check([[chain("x", QUERY, 0.0), chain("x", OTHER, 30.0)]])
        chain_map.of_target(target_from_sequence(f"{QUERY}:{OTHER}").chains)

    with pytest.raises(InputError, match=message):
        assign()


def test_residues_of_low_plddt_are_left_free(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "model.pdb"
    path.write_text(pdb_text({"A": QUERY[:5]}, b_factors={k: 40.0 + 10 * k for k in range(1, 6)}))
    (one,) = read_whole(path, min_plddt=65.0)
    assert one.chain.mask.any(-1).tolist() == [False, False, True, True, True]
    assert "2 residues of pLDDT under 65 are left free" in caplog.text
    with pytest.raises(InputError, match="all residues have a pLDDT"):
        read_whole(path, min_plddt=95.0)


def test_clashes_are_left_free() -> None:
    """Gaps without atoms, in both chains; all other residues stay."""
    file = [chain("x", QUERY), chain("x", OTHER, 40.0)]
    file[1].chain.positions[7] = file[0].chain.positions[3] + 1.0 * file[0].chain.mask[3][:, None]
    sequences = [QUERY, OTHER]
    msas = [alone(one) for one in sequences]
    first, second = (each.templates[0] for each in complex_templates(sequences, msas, [file]))
    assert first.sequence == QUERY[:3] + "-" + QUERY[4:]
    assert second.sequence == OTHER[:7] + "-" + OTHER[8:]
    assert not first.mask[3].any()
    assert not first.positions[3].any()
    kept = complex_templates(sequences, msas, [file], keep_clashes=True)
    assert [each.templates[0].sequence for each in kept] == sequences


def test_a_run_puts_complexes_before_other_templates(tmp_path: Path) -> None:
    """Within the number of templates of a chain."""
    whole, single = tmp_path / "whole.cif", tmp_path / "single.cif"
    whole.write_text(entry({"A": HOMOLOGUE, "B": HOMOLOGUE}))
    single.write_text(entry({"A": QUERY}))
    assert [one.name for one in read_whole(whole)] == ["whole_A", "whole_B"]
    options = TemplateOptions(
        complexes=(whole, whole), structures=(single,), max_templates=3, keep_clashes=True
    )
    target = target_from_sequence(f"{QUERY}:{QUERY}")
    found = TemplateFinder(options).find(target, [([], [])] * 2)
    assert [one.name for one in found[0].templates] == ["whole_A", "whole_A", "single_A"]
    assert [one.name for one in found[1].templates] == ["whole_B", "whole_B", "single_A"]
    assert found[0].features()["template_frame"].tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"complexes": (Path("a"),) * 5}, "5 files, but max_templates= is 4"),
        ({"chains": (Path("a"),)}, "TemplateOptions.chains needs TemplateOptions.complexes"),
        ({"chain_map": Path("a")}, "TemplateOptions.chain_map belongs to TemplateOptions.complexes"),
        ({"overlap": 0.9}, "TemplateOptions.overlap belongs to"),
        ({"min_plddt": 50.0}, "TemplateOptions.min_plddt belongs to"),
        ({"complexes": (Path("a"),), "overlap": 0.9, "keep_clashes": True}, "give one"),
        ({"complexes": (Path("a"),), "overlap": 0.0}, "must be over 0 and at most 4"),
        ({"complexes": (Path("a"),), "min_plddt": 101.0}, "must be from 0 to 100"),
    ],
)
def test_contradictions_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TemplateOptions(**changes)
